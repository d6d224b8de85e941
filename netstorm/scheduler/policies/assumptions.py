"""What a job's first policy rests on: the settings of policies, the workload, and the assumed network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.codecs import ChunkSizes
from netstorm.scheduler.rounds.key_registry import KeyRegistry
from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import Options

__all__ = ["InitialAssumptions", "PolicySettings", "Workload", "workload_of"]

_SIMILAR_SIZE: Final = 0.25
"""Workloads whose bytes differ by more may need other trees: trees for 100 MB are predicted to take 12 %
longer with 4 MB (docs/measurements/awareness.md, "A policy for the job's own tensors").
"""

FIXED_TOPOLOGIES: Final = frozenset({"sharded", "balanced", "ring", "custom"})
"""Topologies that are the same in every network."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a job sums in an iteration."""

    tensors: tuple[int, ...]
    """Bytes of each tensor, in order of priority."""
    chunk_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(self.tensors)

    def is_similar(self, other: Workload) -> bool:
        """Return whether a policy for one workload suits the other."""
        large, small = max(self.bytes, other.bytes), min(self.bytes, other.bytes)
        return large <= (1 + _SIMILAR_SIZE) * small and self.chunk_bytes == other.chunk_bytes


def workload_of(keys: KeyRegistry) -> Workload | None:
    """Return what a job sums; None: it has no keys yet."""
    return Workload(keys.sizes, keys.chunk_bytes) if sum(keys.sizes) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """How policies are formed, and when."""

    topology: str = "fapt"
    update_time_s: float = 5.0
    update_rate: float = 0.1
    num_roots: int = 0
    hub: int = -1
    """-1: the best placed rank."""
    custom: str = ""
    seed: int = 0
    freeze_roots: bool = False
    """Roots and their shares stay as in the first policy, as the paper's do."""
    auxiliary: bool = False
    """Policies have auxiliary paths."""
    explore: bool = False
    """Some auxiliary paths lead over links that have not been measured."""

    def options(
        self,
        workload: Workload,
        *,
        known: bool,
        unmeasured: Iterable[tuple[int, int]] = (),
        measured: Iterable[tuple[int, int]] = (),
    ) -> Options:
        """Return the options of a topology scheme; see `Options` for the arguments."""
        return Options(
            num_roots=self.num_roots,
            hub=None if self.hub < 0 else Rank(self.hub),
            chunk_bytes=workload.chunk_bytes,
            tensors=workload.tensors,
            custom=self.custom,
            known=known,
            auxiliary=self.auxiliary,
            unmeasured=tuple(unmeasured),
            measured=tuple(measured),
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialAssumptions:
    """What the first policy is formed for."""

    network: Network
    known: bool
    """The network's rates come from a network file; otherwise they are made up."""
    described: bool = False
    """A network file says which links there are."""
    trusted: bool = False
    """Known rates are believed, whatever is measured."""
    find_routes: bool = False
    """Without a network file, look for pairs that are routes over other links."""
    settings: PolicySettings
    workload: Workload
    chunks: ChunkSizes | None = None
    """Chunk sizes that suit slow links; None: the configured ones."""
    link_share: float = 1.0
    """The job's part of each known rate; other jobs have the rest."""

    @property
    def planned(self) -> Network:
        """The network that policies are formed for."""
        if self.link_share == 1.0 or not self.known:
            return self.network
        return self.network.scaled(self.link_share)
