"""Some values of a tensor in memory of their own, as a call or a codec takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from netstorm.frontends.torch.process_group.memory import Staged

__all__ = ["PartOf"]


class PartOf(Staged):
    """Values of several places of a tensor in a row, perhaps of another type; all of them in place if
    possible.
    """

    must_wait = True

    def __init__(self, whole: Staged, places: Sequence[slice], dtype: torch.dtype) -> None:
        """Describe the values; `wait_until_read` reads them.

        Args:
            whole: the tensor.
            places: where the values are, in the order in which they are wanted.
            dtype: in which they are wanted.
        """
        self._whole = whole
        self._values = whole.host.reshape(-1)  # a view: it is contiguous
        self._places = places
        self._write = True
        self.tensor = self._values
        self.device = None
        in_place = dtype == self._values.dtype and _all_of(self._values.numel(), places)
        elements = sum(place.stop - place.start for place in places)
        self.host = self._values if in_place else torch.empty(elements, dtype=dtype)

    def wait_until_read(self) -> None:
        """Read the values."""
        self._whole.wait_until_read()
        if self.is_copy:
            for mine, theirs in self._pairs():
                mine.copy_(theirs)

    def copy_back(self) -> None:
        """Give the values to the tensor."""
        if self.is_copy:
            for mine, theirs in self._pairs():
                theirs.copy_(mine)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        mine = torch.split(self.host, [place.stop - place.start for place in self._places])
        return [(part, self._values[place]) for part, place in zip(mine, self._places, strict=True)]


def _all_of(elements: int, places: Sequence[slice]) -> bool:
    end = 0
    for place in places:
        if place.start != end:
            return False
        end = place.stop
    return end == elements
