"""Metrics and traces by OpenTelemetry, for one client::

    aiodlock.otel.instrument(client)

Metrics (seconds; attributes ``aiodlock.mode``, ``aiodlock.kind``, and ``aiodlock.lock`` if you name it):

- ``aiodlock.wait.duration``, a histogram, with ``aiodlock.outcome``: ``acquired``, ``timeout``
  (also of a try that does not wait), ``cancelled``, ``error``, or ``done`` (a ``once`` was answered from
  its record)
- ``aiodlock.hold.duration``, a histogram, with ``aiodlock.outcome``: ``released`` or ``lost``, then also
  ``aiodlock.reason``
- ``aiodlock.waiting`` and ``aiodlock.held``, how many requests and leases this process has now
- ``aiodlock.extension.failures`` and ``aiodlock.release.failures``, counters

Traces: the spans ``aiodlock wait`` and ``aiodlock hold``, one after the other, in the span that was current
where the lock was acquired.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakSet

try:
    from opentelemetry import metrics, trace
except ImportError as _missing:
    raise ImportError(
        "aiodlock.otel needs OpenTelemetry's API: pip install 'aiodlock[otel]'"
    ) from _missing

from ._client import Client
from ._errors import LockError, LossReason
from ._hooks import Hooks
from ._model import RequestInfo

__all__ = ["instrument"]

_logger = logging.getLogger("aiodlock")
_NAME = "aiodlock"
#: Clients of ``aiodlock.sync`` too.
_instrumented: WeakSet[Client] = WeakSet()
#: From a round trip to the length of a job; the defaults are made for milliseconds.
_SECONDS = (0.0005, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0)


def instrument(
    client: Client,
    *,
    meter_provider: metrics.MeterProvider | None = None,
    tracer_provider: trace.TracerProvider | None = None,
    label: Callable[[str], str | None] | None = None,
) -> None:
    """Let a client report metrics and spans, from now on and for its whole life.

    Requests and leases that the client has already are not reported. Another call for the same client does
    nothing, with a warning.

    ```python
    import aiodlock.otel

    aiodlock.otel.instrument(client, label=lambda name: name.partition(":")[0])
    ```

    :param client: entered or not.
    :param meter_provider: default: the global one.
    :param tracer_provider: default: the global one.
    :param label: makes of a lock's name the metrics' ``aiodlock.lock``, None for none; it should have few
        values: ``lambda name: name.partition(":")[0]``. Default: metrics do not tell locks apart, spans do.
    """
    if label is not None and not callable(label):
        raise TypeError(f"label must be a function that gets a lock's name, not {label!r}")
    if client in _instrumented:
        # As OpenTelemetry's own instrumentations do: all would be counted twice.
        _logger.warning("%r is instrumented already: this call does nothing", client)
        return
    client.add_hooks(
        _Reporter(
            metrics.get_meter(_NAME, meter_provider=meter_provider),
            trace.get_tracer(_NAME, tracer_provider=tracer_provider),
            label,
        )
    )
    _instrumented.add(client)


class _Open(NamedTuple):
    span: trace.Span
    about: dict[str, str]


class _Reporter(Hooks):
    """Mutable state: ``_waits`` and ``_holds``, what has not ended, by request id.

    Attributes are made once per request: what was counted up is counted down under the same ones, also if a
    ``label`` raises or changes its mind.

    A request that is in neither began before the client was instrumented, and is not reported.
    """

    def __init__(
        self, meter: metrics.Meter, tracer: trace.Tracer, label: Callable[[str], str | None] | None
    ) -> None:
        self._tracer = tracer
        self._label = label
        self._waits: dict[str, _Open] = {}
        self._holds: dict[str, _Open] = {}
        self._wait_duration = meter.create_histogram(
            "aiodlock.wait.duration",
            unit="s",
            description="From asking for a lock to getting it, or giving up.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._hold_duration = meter.create_histogram(
            "aiodlock.hold.duration",
            unit="s",
            description="From getting a lock to releasing or losing it.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._waiting = meter.create_up_down_counter(
            "aiodlock.waiting", unit="{request}", description="Requests without an end so far."
        )
        self._held = meter.create_up_down_counter(
            "aiodlock.held", unit="{lease}", description="Leases that are held."
        )
        self._extensions = meter.create_counter(
            "aiodlock.extension.failures", unit="{failure}", description="Extensions that failed."
        )
        self._releases = meter.create_counter(
            "aiodlock.release.failures", unit="{failure}", description="Releases without effect."
        )

    def acquiring(self, request: RequestInfo) -> None:
        about = self._about(request)
        self._waiting.add(1, about)
        attributes = {**about, "aiodlock.lock": request.name, "aiodlock.owner": request.owner}
        span = self._tracer.start_span("aiodlock wait", attributes=attributes)
        self._waits[request.id] = _Open(span, about)

    def acquired(self, request: RequestInfo, waited: float) -> None:
        if request.id not in self._waits:
            return
        about = self._waits[request.id].about
        self._end_wait(request, waited, "acquired")
        self._held.add(1, about)
        attributes: dict[str, str | int] = {
            **about,
            "aiodlock.lock": request.name,
            "aiodlock.owner": request.owner,
            "aiodlock.token": request.token,
        }
        span = self._tracer.start_span("aiodlock hold", attributes=attributes)
        self._holds[request.id] = _Open(span, about)

    def not_acquired(self, request: RequestInfo, waited: float, error: BaseException) -> None:
        self._end_wait(request, waited, _outcome(error), error)

    def done(self, request: RequestInfo, waited: float) -> None:
        self._end_wait(request, waited, "done")

    def released(self, request: RequestInfo, held: float) -> None:
        self._end_hold(request, held, {"aiodlock.outcome": "released"})

    def lost(self, request: RequestInfo, held: float, reason: LossReason) -> None:
        self._end_hold(request, held, {"aiodlock.outcome": "lost", "aiodlock.reason": reason})

    def extension_failed(self, request: RequestInfo, error: Exception) -> None:
        known = self._holds.get(request.id) or self._waits.get(request.id)
        self._extensions.add(1, known.about if known is not None else self._about(request))
        if known is not None:
            known.span.add_event("extension failed", {"error": str(error)})

    def release_failed(self, request: RequestInfo, error: Exception) -> None:
        self._releases.add(1, self._about(request))

    def _about(self, request: RequestInfo) -> dict[str, str]:
        about: dict[str, str] = {"aiodlock.mode": request.mode, "aiodlock.kind": request.kind}
        label = self._label(request.name) if self._label is not None else None
        if label is not None:
            about["aiodlock.lock"] = label
        return about

    def _end_wait(
        self,
        request: RequestInfo,
        waited: float,
        outcome: str,
        error: BaseException | None = None,
    ) -> None:
        ended = self._waits.pop(request.id, None)
        if ended is None:
            return
        span, about = ended
        self._waiting.add(-1, about)
        self._wait_duration.record(waited, {**about, "aiodlock.outcome": outcome})
        span.set_attribute("aiodlock.outcome", outcome)
        if outcome in ("timeout", "error"):
            span.set_status(trace.StatusCode.ERROR, str(error))
        span.end()

    def _end_hold(self, request: RequestInfo, held: float, outcome: dict[str, str]) -> None:
        ended = self._holds.pop(request.id, None)
        if ended is None:
            return
        span, about = ended
        self._held.add(-1, about)
        self._hold_duration.record(held, {**about, **outcome})
        span.set_attributes(outcome)
        if "aiodlock.reason" in outcome:
            span.set_status(trace.StatusCode.ERROR, f"lost: {outcome['aiodlock.reason']}")
        span.end()


def _outcome(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and isinstance(error, LockError):
        return "timeout"
    return "error" if isinstance(error, Exception) else "cancelled"
