"""Aggregate and forward: the way of contributions and results through a general node. Pure.

Per chunk and round: a node adds its own and all children's contributions, and sends the sum to its parent. At
the root the sum is complete when every rank is in it. Then it goes down the same tree, and each node writes
it to the user's destination (design, §5).
"""

from __future__ import annotations

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
from netstorm.kvstore.rounds.early_parts import EarlyParts
from netstorm.kvstore.rounds.operation_queue import OperationQueue
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
        topology_requests: report to the scheduler which rounds have begun.
        completed_rounds: number of each round of a key that is complete here, until the owner of this object
            clears it.
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
        self.topology_requests: Final = TopologyRequests()
        self.completed_rounds: Final[list[int]] = []
        self.dispatch: Final = Dispatch(auxiliary or AuxiliaryOptions(), counters)
        self.takeover: Final = Takeover(rank)
        self._bit: Final = 1 << rank
        self._bindings: Final = bindings
        self._counters: Final = counters
        self._keys: Final[dict[int, Key]] = {}
        self._rounds: Final[dict[Owner, Round]] = {}
        self._complete: Final = CompleteRounds()
        self._waiting: Final = OperationQueue()
        self._early: Final = EarlyParts(counters)
        self._outbox: Final = outbox
        self._outgoing: Final = Outgoing(self.dispatch, self.takeover, outbox, counters)
        self._withheld: Final = WithheldSums()
        self._moves: Final = ChunkMoves(
            takeover=self.takeover,
            rounds=self._rounds,
            outgoing=self._outgoing,
            counters=counters,
            contribute=self._contribute,
        )
        self._changed: Final[deque[int]] = deque()
        """Keys of which something may begin now."""

    # ---------------------------------------------------------------------------------- the user's operations

    def add_key(self, key: Key) -> None:
        """Add a key that the scheduler has numbered; parts that came before are handled now."""
        self._keys[key.identity] = key
        self._complete.add_key(key.identity)
        self.advance([key.identity])

    def submit(self, operation: Operation, now: float) -> None:
        """Begin an operation, or queue it until its policy is here. Its key must be known."""
        operation.begun_at = now
        self._waiting.add(operation)
        self.advance([operation.key.identity])

    def outstanding(self) -> Iterator[Operation]:
        """Yield the operations that are not complete and that this rank's program waits for."""
        return (operation for operation in self._operations() if not operation.for_others)

    def _operations(self) -> Iterator[Operation]:
        yield from self._waiting
        for round in self._rounds.values():
            if round.operation is not None:
                yield round.operation

    def advance(self, keys: Iterable[int] | None = None) -> None:
        """Begin what may begin, and handle early parts: something about `keys` (None: all) has changed."""
        self._changed.extend(self._keys if keys is None else keys)
        while self._changed:
            key = self._changed.popleft()
            if key not in self._keys:
                continue
            waiting = self._waiting.of(key)
            while waiting and (version := self._may_begin(waiting[0])) is not None:
                self._begin(waiting.pop(0), version)
            if waiting:
                self.topology_requests.request_now(key)
            for peer, part, payload, crc in self._early.take(key):
                try:
                    self._handle(peer, part, payload, crc)
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
        if found is not None and not (found.version == version and found.accepts(form)):
            # Made by a part that came before our binding and names another policy, which no correct node
            # sends; or by a rank that pushes another kind of array, which the scheduler will report.
            self.topology_requests.request_now(key.identity)
            del self._rounds[key.identity, operation.round]
            self._release(self._withheld.end(found))
            self._counters.add("protocol_violations")
            _log.warning(
                "dropped parts of %s under policy %d in codec %d; it runs under policy %d in codec %d",
                operation,
                found.version,
                found.form.codec,
                version,
                form.codec,
            )
        round = self._round(key, operation.round, version, form)
        round.operation = operation
        round.switch_form(form)
        self._withheld.begin(round, operation.priority)
        self.topology_requests.record_begin(
            RoundBegun(key=key.identity, round=operation.round, rule=operation.rule)
        )
        for chunk in range(len(round.sums)):
            self._contribute(round, chunk)
        if not round.sums:
            self._complete_round(round)

    def _contribute(self, round: Round, chunk: int) -> None:
        """Add this rank's own contribution to a chunk."""
        round.sum_of(chunk).add_own(round.own_values(chunk), self._bit)
        self._forward(round, chunk)

    # ----------------------------------------------------------------------------------- parts of other nodes

    def receive(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int) -> None:
        """Handle a part of a tree neighbour.

        Raises:
            ProtocolViolation: the part cannot belong to what the scheduler has fixed.
        """
        self._handle(peer, part, payload, payload_crc)
        self.advance([])

    def _handle(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int) -> None:
        key = self._keys.get(part.key)
        plan = self._bindings.plan(part.version)
        if key is None or plan is None:
            self._early.keep(peer, part, payload, payload_crc)
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
            # The announcement that its chunk has moved has not come yet.
            self._early.keep(peer, part, payload, payload_crc)
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
        if part.version != round.plan_of(part.chunk).version:  # it has moved just now
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

    # --------------------------------------------------------------------------------- the progress of rounds

    def _round(self, key: Key, number: int, version: int, form: Form) -> Round:
        found = self._rounds.get((key.identity, number))
        if found is None:
            plan = self._bindings.plan(version)
            assert plan is not None
            moves = self.takeover.moves(key.identity, number)
            found = self._rounds[key.identity, number] = Round(key, number, plan, form, moves)
            self._moves.give_up_chunks(found)
        elif found.version != version:
            raise ProtocolViolation(
                f"round {number} of key {key.name!r} runs under policy {found.version} here and under "
                f"{version} elsewhere"
            )
        elif not found.accepts(form):
            self.topology_requests.request_now(key.identity)
            raise ProtocolViolation(
                f"round {number} of key {key.name!r} has codec {found.form.codec} here and {form.codec} "
                "elsewhere"
            )
        elif form.codec != found.form.codec:
            found.switch_form(form)
        return found

    def _forward(self, round: Round, chunk: int) -> None:
        """Send a chunk's sum to the parent, if it is complete for this subtree and not withheld. At the root
        it is the result.
        """
        plan = round.plan_of(chunk)
        tree = plan.tree_of(round.layout.slots[chunk])
        total = round.sum_of(chunk)
        if total.contributors != plan.expected[tree] or round.results[chunk]:
            return
        if plan.reduce_parent[tree] < 0:
            self._deliver(round, chunk, total.to_keep(), None, round.priority)
        elif not self._withheld.withhold(round, chunk):
            self._outgoing.send_up(round, chunk)

    def _deliver(
        self, round: Round, chunk: int, payload: Buffer | None, crc: int | None, priority: int
    ) -> None:
        """Forward a chunk's result, and write it to the user's destination."""
        self._outgoing.send_down(round, chunk, payload, crc, priority)
        round.store(chunk, payload)
        self.topology_requests.record_result(round)
        self._release(self._withheld.result(round, chunk))
        if round.missing == 0 and round.operation is not None:
            self._complete_round(round)

    def relay(self, part: Part, payload: Buffer | None, payload_crc: int) -> bool:
        """Forward a part along its auxiliary path, without looking into it; False if the path ends here."""
        key = self._keys.get(part.key)
        offset = 0 if key is None else key.offset_of(part.chunk)
        if not self._outgoing.forward(part, payload, payload_crc, offset):
            return False
        self._counters.add("relayed")
        return True

    def is_obsolete(self, part: Part) -> bool:
        """Return whether a sum need not be sent: its result is here, or its chunk has moved."""
        if (part.key, part.round) in self._complete:
            return True
        moved = self.takeover.version_of(part.key, part.round, part.chunk)
        if moved is not None and part.version < moved:
            return True
        round = self._rounds.get((part.key, part.round))
        return round is not None and round.results[part.chunk]

    def _complete_round(self, round: Round) -> None:
        """Complete the operation of a round whose results are all written."""
        operation, key = round.operation, round.key.identity
        self.topology_requests.request_now(key)
        assert operation is not None
        del self._rounds[key, round.round]
        self._release(self._withheld.end(round))
        self.takeover.end_round(key, round.round)
        self._complete.add(key, round.round)
        self._bindings.forget_before(key, self._complete.up_to(key) + 1)
        self._counters.add("rounds")
        if not operation.for_others:
            self.completed_rounds.append(round.round)
        self._outbox.complete(operation.done, None)
        self._changed.append(key)

    # ---------------------------------------------------------------------------- takeover by another policy

    def new_policy(self, plan: Plan) -> None:
        """Install a policy; rounds under way move to it if it takes over."""
        self._moves.new_policy(plan)
        self.advance()

    def chunks_moved(self, announcement: Moved) -> None:
        """Handle the announcement that chunks have moved to another policy.

        Raises:
            ProtocolViolation: the policy is not known.
        """
        plan = self._bindings.plan(announcement.version)
        if plan is None:
            raise ProtocolViolation(
                f"chunks have moved to policy {announcement.version}, which is not known here"
            )
        if (announcement.key, announcement.round) not in self._complete:
            self._moves.moved(announcement, plan)
            self.advance([announcement.key])

    # ----------------------------------------------------------------------------------------- for the driver

    def run_dispatch(self, links: Links, now: float) -> bool:
        """Send the chunks that wait for the state of links; return whether there were any."""
        if self.dispatch.is_idle():
            return False
        self._outbox.add_all(self.dispatch.run(links, now))
        return True

    def tick(self, now: float) -> None:
        """Release the sums that are withheld for rounds that have had no result for too long."""
        self._release(self._withheld.release_overdue(self._rounds, now))

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return self._withheld.next_deadline()

    def _release(self, released: Iterator[tuple[tuple[int, int], int]]) -> None:
        for owner, chunk in released:
            round = self._rounds[owner]
            # A faulty peer may have sent the result of what is withheld; moved chunks are not withheld.
            if not round.results[chunk] and chunk not in round.moved:
                self._outgoing.send_up(round, chunk)

    def fail_all(self, error: Exception) -> None:
        """Fail every operation and forget every round."""
        operations = list(self._operations())
        self._waiting.clear()
        self._rounds.clear()
        self._withheld.clear()
        self.topology_requests.clear()
        self._early.clear()
        self.takeover.clear()
        self.dispatch.clear()
        for operation in operations:
            self._outbox.complete(operation.done, error)

    def waiting_text_of(self, operation: Operation) -> str:
        """Return what an operation waits for, for a person."""
        round = self._rounds.get((operation.key.identity, operation.round))
        if round is None or round.operation is None:
            return f"{operation}: not begun; it waits for earlier rounds, or for the scheduler's answer"
        return f"{operation}: {round.waiting_text()}"

    def oldest(self) -> float:
        """Return when the oldest outstanding operation was submitted (inf: none is)."""
        return min((operation.begun_at for operation in self.outstanding()), default=math.inf)
