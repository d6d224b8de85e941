"""The clock of a simulated host: an arbitrary origin, a drift, and an error against the cluster clock."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LocalClock"]


@dataclass(frozen=True, slots=True)
class LocalClock:
    """A host's monotonic clock, as a function of virtual time. Times in s."""

    offset_s: float = 0.0
    drift: float = 0.0
    """Seconds gained in a second; a quartz is good to about 5e-5."""
    sync_error_s: float = 0.0
    """Error of this host's estimate of the cluster clock, which stamps messages."""
    sync_drift: float = 0.0
    """Seconds by which that error grows in a second."""

    def local(self, time: float) -> float:
        """Return what this clock shows at a virtual time."""
        return time * (1.0 + self.drift) + self.offset_s

    def cluster(self, time: float) -> float:
        """Return this host's estimate of the cluster clock at a virtual time."""
        return time * (1.0 + self.sync_drift) + self.sync_error_s

    def virtual(self, local: float) -> float:
        """Return the virtual time at which this clock shows `local`."""
        return (local - self.offset_s) / (1.0 + self.drift)
