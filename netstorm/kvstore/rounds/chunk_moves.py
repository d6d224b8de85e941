"""Chunks of rounds under way are given away, and moved, when a policy takes over (see `takeover`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final

from netstorm.kvstore.rounds.outgoing import Outgoing
from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.takeover import Tag, Takeover
from netstorm.kvstore.rounds.withheld_sums import Owner
from netstorm.observe.counters import Counters
from netstorm.protocol.messages import Moved, Phase
from netstorm.topology.policy import Plan

__all__ = ["ChunkMoves"]


class ChunkMoves:
    """Does to the open rounds of a node what its `takeover` says."""

    def __init__(
        self,
        *,
        takeover: Takeover,
        rounds: Mapping[Owner, Round],
        outgoing: Outgoing,
        counters: Counters,
        contribute: Callable[[Round, int], None],
    ) -> None:
        """Begin with nothing moved.

        Args:
            takeover: which chunks have moved.
            rounds: those that are open; others keep them.
            outgoing: parts that may have to be taken back.
            counters: count what is done.
            contribute: adds what the user's program has of a chunk of a round, which is not summed at all.
        """
        self._takeover: Final = takeover
        self._rounds: Final = rounds
        self._outgoing: Final = outgoing
        self._counters: Final = counters
        self._contribute: Final = contribute

    def new_policy(self, plan: Plan) -> None:
        """A policy has come: what is under way goes over to it, if it says so."""
        if self._takeover.install(plan):
            for round in list(self._rounds.values()):
                self.give_away(round)
            self._outgoing.take_back(self._takeover.goes_around, self._outgoing.go_around)

    def told(self, said: Moved, plan: Plan) -> None:
        """Take the scheduler's word that chunks of a round that is not complete have moved to `plan`."""
        round = self._rounds.get((said.key, said.round))
        if round is None:
            moves = self._takeover.moves(said.key, said.round)
            moves.update((chunk, plan) for chunk in said.chunks if _is_newer(plan, moves.get(chunk)))
        else:
            self._move(round, said.chunks, plan)

    def give_away(self, round: Round) -> None:
        """Give the chunks that this node is the root of, and has not summed, to the policy that takes over.

        Called before anything is added to a round that is new here, or when that policy comes.
        """
        plan, chunks = self._takeover.plan, self._takeover.to_give(round)
        if plan is not None and chunks:
            self._takeover.gave(round.key.identity, round.round, chunks)
            self._move(round, chunks, plan)

    def _move(self, round: Round, chunks: Iterable[int], plan: Plan) -> None:
        """Forget what is summed of some chunks, and contribute to them again, under another policy."""
        moving = {
            chunk
            for chunk in chunks
            if 0 <= chunk < len(round.sums)
            and not round.results[chunk]
            and _is_newer(plan, round.plan_of(chunk))
        }
        if not moving:
            return
        self._counters.add("chunks_moved", len(moving))
        key, number = round.key.identity, round.round

        def outdated(tag: Hashable) -> bool:
            return (
                isinstance(tag, Tag)
                and (tag.key, tag.round) == (key, number)
                and tag.phase is Phase.REDUCE
                and tag.chunk in moving
                and tag.version < plan.version
            )

        self._outgoing.take_back(outdated)
        for chunk in sorted(moving):
            round.moved[chunk] = plan
            round.sums[chunk] = None
            if round.operation is not None:
                self._contribute(round, chunk)


def _is_newer(plan: Plan, than: Plan | None) -> bool:
    return than is None or plan.version > than.version
