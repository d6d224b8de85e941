"""What the collectives of a group do, whatever framework calls them. Pure.

| collective | segments | source | receivers |
|---|---|---|---|
| all-reduce | one | everybody | everybody |
| reduce | one | everybody | one rank |
| broadcast | one | one rank | all others |
| all-gather | one a rank | its own | all others |
| gather | one a rank | its own | one rank |
| scatter | one a rank | one rank | each its own |
| reduce-scatter | one a rank | everybody | each its own |

Where values are copied, nobody gets his own back: what a rank has for itself stays within its memory.

Frontends give the memory of their tensors as flat arrays: of the type in which elements are stored where
values are reduced (`forms.STORED`), of bytes where they are copied.
"""

from __future__ import annotations

from typing import Final

from netstorm.kvstore.calls import TensorExchange
from netstorm.kvstore.forms import Array, Segments
from netstorm.protocol.codecs import Element, Reduction

__all__ = ["CollectiveExchanges", "reduced"]


def reduced(
    text: str,
    source: Array,
    destination: Array | None,
    reduction: Reduction,
    element: Element,
    *,
    receivers: tuple[int, ...] = (),
    priority: int = 0,
) -> TensorExchange:
    """Reduce an array over all ranks; `destination` None: this rank drops the result."""
    return TensorExchange(
        text=text,
        reduction=reduction,
        element=element,
        segment_bytes=source.nbytes,
        source=(source,),
        destination=(destination,),
        receivers=receivers,
        priority=priority,
    )


class CollectiveExchanges:
    """The exchanges of one member of a group. `text` is the call's, as error messages show it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank: Final = rank
        self._size: Final = size
        self._each: Final = tuple(1 << one for one in range(size))
        """The bit set of each rank alone."""
        self._others: Final = tuple((1 << size) - 1 & ~bit for bit in self._each)
        """The bit set of all but each rank."""

    def reduce(
        self,
        text: str,
        source: Array,
        destination: Array | None,
        reduction: Reduction,
        element: Element,
        *,
        root: int,
    ) -> TensorExchange:
        """Reduce an array over all ranks; `root` alone has a destination."""
        target = destination if root == self._rank else None
        return reduced(text, source, target, reduction, element, receivers=(1 << root,))

    def broadcast(self, text: str, array: Array, root: int) -> TensorExchange:
        """Copy the array of `root` to everybody's."""
        mine = root == self._rank
        source, target = (array, None) if mine else (None, array)
        return _copied(text, (source,), (target,), array.nbytes, (self._others[root],))

    def all_gather(self, text: str, mine: Array, outputs: Segments) -> TensorExchange:
        """Copy every rank's array to all; `outputs` by rank."""
        return _copied(text, self._at_own_place(mine), outputs, mine.nbytes, self._others)

    def gather(self, text: str, mine: Array, outputs: Segments | None, root: int) -> TensorExchange:
        """Copy every rank's array to `root`, which alone has `outputs`, by rank."""
        targets = (None,) * self._size if outputs is None else outputs
        receivers = tuple(1 << root & others for others in self._others)
        return _copied(text, self._at_own_place(mine), targets, mine.nbytes, receivers)

    def scatter(self, text: str, output: Array, inputs: Segments | None, root: int) -> TensorExchange:
        """Copy each array of `root`, which alone has `inputs`, by rank, to the rank of its place."""
        given = (None,) * self._size if inputs is None else inputs
        receivers = tuple(bit & self._others[root] for bit in self._each)
        return _copied(text, given, self._at_own_place(output), output.nbytes, receivers)

    def reduce_scatter(
        self, text: str, output: Array, inputs: Segments, reduction: Reduction, element: Element
    ) -> TensorExchange:
        """Reduce the arrays of each place, and give the result to the rank of that place."""
        return TensorExchange(
            text=text,
            reduction=reduction,
            element=element,
            segment_bytes=output.nbytes,
            source=inputs,
            destination=self._at_own_place(output),
            receivers=self._each,
        )

    def _at_own_place(self, array: Array) -> Segments:
        return tuple(array if rank == self._rank else None for rank in range(self._size))


def _copied(
    text: str, source: Segments, destination: Segments, size: int, receivers: tuple[int, ...]
) -> TensorExchange:
    return TensorExchange(
        text=text,
        reduction=Reduction.COPY,
        element=Element.BYTES,
        segment_bytes=size,
        source=source,
        destination=destination,
        receivers=receivers,
    )
