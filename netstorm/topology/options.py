"""What schemes may be told."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.errors import UsageError
from netstorm.topology.networks.elements import Rank
from netstorm.topology.trees.metric import CHUNK_BYTES

__all__ = ["Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a scheme may be told; each reads what concerns it.

    Raises:
        UsageError: a value that no scheme can use.
    """

    num_roots: int = 0
    """How many ranks are roots; 0: all."""
    hub: Rank | None = None
    """None: the best placed one."""
    chunk_bytes: int = CHUNK_BYTES
    """Bytes of a full chunk."""
    tensors: tuple[int, ...] = (100_000_000,)
    """Bytes of each tensor that is to be reduced, in order of priority."""
    degree: int = 2
    """Most children of a rank in a balanced tree."""
    custom: str = ""
    """Path of the file that describes a custom topology."""
    known: bool = True
    """Rates and latencies are known or measured; if they are made up, no look-ahead is computed from them."""
    auxiliary: bool = False
    """The policy gets detours around its busiest hops."""
    unmeasured: tuple[tuple[int, int], ...] = ()
    """(source, target) of links that have not been measured (of late): with `auxiliary`, some of the detours
    lead over them.
    """
    measured: tuple[tuple[int, int], ...] = ()
    """Those of them that were measured once: to look at them again is not urgent."""
    seed: int = 0
    """Of whatever is searched for at random: the same seed gives the same policy."""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise UsageError(f"chunk_bytes is {self.chunk_bytes}: expected at least 1")
        if not self.tensors or min(self.tensors) < 0 or not sum(self.tensors):
            raise UsageError(
                f"tensors of {list(self.tensors)[:12]} bytes: expected at least one that is not empty"
            )
        if self.degree < 1:
            raise UsageError(f"degree {self.degree}: expected at least 1, the most children that a rank has")

    def tree_bytes(self, trees: int) -> int:
        """Return what each edge of one of so many trees carries in all, and no less than a chunk.

        That is what decides whether an edge's rate or its latency counts, for trees that are formed by the
        delays of their edges: formed for single chunks, as if each were alone, N-root FAPTs took 1.6 times as
        long for 244 MB.
        """
        return max(self.tensor_bytes // trees, min(self.chunk_bytes, self.tensor_bytes))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(self.tensors)
