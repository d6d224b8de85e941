"""Sums of one tensor within a site and across sites, as operations that follow each other. Pure.

A sum over all ranks has three steps: within the site; across sites, among one rank of each, the leaders; and
from each leader to its site. So every site sends and receives each value once over the WAN. All three are
collective rounds of keys that only those ranks have (`GroupCalls`), so no other rank adds or forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from netstorm.errors import UsageError
from netstorm.kvstore.operations.allreduce import Done, Operation
from netstorm.kvstore.operations.group_calls import Exchange, GroupCalls
from netstorm.kvstore.operations.sites import Sites
from netstorm.kvstore.values.form import Array
from netstorm.kvstore.values.key import Key
from netstorm.protocol.collectives import Element, Reduction

__all__ = ["SiteSums", "run_in_turn", "set_memory"]

_ELEMENTS: Final = {
    np.dtype("float16"): Element.FLOAT16,
    np.dtype("float32"): Element.FLOAT32,
    np.dtype("float64"): Element.FLOAT64,
}


class SiteSums:
    """The sums of one tensor. All ranks of a site must ask for the same ones in the same order."""

    def __init__(
        self,
        name: str,
        elements: int,
        dtype: np.dtype[np.generic],
        sites: Sites,
        *,
        register: Callable[..., Key],
        of_all: bool = True,
    ) -> None:
        """Begin without sums.

        Args:
            name: of the tensor, the same at all ranks.
            elements: of the tensor, at least one.
            dtype: of the tensor.
            sites: of the job.
            register: as of `GroupCalls`.
            of_all: a site that has all ranks uses keys of all ranks. If not, its keys name their members:
                in an elastic job these are not joined by ranks that come later.

        Raises:
            UsageError: a type that is not float16, float32 or float64.
        """
        if dtype not in _ELEMENTS:
            raise UsageError(f"{name!r} has type {dtype}; sites sum {', '.join(map(str, _ELEMENTS))}")
        self._element: Final = _ELEMENTS[dtype]
        self._nothing: Final[Array] = np.empty(0, dtype)
        """Takes the place of the memory until `set_memory`."""
        self._bytes: Final = elements * dtype.itemsize
        self._sites: Final = sites

        def group(kind: str, members: tuple[int, ...]) -> GroupCalls:
            size = sites.size if of_all else -1
            return GroupCalls(f"{name}/{kind}", members, size=size, register=register)

        self._site: Final = group(f"site {sites.name}", sites.local)
        self._leaders: Final = group("sites", sites.leaders)

    def within(self, what: str, priority: int = 0) -> list[Operation]:
        """Return the operations of a sum over the own site; none if this rank is alone there.

        Call it on the thread that runs the program; `set_memory` gives the operations their memory.

        Args:
            what: for what it is, the same at all ranks: a difference is an error that names both.
            priority: larger goes first on every link.
        """
        if len(self._sites.local) == 1:
            return []
        return [self._operation(self._site, f"sum of {what}", Reduction.SUM, priority)]

    def average_within(self, what: str, priority: int = 0) -> list[Operation]:
        """Return the operations of an average over those of the own site that contribute; see `within`."""
        if len(self._sites.local) == 1:
            return []
        return [self._operation(self._site, f"average of {what}", Reduction.AVERAGE, priority)]

    def from_leader(self, what: str, priority: int = 0, *, leader: int | None = None) -> list[Operation]:
        """Return the operations that give the leader's values to its site; see `within`.

        Args:
            what: as in `within`.
            priority: as in `within`.
            leader: another rank of the site that leads it now, as all of them know.
        """
        if len(self._sites.local) == 1:
            return []
        leads = self._sites.is_leader if leader is None else self._sites.rank == leader
        return [self._operation(self._site, f"values of {what}", Reduction.COPY, priority, leads=leads)]

    def across(self, what: str, priority: int = 0) -> list[Operation]:
        """Return the operations of a sum over all ranks; see `within`."""
        found = self.within(what, priority)
        if self._sites.is_leader and len(self._sites.leaders) > 1:
            found.append(self._operation(self._leaders, f"sum of {what}", Reduction.SUM, priority))
        return found + self.from_leader(what, priority)

    def _operation(
        self, calls: GroupCalls, text: str, reduction: Reduction, priority: int, *, leads: bool = False
    ) -> Operation:
        copies = reduction is Reduction.COPY
        gives, gets = leads or not copies, not (leads and copies)
        exchange = Exchange(
            text=f"{text}, {self._bytes} bytes",
            reduction=reduction,
            element=self._element,
            segment_bytes=self._bytes,
            source=(self._nothing if gives else None,),
            destination=(self._nothing if gets else None,),
            priority=priority,
        )
        return calls.operation(exchange, _ignore)


def set_memory(operations: Sequence[Operation], values: Array) -> None:
    """Let operations of `SiteSums` take and leave their values in `values`: flat, of the tensor's type."""
    for operation in operations:
        gives, gets = operation.source, operation.destination
        assert isinstance(gives, tuple)
        assert isinstance(gets, tuple)
        operation.source = (None if gives[0] is None else values,)
        operation.destination = (None if gets[0] is None else values,)


def run_in_turn(operations: Sequence[Operation], submit: Callable[[Operation], None], done: Done) -> None:
    """Submit operations one after the other; call `done` after the last one, or with the first error."""
    if not operations:
        done(None)
        return
    first, *others = operations

    def ended(error: Exception | None) -> None:
        if error is not None:
            done(error)
        else:
            run_in_turn(others, submit, done)

    first.done = ended
    submit(first)


def _ignore(_: Exception | None) -> None:
    """Stand in for what `run_in_turn` sets."""
