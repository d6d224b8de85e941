"""Sums of tensors within a site, and which of its ranks leads it: speaks for it to other sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from netstorm.kvstore.calls import RegisterKey, Sites, SiteSums, run_in_turn, set_memory
from netstorm.kvstore.forms import Array
from netstorm.kvstore.operations import Done, Operation

__all__ = ["SiteLead", "SiteTensor"]


class SiteTensor(NamedTuple):
    """A tensor that is summed within sites: the same at all ranks."""

    name: str
    elements: int
    dtype: np.dtype[np.generic]


class SiteLead:
    """The ranks of a site that share some tensors, the lowest of which leads.

    In an elastic job a rank that has left is missing in the next result, which is the same at all that are
    left. So they agree on who leads. Sums and values are numbered when they begin: a rank begins one after
    the other, in the order of its script, and all ranks of the site in the same order.

    There a sum is done once all that are left have it. A leader that pushed a sum which nobody else has, and
    then died, would be followed by one that pushes the same gradients: those that are left make the sum anew.
    """

    def __init__(
        self,
        tensors: Sequence[SiteTensor],
        sites: Sites,
        *,
        register: RegisterKey,
        submit: Callable[[Operation], None],
        elastic: bool,
    ) -> None:
        """Begin with all ranks of the site.

        Args:
            tensors: what is summed and shared, flat; those without elements are left as they are.
            sites: of the job; of a rank that has joined later, itself alone.
            register: makes keys known to the job.
            submit: begins an operation.
            elastic: ranks may leave.
        """

        def sums_of(tensor: SiteTensor) -> SiteSums:
            # In an elastic job only those that have begun it ask for them.
            return SiteSums(*tensor, sites, register=register, of_all=not elastic)

        self.ranks = sites.local
        """Those that are left, as the last result says."""
        self._rank: Final = sites.rank
        self._submit: Final = submit
        self._sums: Final = [
            sums_of(tensor) if tensor.elements and len(sites.local) > 1 else None for tensor in tensors
        ]
        self._confirmations: SiteSums | None = None
        if elastic and any(self._sums):
            self._confirmations = sums_of(
                SiteTensor(f"{tensors[0].name}: all have it", 1, np.dtype("float32"))
            )

    @property
    def leader(self) -> int:
        """The rank that pushes and pulls."""
        return self.ranks[0]

    @property
    def leads(self) -> bool:
        """Whether this rank does."""
        return self.leader == self._rank

    def sum(self, values: Sequence[Array], what: str, priority: int, done: Done) -> None:
        """Replace values by their sums over the site.

        Args:
            values: of each tensor.
            what: for error messages, the same at all ranks.
            priority: larger goes first on every link.
            done: hears of the end.
        """
        self._run(lambda sums: sums.within(what, priority), values, self._confirmed(what, priority, done))

    def average(self, values: Sequence[Array], what: str, priority: int, done: Done) -> None:
        """Replace values by their averages over those of the site that contribute; see `sum`."""
        confirmed = self._confirmed(what, priority, done)
        self._run(lambda sums: sums.average_within(what, priority), values, confirmed)

    def copy(self, values: Sequence[Array], what: str, priority: int, done: Done) -> None:
        """Replace values by the leader's; see `sum`. If another rank leads then, the leader has died, and the
        values are any.
        """
        leader = self.leader
        self._run(lambda sums: sums.from_leader(what, priority, leader=leader), values, done)

    def share(
        self, values: Sequence[Array], what: str, priority: int, pull: Callable[[Done], None], done: Done
    ) -> None:
        """Replace values by those that the leader pulls; see `sum`. If it dies meanwhile, the next one pulls.
        `pull` has this rank's values replaced by the newest ones.
        """
        leader = self.leader

        def shared(error: Exception | None) -> None:
            if error is None and self.leader != leader:
                self.share(values, what, priority, pull, done)
            else:
                done(error)

        def pulled(error: Exception | None) -> None:
            if error is None:
                self.copy(values, what, priority, shared)
            else:
                done(error)

        if self.leads:
            pull(pulled)
        else:
            pulled(None)

    def _confirmed(self, what: str, priority: int, done: Done) -> Done:
        """Return what hears of the end of a sum, and calls `done` once all have the sum. Who is missing by
        then does not count: the sum has said who leads.
        """
        confirmations = self._confirmations
        if confirmations is None:
            return done

        def summed(error: Exception | None) -> None:
            if error is not None:
                done(error)
                return
            operations = confirmations.within(f"confirmation of {what}", priority)
            set_memory(operations, np.zeros(1, np.float32))
            run_in_turn(operations, self._submit, done)

        return summed

    def _run(
        self, operations_of: Callable[[SiteSums], list[Operation]], values: Sequence[Array], done: Done
    ) -> None:
        operations: list[Operation] = []
        for sums, memory in zip(self._sums, values, strict=True):
            if sums is not None:
                begun = operations_of(sums)
                set_memory(begun, memory)
                operations += begun

        def ended(error: Exception | None) -> None:
            if error is None:
                for operation in operations:
                    for bits in operation.contributors:  # of some chunks
                        self.ranks = tuple(
                            rank for rank in self.ranks if bits >> rank & 1 or rank == self._rank
                        )
            done(error)

        run_in_turn(operations, self._submit, ended)
