"""What a rank of `netstorm bench churn` does in a step, whichever system sums for it: numbers that say whose
they are, the check of every element of every sum, and a state that all sums make together.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from netstorm.protocol.frames import checksum

__all__ = ["END", "Numbers", "Work", "WrongSum", "say", "weight_of"]

_SIZES: Final = {"small": 100, "medium": 20_000, "large": 100_000}
END: Final = "end"
"""A key of one number, which is not 0 once a rank asks for the end."""

Numbers = npt.NDArray[np.int64]


class WrongSum(Exception):
    """A result is not the sum of those whom it names."""


def weight_of(ranks: Iterable[int]) -> int:
    """Return the sum of some ranks' weights. A rank's is a power of four, so a sum shows how often each is in
    it.
    """
    return sum(1 << 2 * rank for rank in ranks)


class Work:
    """The numbers of one rank.

    Attributes:
        rank: whose they are.
        sizes: elements by name.
        state: by name, what all sums so far make together.
        step: the next one.
        ends: this rank asks for the end.
    """

    def __init__(self, rank: int) -> None:
        self.rank: Final = rank
        self.sizes: Final = {**_SIZES, END: 1}
        self.state: Final[dict[str, Numbers]] = {
            name: np.zeros(size, np.int64) for name, size in self.sizes.items()
        }
        self.step = 0
        self.ends = False
        self._base: Final = {
            name: np.arange(size, dtype=np.int64) % 1009 for name, size in self.sizes.items()
        }

    def contribution(self, name: str, weight: int | None = None) -> Numbers:
        """Return what a rank contributes to this step, or what ranks with a `weight` contribute together."""
        weight = weight_of([self.rank]) if weight is None else weight
        if name == END:
            return np.array([weight if self.ends else 0], np.int64)
        return (self._base[name] + self.step * 1_000_003) * weight

    def check(self, name: str, found: Numbers, weight: int, part: slice, what: object) -> None:
        """Check a part of the sum of ranks with a weight.

        Raises:
            WrongSum: it is another one.
        """
        found, expected = found[part], self.contribution(name, weight)[part]
        if name != END and not np.array_equal(found, expected):
            raise WrongSum(
                f"{what}, elements {part.start} to {part.stop}: {found[:3]}…, expected {expected[:3]}… of "
                f"ranks whose weight is {weight:#x}"
            )

    def ranks_in(self, results: Mapping[str, Numbers]) -> list[int]:
        """Return who is in the sums of a step, and check every element.

        Raises:
            WrongSum: they are sums of no ranks.
        """
        weight, rest = divmod(int(results["small"][1]), 1 + self.step * 1_000_003)
        ranks = [rank for rank in range(weight.bit_length()) if weight >> 2 * rank & 1]
        if rest or weight != weight_of(ranks):
            raise WrongSum(f"step {self.step}: {results['small'][:3]}… are the sums of no ranks")
        for name, found in results.items():
            self.check(name, found, weight, slice(0, len(found)), f"step {self.step} of {name!r}")
        return ranks

    def complete(self, results: Mapping[str, Numbers], ranks: int) -> bool:
        """Make the next state, and say so; `ranks` is a bit set. Return whether this was the last step."""
        for name, result in results.items():
            self.state[name] *= 31
            self.state[name] += result
        self.step += 1
        state = checksum(b"".join(numbers.tobytes() for numbers in self.state.values()))
        say(step=self.step, state=state, ranks=ranks, at=time.monotonic())
        return bool(results[END][0])


def say(**values: Any) -> None:
    """Tell the parent."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
