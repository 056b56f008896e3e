"""A web service whose workers report their locks by OTLP, each under a name of its own.

OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 AIODLOCK_URL=redis://localhost:6379/0 \\
    uvicorn examples.metrics_service:app --workers 2
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

import aiodlock.fastapi
import aiodlock.otel
from aiodlock import Lease
from aiodlock.fastapi import Locked

URL = os.environ.get("AIODLOCK_URL", "memory://")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Each worker runs this after the fork: it has its own client, its own meter and its own name."""
    worker = {
        "service.name": "shop",
        # Without this, the workers' series overwrite each other.
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
    }
    meters = MeterProvider(
        [PeriodicExportingMetricReader(OTLPMetricExporter())], resource=Resource.create(worker)
    )
    async with aiodlock.fastapi.lifespan(URL)(app):
        aiodlock.otel.instrument(
            app.state.aiodlock,
            meter_provider=meters,
            label=lambda name: name.partition(":")[0],  # "order:42" counts as "order"
        )
        try:
            yield
        finally:
            meters.shutdown()  # sends what is left


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{order_id}/pay")
async def pay(order_id: int, lease: Annotated[Lease, Locked("order:{order_id}")]) -> int:
    """Work on an order; return the process id of the worker."""
    return os.getpid()
