"""What the scheduler must know before its job begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from netstorm.protocol.chunks import ITEM_BYTES
from netstorm.settings import Settings, declarations

__all__ = ["SchedulerOptions"]

_GROWTH: Final = 16
"""How much larger than CHUNK_SIZE chunks may be among nodes of one machine: a WAN's store-and-forward delay,
for which chunks are small, is nothing there, and processors are the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """One job, as its scheduler was told to run it. Durations are in seconds."""

    num_workers: int
    job: str = "default"
    release: str = ""
    """Version of the NetStorm package; nodes must have the same."""
    chunk_size: int = 65_536
    """Elements."""
    largest_chunk: int = 65_536
    """Elements; chunks of large keys may grow to it."""
    largest_local_chunk: int = 1_048_576
    """The same, if all nodes are on one machine."""
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
        largest_chunk = settings.largest_chunk or settings.chunk_size
        local = min(_GROWTH * settings.chunk_size, settings.max_message_bytes // max(ITEM_BYTES.values()))
        return cls(
            num_workers=settings.num_workers,
            job=settings.job,
            release=release,
            chunk_size=settings.chunk_size,
            largest_chunk=largest_chunk,
            largest_local_chunk=largest_chunk if settings.largest_chunk or settings.network_file else local,
            job_wide={row.variable: str(getattr(settings, name)) for name, row in declarations().items()},
            heartbeat_interval_s=settings.heartbeat_interval_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            join_timeout_s=settings.join_timeout_s,
            wait_timeout_s=settings.wait_timeout_s,
            link_timeout_s=settings.link_timeout_s,
        )
