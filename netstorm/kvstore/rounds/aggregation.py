"""Aggregate and forward: the way of contributions and results through a general node. Pure.

Per chunk and round: a node adds its own and all children's contributions, and sends the sum to its parent. At
the root the sum is complete when every rank is in it. Then it goes down the same tree, and each node writes
it to the user's destination (design, §5).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from netstorm.errors import NodeLost, ProtocolViolation
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.operations.operation_queue import OperationQueue
from netstorm.kvstore.operations.outbox import Outbox
from netstorm.kvstore.paths.auxiliary import AuxiliaryOptions
from netstorm.kvstore.paths.dispatch import Dispatch
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.chunk_moves import ChunkMoves
from netstorm.kvstore.rounds.complete_rounds import CompleteRounds
from netstorm.kvstore.rounds.forwarding import Forwarding
from netstorm.kvstore.rounds.incoming import Incoming
from netstorm.kvstore.rounds.outgoing import Outgoing
from netstorm.kvstore.rounds.round import OrderedRound, Round
from netstorm.kvstore.rounds.takeover import Takeover
from netstorm.kvstore.rounds.topology_requests import TopologyRequests
from netstorm.kvstore.rounds.views.late_start import LateStart
from netstorm.kvstore.rounds.views.view_changes import ViewChanges, lost_error
from netstorm.kvstore.rounds.waiting_calls import WaitingCalls
from netstorm.kvstore.rounds.withheld_sums import Owner
from netstorm.kvstore.values.form import Form
from netstorm.kvstore.values.key import Key
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Moved, Part, RoundBegun, ViewAgreed
from netstorm.pslite.session.link_state import Links
from netstorm.pslite.waiting_bytes import WaitingBytes
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
        calls: reports collective calls that wait.
        views: how rounds under way end when nodes leave or join.
        incoming: the parts that others send.
    """

    def __init__(
        self,
        rank: int,
        bindings: Bindings,
        outbox: Outbox,
        counters: Counters,
        auxiliary: AuxiliaryOptions | None = None,
        *,
        elastic: bool = False,
        waiting: WaitingBytes | None = None,
        reproducible: bool = False,
    ) -> None:
        self.topology_requests: Final = TopologyRequests()
        self.completed_rounds: Final[list[int]] = []
        self.dispatch: Final = Dispatch(auxiliary or AuxiliaryOptions(), counters)
        self.takeover: Final = Takeover(rank)
        self.calls: Final = WaitingCalls()
        self._bit: Final = 1 << rank
        self._round_type: Final = OrderedRound if reproducible else Round
        self._bindings: Final = bindings
        self._counters: Final = counters
        self._keys: Final[dict[int, Key]] = {}
        self._rounds: Final[dict[Owner, Round]] = {}
        self._complete: Final = CompleteRounds()
        self._waiting: Final = OperationQueue()
        self._outbox: Final = outbox
        self._outgoing: Final = Outgoing(self.dispatch, self.takeover, outbox, counters)
        self._sums: Final = self._make_sums(rank)
        self._moves: Final = ChunkMoves(
            takeover=self.takeover,
            rounds=self._rounds,
            outgoing=self._outgoing,
            counters=counters,
            contribute=self._contribute,
        )
        self.views: Final = ViewChanges(
            rank,
            active=elastic,
            keys=self._keys,
            rounds=self._rounds,
            complete=self._complete,
            bindings=bindings,
            takeover=self.takeover,
            withheld=self._sums.withheld,
            outgoing=self._outgoing,
            outbox=outbox,
            counters=counters,
            contribute=self._contribute,
            fail=self._complete_round,
        )
        self._late_start: Final = LateStart(
            keys=self._keys,
            rounds=self._rounds,
            views=self.views,
            topology_requests=self.topology_requests,
            end_round=self._complete_round,
        )
        self.incoming: Final = self._make_incoming(waiting or WaitingBytes())
        self._changed: Final[deque[int]] = deque()
        """Keys of which something may begin now."""

    def _make_sums(self, rank: int) -> Forwarding:
        return Forwarding(
            rank,
            rounds=self._rounds,
            outgoing=self._outgoing,
            counters=self._counters,
            deliver=self._deliver,
        )

    def _make_incoming(self, waiting: WaitingBytes) -> Incoming:
        return Incoming(
            keys=self._keys,
            rounds=self._rounds,
            complete=self._complete,
            bindings=self._bindings,
            takeover=self.takeover,
            views=self.views,
            outgoing=self._outgoing,
            loss=self._sums.loss,
            counters=self._counters,
            waiting=waiting,
            find_round=self._round,
            forward=self._sums.forward,
            deliver=self._deliver,
        )

    # ---------------------------------------------------------------------------------- the user's operations

    def add_key(self, key: Key) -> None:
        """Add a key that the scheduler has numbered; parts that came before are handled now."""
        self._keys[key.identity] = key
        self._complete.add_key(key.identity)
        self._late_start.add_key(key.identity)
        self.advance([key.identity])

    def submit(self, operation: Operation, now: float) -> None:
        """Begin an operation, or queue it until its policy is here. Its key must be known."""
        operation.begun_at = now
        self.calls.add(operation)
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
                if self.views.is_lost(key, waiting[0].round):
                    operation = waiting.pop(0)
                    self._outbox.complete(operation.done, lost_error(operation))
                else:
                    self._begin(waiting.pop(0), version)
            if waiting:
                self.topology_requests.request_all(key)
            self.incoming.receive_early(key)

    def _may_begin(self, operation: Operation) -> int | None:
        """Return the policy version that an operation runs under, or None while it must wait."""
        key = operation.key
        if self.views.changing or operation.round > self._complete.up_to(key.identity) + key.rounds_under_way:
            return None
        version = self._bindings.version_of(key.identity, operation.round)
        if version is None:
            return self._late_start.version_of(key.identity, operation.round)
        return None if self._bindings.plan(version) is None else version

    def _begin(self, operation: Operation, version: int) -> None:
        key = operation.key
        found = self._rounds.get((key.identity, operation.round))
        form = operation.form
        if found is not None and not (found.version == version and found.accepts(form, operation.digest)):
            # Made by a part that came before our binding and names another policy, which no correct node
            # sends; or by a rank that pushes or calls something else, which the scheduler will report.
            self.topology_requests.request_all(key.identity)
            del self._rounds[key.identity, operation.round]
            self._sums.release(self._sums.withheld.end(found))
            self._counters.add("protocol_violations")
            was = f"policy {found.version} in codec {found.form.codec}"
            runs = f"policy {version} in codec {form.codec}"
            _log.warning("dropped parts of %s under %s; it runs under %s", operation, was, runs)
        round = self._round(key, operation.round, version, form, operation.digest)
        round.operation = operation
        round.switch_form(form)
        if operation.loss is not None:
            self._sums.loss.open(round, operation.loss)
        self._sums.loss.write_early(round)
        self.views.write_kept(round)
        self._sums.withheld.begin(round, operation.priority)
        self.topology_requests.record_begin(
            key,
            RoundBegun(key=key.identity, round=operation.round, rule=operation.rule),
            operation.begun_at,
        )
        for chunk, known in enumerate(tuple(round.results)):
            if not known:
                self._contribute(round, chunk)
        if round.missing == 0 and (key.identity, round.round) not in self._complete:
            self._complete_round(round)
        elif round.missing and not round.plan.everybody & self._bit:
            self.views.caught_up = True
        if self.views.begins and round.plan.everybody & self._bit:
            self.views.contributes_to.add(key.identity)

    def _contribute(self, round: Round, chunk: int) -> None:
        """Add this rank's own contribution to a chunk, unless a result is to come, or it is silent."""
        key = round.key.identity
        if self.views.awaits_result(key, round.round, chunk):
            return
        if not round.plan_of(chunk).everybody & self._bit:
            return  # what others have sent through this rank has gone on already
        round.sum_of(chunk).add_own(round.own_values(chunk), self._bit)
        self._sums.loss.add_own(round, chunk)
        if self.views.active:
            round.record_settled(chunk, self._complete.up_to(key))
        self._sums.forward(round, chunk)

    # ----------------------------------------------------------------------------------- parts of other nodes

    def receive(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> None:
        """Handle a part of a tree neighbour.

        Raises:
            ProtocolViolation: the part cannot belong to what the scheduler has fixed.
        """
        self.incoming.receive(peer, part, payload, payload_crc)
        self.advance([])

    # --------------------------------------------------------------------------------- the progress of rounds

    def _round(self, key: Key, number: int, version: int, form: Form, call: int) -> Round:
        found = self._rounds.get((key.identity, number))
        if found is None:
            plan = self._bindings.plan(version, key.spec.members)
            assert plan is not None
            moves = self.takeover.moves(key.identity, number)
            found = self._rounds[key.identity, number] = self._round_type(
                key, number, plan, form, moves, call=call
            )
            if not plan.everybody & self._bit:
                self._late_start.ask_for_binding(key, number)
            self._moves.give_up_chunks(found)
        elif found.version != version:
            raise ProtocolViolation(
                f"round {number} of key {key.name!r} runs under policy {found.version} here and under "
                f"{version} elsewhere"
            )
        elif not found.accepts(form, call):
            self.topology_requests.request_all(key.identity)
            codecs = f"codec {found.form.codec} here and {form.codec} elsewhere"
            differing = codecs if call == found.call else "one call here and another elsewhere"
            raise ProtocolViolation(f"round {number} of key {key.name!r} has {differing}")
        elif form.codec != found.form.codec:
            found.switch_form(form)
        return found

    def _deliver(self, round: Round, chunk: int, payload: Buffer | None, contributors: int) -> None:
        """Write a chunk's result to the user's destination."""
        self._sums.loss.delivered(round, chunk, payload, contributors)
        self.views.keep(round, chunk, payload, contributors)
        round.store(chunk, payload, contributors)
        self.topology_requests.record_result(round)
        self._sums.release(self._sums.withheld.result(round, chunk))
        if round.missing == 0 and round.operation is not None:
            self._complete_round(round)
        elif round.missing == 0:
            self._changed.append(round.key.identity)
            self._late_start.end_unneeded(round)

    def _complete_round(self, round: Round, error: NodeLost | None = None) -> None:
        """Complete the operation of a round whose results are all written, or cannot be."""
        operation, key = round.operation, round.key.identity
        self.topology_requests.request_now(key)
        del self._rounds[key, round.round]
        self._sums.release(self._sums.withheld.end(round))
        self.takeover.end_round(key, round.round)
        self._complete.add(key, round.round)
        self._bindings.forget_before(key, self._complete.up_to(key) + 1)
        self._changed.append(key)
        if operation is None:
            return
        self._counters.add("rounds")
        self.calls.remove(operation)
        if not operation.for_others:
            self.completed_rounds.append(round.round)
        self._outbox.complete(operation.done, error)

    def begin_at(self, rounds: Mapping[int, int]) -> None:
        """Go on with these rounds, by key: the program has the state of all before."""
        self._late_start.begin_at(rounds)
        self.advance(rounds)

    # ---------------------------------------------------------------------------- takeover by another policy

    def new_policy(self, plan: Plan) -> None:
        """Install a policy; rounds under way move to it if it takes over, once the view is agreed on."""
        self.views.set_members(plan.policy)
        self._moves.new_policy(plan, later=self.views.changing)
        self.advance()

    def agree(self, message: ViewAgreed) -> bool:
        """Go on in a new view; return whether its change ends, see `ViewChanges`."""
        ended = self.views.agree(message)
        if ended:
            self._moves.view_agreed(self.views.version)
            self.advance()
        return ended

    def chunks_moved(self, announcement: Moved) -> None:
        """Handle the announcement that chunks have moved to another policy.

        Raises:
            ProtocolViolation: the policy is not known.
        """
        former = announcement.version < self.views.version  # everything has moved to the view's policy since
        if not former and (announcement.key, announcement.round) not in self._complete:
            self._moves.moved(announcement, self._bindings.plan(announcement.version))
            self.advance([announcement.key])

    # ----------------------------------------------------------------------------------------- for the driver

    def run_dispatch(self, links: Links, now: float) -> bool:
        """Send the chunks that wait for the state of links; return whether there were any."""
        if self.dispatch.is_idle():
            return False
        self._outbox.add_all(self.dispatch.run(links, now))
        return True

    def tick(self, now: float) -> None:
        """Do what is due."""
        self._sums.tick(now)
        self.calls.tick(now)
        self.topology_requests.tick(now)
        if self._changed:
            self.advance([])

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return min(self._sums.next_tick(), self.calls.next_tick(), self.topology_requests.next_tick())

    def fail_all(self, error: Exception) -> None:
        """Fail every operation and forget every round."""
        operations = list(self._operations())
        self.calls.clear()
        self._waiting.clear()
        self._rounds.clear()
        self._sums.clear()
        self.topology_requests.clear()
        self.incoming.clear()
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
