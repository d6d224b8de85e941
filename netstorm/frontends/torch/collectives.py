"""PyTorch's collectives as exchanges: which rank gives which segment, and who wants its result.

| collective | segments | source | receivers |
|---|---|---|---|
| all-reduce | one | everybody | everybody |
| reduce | one | everybody | one rank |
| broadcast | one | one rank | everybody |
| all-gather | one a rank | its own | everybody |
| gather | one a rank | its own | one rank |
| scatter | one a rank | one rank | each its own |
| reduce-scatter | one a rank | everybody | each its own |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import torch

from netstorm.errors import UsageError
from netstorm.frontends.torch.process_group.elements import NAMES, element_of, type_name
from netstorm.frontends.torch.process_group.memory import array_of, described
from netstorm.kvstore.calls import Exchange
from netstorm.kvstore.forms import Segments
from netstorm.protocol.codecs import Element, Reduction
from netstorm.protocol.messages import LossTerms

__all__ = ["Exchanges"]


class Exchanges:
    """The exchanges of one member of a group. Tensors are on the CPU, dense and contiguous
    (`memory.staged`).
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank: Final = rank
        self._size: Final = size

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, priority: int = 0) -> Exchange:
        """Reduce a tensor in place; a higher `priority` goes first on every link."""
        text = f"all_reduce({NAMES[reduction]}) of {described(tensor)}"
        return self._reduced(tensor, reduction, text, priority=priority)

    def sum_with_loss(
        self, kept: torch.Tensor, result: torch.Tensor, terms: LossTerms, priority: int
    ) -> Exchange:
        """Sum `kept` into `result`, maybe without late contributions, which stay in `kept`."""
        text = f"all_reduce(SUM) of {described(kept)} with {terms}"
        exchange = self._reduced(kept, Reduction.SUM, text, priority=priority)
        element = element_of(result.dtype, Reduction.SUM)
        return msgspec.structs.replace(exchange, destination=(array_of(result, element),), loss=terms)

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int) -> Exchange:
        """Reduce a tensor in place at `root`; it stays as it is elsewhere."""
        return self._reduced(
            tensor,
            reduction,
            f"reduce({NAMES[reduction]}) to rank {root} of {described(tensor)}",
            in_place=root == self._rank,
            receivers=(root,),
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> Exchange:
        """Copy a tensor of `root` to everybody's."""
        array = array_of(tensor, Element.BYTES)
        mine = root == self._rank
        return Exchange(
            text=f"broadcast from rank {root} of {described(tensor)}",
            reduction=Reduction.COPY,
            element=Element.BYTES,
            segment_bytes=array.nbytes,
            source=(array if mine else None,),
            destination=(None if mine else array,),
        )

    def barrier(self) -> Exchange:
        """Wait for everybody: a sum of one byte."""
        one = torch.zeros(1, dtype=torch.uint8)
        return self._reduced(one, Reduction.SUM, "barrier()")

    def all_gather(
        self, outputs: Sequence[torch.Tensor], mine: torch.Tensor, name: str = "all_gather"
    ) -> Exchange:
        """Copy every rank's tensor to all; `outputs` by rank."""
        self._check(outputs, mine, name)
        return self._copied(
            f"{name} of {described(mine)}",
            source=tuple(mine if rank == self._rank else None for rank in range(self._size)),
            destination=tuple(outputs),
            size=mine.nbytes,
        )

    def gather(self, outputs: Sequence[torch.Tensor] | None, mine: torch.Tensor, root: int) -> Exchange:
        """Copy every rank's tensor to `root`, where `outputs` are, by rank."""
        if outputs is not None:
            self._check(outputs, mine, "gather")
        return self._copied(
            f"gather to rank {root} of {described(mine)}",
            source=tuple(mine if rank == self._rank else None for rank in range(self._size)),
            destination=(None,) * self._size if outputs is None else tuple(outputs),
            size=mine.nbytes,
            receivers=(root,) * self._size,
        )

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> Exchange:
        """Copy each tensor of `root`, where `inputs` are, to the rank of its place."""
        if inputs is not None:
            self._check(inputs, output, "scatter")
        return self._copied(
            f"scatter from rank {root} of {described(output)}",
            source=(None,) * self._size if inputs is None else tuple(inputs),
            destination=tuple(output if rank == self._rank else None for rank in range(self._size)),
            size=output.nbytes,
            receivers=tuple(range(self._size)),
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
    ) -> Exchange:
        """Reduce the tensors of each place, and give the result to the rank of that place."""
        self._check(inputs, output, "reduce_scatter")
        element = element_of(output.dtype, reduction)
        return Exchange(
            text=f"reduce_scatter({NAMES[reduction]}) of {described(output)}",
            reduction=reduction,
            element=element,
            segment_bytes=output.nbytes,
            source=tuple(array_of(tensor, element) for tensor in inputs),
            destination=tuple(
                array_of(output, element) if rank == self._rank else None for rank in range(self._size)
            ),
            receivers=tuple(range(self._size)),
        )

    def _reduced(
        self,
        tensor: torch.Tensor,
        reduction: Reduction,
        text: str,
        *,
        in_place: bool = True,
        receivers: tuple[int, ...] = (),
        priority: int = 0,
    ) -> Exchange:
        element = element_of(tensor.dtype, reduction)
        array = array_of(tensor, element)
        return Exchange(
            text=text,
            reduction=reduction,
            element=element,
            segment_bytes=array.nbytes,
            source=(array,),
            destination=(array if in_place else None,),
            receivers=receivers,
            priority=priority,
        )

    def _copied(
        self,
        text: str,
        *,
        source: Sequence[torch.Tensor | None],
        destination: Sequence[torch.Tensor | None],
        size: int,
        receivers: tuple[int, ...] = (),
    ) -> Exchange:
        return Exchange(
            text=text,
            reduction=Reduction.COPY,
            element=Element.BYTES,
            segment_bytes=size,
            source=_bytes(source),
            destination=_bytes(destination),
            receivers=receivers,
        )

    def _check(self, tensors: Sequence[torch.Tensor], like: torch.Tensor, name: str) -> None:
        """Check that there is one tensor a rank, all of the same size.

        Raises:
            UsageError: there is not.
        """
        if len(tensors) != self._size:
            raise UsageError(f"{name}: {len(tensors)} tensors for {self._size} ranks; give one a rank")
        for rank, tensor in enumerate(tensors):
            if tensor.dtype != like.dtype or tensor.numel() != like.numel():
                raise UsageError(
                    f"{name}: the tensor of rank {rank} is {type_name(tensor.dtype)} {tuple(tensor.shape)}, "
                    f"and this rank's {type_name(like.dtype)} {tuple(like.shape)}: all must be of one type "
                    "and size (all_to_all takes tensors of different sizes)"
                )


def _bytes(tensors: Sequence[torch.Tensor | None]) -> Segments:
    return tuple(None if tensor is None else array_of(tensor, Element.BYTES) for tensor in tensors)
