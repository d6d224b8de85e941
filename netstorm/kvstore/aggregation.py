"""Aggregate and forward: what a general node does with contributions and results.

Per chunk and round: our own and all children's contributions are added, the sum goes to the parent; at the
root it is complete when every rank is in; then it goes down again, and each node writes it to where its user
wants it (design, §5).
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Final

import numpy as np

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.auxiliary import AuxiliaryOptions
from netstorm.kvstore.bindings import Bindings
from netstorm.kvstore.checks import ROUNDS_AHEAD, check_part
from netstorm.kvstore.chunk_sum import ChunkSum
from netstorm.kvstore.dispatch import Dispatch
from netstorm.kvstore.form import Form
from netstorm.kvstore.held_back import HeldBack
from netstorm.kvstore.keys import Key
from netstorm.kvstore.operation import Operation, Round
from netstorm.kvstore.relay import onward
from netstorm.kvstore.takeover import Tag, Takeover
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer, checksum
from netstorm.protocol.ids import Peer, bits_to_wire, ranks_in
from netstorm.protocol.messages import Moved, Part, Phase, RoundBegun
from netstorm.pslite.machine import Call, Instruction, Order, Send, TakeBack
from netstorm.topology.policy import Plan

__all__ = ["ROUNDS_AHEAD", "Aggregation"]

_SENT: Final = ChunkSum(np.dtype(np.float32), wide=False)
"""Stands for a sum that has gone to the parent: everybody it could count has been counted."""
_SENT.contributors = -1

_ASK_AHEAD_S: Final = 0.5
"""How long before the end of a round, as the last one was, the scheduler is asked for the next one's policy:
it has answered long before."""

_log = logging.getLogger(__name__)


class Aggregation:
    """All open rounds of all keys on one node."""

    def __init__(
        self, rank: int, bindings: Bindings, counters: Counters, auxiliary: AuxiliaryOptions | None = None
    ) -> None:
        self._rank: Final = rank
        self._bit: Final = 1 << rank
        self._bindings: Final = bindings
        self._counters: Final = counters
        self._keys: dict[int, Key] = {}
        self._rounds: dict[tuple[int, int], Round] = {}
        self._complete: dict[int, int] = {}
        """Last round of each key below which all are complete here."""
        self._complete_beyond: dict[int, set[int]] = {}
        self._waiting: dict[int, list[Operation]] = {}
        """Operations that may not begin yet (no binding, or too far ahead), by round: they come in any order,
        since the caller's engine starts them when their data is there.
        """
        self._early: dict[int, list[tuple[Peer, Part, Buffer | None, int]]] = {}
        """Parts of keys or policies that are not known here yet (the paper's case 2)."""
        self.begun: list[RoundBegun] = []
        """Rounds that have begun and of which the scheduler is to be told."""
        self.round_s = 0.0
        """What the last round took, in s. If that is long, the scheduler need not be asked as soon as one
        begins.
        """
        self._unasked: dict[int, RoundBegun] = {}
        """By key: begun, and not to be told yet. The later the scheduler is asked, the newer is the policy of
        the round that follows.
        """
        self._begun_last: dict[int, deque[RoundBegun]] = {}
        """The last ones, by key."""
        self.closed: list[int] = []
        """Number of each round of a key that is complete here, until its owner has taken note."""
        self.instructions: list[Instruction] = []
        self.dispatch: Final = Dispatch(auxiliary or AuxiliaryOptions(), counters)
        """Parts for neighbours that have auxiliary paths."""
        self.last_part: dict[int, str] = {}
        """The last part heard from each rank, for error messages."""
        self._held: Final = HeldBack()
        self.takeover: Final = Takeover(rank)
        self._moved: deque[int] = deque()
        """Keys of which something may begin now."""

    # ------------------------------------------------------------------------------------ what the user wants

    def add_key(self, key: Key) -> None:
        """Learn a key's numbers; parts that came before it are looked at now."""
        self._keys[key.identity] = key
        self._complete.setdefault(key.identity, -1)
        self.advance([key.identity])

    def submit(self, operation: Operation, now: float) -> None:
        """Begin an operation, or queue it until its policy is here. Its key must be known."""
        operation.begun_at = now
        key = operation.key.identity
        bisect.insort(self._waiting.setdefault(key, []), operation, key=lambda waiting: waiting.round)
        self.advance([key])

    def outstanding(self) -> Iterator[Operation]:
        """Yield the operations that are not complete and that somebody here waits for."""
        return (operation for operation in self._operations() if not operation.for_others)

    def _operations(self) -> Iterator[Operation]:
        for waiting in self._waiting.values():
            yield from waiting
        for round in self._rounds.values():
            if round.operation is not None:
                yield round.operation

    def advance(self, keys: Iterable[int] | None = None) -> None:
        """Begin what may begin, and take up early parts: something about `keys` (None: all) has changed."""
        self._moved.extend(self._keys if keys is None else keys)
        while self._moved:
            key = self._moved.popleft()
            if key not in self._keys:
                continue
            waiting = self._waiting.get(key)
            while waiting and (version := self._may_begin(waiting[0])) is not None:
                self._begin(waiting.pop(0), version)
            if waiting:
                self._ask_for_next(key)
            for peer, part, payload, crc in self._early.pop(key, ()):
                try:
                    self._take(peer, part, payload, crc)
                except ProtocolViolation as error:
                    self._counters.add("protocol_violations")
                    _log.warning("dropped a part that rank %d sent early: %s", peer, error)

    def has_news(self) -> bool:
        """Return whether the scheduler is to be told something."""
        return bool(self.begun or self.takeover.news)

    def ask_again(self) -> tuple[RoundBegun, ...]:
        """Return the last rounds that have begun; the next request is without them."""
        self.begun = []
        return tuple(begun for last in self._begun_last.values() for begun in last)

    def _may_begin(self, operation: Operation) -> int | None:
        """Return the policy version that an operation runs under, or None while it must wait."""
        key = operation.key.identity
        if operation.round > self._complete[key] + ROUNDS_AHEAD:
            return None
        version = self._bindings.version_of(key, operation.round)
        return None if version is None or self._bindings.plan(version) is None else version

    def _begin(self, operation: Operation, version: int) -> None:
        key = operation.key
        found = self._rounds.get((key.identity, operation.round))
        form = operation.form
        if found is not None and (found.version, found.form.codec) != (version, form.codec):
            # made by a part that came before our binding and named another policy, which no correct node
            # sends; or of a rank that pushes another kind of array, as the scheduler will notice
            self._ask_for_next(key.identity)
            del self._rounds[key.identity, operation.round]
            self._release(self._held.end(found))
            self._counters.add("protocol_violations")
            _log.warning(
                "forgot parts of %s under policy %d in codec %d; it runs under %d in %d",
                operation,
                found.version,
                found.form.codec,
                version,
                form.codec,
            )
        round = self._round(key, operation.round, version, form)
        round.operation = operation
        round.form = form
        self._held.begin(round, operation.priority)
        begun = RoundBegun(key=key.identity, round=operation.round, rule=operation.rule)
        self._begun_last.setdefault(key.identity, deque(maxlen=ROUNDS_AHEAD + 1)).append(begun)
        if self.round_s > 2 * _ASK_AHEAD_S:
            self._ask_for_next(key.identity)
            self._unasked[key.identity] = begun
        else:
            self.begun.append(begun)
        for chunk in range(len(round.sums)):
            round.sum_of(chunk).add_own(round.own_values(chunk), self._bit)
            self._forward(round, chunk)
        if not round.sums:
            self._close(round)

    def _ask_for_next(self, key: int) -> None:
        """Have the scheduler asked now under which policy the round after the one that has begun runs."""
        begun = self._unasked.pop(key, None)
        if begun is not None:
            self.begun.append(begun)

    # -------------------------------------------------------------------------------------- what others send

    def receive(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int) -> None:
        """Take a part from a tree neighbour.

        Raises:
            ProtocolViolation: the part cannot belong to what the scheduler has fixed.
        """
        self._take(peer, part, payload, payload_crc)
        self.advance([])

    def _take(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int) -> None:
        key = self._keys.get(part.key)
        plan = self._bindings.plan(part.version)
        if key is None or plan is None:
            self._keep(peer, part, payload, payload_crc)
            return
        if self._is_complete(part.key, part.round):
            self._counters.add("parts_of_complete_rounds")
            return
        bound = self._bindings.version_of(part.key, part.round)
        moved = self.takeover.version_of(part.key, part.round, part.chunk)
        if moved is not None and part.version < moved:
            self._counters.add("parts_of_moved_chunks")
            return
        current = bound if moved is None else moved
        later = plan.policy.takes_over and (current is None or part.version > current)
        if later or (moved is not None and bound is None):
            self._keep(peer, part, payload, payload_crc)  # we have not been told yet where its chunk is
            return
        form, contributors = check_part(
            peer,
            part,
            payload,
            key=key,
            plan=plan,
            complete=self._complete[part.key],
            bound=current,
        )
        round = self._round(key, part.round, part.version if bound is None else bound, form)
        if part.version != round.plan_of(part.chunk).version:  # since just now
            self._counters.add("parts_of_moved_chunks")
            return
        if part.phase is Phase.REDUCE:
            total = round.sum_of(part.chunk)
            if total.contributors & contributors:
                self._counters.add("contributions_counted_before")
                return
            total.add_received(payload, contributors)
            self._forward(round, part.chunk)
        else:
            if round.results[part.chunk]:
                self._counters.add("results_known_before")
                return
            self._deliver(round, part.chunk, payload, payload_crc, part.priority)
        self.last_part[int(peer)] = f"round {part.round} of {key.name}"

    def _keep(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int) -> None:
        self._early.setdefault(part.key, []).append((peer, part, payload, payload_crc))
        self._counters.add("parts_kept_early")

    # ----------------------------------------------------------------------------------------------- moving
    # on

    def _round(self, key: Key, number: int, version: int, form: Form) -> Round:
        found = self._rounds.get((key.identity, number))
        if found is None:
            plan = self._bindings.plan(version)
            assert plan is not None
            moves = self.takeover.moves(key.identity, number)
            found = self._rounds[key.identity, number] = Round(key, number, plan, form, moves)
            self._give_away(found)
        elif found.version != version:
            raise ProtocolViolation(
                f"round {number} of {key.name} runs under policy {found.version} here and under {version} "
                "elsewhere"
            )
        elif found.form.codec != form.codec:
            self._ask_for_next(key.identity)
            raise ProtocolViolation(
                f"round {number} of {key.name} has codec {found.form.codec} here and {form.codec} elsewhere"
            )
        return found

    def _forward(self, round: Round, chunk: int) -> None:
        """Send a chunk's sum to the parent, if it is complete for this subtree and need not wait; at the root
        it is the result.
        """
        plan, layout = round.plan_of(chunk), round.key.layout
        assert layout is not None
        tree = plan.tree_of(layout.slots[chunk])
        total = round.sum_of(chunk)
        if total.contributors != plan.expected[tree] or round.results[chunk]:
            return
        parent = plan.reduce_parent[tree]
        if parent < 0:
            priority = 0 if round.operation is None else round.operation.priority
            self._deliver(round, chunk, total.to_keep(), None, priority)
        elif not self._held.must_wait(round, chunk):
            self._send_up(round, chunk)

    def _send_up(self, round: Round, chunk: int) -> None:
        """Send a chunk's sum, which is complete for this subtree, to the parent."""
        plan, layout = round.plan_of(chunk), round.key.layout
        assert layout is not None
        tree = plan.tree_of(layout.slots[chunk])
        total = round.sum_of(chunk)
        self._send(
            plan.reduce_parent[tree],
            round,
            chunk,
            tree=tree,
            phase=Phase.REDUCE,
            contributors=total.contributors,
            payload=total.to_send(),
            crc=None,
            priority=0 if round.operation is None else round.operation.priority,
        )
        round.sums[chunk] = _SENT

    def _deliver(
        self, round: Round, chunk: int, payload: Buffer | None, crc: int | None, priority: int
    ) -> None:
        """A chunk's result is here: pass it on, and write it."""
        plan, layout = round.plan_of(chunk), round.key.layout
        assert layout is not None
        tree = plan.tree_of(layout.slots[chunk])
        children = plan.broadcast_children[tree]
        if crc is None and payload is not None and children:
            crc = checksum(payload)
        for child in children:
            self._send(
                child,
                round,
                chunk,
                tree=tree,
                phase=Phase.BROADCAST,
                contributors=plan.everybody,
                payload=payload,
                crc=crc,
                priority=priority,
            )
        round.store(chunk, payload)
        if self._unasked and self.round_s * round.missing <= _ASK_AHEAD_S * len(round.sums):
            self._ask_for_next(round.key.identity)
        self._release(self._held.result(round, chunk))
        if round.missing == 0 and round.operation is not None:
            self._close(round)

    def _send(
        self,
        to: int,
        round: Round,
        chunk: int,
        *,
        tree: int,
        phase: Phase,
        contributors: int,
        payload: Buffer | None,
        crc: int | None,
        priority: int,
    ) -> None:
        layout, plan = round.key.layout, round.plan_of(chunk)
        assert layout is not None
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
        )
        order: Order = (-priority, round.round, layout.offsets[chunk])
        send = Send(
            peer=Peer(to),
            message=part,
            payload=payload,
            order=order,
            payload_crc=None if payload is None else crc,
            tag=Tag(part.key, part.round, chunk, phase, part.version, layout.slots[chunk], to),
        )
        detours = plan.detours
        if detours and to in detours:
            self.dispatch.hold(send, detours[to])
        else:
            self.instructions.append(send)

    def relay(self, part: Part, payload: Buffer | None, payload_crc: int) -> bool:
        """Send a part on along its auxiliary path, without looking at it; False if this is its end."""
        key = self._keys.get(part.key)
        layout = None if key is None else key.layout
        known = layout is not None and 0 <= part.chunk < layout.chunks
        place = layout.offsets[part.chunk] if layout is not None and known else 0
        send = onward(part, payload, payload_crc, (-part.priority, part.round, place))
        if send is None:
            return False
        self._counters.add("relayed")
        if self.dispatch.waits_for(int(send.peer)):
            self.dispatch.hold(send)
        else:
            self.instructions.append(send)
        return True

    def not_delivered(self, returned: Iterable[Send]) -> Iterator[Send]:
        """Yield what is to be sent again of what a link that has failed gives back.

        A sum whose result is here has arrived, and one whose chunk has moved nobody wants. Others are copied:
        they may be the user's own memory, which is his again with the result; that comes, if the sum had
        arrived after all, while it is under way.
        """
        for send in returned:
            part = send.message
            if not isinstance(part, Part):
                continue  # a trial, or a confirmation that nobody waits for
            own = part.phase is Phase.REDUCE and not (part.is_aux and part.path[0] != self._rank)
            if own and self._is_known(part):
                continue
            if own and send.payload is not None:
                yield dataclasses.replace(send, payload=bytes(memoryview(send.payload)))
            else:
                yield send

    def _is_complete(self, key: int, round: int) -> bool:
        return round <= self._complete.get(key, -1) or round in self._complete_beyond.get(key, ())

    def _is_known(self, part: Part) -> bool:
        if self._is_complete(part.key, part.round):
            return True
        moved = self.takeover.version_of(part.key, part.round, part.chunk)
        if moved is not None and part.version < moved:
            return True
        round = self._rounds.get((part.key, part.round))
        return round is not None and round.results[part.chunk]

    def _close(self, round: Round) -> None:
        """Every chunk's result is written: tell the user, and move on."""
        operation, key = round.operation, round.key.identity
        self._ask_for_next(key)
        assert operation is not None
        del self._rounds[key, round.round]
        self._release(self._held.end(round))
        self.takeover.close(key, round.round)
        beyond = self._complete_beyond.setdefault(key, set())
        beyond.add(round.round)
        while self._complete[key] + 1 in beyond:
            self._complete[key] += 1
            beyond.remove(self._complete[key])
        self._bindings.forget_before(key, self._complete[key] + 1)
        self._counters.add("rounds")
        if not operation.for_others:
            self.closed.append(round.round)
        done = operation.done
        self.instructions.append(Call(function=lambda: done(None)))
        self._moved.append(key)

    # ------------------------------------------------------------------- going over to another policy

    def new_policy(self, plan: Plan) -> None:
        """A policy has come: what is under way goes over to it, if it says so."""
        if self.takeover.install(plan):
            for round in list(self._rounds.values()):
                self._give_away(round)
            wanted = self.takeover.goes_around
            self._go_around(self.dispatch.take_out(wanted))
            self.instructions.append(TakeBack(wanted=wanted, then=self._go_around))
        self.advance()

    def _go_around(self, sends: list[Send]) -> None:
        self._counters.add("results_around", len(sends))
        self.instructions += self.takeover.around(sends)

    def moved(self, said: Moved) -> None:
        """Take the scheduler's word that chunks have moved.

        Raises:
            ProtocolViolation: to a policy that is not known.
        """
        plan = self._bindings.plan(said.version)
        if plan is None:
            raise ProtocolViolation(f"chunks have moved to policy {said.version}, which is not known here")
        if self._is_complete(said.key, said.round):
            return
        round = self._rounds.get((said.key, said.round))
        if round is None:
            moves = self.takeover.moves(said.key, said.round)
            moves.update((chunk, plan) for chunk in said.chunks if _is_newer(plan, moves.get(chunk)))
        else:
            self._move(round, said.chunks, plan)
        self.advance([said.key])

    def _give_away(self, round: Round) -> None:
        """Give the chunks that this node is the root of, and has not summed, to the policy that takes over.

        Called before anything is added to a round that is new here, or when that policy comes.
        """
        plan, layout = self.takeover.plan, round.key.layout
        if plan is None or round.version >= plan.version or layout is None:
            return
        mine, left = 0, []
        for chunk, slot in enumerate(layout.slots):
            now = round.plan_of(chunk)
            if now.root[now.tree_of(slot)] == self._rank:
                mine += 1
                if not round.results[chunk] and now.version < plan.version:
                    left.append(chunk)
        if self.takeover.worth_it(left, mine):
            self.takeover.gave(round.key.identity, round.round, left)
            self._move(round, left, plan)

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

        self.dispatch.take_out(outdated)
        self.instructions.append(TakeBack(wanted=outdated))
        for chunk in sorted(moving):
            round.moved[chunk] = plan
            round.sums[chunk] = None
            if round.operation is not None:
                round.sum_of(chunk).add_own(round.own_values(chunk), self._bit)
                self._forward(round, chunk)

    # -------------------------------------------------------------------------------------- the look-ahead

    def tick(self, now: float) -> None:
        """Send what is held for rounds that have begun here long ago and have had no result."""
        self._release(self._held.doubt(self._rounds, now))

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return self._held.due()

    def _release(self, released: Iterator[tuple[tuple[int, int], int]]) -> None:
        for owner, chunk in released:
            round = self._rounds[owner]
            # A peer that lies may have sent the result of what is held; what has moved is not.
            if not round.results[chunk] and chunk not in round.moved:
                self._send_up(round, chunk)

    def fail_all(self, error: Exception) -> None:
        """Fail every operation and forget every round."""
        operations = list(self._operations())
        self._waiting.clear()
        self._rounds.clear()
        self._held.clear()
        self._unasked.clear()
        self._early.clear()
        self.takeover.clear()
        self.dispatch.clear()
        for operation in operations:
            self.instructions.append(Call(function=lambda done=operation.done: done(error)))  # type: ignore[misc]

    def missing_in(self, operation: Operation) -> str:
        """Say what an operation waits for, for a person."""
        round = self._rounds.get((operation.key.identity, operation.round))
        if round is None or round.operation is None:
            return f"{operation}: not begun, earlier rounds or the scheduler's answer are missing"
        ranks: set[int] = set()
        layout = round.key.layout
        assert layout is not None
        for chunk, done in enumerate(round.results):
            if not done:
                total = round.sums[chunk]
                plan = round.plan_of(chunk)
                expected = plan.expected[plan.tree_of(layout.slots[chunk])]
                if total is not None and total is not _SENT:
                    ranks.update(ranks_in(expected & ~total.contributors))
        waited = f"contributions of ranks {sorted(ranks)}" if ranks else "results from other ranks"
        return f"{operation}: {round.missing} of {len(round.results)} chunks wait for {waited}"

    def oldest(self) -> float:
        """Return when the oldest outstanding operation was submitted (inf: none is)."""
        return min((operation.begun_at for operation in self.outstanding()), default=math.inf)


def _is_newer(plan: Plan, than: Plan | None) -> bool:
    return than is None or plan.version > than.version
