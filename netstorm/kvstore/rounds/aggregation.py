"""Aggregate and forward: what a general node does with contributions and results.

Per chunk and round: our own and all children's contributions are added, the sum goes to the parent; at the
root it is complete when every rank is in; then it goes down again, and each node writes it to where its user
wants it (design, §5).
"""

from __future__ import annotations

import bisect
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.paths.auxiliary import AuxiliaryOptions
from netstorm.kvstore.paths.dispatch import Dispatch
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.chunk_moves import ChunkMoves
from netstorm.kvstore.rounds.complete_rounds import CompleteRounds
from netstorm.kvstore.rounds.outgoing import Outgoing
from netstorm.kvstore.rounds.part_checks import ROUNDS_AHEAD, check_part
from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.takeover import Takeover
from netstorm.kvstore.rounds.topology_requests import TopologyRequests
from netstorm.kvstore.rounds.withheld_sums import Owner, WithheldSums
from netstorm.kvstore.values.form import Form
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Moved, Part, Phase, RoundBegun
from netstorm.pslite.session.link_state import Links
from netstorm.topology.policy import Plan

__all__ = ["Aggregation"]

_log = logging.getLogger(__name__)


class Aggregation:
    """All open rounds of all keys on one node.

    Attributes:
        asking: when the scheduler is told which rounds have begun.
        closed: number of each round of a key that is complete here, until its owner has taken note.
        dispatch: parts for neighbours that have auxiliary paths.
        takeover: which chunks have moved to policies that take over.
    """

    def __init__(
        self,
        rank: int,
        bindings: Bindings,
        outbox: Outbox,
        counters: Counters,
        auxiliary: AuxiliaryOptions | None = None,
    ) -> None:
        self.asking: Final = TopologyRequests()
        self.closed: Final[list[int]] = []
        self.dispatch: Final = Dispatch(auxiliary or AuxiliaryOptions(), counters)
        self.takeover: Final = Takeover(rank)
        self._bit: Final = 1 << rank
        self._bindings: Final = bindings
        self._counters: Final = counters
        self._keys: Final[dict[int, Key]] = {}
        self._rounds: Final[dict[Owner, Round]] = {}
        self._complete: Final = CompleteRounds()
        self._waiting: Final[dict[int, list[Operation]]] = {}
        """Operations that may not begin yet (no binding, or too far ahead), by round: they come in any order,
        since the caller's engine starts them when their data is there.
        """
        self._early: Final[dict[int, list[tuple[Peer, Part, Buffer | None, int]]]] = {}
        """Parts of keys or policies that are not known here yet (the paper's case 2)."""
        self._outbox: Final = outbox
        self._outgoing: Final = Outgoing(self.dispatch, self.takeover, outbox, counters)
        self._held: Final = WithheldSums()
        self._moving: Final = ChunkMoves(
            takeover=self.takeover,
            rounds=self._rounds,
            outgoing=self._outgoing,
            counters=counters,
            contribute=self._contribute,
        )
        self._changed: Final[deque[int]] = deque()
        """Keys of which something may begin now."""

    # ------------------------------------------------------------------------------------ what the user wants

    def add_key(self, key: Key) -> None:
        """Learn a key's numbers; parts that came before it are looked at now."""
        self._keys[key.identity] = key
        self._complete.add_key(key.identity)
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
        self._changed.extend(self._keys if keys is None else keys)
        while self._changed:
            key = self._changed.popleft()
            if key not in self._keys:
                continue
            waiting = self._waiting.get(key)
            while waiting and (version := self._may_begin(waiting[0])) is not None:
                self._begin(waiting.pop(0), version)
            if waiting:
                self.asking.ask(key)
            for peer, part, payload, crc in self._early.pop(key, ()):
                try:
                    self._take(peer, part, payload, crc)
                except ProtocolViolation as error:
                    self._counters.add("protocol_violations")
                    _log.warning("dropped a part that rank %d sent early: %s", peer, error)

    def _may_begin(self, operation: Operation) -> int | None:
        """Return the policy version that an operation runs under, or None while it must wait."""
        key = operation.key.identity
        if operation.round > self._complete.up_to(key) + ROUNDS_AHEAD:
            return None
        version = self._bindings.version_of(key, operation.round)
        return None if version is None or self._bindings.plan(version) is None else version

    def _begin(self, operation: Operation, version: int) -> None:
        key = operation.key
        found = self._rounds.get((key.identity, operation.round))
        form = operation.form
        if found is not None and not (found.version == version and found.admits(form)):
            # made by a part that came before our binding and named another policy, which no correct node
            # sends; or of a rank that pushes another kind of array, as the scheduler will notice
            self.asking.ask(key.identity)
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
        round.take_form(form)
        self._held.begin(round, operation.priority)
        self.asking.begun(RoundBegun(key=key.identity, round=operation.round, rule=operation.rule))
        for chunk in range(len(round.sums)):
            self._contribute(round, chunk)
        if not round.sums:
            self._close(round)

    def _contribute(self, round: Round, chunk: int) -> None:
        """Add what the user's program has of a chunk."""
        round.sum_of(chunk).add_own(round.own_values(chunk), self._bit)
        self._forward(round, chunk)

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
        if (part.key, part.round) in self._complete:
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
            complete=self._complete.up_to(part.key),
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

    def _keep(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int) -> None:
        self._early.setdefault(part.key, []).append((peer, part, payload, payload_crc))
        self._counters.add("parts_kept_early")

    # --------------------------------------------------------------------------------------------- moving on

    def _round(self, key: Key, number: int, version: int, form: Form) -> Round:
        found = self._rounds.get((key.identity, number))
        if found is None:
            plan = self._bindings.plan(version)
            assert plan is not None
            moves = self.takeover.moves(key.identity, number)
            found = self._rounds[key.identity, number] = Round(key, number, plan, form, moves)
            self._moving.give_away(found)
        elif found.version != version:
            raise ProtocolViolation(
                f"round {number} of {key.name} runs under policy {found.version} here and under {version} "
                "elsewhere"
            )
        elif not found.admits(form):
            self.asking.ask(key.identity)
            raise ProtocolViolation(
                f"round {number} of {key.name} has codec {found.form.codec} here and {form.codec} elsewhere"
            )
        elif form.codec != found.form.codec:
            found.take_form(form)
        return found

    def _forward(self, round: Round, chunk: int) -> None:
        """Send a chunk's sum to the parent, if it is complete for this subtree and need not wait; at the root
        it is the result.
        """
        plan = round.plan_of(chunk)
        tree = plan.tree_of(round.layout.slots[chunk])
        total = round.sum_of(chunk)
        if total.contributors != plan.expected[tree] or round.results[chunk]:
            return
        if plan.reduce_parent[tree] < 0:
            self._deliver(round, chunk, total.to_keep(), None, round.priority)
        elif not self._held.must_wait(round, chunk):
            self._outgoing.send_up(round, chunk)

    def _deliver(
        self, round: Round, chunk: int, payload: Buffer | None, crc: int | None, priority: int
    ) -> None:
        """A chunk's result is here: pass it on, and write it."""
        self._outgoing.send_down(round, chunk, payload, crc, priority)
        round.store(chunk, payload)
        self.asking.got_on(round)
        self._release(self._held.result(round, chunk))
        if round.missing == 0 and round.operation is not None:
            self._close(round)

    def relay(self, part: Part, payload: Buffer | None, payload_crc: int) -> bool:
        """Send a part on along its auxiliary path, without looking at it; False if this is its end."""
        key = self._keys.get(part.key)
        offset = 0 if key is None else key.offset_of(part.chunk)
        if not self._outgoing.pass_on(part, payload, payload_crc, offset):
            return False
        self._counters.add("relayed")
        return True

    def is_known(self, part: Part) -> bool:
        """Return whether a sum has arrived, as its result is here, or nobody wants it, as it has moved."""
        if (part.key, part.round) in self._complete:
            return True
        moved = self.takeover.version_of(part.key, part.round, part.chunk)
        if moved is not None and part.version < moved:
            return True
        round = self._rounds.get((part.key, part.round))
        return round is not None and round.results[part.chunk]

    def _close(self, round: Round) -> None:
        """Every chunk's result is written: tell the user, and move on."""
        operation, key = round.operation, round.key.identity
        self.asking.ask(key)
        assert operation is not None
        del self._rounds[key, round.round]
        self._release(self._held.end(round))
        self.takeover.close(key, round.round)
        self._complete.add(key, round.round)
        self._bindings.forget_before(key, self._complete.up_to(key) + 1)
        self._counters.add("rounds")
        if not operation.for_others:
            self.closed.append(round.round)
        self._outbox.call(operation.done, None)
        self._changed.append(key)

    # ------------------------------------------------------------------- going over to another policy

    def new_policy(self, plan: Plan) -> None:
        """A policy has come: what is under way goes over to it, if it says so."""
        self._moving.new_policy(plan)
        self.advance()

    def moved(self, said: Moved) -> None:
        """Take the scheduler's word that chunks have moved.

        Raises:
            ProtocolViolation: to a policy that is not known.
        """
        plan = self._bindings.plan(said.version)
        if plan is None:
            raise ProtocolViolation(f"chunks have moved to policy {said.version}, which is not known here")
        if (said.key, said.round) not in self._complete:
            self._moving.told(said, plan)
            self.advance([said.key])

    # ---------------------------------------------------------------------------------- what its driver wants

    def run_dispatch(self, links: Links, now: float) -> bool:
        """Let chunks that wait for what links are like go where they should; return whether there are any."""
        if self.dispatch.idle():
            return False
        self._outbox.add_all(self.dispatch.run(links, now))
        return True

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
                self._outgoing.send_up(round, chunk)

    def fail_all(self, error: Exception) -> None:
        """Fail every operation and forget every round."""
        operations = list(self._operations())
        self._waiting.clear()
        self._rounds.clear()
        self._held.clear()
        self.asking.clear()
        self._early.clear()
        self.takeover.clear()
        self.dispatch.clear()
        for operation in operations:
            self._outbox.call(operation.done, error)

    def missing_in(self, operation: Operation) -> str:
        """Say what an operation waits for, for a person."""
        round = self._rounds.get((operation.key.identity, operation.round))
        if round is None or round.operation is None:
            return f"{operation}: not begun, earlier rounds or the scheduler's answer are missing"
        return f"{operation}: {round.waits_for()}"

    def oldest(self) -> float:
        """Return when the oldest outstanding operation was submitted (inf: none is)."""
        return min((operation.begun_at for operation in self.outstanding()), default=math.inf)
