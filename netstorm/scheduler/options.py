"""The options of one job's scheduler, and how settings become options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from netstorm.protocol.codecs import ITEM_BYTES, ChunkSizes
from netstorm.pslite.proofs import SchedulerSecret
from netstorm.settings import Settings, declarations

__all__ = ["SchedulerOptions", "chunk_sizes"]

_GROWTH: Final = 2
"""How many times larger than CHUNK_SIZE chunks become in large keys. There the time to fill the pipeline
matters less, and processor time more."""

_ENOUGH: Final = 256
"""Chunks of a key that are enough to fill the pipeline: a key with more gets larger chunks."""

_LOCAL_GROWTH: Final = 16
"""The same among nodes of one machine. Chunks are small because of a WAN's store-and-forward delay; on one
machine there is none, and processors are the limit."""

_LEAST_GROWTH: Final = 2
"""The same of the smallest chunks, unless CHUNK_SIZE is set: a batch of a small network, whose largest key
has 400 KB, takes .91 of the processor time."""

_ENOUGH_LOCALLY: Final = 4
"""At most: fewer than in a network, since each costs processor time, which is what the nodes of one machine
share. No more than nodes and processors can add up at once: with two cores, 2 instead of 4 chunks of
4 MB take .9, .75 and .75 of the time among 2, 3 and 9 ranks."""

_LEAST_LOCALLY: Final = 2

_CHUNKS: Final = ChunkSizes(32_768, 65_536, _ENOUGH)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """The options of one job. Durations are in seconds."""

    num_workers: int
    """The ranks that there are. If nodes may leave and join, some may be places that no node has."""
    elastic: tuple[int, int] | None = None
    """Fewest and most nodes, of a job that nodes may leave and join; None: of any other job."""
    begin_with: int = 0
    """With how many nodes the job begins; 0: `num_workers`."""
    standbys: int = 0
    """How many schedulers wait to take over."""
    recoverable: bool = False
    """Another one may be started that takes over."""
    job: str = "default"
    release: str = ""
    """Version of the NetStorm package; nodes must have the same."""
    chunks: ChunkSizes = _CHUNKS
    local_chunks: ChunkSizes = _CHUNKS
    """Chunk sizes if all nodes are on one machine."""
    job_wide: Mapping[str, str] = field(default_factory=dict)
    """Settings by variable name. A node to which another value was given explicitly is refused."""
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    last_word_s: float = 0.3
    """How long a process that has ended is not lost yet: the launcher, which may be on another machine, may
    say with which exit code or signal it has ended. All together must take less than 1 s."""
    join_timeout_s: float = 300.0
    wait_timeout_s: float = 3600.0
    link_timeout_s: float = 10.0
    scheduler_timeout_s: float = 300.0
    boot: str = ""
    """Identity of the host's run since it was last started; for the replay log."""
    first_node_settings: Mapping[str, str] = field(default_factory=dict)
    """By variable: settings of the job's first node, on a scheduler of several; for the replay log."""
    settings_from: str = "the scheduler"
    """Whose settings hold for the whole job; for texts."""
    secret: SchedulerSecret = field(default_factory=SchedulerSecret)
    """By which nodes recognise the job's schedulers; empty: the job has no key."""
    reproducible: bool = False
    """NETSTORM_REPRODUCIBLE=1. If the scheduler was not given it, nodes may ask for it."""
    joins: bool = False
    """NETSTORM_UNEVEN=join: ranks that have finished contribute zeros until all have, and no barrier waits
    for them."""

    @property
    def majority(self) -> bool:
        """Whether this scheduler goes on only with a majority of the last view, since another one may go on
        with the others.
        """
        return self.recoverable or self.standbys > 0

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        *,
        release: str,
        boot: str = "",
        processors: int = _ENOUGH_LOCALLY,
        first_node_settings: Mapping[str, str] | None = None,
        secret: SchedulerSecret | None = None,
    ) -> SchedulerOptions:
        """Return the options that follow from `settings`, on a machine of some processors.

        All settings are in `job_wide`: a node decides which of them it reports when it joins.
        """
        chunks = chunk_sizes(settings)
        enough = max(_LEAST_LOCALLY, min(_ENOUGH_LOCALLY, processors, settings.places))
        local = _chunk_sizes(settings, _LOCAL_GROWTH, enough)
        if settings.source("chunk_size") == "default":
            local = replace(local, smallest=_LEAST_GROWTH * local.smallest)
        return cls(
            num_workers=settings.places,
            elastic=settings.elastic_range,
            standbys=len(settings.standby_addresses),
            recoverable=settings.recoverable,
            begin_with=settings.num_workers,
            job=settings.job,
            release=release,
            chunks=chunks,
            local_chunks=chunks if settings.network_file else local,
            job_wide={
                row.variable: str(getattr(settings, name))
                for name, row in declarations().items()
                if not (name == "job_weight" and settings.jobs == 1)  # a single job has the whole network
                and not (name == "reproducible" and settings.source(name) == "default")
            },
            heartbeat_interval_s=settings.heartbeat_interval_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            join_timeout_s=settings.join_timeout_s,
            wait_timeout_s=settings.wait_timeout_s,
            link_timeout_s=settings.link_timeout_s,
            scheduler_timeout_s=settings.scheduler_timeout_s,
            boot=boot,
            first_node_settings=first_node_settings or {},
            settings_from="the scheduler" if settings.jobs == 1 else "the job's first node or the scheduler",
            secret=secret or SchedulerSecret(),
            reproducible=settings.reproducible,
            joins=settings.uneven == "join",
        )


def chunk_sizes(settings: Settings) -> ChunkSizes:
    """Return the sizes of chunks between machines."""
    return _chunk_sizes(settings, _GROWTH, _ENOUGH)


def _chunk_sizes(settings: Settings, growth: int, enough: int) -> ChunkSizes:
    size = settings.chunk_size
    most = settings.max_message_bytes // max(ITEM_BYTES.values())
    return ChunkSizes(size, settings.largest_chunk or min(growth * size, most), enough, most)
