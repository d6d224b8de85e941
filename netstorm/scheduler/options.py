"""What the scheduler must know before its job begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from netstorm.protocol.chunks import ITEM_BYTES, ChunkSizes
from netstorm.settings import Settings, declarations

__all__ = ["SchedulerOptions", "chunk_sizes"]

_GROWTH: Final = 2
"""How much larger than CHUNK_SIZE chunks become in large keys: there the time to fill the pipeline counts for
less, and processor time for more."""

_ENOUGH: Final = 256

_LOCAL_GROWTH: Final = 32
"""The same among nodes of one machine: a WAN's store-and-forward delay, for which chunks are small, is
nothing there, and processors are the bound."""

_ENOUGH_LOCALLY: Final = 32

_CHUNKS: Final = ChunkSizes(32_768, 65_536, _ENOUGH)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """One job, as its scheduler was told to run it. Durations are in seconds."""

    num_workers: int
    job: str = "default"
    release: str = ""
    """Version of the NetStorm package; nodes must have the same."""
    chunks: ChunkSizes = _CHUNKS
    local_chunks: ChunkSizes = _CHUNKS
    """If all nodes are on one machine."""
    job_wide: Mapping[str, str] = field(default_factory=dict)
    """Settings by variable name. A node that was explicitly given another value for one is refused."""
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    join_timeout_s: float = 300.0
    wait_timeout_s: float = 3600.0
    link_timeout_s: float = 10.0
    scheduler_timeout_s: float = 300.0
    boot: str = ""
    """Identity of this run of the machine; for the log."""
    said: Mapping[str, str] = field(default_factory=dict)
    """What the first node said of the job, by variable; for the log."""
    told_by: str = "the scheduler"
    """Who says what holds for the whole job, for a person."""
    joins: bool = False
    """Ranks that have finished contribute zeros, and hold up no barrier, until all have."""

    @classmethod
    def from_settings(
        cls, settings: Settings, *, release: str, boot: str = "", said: Mapping[str, str] | None = None
    ) -> SchedulerOptions:
        """Take from `settings` what concerns the scheduler.

        All of them are compared with what a node says was given to it; which ones it says is its choice.
        """
        chunks = chunk_sizes(settings)
        local = _chunk_sizes(settings, _LOCAL_GROWTH, _ENOUGH_LOCALLY)
        return cls(
            num_workers=settings.num_workers,
            job=settings.job,
            release=release,
            chunks=chunks,
            local_chunks=chunks if settings.network_file else local,
            job_wide={
                row.variable: str(getattr(settings, name))
                for name, row in declarations().items()
                if not (name == "job_weight" and settings.jobs == 1)  # one job has all there is
            },
            heartbeat_interval_s=settings.heartbeat_interval_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            join_timeout_s=settings.join_timeout_s,
            wait_timeout_s=settings.wait_timeout_s,
            link_timeout_s=settings.link_timeout_s,
            scheduler_timeout_s=settings.scheduler_timeout_s,
            boot=boot,
            said=said or {},
            told_by="the scheduler" if settings.jobs == 1 else "the job's first node or the scheduler",
            joins=settings.uneven == "join",
        )


def chunk_sizes(settings: Settings) -> ChunkSizes:
    """Return the sizes of chunks between machines."""
    return _chunk_sizes(settings, _GROWTH, _ENOUGH)


def _chunk_sizes(settings: Settings, growth: int, enough: int) -> ChunkSizes:
    size = settings.chunk_size
    most = settings.max_message_bytes // max(ITEM_BYTES.values())
    return ChunkSizes(size, settings.largest_chunk or min(growth * size, most), enough, most)
