"""Rounds under way that go over to a new policy, chunk by chunk. Pure.

A policy is bound to rounds that nobody has begun (`bindings`); but where links have changed, the round
under way and the next one may take many times as long under the trees of before. So a policy may take over
(`Policy.takes_over`). What happens to a chunk then is for one node alone to say, the root that its sum is
formed at: if it has formed it, that is the result, at all ranks; if not, it never will, and says so by way of
the scheduler (`Moved`). Whoever hears it forgets the sum that it has, and contributes once more, under the
new policy. So each chunk is summed once, by one tree, and all ranks get the same bytes.

Not all are moved. Links that change together are noticed one after the other, and where each policy moved
everything nothing was ever summed: five of them in as many seconds made ranks send 2.4 times what a round
needs. What is under way stays in its tree if nothing that its sum lacks has yet to cross what has become slow
(`Policy.slow`). And where a policy gains less than to send sums once more costs, all that is under way stays
(`Policy.keeps_begun`): only what has not begun goes over.

What has been handed to links and has not left goes over, too: sums of chunks that have moved are taken out
of the queues, and results take the ways of the new policy's trees to where the old ones' lead. So do those
that are formed later, where the old ones would take them over something slow.

Here is which chunks have moved, and what is to; `moving` does it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from netstorm.kvstore.paths.relay import around
from netstorm.kvstore.rounds.round import Round
from netstorm.protocol.messages import Moved, Part, Phase
from netstorm.pslite.machine import Send
from netstorm.topology.policy import Plan

__all__ = ["Tag", "Takeover"]

_LEAST: Final = 1 / 8
"""Part of the chunks that a root sums of a round below which it keeps them: what is on its way arrives sooner
than what is sent once more.
"""


class Tag(NamedTuple):
    """What a part is known by while it is in a link's queue."""

    key: int
    round: int
    chunk: int
    phase: Phase
    version: int
    tree_slot: int
    """The chunk's slot."""
    peer: int


class Takeover:
    """The policy that takes over, and which chunks of open rounds have moved to which policy."""

    def __init__(self, rank: int) -> None:
        self._rank: Final = rank
        self.plan: Plan | None = None
        """The newest that takes over; None: none does."""
        self.news: list[Moved] = []
        """What the scheduler is to be told."""
        self._slow: frozenset[tuple[int, int]] = frozenset()
        """What has become slow, by that policy."""
        self._keeps_begun = False
        """It wants no chunk of which something has come to its root."""
        self._behind_of: dict[int, tuple[tuple[int, ...], ...]] = {}
        """By the version of an earlier plan: for each tree, which ranks are behind each slow link."""
        self._told: dict[tuple[int, int], list[Moved]] = {}
        """What it has been told, of open rounds."""
        self._moves: dict[tuple[int, int], dict[int, Plan]] = {}

    def install(self, plan: Plan) -> bool:
        """Take note of a policy; return whether it takes over from now on."""
        if not plan.policy.takes_over or (self.plan is not None and plan.version <= self.plan.version):
            return False
        self.plan = plan
        self._slow = frozenset(plan.policy.slow)
        self._keeps_begun = plan.policy.keeps_begun
        self._behind_of.clear()
        return True

    def moves(self, key: int, round: int) -> dict[int, Plan]:
        """Return the plans of the chunks of a round that have moved, by chunk; later ones will be in it."""
        return self._moves.setdefault((key, round), {})

    def version_of(self, key: int, round: int, chunk: int) -> int | None:
        """Return the version that a chunk has moved to, or None."""
        moves = self._moves.get((key, round))
        return moves[chunk].version if moves and chunk in moves else None

    def to_give(self, round: Round) -> list[int]:
        """Return the chunks that this node is the root of, has not summed, and should give away."""
        plan = self.plan
        if plan is None or round.version >= plan.version:
            return []
        mine, left = 0, []
        for chunk, slot in enumerate(round.layout.slots):
            now = round.plan_of(chunk)
            tree = now.tree_of(slot)
            if now.root[tree] == self._rank:
                mine += 1
                if round.results[chunk] or now.version >= plan.version:
                    continue
                if not (round.is_under_way(chunk) and self._stays(round, chunk, now, tree)):
                    left.append(chunk)
        return left if len(left) > _LEAST * mine else []

    def _stays(self, round: Round, chunk: int, before: Plan, tree: int) -> bool:
        """Return whether a chunk of which something has come to this node, its root, stays in its tree."""
        return self._keeps_begun or (bool(self._slow) and self._can_end(round, chunk, before, tree))

    def _can_end(self, round: Round, chunk: int, before: Plan, tree: int) -> bool:
        """Return whether nothing that a sum lacks at its root has yet to cross what has become slow."""
        if before.version not in self._behind_of:
            self._behind_of[before.version] = tuple(
                tuple(
                    one.subtree_mask[rank]
                    for rank, parent in enumerate(one.reduce_parent)
                    if (rank, parent) in self._slow
                )
                for one in before.policy.trees
            )
        have = round.sum_of(chunk).contributors
        return not any(behind & ~have for behind in self._behind_of[before.version][tree])

    def gave(self, key: int, round: int, chunks: Iterable[int]) -> None:
        """This node is the root of some chunks, and gives them to the policy that takes over."""
        assert self.plan is not None
        said = Moved(key=key, round=round, version=self.plan.version, chunks=tuple(chunks))
        self.news.append(said)
        self._told.setdefault((key, round), []).append(said)

    def take_news(self) -> list[Moved]:
        """Return what the scheduler is to be told, once."""
        news, self.news = self.news, []
        return news

    def say_again(self) -> tuple[Moved, ...]:
        """Return all that a scheduler that has forgotten it must know."""
        self.news.clear()
        return tuple(said for told in self._told.values() for said in told)

    def close(self, key: int, round: int) -> None:
        """A round is complete here: all ranks have contributed to all of it, and know what has moved."""
        self._told.pop((key, round), None)
        self._moves.pop((key, round), None)

    def clear(self) -> None:
        """Forget everything."""
        self.news.clear()
        self._told.clear()
        self._moves.clear()

    # ------------------------------------------------------------------------------- results on their way

    def goes_around(self, tag: Hashable) -> bool:
        """Return whether a part that waits for a link is a result that should take another way now."""
        if not isinstance(tag, Tag) or self.plan is None or tag.phase is not Phase.BROADCAST:
            return False
        if self._keeps_begun and (self._rank, tag.peer) not in self._slow:
            return False
        return tag.version < self.plan.version and len(self._way(tag)) > 2

    def avoids(self, tag: Tag) -> bool:
        """Return whether a part that is about to be sent is such a result, over something slow."""
        return (self._rank, tag.peer) in self._slow and self.goes_around(tag)

    def around(self, sends: Iterable[Send]) -> list[Send]:
        """Return results that were taken back as they go now, source-routed along the new trees."""
        found = []
        for send in sends:
            assert isinstance(send.tag, Tag)
            assert isinstance(send.message, Part)
            found.append(around(send, self._rank, self._way(send.tag)))
        return found

    def _way(self, tag: Tag) -> tuple[int, ...]:
        assert self.plan is not None
        policy = self.plan.policy
        return policy.trees[policy.tree_of(tag.tree_slot)].path(self._rank, tag.peer)
