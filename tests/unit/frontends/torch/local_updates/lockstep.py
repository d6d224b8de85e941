"""Several ranks in one process: their collectives are carried out when the first one waits for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Waitable(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


@dataclass
class Collective:
    """A tensor of each rank, until one waits."""

    combine: Callable[[torch.Tensor], torch.Tensor]
    tensors: list[torch.Tensor] = field(default_factory=list)
    waits: int = 0
    done: bool = False

    def wait(self) -> None:
        self.waits += 1
        if not self.done:
            result = self.combine(torch.stack(self.tensors)).to(self.tensors[0].dtype)
            for tensor in self.tensors:
                tensor.copy_(result)
            self.done = True


@dataclass
class World:
    """What all ranks have begun, in their common order."""

    size: int
    short_integers: bool = False
    collectives: list[Collective] = field(default_factory=list)

    def ranks(self) -> list[RanksOf]:
        return [RanksOf(self) for _ in range(self.size)]


@dataclass
class RanksOf:
    """One rank's view of a world."""

    world: World
    begun: int = 0

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def short_integers(self) -> bool:
        return self.world.short_integers

    def begin_sum(self, tensor: torch.Tensor) -> Collective:
        # Of the type's own width, as a back end adds: an overflow shows.
        return self._begin(tensor, lambda parts: parts.sum(dim=0, dtype=parts.dtype))

    def begin_max(self, tensor: torch.Tensor) -> Collective:
        return self._begin(tensor, lambda parts: parts.amax(dim=0))

    def _begin(self, tensor: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor]) -> Collective:
        if self.begun == len(self.world.collectives):
            self.world.collectives.append(Collective(combine))
        collective = self.world.collectives[self.begun]
        collective.tensors.append(tensor)
        self.begun += 1
        return collective


def together(generators: Sequence[Generator[Waitable, None, Result]]) -> list[Result]:
    """Run one generator a rank, so that each collective has begun at all ranks before any waits for it."""
    while True:
        works, results = [], []
        for generator in generators:
            try:
                works.append(next(generator))
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert not works, "some ranks take more collectives than others"
            return results
        for work in works:
            work.wait()
