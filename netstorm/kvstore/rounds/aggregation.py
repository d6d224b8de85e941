"""Aggregate and forward: the way of contributions and results through a general node. Pure.

Per chunk and round: a node adds its own and all children's contributions, and sends the sum to its parent. At
the root the sum is complete when every rank is in it. Then it goes down the same tree, and each node writes
it to the user's destination (design, §5).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from netstorm.errors import NodeLost, NotAuthorised, ProtocolViolation
from netstorm.kvstore.forms import Collective, Form, Key, UndeterminedForm
from netstorm.kvstore.operations import CollectiveCall, Operation, OperationQueue, Outbox
from netstorm.kvstore.paths.dispatch import AuxiliaryOptions, Dispatch
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.bounded_loss import BoundedLoss
from netstorm.kvstore.rounds.outgoing import ChunkMoves, ChunkTakeover, OutgoingParts, Owner, WithheldSums
from netstorm.kvstore.rounds.round import CompleteRounds, OrderedRound, Round, has_sent
from netstorm.kvstore.rounds.views import ViewChanges, lost_error
from netstorm.observe.log import Counters
from netstorm.protocol.codecs import ELEMENT_BYTES, UNDETERMINED_FORM
from netstorm.protocol.frames import Buffer, Peer, bits_from_wire, ranks_in
from netstorm.protocol.messages import (
    ANY_RULE,
    CallsWaiting,
    CallTimedOut,
    LossTerms,
    Message,
    Moved,
    Part,
    Phase,
    RoundBegun,
    ViewAgreed,
    WaitingCall,
)
from netstorm.pslite.machine import Charge, Links, WaitingBytes
from netstorm.topology.policy import Plan

__all__ = ["Aggregation", "EarlyPart", "Incoming", "TopologyRequests", "ZeroContributions", "check_part"]


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
        self.takeover: Final = ChunkTakeover(rank)
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
        self._outgoing: Final = OutgoingParts(self.dispatch, self.takeover, outbox, counters)
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


# Parts that other nodes send: which of them count, and for which round. Pure.
#
# A part may come before what it refers to is known, and after what it was for is over. The former are kept,
# the latter are dropped; all others are checked against what the scheduler has fixed.


class Incoming:
    """The received parts of one node."""

    def __init__(
        self,
        *,
        keys: Mapping[int, Key],
        rounds: Mapping[Owner, Round],
        complete: CompleteRounds,
        bindings: Bindings,
        takeover: ChunkTakeover,
        views: ViewChanges,
        outgoing: OutgoingParts,
        loss: BoundedLoss,
        counters: Counters,
        waiting: WaitingBytes,
        find_round: Callable[[Key, int, int, Form, int], Round],
        forward: Callable[[Round, int], None],
        deliver: Callable[[Round, int, Buffer | None, int], None],
    ) -> None:
        """Begin without parts.

        Args:
            keys: by number.
            rounds: the open rounds.
            complete: which rounds are complete here.
            bindings: which policy a round runs under.
            takeover: which chunks have moved.
            views: tells which parts are of a view before, or are results that were agreed on.
            outgoing: sends results to the children.
            loss: ends rounds without some contributions.
            counters: of the process.
            waiting: counts what is kept early.
            find_round: returns a round of a key by number, policy version, form and call; it is made if there
                is none.
            forward: sends a chunk's sum on if it is complete for this subtree.
            deliver: writes a chunk's result, with its contributors, to the user's destination.
        """
        self._keys: Final = keys
        self._rounds: Final = rounds
        self._complete: Final = complete
        self._bindings: Final = bindings
        self._takeover: Final = takeover
        self._views: Final = views
        self._outgoing: Final = outgoing
        self._loss: Final = loss
        self._counters: Final = counters
        self._find_round: Final = find_round
        self._forward: Final = forward
        self._deliver: Final = deliver
        self._early: Final = EarlyParts(counters, waiting)

    def receive(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> None:
        """Handle a part of a tree neighbour.

        Raises:
            ProtocolViolation: the part cannot belong to what the scheduler has fixed.
            NoRoom: it would have to wait, and too much waits already.
        """
        key = self._keys.get(part.key)
        plan = None if key is None else self._bindings.plan(part.version, key.spec.members)
        if part.version < self._views.version:
            self._counters.add("parts_of_former_views")
        elif key is None or plan is None or self._views.changing:
            self._early.keep(peer, part, payload, payload_crc)
        elif (part.key, part.round) in self._complete:
            self._counters.add("parts_of_complete_rounds")
        elif part.phase is Phase.RECOVERY:
            self._recover(peer, part, payload, key, plan)
        elif not self._waits_for_move(peer, part, payload, payload_crc, plan):
            self._take(peer, part, payload, key, plan, payload_crc=payload_crc)

    def receive_early(self, key: int) -> None:
        """Handle the parts of a key that came before something about it had changed."""
        for early in self._early.take(key):
            self._early.begin_again(early)
            try:
                self.receive(early.peer, early.part, early.payload, early.payload_crc)
            except ProtocolViolation as error:
                self._counters.add("protocol_violations")
                _log.warning("dropped a part that rank %d sent early: %s", early.peer, error)

    def clear(self) -> None:
        """Drop all parts that came early."""
        self._early.clear()

    def _waits_for_move(
        self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None, plan: Plan
    ) -> bool:
        """Drop a part of a chunk that has moved, and keep one whose chunk's move is not announced yet.
        Return whether the part was one of these.
        """
        bound = self._bindings.version_of(part.key, part.round)
        moved = self._takeover.version_of(part.key, part.round, part.chunk)
        if moved is not None and part.version < moved:
            self._counters.add("parts_of_moved_chunks")
            return True
        current = bound if moved is None else moved
        later = plan.policy.takes_over and (current is None or part.version > current)
        if later or (moved is not None and bound is None):
            self._early.keep(peer, part, payload, payload_crc)
            return True
        return False

    def _take(
        self,
        peer: Peer,
        part: Part,
        payload: Buffer | None,
        key: Key,
        plan: Plan,
        *,
        payload_crc: int | None,
    ) -> None:
        """Add a sum to that of this node, or take a result."""
        bound = self._bindings.version_of(part.key, part.round)
        moved = self._takeover.version_of(part.key, part.round, part.chunk)
        form, contributors = check_part(
            peer,
            part,
            payload,
            key=key,
            plan=plan,
            complete=self._complete.up_to(part.key) + self._views.lag(plan) + self._loss.lag(key, part),
            bound=bound if moved is None else moved,
        )
        version = part.version if bound is None else bound
        found = self._rounds.get((part.key, part.round))
        if (
            found is not None
            and found.operation is None
            and not (found.version == version and found.accepts(form, part.call))
        ):  # the one that has come before may be wrong: that shows once this rank's operation is here
            self._early.keep(peer, part, payload, payload_crc)
            return
        round = self._find_round(key, part.round, version, form, part.call)
        if part.version != round.plan_of(part.chunk).version:  # it has moved just now
            self._counters.add("parts_of_moved_chunks")
        elif part.phase is Phase.REDUCE:
            if part.loss is not None and not self._may_still_count(round, part, part.loss, contributors):
                return
            total = round.sum_of(part.chunk)
            if total.contributors & contributors:
                self._counters.add("contributions_counted_before")
                return
            total.add_received(payload, contributors)
            round.record_settled(part.chunk, part.settled)
            self._forward(round, part.chunk)
        elif round.results[part.chunk]:
            self._counters.add("results_known_before")
        else:
            check_sum_is_in(peer, part, round)
            round.settled[part.chunk] = part.settled
            if part.loss is not None:
                self._loss.open(round, part.loss)
            self._outgoing.send_down(
                round, part.chunk, payload, payload_crc, part.priority, contributors=contributors
            )
            self._deliver(round, part.chunk, payload, contributors)

    def _may_still_count(self, round: Round, part: Part, terms: LossTerms, contributors: int) -> bool:
        """Note a part of a round that may end without some; return whether it may still be in the result."""
        loss = self._loss.open(round, terms)
        if round.results[part.chunk]:
            self._counters.add("contributions_too_late")
            return False
        if loss.passed(part.chunk, part.version) & contributors:
            self._counters.add("contributions_counted_before")
            return False
        if not round.sum_of(part.chunk).contributors & contributors:
            loss.add_mass(part.chunk, part.version, terms.mass)
        return True

    def _recover(self, peer: Peer, part: Part, payload: Buffer | None, key: Key, plan: Plan) -> None:
        """Take a result from a rank that has it, after a change of the view."""
        self._views.check_recovery(peer, part)
        form, contributors = check_result(part, payload, key, plan)
        round = self._find_round(key, part.round, part.version, form, part.call)
        if not round.results[part.chunk]:
            self._deliver(round, part.chunk, payload, contributors)

    def relay(self, part: Part, payload: Buffer | None, payload_crc: int | None) -> bool:
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
        moved = self._takeover.version_of(part.key, part.round, part.chunk)
        if moved is not None and part.version < moved:
            return True
        round = self._rounds.get((part.key, part.round))
        return round is not None and round.results[part.chunk]


# Sums that are complete go on: to the parent, or as results. Pure.
#
# A sum may be withheld for a look-ahead (`withheld_sums`), or go on though it lacks contributions
# (`bounded_loss`).


class Forwarding:
    """The sums of all open rounds of one node.

    Attributes:
        withheld: sums that wait for the look-ahead.
        loss: rounds that may end without some contributions.
    """

    def __init__(
        self,
        rank: int,
        *,
        rounds: Mapping[Owner, Round],
        outgoing: OutgoingParts,
        counters: Counters,
        deliver: Callable[[Round, int, Buffer | None, int], None],
    ) -> None:
        """Begin without sums; see `BoundedLoss` for the arguments."""
        self.withheld: Final = WithheldSums()
        self.loss: Final = BoundedLoss(
            rank,
            rounds=rounds,
            outgoing=outgoing,
            counters=counters,
            deliver=deliver,
            withhold_no_more=self._withhold_no_more,
        )
        self._rounds: Final = rounds
        self._outgoing: Final = outgoing
        self._deliver: Final = deliver

    def forward(self, round: Round, chunk: int) -> None:
        """Send a chunk's sum to the parent, if it is complete for this subtree and not withheld. At the root
        it is the result.
        """
        plan = round.plan_of(chunk)
        tree = plan.tree_of(round.layout.slots[chunk])
        total, expected = round.sum_of(chunk), plan.expected[tree]
        passed = 0 if round.loss is None else round.loss.passed(chunk, plan.version)
        if not expected or round.results[chunk]:
            return
        if total.contributors | passed != expected:
            if round.loss is not None:
                self.loss.incomplete(round, chunk)
        elif plan.reduce_parent[tree] < 0:
            self.loss.completed(round, chunk)
            result = total.to_keep()
            self._outgoing.send_down(round, chunk, result, None, round.priority, contributors=expected)
            self._deliver(round, chunk, result, expected)
        elif passed or not self.withheld.withhold(round, chunk):
            self._outgoing.send_up(round, chunk)

    def release(self, released: Iterator[tuple[Owner, int]]) -> None:
        """Send the sums that are withheld no longer."""
        for owner, chunk in released:
            round = self._rounds[owner]
            # A faulty peer may have sent the result of what is withheld; moved chunks are not withheld.
            if not round.results[chunk] and chunk not in round.moved:
                self._outgoing.send_up(round, chunk)

    def _withhold_no_more(self, round: Round) -> None:
        span = round.look_ahead_span
        if span is not None:
            waiting = sorted(span.withheld)
            self.release(self.withheld.end(round))
            round.look_ahead_span = None
            for chunk in waiting:
                if not round.results[chunk] and chunk not in round.moved:
                    self._outgoing.send_up(round, chunk)

    def tick(self, now: float) -> None:
        """Send the sums of rounds that have had no result for too long, and end what is late."""
        self.release(self.withheld.release_overdue(self._rounds, now))
        self.loss.tick(now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return min(self.withheld.next_deadline(), self.loss.next_tick())

    def clear(self) -> None:
        """Forget everything."""
        self.withheld.clear()
        self.loss.clear()


# Checks of received parts: each must agree with what the scheduler has fixed. Pure.


def check_part(
    peer: Peer,
    part: Part,
    payload: Buffer | None,
    *,
    key: Key,
    plan: Plan,
    complete: int,
    bound: int | None,
) -> tuple[Form, int]:
    """Return a form with the part's codec, and the bit set of the ranks whose contributions are in the part.

    Args:
        peer: who has sent it.
        key: the part's, with its layout.
        plan: of the part's policy.
        complete: last round of the key below which all are complete here.
        bound: the policy version that the scheduler has bound the round to; None: not known yet.

    Raises:
        ProtocolViolation: no correct node sends it.
    """
    form = _form(part, key, plan)
    layout = key.layout_of(form)
    if not 0 <= part.chunk < layout.chunks:
        raise ProtocolViolation(f"{_name(part, key)}: the key has chunks 0 to {layout.chunks - 1}")
    # The sender may be so far ahead of what it has completed, and we may be one result behind it.
    ahead = 2 * key.rounds_under_way
    if part.round > complete + ahead:
        raise ProtocolViolation(
            f"{_name(part, key)} is more than {ahead} rounds ahead of round {complete}, "
            "the last complete one here"
        )
    if part.dtype != key.spec.dtype:
        raise ProtocolViolation(f"{_name(part, key)} is {part.dtype}; the key is {key.spec.dtype}")
    if bound is not None and bound != part.version:
        raise ProtocolViolation(
            f"{_name(part, key)} names policy {part.version}; the round runs under {bound}"
        )
    if part.loss is not None and not (0 < part.loss.bound < 1 and 0 < part.loss.deadline_s < math.inf):
        raise ProtocolViolation(
            f"{_name(part, key)} has loss bound {part.loss.bound} and deadline {part.loss.deadline_s}: "
            "expected a bound between 0 and 1, and a deadline of more than 0 s"
        )
    if not -1 <= part.settled < max(0, part.round):
        raise ProtocolViolation(
            f"{_name(part, key)} says that round {part.settled} is complete everywhere: expected -1 or an "
            "earlier round"
        )
    contributors = _check_sender(peer, part, key, plan, plan.tree_of(layout.slots[part.chunk]))
    _check_payload(part, payload, key, form, contributors)
    return form, contributors


def check_result(part: Part, payload: Buffer | None, key: Key, plan: Plan) -> tuple[Form, int]:
    """Return the form and the contributors, as `check_part` does, of a result that comes outside the trees.

    Raises:
        ProtocolViolation: no correct node sends it.
    """
    form, contributors = _form(part, key, plan), bits_from_wire(part.contributors)
    if not 0 <= part.chunk < key.layout_of(form).chunks or part.dtype != key.spec.dtype or not contributors:
        raise ProtocolViolation(f"{_name(part, key)}, of {part.dtype}, is none that this key can have")
    if contributors >> plan.policy.size:
        raise ProtocolViolation(f"{_name(part, key)} counts ranks that the job does not have")
    _check_payload(part, payload, key, form, contributors)
    return form, contributors


def check_sum_is_in(peer: Peer, part: Part, round: Round) -> None:
    """Check that a result from a tree's parent can have the sum that this node sends to its parent.

    Raises:
        NotAuthorised: that sum has not been sent, so the result was made up.
    """
    plan = round.plan_of(part.chunk)
    expected = plan.expected[part.tree] if part.loss is None else 0
    if expected and not has_sent(round, part.chunk):
        raise NotAuthorised(
            f"{_name(part, round.key)} comes from rank {peer} before rank {plan.rank} has sent its sum of "
            f"ranks {ranks_in(expected)}: nobody can have it"
        )


def _check_payload(part: Part, payload: Buffer | None, key: Key, form: Form, contributors: int) -> None:
    if payload is not None:
        start, end = key.layout_of(form).bounds[part.chunk]
        problem = form.problem(payload, end - start, contributors)
        if problem is not None:
            raise ProtocolViolation(f"{_name(part, key)} {problem}")


def _form(part: Part, key: Key, plan: Plan) -> Form:
    """Return a form with the part's codec."""
    if part.codec == UNDETERMINED_FORM and not key.is_collective:
        return UndeterminedForm()
    form = key.form_of(part.codec)
    if form is None:
        raise ProtocolViolation(f"{_name(part, key)} has codec {part.codec}, which this key never has")
    if isinstance(form, Collective):
        segments, size = form.signature.segments, form.signature.segment_bytes
        if segments > plan.ranks or segments * size > key.elements * ELEMENT_BYTES:
            raise ProtocolViolation(
                f"{_name(part, key)} has {segments} segments of {size} bytes; the key has "
                f"{key.elements * ELEMENT_BYTES} bytes in all, and {plan.ranks} members"
            )
    return form


def _check_sender(peer: Peer, part: Part, key: Key, plan: Plan, tree: int) -> int:
    """Return the bit set of the part's contributors, if `peer` sends such parts in `tree`, the chunk's."""
    if part.tree != tree:
        raise ProtocolViolation(
            f"{_name(part, key)} names tree {part.tree}; under this policy it is in tree {tree}"
        )
    if part.phase is not Phase.REDUCE:
        if int(peer) != plan.broadcast_parent[tree]:
            raise ProtocolViolation(
                f"{_name(part, key)} comes from rank {peer}, not this node's parent in tree {tree}"
            )
        return _check_contributors(part, key, plan.everybody)
    if int(peer) not in plan.reduce_children[tree]:
        raise ProtocolViolation(
            f"{_name(part, key)} comes from rank {peer}, no child of this node in tree {tree}"
        )
    return _check_contributors(part, key, plan.mask_of(tree, int(peer)))


def _check_contributors(part: Part, key: Key, expected: int) -> int:
    """Return the bit set of the part's contributors: all that are expected, or some if a round may end
    without the others.
    """
    contributors = bits_from_wire(part.contributors)
    some = part.loss is not None and contributors and not contributors & ~expected
    if contributors != expected and not some:
        whose = "the sender's subtree" if part.phase is Phase.REDUCE else "all ranks of the policy"
        raise ProtocolViolation(f"{_name(part, key)} counts ranks {ranks_in(contributors)}, not {whose}")
    return contributors


def _name(part: Part, key: Key) -> str:
    return f"{part.phase.name.lower()} part of chunk {part.chunk}, round {part.round} of key {key.name!r}"


# Parts that came before what they refer to is known here: a key, a policy, or a moved chunk. Pure.
#
# The paper's case 2 (arXiv 2404.11352 §VII-A): a contribution is never dropped because its policy is not
# known.


@dataclass(frozen=True, slots=True)
class EarlyPart:
    """A part that waits."""

    peer: Peer
    """Its sender, or the first rank of its path."""
    part: Part
    payload: Buffer | None
    payload_crc: int | None
    charge: Charge


class EarlyParts:
    """The early parts of one node, by key. Their bytes are bounded (`pslite.waiting_bytes`)."""

    def __init__(self, counters: Counters, waiting: WaitingBytes) -> None:
        self._counters: Final = counters
        self._waiting: Final = waiting
        self._by_key: Final[dict[int, list[EarlyPart]]] = {}

    def keep(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> None:
        """Keep a part until `take`.

        Raises:
            NoRoom: too much waits already.
        """
        size = 0 if payload is None else memoryview(payload).nbytes
        charge = self._waiting.take(size, part.key, f"keys that are new here, as {part.key} is, or a policy")
        self._by_key.setdefault(part.key, []).append(EarlyPart(peer, part, payload, payload_crc, charge))
        self._counters.add("parts_kept_early")

    def take(self, key: int) -> list[EarlyPart]:
        """Return the parts of a key, once. The caller handles each, after `begin_again`."""
        self._waiting.ready(key)
        taken = self._by_key.pop(key, [])
        for early in taken:
            self._waiting.give_back(early.charge)
        return taken

    def begin_again(self, early: EarlyPart) -> None:
        """Charge its sender for a part that has waited, if it has to wait again."""
        self._waiting.begin(early.charge.peer, again=True)

    def clear(self) -> None:
        """Drop all parts."""
        for key in list(self._by_key):
            self.take(key)
        self._waiting.all_ready()


# Collective calls that wait, for the scheduler to compare: ranks whose calls differ wait for each other.
# Pure.
#
# A call that other ranks do not make never completes. So a rank reports what has waited for a second, and the
# scheduler, which hears of both sides, can name them. A call that reaches its time-out ends the job, and the
# scheduler names the ranks that have not made it. What completes sooner costs nothing.

_PATIENCE_S: Final = 1.0
"""How long a call waits before it is reported. Rounds over slow links take longer: a report is a few
bytes."""


class WaitingCalls:
    """The collective calls of one node that have not completed."""

    def __init__(self) -> None:
        self._new: Final[dict[int, Operation]] = {}
        """By identity, in order of submission: those that have not been reported."""
        self._reported: Final[dict[int, Operation]] = {}
        self._deadline = math.inf
        """The first time-out among them, or of one that has completed since."""
        self._reports: Final[list[Message]] = []

    def add(self, operation: Operation) -> None:
        """Record that an operation has been submitted."""
        if operation.call is not None:
            self._new[id(operation)] = operation
            self._deadline = min(self._deadline, _deadline(operation))

    def remove(self, operation: Operation) -> None:
        """Record that an operation has completed."""
        if operation.call is not None:
            self._new.pop(id(operation), None)
            self._reported.pop(id(operation), None)

    def tick(self, now: float) -> None:
        """Prepare reports of calls that have waited long enough, or too long."""
        due = []
        for identity, operation in list(self._new.items()):
            if now < operation.begun_at + _PATIENCE_S:
                break
            self._reported[identity] = self._new.pop(identity)
            due.append(_report(operation.call))
        if due:
            self._reports.append(CallsWaiting(calls=tuple(due)))
        if now >= self._deadline:
            self._time_out(now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        first = next(iter(self._new.values()), None)
        return self._deadline if first is None else min(self._deadline, first.begun_at + _PATIENCE_S)

    def has_reports(self) -> bool:
        """Return whether there is something to report."""
        return bool(self._reports)

    def take_reports(self) -> list[Message]:
        """Return the reports to the scheduler, once."""
        taken = list(self._reports)
        self._reports.clear()
        return taken

    def report_again(self) -> None:
        """Report everything once more: the scheduler that has heard it is gone."""
        again = {**self._reported, **self._new}
        self._reported.clear()
        self._new.clear()
        self._new.update(again)

    def clear(self) -> None:
        """Forget all calls."""
        self._new.clear()
        self._reported.clear()
        self._reports.clear()
        self._deadline = math.inf

    def _time_out(self, now: float) -> None:
        operations = [*self._reported.values(), *self._new.values()]
        for operation in operations:
            call = operation.call
            if call is not None and now >= _deadline(operation):
                self._reports.append(
                    CallTimedOut(call=_report(call), members=call.members, seconds=call.timeout_s)
                )
                self._deadline = math.inf  # it ends the job
                return
        self._deadline = min(map(_deadline, operations), default=math.inf)


def _deadline(operation: Operation) -> float:
    assert operation.call is not None
    return operation.begun_at + operation.call.timeout_s


def _report(call: CollectiveCall | None) -> WaitingCall:
    assert call is not None
    return WaitingCall(group=call.group, number=call.number, text=call.text)


# Topology requests (TRP): when to report that a round has begun, which requests the next policy. Pure.
#
# The later the request, the newer is the policy that the next round gets; but the answer must be here before
# any rank waits for it. So where rounds take long, the request is sent shortly before the end of a round. And
# where many rounds of a key may be under way, the scheduler has granted many: one request serves several.

_AHEAD_S: Final = 0.5
"""How long before the expected end of a round the next policy is requested: far more than an answer takes."""

_PART: Final = 4
"""A request reports this part of the rounds that may be under way; what is left lasts for several answers."""

_LONGEST_S: Final = 0.25
"""How long a report waits for others: a mismatch of calls should be found while it can still be
understood."""


class TopologyRequests:
    """The topology requests of one node, for all keys.

    Attributes:
        round_s: duration of the last round, in s; set from outside.
    """

    def __init__(self) -> None:
        self.round_s = 0.0
        self._pending: list[RoundBegun] = []
        """To be sent now."""
        self._deferred: Final[dict[int, RoundBegun]] = {}
        """By key: to be sent shortly before the end of the round."""
        self._gathered: Final[dict[int, list[RoundBegun]]] = {}
        """By key: to be sent when there are enough of them."""
        self._gathered_at = math.inf
        """When the first of them came."""
        self._recent: Final[dict[int, deque[RoundBegun]]] = {}
        """The last ones, by key."""

    def record_begin(self, key: Key, round: RoundBegun, now: float) -> None:
        """Record that a round of a key has begun here."""
        recent = self._recent.setdefault(round.key, deque(maxlen=key.rounds_under_way + 1))
        recent.append(round)
        enough = key.rounds_under_way // _PART
        if self.round_s > 2 * _AHEAD_S:
            self.request_now(round.key)
            self._deferred[round.key] = round
        elif enough > 1:
            gathered = self._gathered.setdefault(round.key, [])
            gathered.append(round)
            self._gathered_at = min(self._gathered_at, now)
            if len(gathered) >= enough:
                self.request_all(round.key)
        else:
            self._pending.append(round)

    def record_result(self, round: Round) -> None:
        """Record that one more result of a round is here."""
        if self._deferred and self.round_s * round.missing <= _AHEAD_S * len(round.sums):
            self.request_now(round.key.identity)

    def request_now(self, key: int) -> None:
        """Defer the request for the next round of a key no longer."""
        begun = self._deferred.pop(key, None)
        if begun is not None:
            self._pending.append(begun)

    def request_all(self, key: int) -> None:
        """Report everything of a key now: a round waits for the answer, or for the scheduler's comparison."""
        self._pending += self._gathered.pop(key, ())
        self.request_now(key)
        if not self._gathered:
            self._gathered_at = math.inf

    def tick(self, now: float) -> None:
        """Report what has waited long enough for others."""
        if now >= self.next_tick():
            for key in list(self._gathered):
                self.request_all(key)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return self._gathered_at + _LONGEST_S

    def has_pending(self) -> bool:
        """Return whether there are requests to send now."""
        return bool(self._pending)

    def take(self) -> tuple[RoundBegun, ...]:
        """Return the requests to send now, once."""
        taken, self._pending = self._pending, []
        return tuple(taken)

    def recent(self) -> tuple[RoundBegun, ...]:
        """Return all that a restarted scheduler must know; it includes what is pending."""
        self.clear()
        return tuple(begun for recent in self._recent.values() for begun in recent)

    def clear(self) -> None:
        """Drop all requests."""
        self._pending = []
        self._deferred.clear()
        self._gathered.clear()
        self._gathered_at = math.inf


# The zeros that a rank contributes after its program has ended, with NETSTORM_UNEVEN=join. Pure.
#
# A finished rank does not know which rounds the others will still push, and need not. It always contributes
# as far ahead of what is complete as a node may, so its zeros are there before any rank waits for them. Nor
# does it know whether the others will push dense arrays, rows or compressed ones: zeros have no payload, and
# a form of their own that any other form replaces.


class ZeroContributions:
    """Operations of zeros, one after the other, so that the other ranks' rounds complete."""

    def __init__(self) -> None:
        self._pending: Final[deque[Key]] = deque()

    def begin(self, keys: Iterable[Key]) -> None:
        """Contribute zeros to every round of `keys` that the program has not pushed.

        Args:
            keys: granted keys. Rounds of a key without elements complete without contributions. Collective
                rounds get no zeros: what a rank would contribute is not known.
        """
        for key in keys:
            if key.layout is not None and key.layout.chunks:
                self._pending.extend([key] * key.rounds_under_way)

    def has_pending(self) -> bool:
        """Return whether there are operations to take."""
        return bool(self._pending)

    def take(self) -> list[Operation]:
        """Return the operations to submit now."""
        taken = []
        while self._pending:
            taken.append(self._next(self._pending.popleft()))
        return taken

    def _next(self, key: Key) -> Operation:
        def done(error: Exception | None) -> None:
            if error is None:
                self._pending.append(key)

        return Operation(
            key=key,
            round=key.take_round(),
            source=None,
            destination=None,
            done=done,
            rule=ANY_RULE,
            form=UndeterminedForm(),
            for_others=True,
        )


# Where the program of a rank begins that has joined later: it has the state of all rounds before. Pure.


class LateStart:
    """The late start of one node's program; nothing of it concerns a rank that has begun with the job."""

    def __init__(
        self,
        *,
        keys: Mapping[int, Key],
        rounds: Mapping[Owner, Round],
        views: ViewChanges,
        topology_requests: TopologyRequests,
        end_round: Callable[[Round], None],
    ) -> None:
        """Begin without a state.

        Args:
            keys: by number; `Aggregation` adds to them.
            rounds: the open rounds; `Aggregation` changes them.
            views: know where the program begins, and what was lost before.
            topology_requests: ask for bindings.
            end_round: ends a round whose results are all here.
        """
        self._keys: Final = keys
        self._rounds: Final = rounds
        self._views: Final = views
        self._topology_requests: Final = topology_requests
        self._end_round: Final = end_round

    def begin_at(self, rounds: Mapping[int, int]) -> None:
        """Go on with these rounds, by key.

        Of those before, the results still come here: other nodes may need them from this one. Keys that are
        not named keep the results that came meanwhile.
        """
        self._views.begins.update(rounds)
        for key, first in rounds.items():
            if key in self._keys:
                for owner in [owner for owner in self._rounds if owner[0] == key]:
                    self.end_unneeded(self._rounds[owner])
                self._views.give_up_lost(key)
                self.ask_for_binding(self._keys[key], max(0, first - 1))

    def add_key(self, key: int) -> None:
        """Go on with a key that was not known when the state came."""
        if key in self._views.begins:
            self.begin_at({key: self._views.begins[key]})

    def end_unneeded(self, round: Round) -> None:
        """End a round of which all results are here, if the program's state has them already."""
        unneeded = round.round < self._views.begins.get(round.key.identity, 0)
        if round.missing == 0 and round.operation is None and unneeded:
            self._end_round(round)

    def version_of(self, key: int, round: int) -> int | None:
        """Return the policy version of a round of which all results are here; None: some are missing.

        The scheduler does not tell a rank that is behind of what all others have begun long ago.
        """
        found = self._rounds.get((key, round))
        return None if found is None or found.missing or key not in self._views.begins else found.version

    def ask_for_binding(self, key: Key, round: int) -> None:
        """Ask what a silent rank is not told otherwise: under which policy the next round runs."""
        self._topology_requests.record_begin(key, RoundBegun(key.identity, round, ANY_RULE), 0.0)
