"""The scheduler sends its metrics to a collector by OTLP: what one receives, and what happens without one."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.integration.jobs import Job, free_port
from tests.integration.test_watching import FAST, NODE, get, samples, wait_for, watched_at

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Receive on loopback; yield the address, and what has come, decoded."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/metrics"
            received.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def points(request: Any) -> dict[tuple[str, str], float]:
    """Return values by name and rank, as `samples` does."""
    found = {}
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        data = metric.sum if metric.HasField("sum") else metric.gauge
        for point in data.data_points:
            labels = {one.key: one.value.string_value for one in point.attributes}
            found[metric.name, labels.get("rank", "")] = getattr(point, point.WhichOneof("value"))
    return found


def test_a_collector_gets_the_metrics_that_prometheus_would(tmp_path):
    with collector() as (address, received):
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_METRIC_EXPORT_INTERVAL": "200"}
        with Job(tmp_path, 2, **variables, **FAST) as job:
            for rank in range(2):
                job.start(rank, NODE)
            for rank in range(2):
                job.wait_until_said(rank, "four rounds")
            page = watched_at(job.said(-1))

            def same() -> bool:
                """Return whether it has what the page says of the job."""
                of_the_job = (
                    name for name in samples(get(page, "/metrics")) if name[0].startswith("netstorm_")
                )
                shown = {name for name in of_the_job if not name[0].startswith("netstorm_web_")}
                sent = points(received[-1]) if received else {}
                return sent.get(("netstorm_node_last_round", "1")) == 3.0 and shown <= sent.keys()

            wait_for(same, "the metrics of the page at the collector")
            (tmp_path / "stop").touch()
            assert [end.code for end in job.end_all()] == [0, 0]
        (resource,) = received[-1].resource_metrics
        names = {one.key: one.value.string_value for one in resource.resource.attributes}
        assert names["service.name"] == "netstorm"
        counters = {one.name for one in resource.scope_metrics[0].metrics if one.HasField("sum")}
        assert "netstorm_scheduler_events_total" in counters
        assert all(name.endswith("_total") for name in counters)


def test_a_job_neither_fails_nor_waits_for_a_collector_that_is_not_there(tmp_path):
    nowhere = f"http://127.0.0.1:{free_port()}"
    with Job(tmp_path, 1, OTEL_EXPORTER_OTLP_ENDPOINT=nowhere, **FAST) as job:
        job.start(0, NODE)
        job.wait_until_said(0, "four rounds")
        (tmp_path / "stop").touch()
        assert [end.code for end in job.end_all()] == [0]
