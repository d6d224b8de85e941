"""What a web server refuses: counted by reason, and logged at a limited rate."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from netstorm import clock
from netstorm.addresses import plain_address

__all__ = ["WebRefusals"]

_log = logging.getLogger(__name__)

_EVERY_S: Final = 60.0
"""Least time between two log lines of one reason: whoever guesses tokens cannot fill the disk."""


class WebRefusals:
    """Counts refusals. Any thread may use it. Reasons are the program's own words, so they are few."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._counts: Final[dict[str, int]] = {}
        self._logged: Final[dict[str, tuple[float, int]]] = {}
        """By reason: when it was logged last, and the count of that time."""

    def note(self, reason: str, client: str) -> None:
        """Record a refusal.

        Args:
            reason: one word, a label in /metrics.
            client: its address, for a person.
        """
        now = clock.monotonic()
        with self._lock:
            count = self._counts[reason] = self._counts.get(reason, 0) + 1
            at, before = self._logged.get(reason, (-_EVERY_S, 0))
            if now - at < _EVERY_S:
                return
            self._logged[reason] = (now, count)
        more = f" (and {count - before - 1} others since the last such line)" if count - before > 1 else ""
        _log.warning("web pages: refused a client at %s: %s%s", plain_address(client), reason, more)

    def counts(self) -> dict[str, int]:
        """Return how many there were, by reason."""
        with self._lock:
            return dict(self._counts)

    def register(self, registry: CollectorRegistry) -> None:
        """Add the counts to a page of metrics."""
        registry.register(_Counts(self))


class _Counts(Collector):
    def __init__(self, refusals: WebRefusals) -> None:
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "netstorm_web_refused", "clients of the web pages that were refused", labels=["reason"]
        )
        for reason, count in self._refusals.counts().items():
            family.add_metric([reason], count)
        yield family
