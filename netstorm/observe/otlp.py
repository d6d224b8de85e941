"""The metrics of a page for Prometheus, sent to a collector by OTLP over HTTP. Needs the extra `otel`.

OTEL_EXPORTER_OTLP_ENDPOINT, and the other variables of OpenTelemetry's exporters, say where and how.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric

from netstorm import __version__, clock
from netstorm.errors import NetStormError, SettingsError
from netstorm.settings import foreign_variable

__all__ = ["OtlpPusher"]

_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
_LAST_S: Final = 2.0
"""How long the end of a job may wait for a collector that does not answer, twice."""


class OtlpPusher:
    """Sends metrics at intervals, and a last time when it is closed.

    Args:
        collect: makes the metrics, on a thread of this object's.

    Raises:
        SettingsError: the interval is none.
    """

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        text = foreign_variable(_INTERVAL) or "60000"
        if not text.isdecimal() or not int(text):
            raise SettingsError(f"{_INTERVAL}={text!r}: expected a whole number of milliseconds, at least 1")
        self._collect: Final = collect
        self._every_s: Final = int(text) / 1000
        self._began: Final = clock.wall()
        self._exporter: Final = OTLPMetricExporter()
        self._over: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="netstorm-otlp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send once more, and end."""
        self._over.set()
        self._thread.join(_LAST_S)
        self._exporter.shutdown()  # it does not try again
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(self._every_s)
            try:
                families = list(self._collect())
            except NetStormError:  # there is no job at present
                continue
            self._exporter.export(as_otlp(families, self._began, clock.wall()))


def as_otlp(families: Iterable[Metric], began: float, now: float) -> sdk.MetricsData:
    """Return metrics as OpenTelemetry has them, under the names and labels that Prometheus sees.

    Args:
        families: counters, gauges and infos.
        began: when counters began to count, in seconds since 1970.
        now: when they had these values.
    """
    made = []
    for family in families:
        points: dict[str, list[sdk.NumberDataPoint]] = {}
        for sample in family.samples:
            point = sdk.NumberDataPoint(
                attributes=sample.labels,
                start_time_unix_nano=int(began * 1e9),
                time_unix_nano=int(now * 1e9),
                value=sample.value,
            )
            points.setdefault(sample.name, []).append(point)
        for name, of_name in points.items():
            data: sdk.Sum | sdk.Gauge = sdk.Gauge(of_name)
            if family.type == "counter":
                data = sdk.Sum(of_name, sdk.AggregationTemporality.CUMULATIVE, is_monotonic=True)
            made.append(sdk.Metric(name, family.documentation, "", data))
    scope = sdk.ScopeMetrics(InstrumentationScope("netstorm", __version__), made, "")
    resource = Resource.create({"service.name": "netstorm"})
    return sdk.MetricsData([sdk.ResourceMetrics(resource, [scope], "")])
