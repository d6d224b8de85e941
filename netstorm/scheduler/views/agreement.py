"""Agreement on a new view: which results are sent to whom, once all members have reported theirs. Pure.

`kvstore.rounds.views.view_changes` is the nodes' side, and explains the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol.frames import bits_from_wire, bits_to_wire, ranks_in
from netstorm.protocol.messages import Recovery, RoundResults, ViewAgreed, ViewReport

__all__ = ["Agreement"]


class Agreement:
    """The reports of the members of one new view.

    Attributes:
        view: its number.
        missing: the members that have not reported.
        ahead: members whose state has results that others lack and nobody can send them. Once all have
            reported, the view cannot be agreed on with these.
    """

    def __init__(
        self,
        view: int,
        members: Iterable[int],
        newcomers: Iterable[int],
        members_of_key: Callable[[int], tuple[int, ...]],
    ) -> None:
        """Begin without reports.

        Args:
            view: its number.
            members: the ranks in the view.
            newcomers: those among them that have no state: they get all results from the first round on that
                some other rank has not completed.
            members_of_key: returns the ranks that take part in a key; empty: all.
        """
        self.view: Final = view
        self.missing: Final = set(members)
        self.ahead: tuple[int, ...] = ()
        self._newcomers: Final = frozenset(newcomers)
        self._members_of_key: Final = members_of_key
        self._reports: Final[dict[int, ViewReport]] = {}

    def report(self, rank: int, message: ViewReport) -> ViewAgreed | None:
        """Record a member's report; return what is agreed, once all have reported and none is ahead.

        Raises:
            ProtocolViolation: the rank was not asked, or has reported before.
        """
        if message.view != self.view:
            return None  # of a view that was given up
        if rank not in self.missing:
            raise ProtocolViolation(f"rank {rank} reports twice, or is not in view {self.view}")
        self.missing.discard(rank)
        self._reports[rank] = message
        if self.missing:
            return None
        self.ahead = self._find_ahead()
        return None if self.ahead else self._agreed()

    def _find_ahead(self) -> tuple[int, ...]:
        """Return the members that have fetched a state from a rank that has left, and that was ahead of all
        others: they must not go on without its contributions, and cannot with them.
        """
        ahead = set()
        for rank, report in self._reports.items():
            for key, begins in report.begins.items():
                for round in range(report.complete.get(key, -1) + 1, begins):
                    needy = any(self._needs(other, key, round) for other in self._reports if other != rank)
                    if needy and not self._is_known(key, round):
                        ahead.add(rank)
        others = self._reports.keys() - self._newcomers - ahead
        return tuple(sorted(ahead)) if others else ()

    def _needs(self, rank: int, key: int, round: int) -> bool:
        """Return whether a member's program waits for a round, or will."""
        report, of_key = self._reports[rank], self._members_of_key(key)
        if of_key and rank not in of_key:
            return False
        if rank in self._newcomers and key not in report.begins:
            return False
        return max(report.complete.get(key, -1), report.begins.get(key, 0) - 1) < round

    def _is_given_up(self, key: int, round: int) -> bool:
        """Return whether nobody waits for a round, and some results of it are nowhere: they were lost with a
        rank of which all members with the job's state have their state.
        """
        return not any(self._needs(rank, key, round) for rank in self._reports) and not self._is_known(
            key, round
        )

    def _is_known(self, key: int, round: int) -> bool:
        """Return whether some member has each result of a round."""
        chunks = of = 0
        for report in self._reports.values():
            for results in report.results:
                if (results.key, results.round) == (key, round):
                    chunks, of = chunks | bits_from_wire(results.chunks), results.of
        return of > 0 and chunks == (1 << of) - 1

    def _agreed(self) -> ViewAgreed:
        first_rounds = self._first_rounds()
        complete = {
            rank: {
                key: first - 1 if report.fresh else report.complete.get(key, -1)
                for key, first in first_rounds.items()
            }
            for rank, report in self._reports.items()
        }
        recoveries: list[Recovery] = []
        lost: list[RoundResults] = []
        for key, round in self._rounds(first_rounds, complete):
            if self._is_given_up(key, round):
                lost.append(RoundResults(key, round, b""))
                continue
            of_key = self._members_of_key(key)
            needy = [
                rank
                for rank in self._reports
                if complete[rank].get(key, -1) < round and (not of_key or rank in of_key)
            ]
            recovered, gone = self._recoveries(key, round, needy, first_rounds.get(key, 0))
            recoveries += recovered
            lost += gone
        return ViewAgreed(
            view=self.view, recoveries=tuple(recoveries), first_rounds=first_rounds, lost=tuple(lost)
        )

    def _first_rounds(self) -> dict[int, int]:
        """Return, by key, the first round that some member with the job's state has not completed."""
        found: dict[int, int] = {}
        for rank, report in self._reports.items():
            if rank not in self._newcomers:
                for key, complete in report.complete.items():
                    of_key = self._members_of_key(key)
                    if not of_key or rank in of_key:
                        found[key] = min(found.get(key, complete + 1), complete + 1)
        return found

    def _rounds(
        self, first_rounds: dict[int, int], complete: dict[int, dict[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Yield the rounds of which somebody has results, those before the begin of a program that lacks
        them, and those that only newcomers lack.
        """
        rounds = {
            (results.key, results.round) for report in self._reports.values() for results in report.results
        }
        for report in self._reports.values():
            for key, begins in report.begins.items():
                rounds.update((key, round) for round in range(report.complete.get(key, -1) + 1, begins))
        for rank in self._newcomers & self._reports.keys():
            for key, first in first_rounds.items():
                rounds.update((key, round) for round in range(complete[rank][key] + 1, first))
        yield from sorted(rounds)

    def _recoveries(
        self, key: int, round: int, needy: list[int], first_round: int
    ) -> tuple[list[Recovery], list[RoundResults]]:
        holders: dict[int, list[int]] = {}
        here: dict[int, int] = {}
        known = 0
        for rank, report in self._reports.items():
            for results in report.results:
                if (results.key, results.round) == (key, round):
                    chunks = bits_from_wire(results.chunks)
                    known |= bits_from_wire(results.known)
                    here[rank] = chunks | bits_from_wire(results.known)
                    for chunk in ranks_in(chunks):
                        holders.setdefault(chunk, []).append(rank)
        if not needy:
            return [], []
        if not holders and not known:
            return [], [RoundResults(key, round, b"")] if round < first_round else []
        sends: dict[tuple[int, int], int] = {}
        for target in needy:
            for chunk, ranks in holders.items():
                if not here.get(target, 0) >> chunk & 1:
                    source = ranks[(chunk + target) % len(ranks)]
                    sends[source, target] = sends.get((source, target), 0) | 1 << chunk
        recoveries = [
            Recovery(key, round, source, target, bits_to_wire(chunks))
            for (source, target), chunks in sends.items()
        ]
        nowhere = known & ~sum(1 << chunk for chunk in holders)
        return recoveries, [RoundResults(key, round, bits_to_wire(nowhere))] if nowhere else []
