"""What the scheduler must know before its job begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netstorm.settings import Settings, declarations

__all__ = ["SchedulerOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """One job, as its scheduler was told to run it. Durations are in seconds."""

    num_workers: int
    job: str = "default"
    release: str = ""
    """Version of the NetStorm package; nodes must have the same."""
    chunk_size: int = 65_536
    """Elements."""
    job_wide: Mapping[str, str] = field(default_factory=dict)
    """Settings by variable name. A node that was explicitly given another value for one is refused."""
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    join_timeout_s: float = 300.0
    wait_timeout_s: float = 3600.0
    link_timeout_s: float = 10.0

    @classmethod
    def from_settings(cls, settings: Settings, *, release: str) -> SchedulerOptions:
        """Take from `settings` what concerns the scheduler.

        All of them are compared with what a node says was given to it; which ones it says is its choice.
        """
        return cls(
            num_workers=settings.num_workers,
            job=settings.job,
            release=release,
            chunk_size=settings.chunk_size,
            job_wide={row.variable: str(getattr(settings, name)) for name, row in declarations().items()},
            heartbeat_interval_s=settings.heartbeat_interval_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            join_timeout_s=settings.join_timeout_s,
            wait_timeout_s=settings.wait_timeout_s,
            link_timeout_s=settings.link_timeout_s,
        )
