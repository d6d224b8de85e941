"""All links into a node, or all links out of it: who shared the access line when, and each link's rate.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from netstorm.protocol.frames import Peer
from netstorm.pslite.measurement.access_line import AccessLineDetector, Contention, slices
from netstorm.pslite.measurement.bbr_restart import BbrRestart
from netstorm.pslite.measurement.busy_periods import BusyLink
from netstorm.pslite.measurement.estimate import Estimate
from netstorm.pslite.measurement.rate_estimator import RateEstimator
from netstorm.pslite.measurement.tcp_progress import DeliveryMonitor, Progress

__all__ = ["LinkDirection", "MeasuredLink"]

_LONGEST_WAIT_S: Final = 2.0
"""How long a busy period waits at most for those of other links that began before its end."""

_IDLE_S: Final = 1.0
"""If nothing arrives for so long, nothing is in flight."""


class MeasuredLink:
    """One link, measured at one of its ends."""

    __slots__ = (
        "bbr_restart",
        "busy",
        "delivery",
        "estimate",
        "estimator",
        "jumped",
        "longest_s",
        "news",
        "shift",
    )

    def __init__(self) -> None:
        self.busy: Final = BusyLink()
        self.delivery: Final = DeliveryMonitor()
        self.bbr_restart: Final = BbrRestart()
        self.estimator: Final = RateEstimator()
        self.estimate: Estimate | None = None
        self.news = False
        """The estimate has not been reported."""
        self.jumped = False
        """The link has changed since the last report."""
        self.longest_s = 0.0
        """Its longest recent busy period."""
        self.shift = 0.0
        """Subtracted from its times, so that several links can be compared."""

    @property
    def kernel_rate(self) -> float:
        """The link's rate according to its sender's kernel, in bit/s; 0: unknown."""
        return self.estimate.rate if self.estimate is not None and self.estimate.delivered else 0.0


class LinkDirection:
    """All links into a node, or all links out of it."""

    def __init__(self, at_least: int) -> None:
        """Estimate rates from at least so many chunks."""
        self._at_least: Final = at_least
        self.links: Final[dict[Peer, MeasuredLink]] = {}
        self._access: Final = AccessLineDetector()
        self._judged = self._newest = -math.inf
        self._newest_at = self._checked_at = 0.0
        """When `_newest` was first seen, and when it was last looked for, on the local clock."""
        self.cap = 0.0
        """The access line's capacity in bit/s; 0: unknown; infinite: the links are independent."""
        self.independent = False

    def link(self, peer: Peer) -> MeasuredLink:
        """Return the link of a peer."""
        found = self.links.get(peer)
        if found is None:
            found = self.links[peer] = MeasuredLink()
        return found

    def judge(self, now: float) -> None:
        """Work out in which times links were busy together, and estimate; `now` on the local clock."""
        horizon = self._horizon(now)
        for part in slices(
            {
                peer: [
                    (
                        max(period.start - link.shift, self._judged),
                        min(period.end - link.shift, horizon),
                        period,
                    )
                    for period in link.busy.periods
                ]
                for peer, link in self.links.items()
            }
        ):
            self._access.add(part)
            if len(part.busy) > 1:
                for period in part.busy.values():
                    period.shared_s += part.end - part.start
        self._judged = max(self._judged, min(horizon, self._newest))
        contention, cap = self._access.classify()
        self.independent = contention is Contention.INDEPENDENT
        self.cap = math.inf if self.independent else cap
        for link in self.links.values():
            self._estimate(link, horizon + link.shift)

    def add_progress(self, progress: Mapping[Peer, Progress], now: float) -> list[Peer]:
        """Record how much the links' connections have delivered; `now` on the local clock.

        Returns:
            The peers on whose connections BBR should be restarted.
        """
        samples = {}
        for peer, link in self.links.items():
            if peer not in progress:
                link.delivery.reset()
                continue
            sample = link.delivery.sample(progress[peer], now)
            if sample is not None:
                samples[peer] = sample
        for peer, sample in samples.items():
            others = (link.delivery.busy for other, link in self.links.items() if other != peer)
            link, took = self.links[peer], sample.end - sample.start
            if link.estimator.add_delivery(sample, link.shift, max(others, default=0.0) * took):
                self._update_estimate(link)
        return [
            peer
            for peer, link in self.links.items()
            if peer in progress and link.bbr_restart.due(progress[peer].bandwidth, link.kernel_rate, now)
        ]

    def has_backlog(self) -> bool:
        """Return whether some connection has unsent data."""
        return any(link.delivery.has_backlog for link in self.links.values())

    def jumped(self) -> bool:
        """Return whether some link has changed since the last report."""
        return any(link.jumped for link in self.links.values())

    def take_news(self) -> list[Peer]:
        """Return the peers whose estimates have not been reported, and count them as reported."""
        found = [peer for peer, link in self.links.items() if link.news]
        for peer in found:
            self.links[peer].news = False
        return found

    def _horizon(self, now: float) -> float:
        """Return until when it is known which links were busy: a chunk is known only after its arrival."""
        newest = max((link.busy.arrived - link.shift for link in self.links.values()), default=-math.inf)
        if newest != self._newest:
            self._newest, self._newest_at = newest, now
        elif now >= self._newest_at + _IDLE_S:
            return math.inf
        longest, faded = 0.0, 0.5 ** min(now - self._checked_at, 10.0)
        self._checked_at = now
        for link in self.links.values():
            link.longest_s = max([faded * link.longest_s, *(period.duration for period in link.busy.periods)])
            longest = max(longest, link.longest_s)
        return newest - min(longest, _LONGEST_WAIT_S)

    def _estimate(self, link: MeasuredLink, horizon: float) -> None:
        done = link.busy.take_until(horizon)
        if done and link.estimator.add_periods(done):
            self._update_estimate(link)

    def _update_estimate(self, link: MeasuredLink) -> None:
        estimate = link.estimator.estimate(self._at_least, independent=self.independent)
        if estimate is None:
            return
        link.jumped = link.jumped or link.estimator.jumped
        link.estimate = estimate
        link.news = True
        link.busy.rate = estimate.rate
