"""Which rank of a site pushes and pulls a key for all, and what its ranks sum and share meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from netstorm.kvstore.operations.allreduce import Done, Operation
from netstorm.kvstore.operations.site_sums import SiteSums, run_in_turn, set_memory
from netstorm.kvstore.values.form import Array

__all__ = ["SiteLead"]


class SiteLead:
    """The ranks of a site for one key, the lowest of which leads.

    In an elastic job a rank that has left is missing in the next result, which is the same at all that are
    left. So they agree on who leads. Sums and values are numbered when they begin: a rank begins one after
    the other, in the order of its script, and all ranks of the site in the same order.
    """

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        sums: SiteSums | None,
        submit: Callable[[Operation], None],
    ) -> None:
        """Begin with all ranks.

        Args:
            rank: this one.
            ranks: of its site, ascending.
            sums: of the key; None if this rank is alone.
            submit: begins an operation.
        """
        self.ranks = ranks
        """Those that are left, as the last result says."""
        self._rank: Final = rank
        self._sums: Final = sums
        self._submit: Final = submit

    @property
    def leads(self) -> bool:
        """Whether this rank pushes and pulls."""
        return self.ranks[0] == self._rank

    def sum(self, values: Array, what: str, priority: int, done: Done) -> None:
        """Replace values by their sum over the site.

        Args:
            values: flat, of the key's type.
            what: for error messages, the same at all ranks.
            priority: larger goes first on every link.
            done: hears of the end.
        """
        self._run([] if self._sums is None else self._sums.within(what, priority), values, done)

    def share(
        self, values: Array, what: str, priority: int, pull: Callable[[Done], None], done: Done
    ) -> None:
        """Replace values by those that the leader pulls. If it dies meanwhile, the next one pulls.

        Args:
            values: as of `sum`, like `what`, `priority` and `done`.
            pull: has `values` replaced by the newest ones.
        """
        sums, leader = self._sums, self.ranks[0]
        if sums is None:
            pull(done)
            return

        def shared(error: Exception | None) -> None:
            if error is None and self.ranks[0] != leader:
                self.share(values, what, priority, pull, done)
            else:
                done(error)

        def pulled(error: Exception | None) -> None:
            if error is None:
                self._run(sums.from_leader(what, priority, leader=leader), values, shared)
            else:
                done(error)

        if self.leads:
            pull(pulled)
        else:
            pulled(None)

    def _run(self, operations: list[Operation], values: Array, done: Done) -> None:
        set_memory(operations, values)

        def ended(error: Exception | None) -> None:
            if error is None:
                for operation in operations:
                    for bits in operation.contributors:  # of some chunks
                        self.ranks = tuple(
                            rank for rank in self.ranks if bits >> rank & 1 or rank == self._rank
                        )
            done(error)

        run_in_turn(operations, self._submit, ended)
