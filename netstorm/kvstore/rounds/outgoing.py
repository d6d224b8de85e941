"""Parts that leave this node: sums to parents, results to children, and what is forwarded for others. Pure.

They go to links at once, wait for their turn where a neighbour has auxiliary paths (`dispatch`), or take the
path that a policy that has taken over has for them (`takeover`). What has not left can be taken back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.operations import Outbox
from netstorm.kvstore.paths.dispatch import Dispatch
from netstorm.kvstore.paths.routes import forwarded_send, reroute_part
from netstorm.kvstore.rounds.round import Round
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer, Checksum, Peer, bits_to_wire
from netstorm.protocol.messages import LossTerms, Moved, Part, Phase
from netstorm.pslite.machine import Order, Send, TakeBack
from netstorm.topology.look_ahead import Withholding
from netstorm.topology.policy import Plan

__all__ = ["ChunkMoves", "ChunkTakeover", "OutgoingParts", "Owner", "PartTag", "WithheldSums"]


_RESULTS_AHEAD: Final = 1 << 62
"""Bytes that results are ahead of sums in rounds that may end without late sums: more than a job has."""


class OutgoingParts:
    """The outgoing parts of one node."""

    def __init__(
        self, dispatch: Dispatch, takeover: ChunkTakeover, outbox: Outbox, counters: Counters
    ) -> None:
        self._counters: Final = counters
        self._dispatch: Final = dispatch
        self._takeover: Final = takeover
        self._outbox: Final = outbox

    def send_up(self, round: Round, chunk: int) -> None:
        """Send a chunk's sum, which is complete for this subtree, to the parent."""
        plan = round.plan_of(chunk)
        tree = plan.tree_of(round.layout.slots[chunk])
        total, loss = round.sum_of(chunk), round.loss
        self._send(
            plan.reduce_parent[tree],
            round,
            chunk,
            plan=plan,
            tree=tree,
            phase=Phase.REDUCE,
            contributors=total.contributors,
            # A late contribution may be on its way when the result is here, and the user's memory changes.
            payload=total.to_send() if loss is None else total.to_keep(),
            loss=None if loss is None else loss.terms_of(chunk, plan.version),
            crc=None,
            priority=round.priority,
            settled=round.settled.get(chunk, -1),
        )
        round.mark_sent(chunk)

    def send_down(
        self,
        round: Round,
        chunk: int,
        payload: Buffer | None,
        crc: int | None,
        priority: int,
        *,
        contributors: int,
    ) -> None:
        """Send a chunk's result to the children.

        Args:
            round: the chunk's.
            chunk: its number.
            payload: the result; None: zeros.
            crc: its checksum; None: not known.
            priority: the root's; a node without an operation of its own does not know it.
            contributors: bit set of the ranks that are in the result.
        """
        plan = round.plan_of(chunk)
        tree = plan.tree_of(round.layout.slots[chunk])
        children = plan.broadcast_children[tree]
        receivers = round.receivers_of(chunk)
        checksum = Checksum(payload) if crc is None and payload is not None and children else crc
        for child in children:
            wanted = receivers is None or receivers & plan.broadcast_mask[tree][child]
            self._send(
                child,
                round,
                chunk,
                plan=plan,
                tree=tree,
                phase=Phase.BROADCAST,
                contributors=contributors,
                payload=payload if wanted else None,
                loss=None if round.loss is None else round.loss.terms,
                crc=checksum,
                priority=priority,
                settled=round.settled.get(chunk, -1),
            )

    def forward(self, part: Part, payload: Buffer | None, payload_crc: int | None, offset: int) -> bool:
        """Forward a part along its auxiliary path, without looking into it; False if the path ends here.

        Args:
            part: of any node.
            payload: the part's.
            payload_crc: the payload's checksum.
            offset: of its chunk among the job's bytes; 0: not known.
        """
        send = forwarded_send(part, payload, payload_crc, (-part.priority, part.round, offset))
        if send is None:
            return False
        if self._dispatch.has_backlog(int(send.peer)):
            self._dispatch.enqueue(send)
        else:
            self._outbox.add(send)
        return True

    def reroute_results(self, results: list[Send]) -> None:
        """Send results over the trees of the policy that has taken over."""
        self._counters.add("results_around", len(results))
        self._outbox.add_all(self._takeover.rerouted(results))

    def take_back(
        self, wanted: Callable[[Hashable], bool], then: Callable[[list[Send]], None] | None = None
    ) -> None:
        """Take back the parts whose tag is `wanted`, as far as they have not left.

        Args:
            wanted: called with tags (`PartTag` for parts of trees).
            then: called with what waits here and, later, with what waits at links; None: drop it.
        """
        taken = self._dispatch.take_out(wanted)
        if then is not None:
            then(taken)
        self._outbox.add(TakeBack(wanted=wanted, then=then))

    def _send(
        self,
        to: int,
        round: Round,
        chunk: int,
        *,
        plan: Plan,
        tree: int,
        phase: Phase,
        contributors: int,
        payload: Buffer | None,
        loss: LossTerms | None,
        crc: int | Checksum | None,
        priority: int,
        settled: int,
    ) -> None:
        layout = round.layout
        offsets = layout.offsets
        if round.loss is not None and round.loss.offsets is not None:
            offsets = round.loss.offsets
        part = Part(
            key=round.key.identity,
            round=round.round,
            chunk=chunk,
            phase=phase,
            version=plan.version,
            tree=tree,
            contributors=bits_to_wire(contributors),
            dtype=round.key.spec.dtype,
            priority=priority,
            codec=round.form.codec,
            call=round.call,
            settled=settled,
            loss=loss,
        )
        # A result must arrive; what is late of a sum need not.
        ahead = _RESULTS_AHEAD if loss is not None and phase is Phase.BROADCAST else 0
        order: Order = (-priority, round.round, offsets[chunk] - ahead)
        tag = PartTag(part.key, part.round, chunk, phase, part.version, layout.slots[chunk], to)
        send = Send(
            peer=Peer(to),
            message=part,
            payload=payload,
            order=order,
            payload_crc=None if payload is None else crc,
            tag=tag,
        )
        detours = plan.detours
        if self._takeover.avoids_link(tag):
            self.reroute_results([send])
        elif detours and to in detours:
            self._dispatch.enqueue(send, detours[to])
        else:
            self._outbox.add(send)


# Takeover: which chunks of rounds under way move to a new policy. Pure; `chunk_moves` moves them.
#
# A policy is bound to rounds that no rank has begun (`bindings`). But when links have changed, the round
# under way and the next one may take many times as long under the old trees. So a policy may take over
# (`Policy.takes_over`). One node alone decides about each chunk: the root at which its sum is formed. If the
# root has formed the sum, that is the result at all ranks. If not, it never will, and announces that through
# the scheduler (`Moved`). Every rank then drops its sum of the chunk, and contributes once more under the new
# policy. So each chunk is summed once, by one tree, and all ranks get the same bytes.
#
# Not every chunk moves. Links that change together are noticed one after the other, and if each policy moved
# everything, five policies in as many seconds would make ranks send 2.4 times what a round needs. So a chunk
# under way stays in its tree if no missing contribution has to cross a slow link (`Policy.slow`). And if a
# policy gains less than sending sums again costs, everything under way stays (`Policy.keeps_begun`): only
# what has not begun moves.
#
# What is queued at links and has not left is moved, too: sums of moved chunks are taken out of the queues,
# and results go over the new policy's trees to the same nodes. So do later results that the old trees would
# send over a slow link.

_LEAST: Final = 1 / 8
"""A root keeps its chunks of a round if at most this part of them would move: what is in flight arrives
sooner than what is sent again.
"""


class PartTag(NamedTuple):
    """What identifies a part while it is in a link's queue."""

    key: int
    round: int
    chunk: int
    phase: Phase
    version: int
    tree_slot: int
    """The chunk's slot."""
    peer: int


class ChunkTakeover:
    """The policy that takes over, and the chunks of open rounds that have moved.

    Attributes:
        plan: of the newest policy that takes over; None: there is none.
        announcements: moves that are to be announced to the scheduler.
    """

    def __init__(self, rank: int) -> None:
        self._rank: Final = rank
        self.plan: Plan | None = None
        self.announcements: list[Moved] = []
        self._slow: frozenset[tuple[int, int]] = frozenset()
        """The links that have become slow, by that policy."""
        self._keeps_begun = False
        """That policy takes no chunk to which another rank has contributed."""
        self._behind_slow_links: dict[int, tuple[tuple[int, ...], ...]] = {}
        """By the version of an earlier plan: for each tree, the bit sets of the ranks behind each slow link.
        """
        self._announced: dict[tuple[int, int], list[Moved]] = {}
        """All announcements of open rounds."""
        self._moves: dict[tuple[int, int], dict[int, Plan]] = {}

    def install(self, plan: Plan) -> bool:
        """Record a policy; return whether it takes over from now on."""
        if not plan.policy.takes_over or (self.plan is not None and plan.version <= self.plan.version):
            return False
        self.plan = plan
        self._slow = frozenset(plan.policy.slow)
        self._keeps_begun = plan.policy.keeps_begun
        self._behind_slow_links.clear()
        return True

    def moves(self, key: int, round: int) -> dict[int, Plan]:
        """Return the plans of the moved chunks of a round, by chunk. Later moves change this dictionary."""
        return self._moves.setdefault((key, round), {})

    def version_of(self, key: int, round: int, chunk: int) -> int | None:
        """Return the version that a chunk has moved to, or None."""
        moves = self._moves.get((key, round))
        return moves[chunk].version if moves and chunk in moves else None

    def chunks_to_move(self, round: Round) -> list[int]:
        """Return the chunks that this node is the root of, has not summed, and should move."""
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
        """Return whether a chunk stays in its tree, whose root is here and has contributions of others."""
        return self._keeps_begun or (bool(self._slow) and self._can_end(round, chunk, before, tree))

    def _can_end(self, round: Round, chunk: int, before: Plan, tree: int) -> bool:
        """Return whether no contribution that the root still misses has to cross a slow link."""
        if before.version not in self._behind_slow_links:
            self._behind_slow_links[before.version] = tuple(
                tuple(
                    tree_of_before.subtree_mask[rank]
                    for rank, parent in enumerate(tree_of_before.reduce_parent)
                    if (rank, parent) in self._slow
                )
                for tree_of_before in before.policy.trees
            )
        have = round.sum_of(chunk).contributors
        return not any(behind & ~have for behind in self._behind_slow_links[before.version][tree])

    def record_moved(self, key: int, round: int, chunks: Iterable[int]) -> None:
        """Record that this node moves chunks, of which it is the root, to the policy that takes over."""
        assert self.plan is not None
        announcement = Moved(key=key, round=round, version=self.plan.version, chunks=tuple(chunks))
        self.announcements.append(announcement)
        self._announced.setdefault((key, round), []).append(announcement)

    def take_announcements(self) -> list[Moved]:
        """Return what is to be announced to the scheduler, once."""
        taken, self.announcements = self.announcements, []
        return taken

    def all_announcements(self) -> tuple[Moved, ...]:
        """Return all that a restarted scheduler must know; it includes what is not announced yet."""
        self.announcements.clear()
        return tuple(moved for announced in self._announced.values() for moved in announced)

    def begin_view(self, version: int) -> None:
        """Forget moves to policies before that of a new view, to which everything moves."""
        self.announcements = [moved for moved in self.announcements if moved.version > version]
        for owner, announced in list(self._announced.items()):
            announced[:] = [moved for moved in announced if moved.version > version]
            if not announced:
                del self._announced[owner]
        for moves in self._moves.values():
            for chunk in [chunk for chunk, plan in moves.items() if plan.version <= version]:
                del moves[chunk]

    def end_round(self, key: int, round: int) -> None:
        """Forget a round that is complete here: all ranks have contributed, and know what has moved."""
        self._announced.pop((key, round), None)
        self._moves.pop((key, round), None)

    def clear(self) -> None:
        """Forget everything."""
        self.announcements.clear()
        self._announced.clear()
        self._moves.clear()

    # ------------------------------------------------------------------------------------ results under way

    def should_reroute(self, tag: Hashable) -> bool:
        """Return whether a part that waits for a link is a result that should go over the new trees."""
        if not isinstance(tag, PartTag) or self.plan is None or tag.phase is not Phase.BROADCAST:
            return False
        if self._keeps_begun and (self._rank, tag.peer) not in self._slow:
            return False
        return tag.version < self.plan.version and len(self._new_path(tag)) > 2

    def avoids_link(self, tag: PartTag) -> bool:
        """Return whether a part about to be sent is such a result, and its link is slow."""
        return (self._rank, tag.peer) in self._slow and self.should_reroute(tag)

    def rerouted(self, sends: Iterable[Send]) -> list[Send]:
        """Return results that were taken back as they are sent now, source-routed along the new trees."""
        rerouted = []
        for send in sends:
            assert isinstance(send.tag, PartTag)
            assert isinstance(send.message, Part)
            rerouted.append(reroute_part(send, self._rank, self._new_path(send.tag)))
        return rerouted

    def _new_path(self, tag: PartTag) -> tuple[int, ...]:
        assert self.plan is not None
        return self.plan.path_to(tag.tree_slot, tag.peer)


# Sums that a node withholds for the look-ahead of their policies (`topology.trees.withholding`). Pure.

Owner: TypeAlias = tuple[int, int]
"""Key and number of a round."""


class WithheldSums:
    """The withheld sums of all open rounds. Those that are released are yielded, as owners and chunks:
    exhaust it.
    """

    def __init__(self) -> None:
        self._by_number: Final[dict[int, Withholding[Owner]]] = {}
        """By number of the round: rounds with different numbers do not wait for each other."""
        self._without_deadline: Final[list[Owner]] = []
        """Rounds that have begun since deadlines were last set."""
        self._deadlines: Final[list[tuple[float, Owner]]] = []
        """Heap of when to wait no longer for a round that may not have begun everywhere."""

    def begin(self, round: Round, priority: int) -> None:
        """Record that a round has begun here."""
        if round.look_ahead_span is not None:
            round.look_ahead_span.priority = priority
            self._of(round).begin(round.look_ahead_span)
            self._without_deadline.append((round.key.identity, round.round))

    def withhold(self, round: Round, chunk: int) -> bool:
        """Withhold a complete sum, if it must wait; return whether it must. Moved chunks never wait."""
        if round.look_ahead_span is None or chunk in round.moved:
            return False
        return self._of(round).withhold(round.look_ahead_span, chunk)

    def result(self, round: Round, chunk: int) -> Iterator[tuple[Owner, int]]:
        """Record a result."""
        if round.look_ahead_span is not None:
            yield from self._of(round).record_result(round.look_ahead_span, chunk)

    def end(self, round: Round) -> Iterator[tuple[Owner, int]]:
        """Forget a round."""
        withholding = self._by_number.get(round.round)
        if withholding is not None and round.look_ahead_span is not None:
            yield from withholding.forget(round.look_ahead_span)
            if withholding.is_empty():
                del self._by_number[round.round]

    def drop(self, round: Round) -> None:
        """Forget a round and what is withheld of it."""
        for _ in self.end(round):
            pass

    def release_overdue(self, rounds: Mapping[Owner, Round], now: float) -> Iterator[tuple[Owner, int]]:
        """Wait no longer for rounds that have begun here long ago and have had no result."""
        for owner in self._without_deadline:
            round = rounds.get(owner)
            if round is not None:
                heapq.heappush(self._deadlines, (now + round.plan.policy.look_ahead_s, owner))
        self._without_deadline.clear()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in rounds):
            _, owner = heapq.heappop(self._deadlines)
            round, withholding = rounds.get(owner), self._by_number.get(owner[1])
            if round is not None and round.look_ahead_span is not None and withholding is not None:
                yield from withholding.expire(round.look_ahead_span)

    def next_deadline(self) -> float:
        """Return when `release_overdue` has something to do."""
        if self._without_deadline:
            return 0.0
        return self._deadlines[0][0] if self._deadlines else math.inf

    def clear(self) -> None:
        """Forget everything."""
        self._by_number.clear()
        self._without_deadline.clear()
        self._deadlines.clear()

    def _of(self, round: Round) -> Withholding[Owner]:
        return self._by_number.setdefault(round.round, Withholding())


# Moves chunks of rounds under way when a policy takes over; `takeover` decides which. Pure.


class ChunkMoves:
    """Moves chunks of the open rounds of one node."""

    def __init__(
        self,
        *,
        takeover: ChunkTakeover,
        rounds: Mapping[Owner, Round],
        outgoing: OutgoingParts,
        counters: Counters,
        contribute: Callable[[Round, int], None],
    ) -> None:
        """Begin with nothing moved.

        Args:
            takeover: which chunks have moved.
            rounds: the open rounds; `Aggregation` changes them.
            outgoing: takes parts back that have not left.
            counters: of the process.
            contribute: adds this rank's contribution to a chunk whose sum is empty.
        """
        self._takeover: Final = takeover
        self._rounds: Final = rounds
        self._outgoing: Final = outgoing
        self._counters: Final = counters
        self._contribute: Final = contribute
        self._later: list[Plan] = []
        """Plans that have come while the view changed."""

    def new_policy(self, plan: Plan, *, later: bool = False) -> None:
        """Install a policy; what is under way moves to it if it takes over: `later`, if the view changes."""
        if later:
            self._later.append(plan)
        elif self._takeover.install(plan):
            for round in list(self._rounds.values()):
                self.give_up_chunks(round)
            self._outgoing.take_back(self._takeover.should_reroute, self._outgoing.reroute_results)

    def view_agreed(self, version: int) -> None:
        """Install the policies that have come while the view changed, after that of the view, `version`."""
        plans, self._later = self._later, []
        for plan in plans:
            if plan.version > version:
                self.new_policy(plan)

    def moved(self, announcement: Moved, plan: Plan | None) -> None:
        """Handle the announcement that chunks of a round that is not complete have moved to `plan`.

        Raises:
            ProtocolViolation: the policy is not known.
        """
        if plan is None:
            raise ProtocolViolation(
                f"chunks have moved to policy {announcement.version}, which is not known here"
            )
        round = self._rounds.get((announcement.key, announcement.round))
        if round is None:
            moves = self._takeover.moves(announcement.key, announcement.round)
            moves.update((chunk, plan) for chunk in announcement.chunks if _is_newer(plan, moves.get(chunk)))
        else:
            self._move(round, announcement.chunks, plan)

    def give_up_chunks(self, round: Round) -> None:
        """Move the chunks that this node is the root of, and has not summed, to the policy that takes over.

        Call it before anything is added to a new round, and when that policy comes.
        """
        if round.key.spec.members:  # a group's rounds are short beside the job's: they end as they began
            return
        plan, chunks = self._takeover.plan, self._takeover.chunks_to_move(round)
        if plan is not None and chunks:
            self._takeover.record_moved(round.key.identity, round.round, chunks)
            self._move(round, chunks, plan)

    def _move(self, round: Round, chunks: Iterable[int], plan: Plan) -> None:
        """Drop the sums of some chunks, and contribute to them again under another policy."""
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
                isinstance(tag, PartTag)
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
