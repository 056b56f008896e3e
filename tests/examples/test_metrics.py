"""Two ways to count the locks of several workers, each with real uvicorn processes."""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from prometheus_client.parser import text_string_to_metric_families

from ..fastapi.conftest import serve_app
from ..scenes import STARTING
from ..servers import Store
from .workers import workers

pytestmark = pytest.mark.stores("valkey9")

SHOP = Path(__file__).parents[2] / "examples" / "shop"
WAITS = "aiodlock.wait.duration"


class Collector:
    """What an OpenTelemetry collector hears: the newest export of each worker."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.post("/v1/metrics")(self.receive)
        self.acquired: dict[str, int] = {}

    async def receive(self, request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            about = {item.key: item.value.string_value for item in resource.resource.attributes}
            assert about["service.name"] == "shop"
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == WAITS:
                        points = metric.histogram.data_points
                        count = sum(point.count for point in points)
                        self.acquired[about["service.instance.id"]] = count
        return Response()


async def click_until_all_served(http: httpx.AsyncClient, number: int) -> Counter[int]:
    """Click until every worker has answered; return how often each did."""
    served: Counter[int] = Counter()
    async with asyncio.timeout(3 * STARTING):
        while len(served) < number or served.total() < 20:
            answer = await http.post(f"/orders/{served.total()}/pay")
            assert answer.status_code == 200, answer.text
            served[answer.json()] += 1
    return served


async def test_each_worker_exports_its_own_locks_and_the_sum_is_all_of_them(store: Store) -> None:
    collector = Collector()
    async with serve_app(collector.app) as endpoint:
        settings = {
            "AIODLOCK_URL": store.url,
            "OTEL_EXPORTER_OTLP_ENDPOINT": str(endpoint.base_url).rstrip("/"),
        }
        async with workers("examples.metrics_service:app", 2, settings) as http:
            served = await click_until_all_served(http, 2)
    # The workers have ended, and sent what was left. One of them alone knows a part only.
    by_worker = {int(name.rpartition(":")[2]): n for name, n in collector.acquired.items()}
    assert by_worker == dict(served)
    assert sum(by_worker.values()) == served.total() > max(by_worker.values())


async def test_any_worker_adds_up_all_of_them_for_prometheus(store: Store, tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    settings = {
        "AIODLOCK_URL": store.url,
        "DATABASE": str(tmp_path / "shop.db"),
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"),
        "PYTHONPATH": str(SHOP),
    }
    async with workers("main:app", 2, settings) as http:
        assert (await http.post("/orders")).json() == 1
        clicks = await asyncio.gather(*[http.post("/orders/1/pay") for _ in range(20)])
        assert sorted(click.json() for click in clicks) == [False] * 19 + [True]
        for _ in range(4):  # whichever worker answers
            page = (await http.get("/metrics")).text
            samples = {
                (sample.name, sample.labels.get("aiodlock_outcome")): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            }
            acquired = samples["aiodlock_wait_duration_seconds_count", "acquired"]
            assert acquired == 20
            assert samples["aiodlock_held", None] == 0


KILLED = """
import os
from lock_metrics import Report
from aiodlock import RequestInfo

held, report = RequestInfo("1", "lock", "order:1", "exclusive", "me", 7), Report()
report.acquiring(held)
report.acquired(held, 0.1)
os.kill(os.getpid(), 9)
"""
TWO_WORKERS_ANSWER = """
import asyncio, lock_metrics, os, prometheus_client.multiprocess as of_prometheus

found = of_prometheus.glob.glob
def found_and_gone(pattern):
    files = found(pattern)
    if "_live" in pattern:
        for file in files:
            os.remove(file)  # by another worker
    return files

of_prometheus.glob.glob = found_and_gone
print(asyncio.run(lock_metrics.metrics()).body.decode())
"""
SHOWN = "import asyncio, lock_metrics; print(asyncio.run(lock_metrics.metrics()).body.decode())"


@pytest.mark.parametrize("shown", [SHOWN, TWO_WORKERS_ANSWER], ids=["one answers", "two answer"])
async def test_killed_worker_holds_nothing_any_more(tmp_path: Path, shown: str) -> None:
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(SHOP), str(SHOP.parents[1])]),
    }

    async def run(code: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code), env=environment, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await asyncio.wait_for(process.communicate(), STARTING)
        return process.returncode, printed.decode()

    assert (await run(KILLED))[0] == -9
    code, page = await run(shown)
    assert code == 0
    assert "aiodlock_held{" not in page
    assert 'aiodlock_outcome="acquired"} 1.0' in page


async def test_the_tests_of_the_shop_pass_as_a_reader_runs_them(tmp_path: Path) -> None:
    for name in ("main.py", "lock_metrics.py", "test_main.py"):
        shutil.copy(SHOP / name, tmp_path)
    command = (sys.executable, "-m", "pytest", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider")
    ended = await asyncio.to_thread(
        subprocess.run, command, cwd=tmp_path, stdout=subprocess.PIPE, timeout=300
    )
    assert ended.returncode == 0, ended.stdout.decode()
    assert b"3 passed" in ended.stdout
