"""What a client's locks do, as metrics of Prometheus, added up over all worker processes.

Give each worker's client a ``Report()``, and serve ``metrics`` at ``/metrics``.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fastapi import Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

import aiodlock
from aiodlock import Hooks, RequestInfo

SECONDS = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0)
LOCK = ["aiodlock_lock", "aiodlock_mode", "aiodlock_kind"]

# The names and labels that aiodlock.otel makes, so that the dashboard and the alerts fit.
WAIT = Histogram(
    "aiodlock_wait_duration_seconds",
    "From asking for a lock to getting it, or giving up.",
    [*LOCK, "aiodlock_outcome"],
    buckets=SECONDS,
)
HOLD = Histogram(
    "aiodlock_hold_duration_seconds",
    "From getting a lock to releasing or losing it.",
    [*LOCK, "aiodlock_outcome", "aiodlock_reason"],
    buckets=SECONDS,
)
WAITING = Gauge("aiodlock_waiting", "Waiting requests.", LOCK, multiprocess_mode="livesum")
HELD = Gauge("aiodlock_held", "Leases that are held.", LOCK, multiprocess_mode="livesum")
EXTENSIONS = Counter("aiodlock_extension_failures", "Extensions that failed.", LOCK)
RELEASES = Counter("aiodlock_release_failures", "Releases without effect.", LOCK)


class Report(Hooks):
    """What a client tells, as numbers."""

    def acquiring(self, request: RequestInfo) -> None:
        WAITING.labels(*about(request)).inc()

    def acquired(self, request: RequestInfo, waited: float) -> None:
        WAITING.labels(*about(request)).dec()
        HELD.labels(*about(request)).inc()
        WAIT.labels(*about(request), "acquired").observe(waited)

    def not_acquired(self, request: RequestInfo, waited: float, error: BaseException) -> None:
        WAITING.labels(*about(request)).dec()
        outcome = "timeout" if isinstance(error, aiodlock.AcquireTimeout) else "error"
        if not isinstance(error, Exception):
            outcome = "cancelled"
        WAIT.labels(*about(request), outcome).observe(waited)

    def done(self, request: RequestInfo, waited: float) -> None:
        WAITING.labels(*about(request)).dec()
        WAIT.labels(*about(request), "done").observe(waited)

    def released(self, request: RequestInfo, held: float) -> None:
        HELD.labels(*about(request)).dec()
        HOLD.labels(*about(request), "released", "").observe(held)

    def lost(self, request: RequestInfo, held: float, reason: str) -> None:
        HELD.labels(*about(request)).dec()
        HOLD.labels(*about(request), "lost", reason).observe(held)

    def extension_failed(self, request: RequestInfo, error: Exception) -> None:
        EXTENSIONS.labels(*about(request)).inc()

    def release_failed(self, request: RequestInfo, error: Exception) -> None:
        RELEASES.labels(*about(request)).inc()


def about(request: RequestInfo) -> tuple[str, str, str]:
    """Return the labels of a request; of the name only what has few values."""
    return request.name.partition(":")[0], request.mode, request.kind


async def metrics() -> Response:
    """Add up what all workers have written, whichever worker answers."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    forget_the_dead()
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def forget_the_dead() -> None:
    """Take a worker that was killed out of the gauges: what it held and waited for has ended without it."""
    for file in Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).glob("gauge_live*.db"):
        worker = int(file.stem.rpartition("_")[2])
        try:
            os.kill(worker, 0)  # nothing is sent
        except ProcessLookupError:
            with suppress(FileNotFoundError):  # another worker answers, too
                mark_process_dead(worker)  # type: ignore[no-untyped-call]
        except PermissionError:
            pass  # it lives
