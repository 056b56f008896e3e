"""Metrics and spans, as OpenTelemetry's own kit exports them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import aiodlock
import aiodlock.sync
from aiodlock import otel, testing

from ..scenes import BRIEF, bounded


class Telemetry:
    """Providers of a test's own, and what was exported."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._exporter = InMemorySpanExporter()
        self.meters = MeterProvider([self._reader])
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def points(self) -> dict[str, list[Any]]:
        """Return the data points of each metric."""
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def shutdown(self) -> None:
        self.meters.shutdown()
        self.tracers.shutdown()


@pytest.fixture
async def telemetry() -> AsyncIterator[Telemetry]:
    telemetry = Telemetry()
    yield telemetry
    telemetry.shutdown()


@pytest.fixture
async def client(telemetry: Telemetry) -> AsyncIterator[aiodlock.Client]:
    client = testing.memory_client()
    otel.instrument(
        client,
        meter_provider=telemetry.meters,
        tracer_provider=telemetry.tracers,
        label=lambda name: name.partition(":")[0],
    )
    async with client:
        yield client


def outcomes(points: list[Any]) -> dict[Any, int]:
    return {point.attributes["aiodlock.outcome"]: point.count for point in points}


async def test_wait_and_hold_are_spans_of_the_callers_span(
    client: aiodlock.Client, telemetry: Telemetry
) -> None:
    with telemetry.tracers.get_tracer("test").start_as_current_span("job") as job:
        async with client.lock("order:42") as lease:
            pass
    wait, hold, _ = telemetry.spans
    assert (wait.name, hold.name) == ("aiodlock wait", "aiodlock hold")
    for span in (wait, hold):
        assert span.parent is not None
        assert span.parent.span_id == job.get_span_context().span_id
        assert span.attributes is not None
        assert span.attributes["aiodlock.lock"] == "order:42"
        assert span.status.is_ok or span.status.is_unset
    assert hold.attributes is not None
    assert hold.attributes["aiodlock.token"] == lease.token
    assert hold.attributes["aiodlock.outcome"] == "released"
    assert wait.end_time is not None
    assert hold.start_time is not None
    assert wait.end_time <= hold.start_time


async def test_durations_have_labels_and_buckets_for_seconds(
    client: aiodlock.Client, telemetry: Telemetry
) -> None:
    for number in range(3):
        async with client.rwlock(f"order:{number}").read:
            pass
    points = telemetry.points()
    (wait,) = points["aiodlock.wait.duration"]
    assert wait.count == 3
    assert wait.attributes == {
        "aiodlock.mode": "shared",
        "aiodlock.kind": "lock",
        "aiodlock.lock": "order",
        "aiodlock.outcome": "acquired",
    }
    assert 0.1 in wait.explicit_bounds
    (hold,) = points["aiodlock.hold.duration"]
    assert hold.count == 3


async def test_waiting_and_held_count_what_is_there_now(
    client: aiodlock.Client, telemetry: Telemetry
) -> None:
    def now() -> tuple[int, int]:
        points = telemetry.points()
        (waiting,), (held,) = points["aiodlock.waiting"], points["aiodlock.held"]
        return waiting.value, held.value

    async with client.lock("x"):
        waiters = [asyncio.create_task(client.lock("x").acquire()) for _ in range(3)]
        async with bounded(10):
            while len((await client.inspect("x")).waiters) < 3:
                await asyncio.sleep(0.005)
        assert now() == (3, 1)
    for waiter in waiters:
        await (await waiter).release()
    assert now() == (0, 0)


async def test_time_out_cancellation_and_refusal_are_told_apart(
    client: aiodlock.Client, telemetry: Telemetry
) -> None:
    async with client.lock("x"):

        async def timed_out() -> None:
            with pytest.raises(aiodlock.AcquireTimeout):
                await client.lock("x", timeout=BRIEF).acquire()

        await asyncio.create_task(timed_out())
        cancelled = asyncio.create_task(client.lock("x").acquire())
        async with bounded(10):
            while not (await client.inspect("x")).waiters:
                await asyncio.sleep(0.005)
        cancelled.cancel()
        await asyncio.wait({cancelled})
    with pytest.raises(ValueError, match="limit"):
        async with client.semaphore("s", 1):
            await client.semaphore("s", 2).acquire()
    found = outcomes(telemetry.points()["aiodlock.wait.duration"])
    assert found.keys() == {"acquired", "timeout", "cancelled", "error"}
    ended = {
        span.attributes["aiodlock.outcome"]: span for span in telemetry.spans if span.attributes
    }
    assert not ended["timeout"].status.is_ok
    assert ended["cancelled"].status.is_unset


async def test_loss_is_an_error_with_its_reason(
    client: aiodlock.Client, telemetry: Telemetry
) -> None:
    lease = await client.lock("x").acquire()
    testing.lose(lease, "taken_over")
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    (hold,) = telemetry.points()["aiodlock.hold.duration"]
    assert hold.attributes["aiodlock.reason"] == "taken_over"
    assert telemetry.spans[-1].status.description == "lost: taken_over"


async def test_once_that_is_done_already_is_no_error(
    client: aiodlock.Client, telemetry: Telemetry
) -> None:
    for _ in range(2):
        async with client.once("x", keep=60):
            pass
    points = telemetry.points()
    assert outcomes(points["aiodlock.wait.duration"]) == {"acquired": 1, "done": 1}
    assert sum(point.value for point in points["aiodlock.waiting"]) == 0
    assert all(span.status.is_unset for span in telemetry.spans)


async def test_requests_that_began_before_are_not_reported(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    async with testing.memory_client() as client:
        client.add_hooks(aiodlock.Hooks())
        first = await client.lock("x").acquire()
        waiters = [asyncio.create_task(client.lock("x").acquire()) for _ in range(2)]
        lost = await client.lock("y").acquire()
        async with bounded(10):
            while len((await client.inspect("x")).waiters) < 2:
                await asyncio.sleep(0.005)
        otel.instrument(client, meter_provider=telemetry.meters, tracer_provider=telemetry.tracers)
        waiters.pop().cancel()
        await first.release()
        await (await waiters.pop()).release()
        testing.lose(lost, "gone")
        assert not telemetry.points()
        async with client.lock("x"):
            pass
    points = telemetry.points()
    assert [points["aiodlock.waiting"][0].value, points["aiodlock.held"][0].value] == [0, 0]
    assert [span.name for span in telemetry.spans] == ["aiodlock wait", "aiodlock hold"]
    assert not [record for record in caplog.records if "hook" in record.message]


async def test_nothing_is_left_when_the_client_is_left(telemetry: Telemetry) -> None:
    client = testing.memory_client()
    otel.instrument(client, meter_provider=telemetry.meters, tracer_provider=telemetry.tracers)
    async with client:
        lease = await client.lock("x").acquire()
        waiting = asyncio.create_task(client.lock("x").acquire())
        async with bounded(10):
            while not (await client.inspect("x")).waiters:
                await asyncio.sleep(0.005)
    await asyncio.wait({waiting})
    assert isinstance(waiting.exception(), aiodlock.ClientClosed)
    with pytest.raises(aiodlock.LockLost):
        await lease.release()
    points = telemetry.points()
    assert points["aiodlock.waiting"][0].value == 0
    assert points["aiodlock.held"][0].value == 0
    assert len(telemetry.spans) == 3


def test_missing_package_is_named() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import aiodlock.otel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'aiodlock[otel]'" in done.stderr


@pytest.mark.parametrize("raises_at", range(4))
async def test_label_that_raises_leaves_no_gauge_behind(
    telemetry: Telemetry, raises_at: int
) -> None:
    calls: list[str] = []

    def label(name: str) -> str:
        calls.append(name)
        if len(calls) > raises_at:
            raise LookupError(name)
        return f"{len(calls)}"  # another one each time

    async with testing.memory_client() as client:
        otel.instrument(
            client,
            meter_provider=telemetry.meters,
            tracer_provider=telemetry.tracers,
            label=label,
        )
        for _ in range(3):
            async with client.lock("a", timeout=5):
                with pytest.raises(aiodlock.AcquireTimeout):
                    await client.lock("a", owner="another", timeout=0).acquire()
    points = telemetry.points()
    for gauge in ("aiodlock.waiting", "aiodlock.held"):
        assert [point.value for point in points.get(gauge, ()) if point.value] == []
    assert calls


def test_label_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="label must be a function"):
        otel.instrument(aiodlock.Client("memory://"), label="order")  # type: ignore[arg-type]


def test_client_for_threads_is_instrumented_as_others(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    with aiodlock.sync.Client("memory://") as client:
        for _ in range(2):
            otel.instrument(
                client,  # type: ignore[arg-type]
                meter_provider=telemetry.meters,
                tracer_provider=telemetry.tracers,
            )
        with client.lock("order:42"):
            assert [point.value for point in telemetry.points()["aiodlock.held"]] == [1]
    assert sum("instrumented already" in record.message for record in caplog.records) == 1


async def test_client_that_is_instrumented_twice_counts_once(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiodlock.Client("memory://") as client:
        for _ in range(2):
            otel.instrument(
                client, meter_provider=telemetry.meters, tracer_provider=telemetry.tracers
            )
        async with client.lock("order:42"):
            assert [point.value for point in telemetry.points()["aiodlock.held"]] == [1]
    assert sum("instrumented already" in record.message for record in caplog.records) == 1
