"""Options of the schemes. A new option of a scheme belongs here."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.errors import UsageError
from netstorm.topology.networks.elements import Rank
from netstorm.topology.trees.metric import CHUNK_BYTES

__all__ = ["Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of all schemes; each scheme reads those that concern it.

    Raises:
        UsageError: a value that no scheme can use.
    """

    num_roots: int = 0
    """Number of roots; 0: all ranks."""
    hub: Rank | None = None
    """Hub of a star; None: the best placed rank."""
    chunk_bytes: int = CHUNK_BYTES
    """Bytes of a full chunk."""
    tensors: tuple[int, ...] = (100_000_000,)
    """Bytes of each tensor that is to be reduced, in order of priority."""
    degree: int = 2
    """Most children of a rank in a balanced tree."""
    custom: str = ""
    """Path of the file that describes a custom topology."""
    known: bool = True
    """Rates and latencies are known or measured; if they are assumed, no look-ahead is computed from them."""
    auxiliary: bool = False
    """The policy gets detours around its busiest hops."""
    unmeasured: tuple[tuple[int, int], ...] = ()
    """(source, target) of links without a recent measurement: with `auxiliary`, some detours lead over them.
    """
    measured: tuple[tuple[int, int], ...] = ()
    """Those of `unmeasured` that were measured before: to measure them again is not urgent."""
    seed: int = 0
    """Seed of random searches: the same seed gives the same policy."""

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
        """Return the bytes that each edge of one of so many trees carries, and at least a chunk.

        Trees that are formed by the delays of their edges need it, to weigh rates against latencies: formed
        for single chunks, N-root FAPTs take 1.6 times as long for 244 MB.
        """
        return max(self.tensor_bytes // trees, min(self.chunk_bytes, self.tensor_bytes))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(self.tensors)
