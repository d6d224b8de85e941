"""Aggregate and forward: the way of contributions and results through a general node. Pure.

Per chunk and round: a node adds its own and all children's contributions, and sends the sum to its parent. At
the root the sum is complete when every rank is in it. Then it goes down the same tree, and each node writes
it to the user's destination (design, §5).

This is the core: it knows rounds, trees and sums. What an option adds is an `Extension`, in a module of its
own; `node_rounds` names them all.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from netstorm.errors import NodeLost, NotAuthorised, ProtocolViolation
from netstorm.kvstore.forms import Array, ChunkLayout, Collective, Form, Key, Sum, UndeterminedForm
from netstorm.kvstore.operations import CollectiveCall, Operation, OperationQueue, Outbox
from netstorm.kvstore.paths.routes import forwarded_send
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.round import (
    SENT,
    CompleteRounds,
    Extension,
    OrderedRound,
    Owner,
    PartTag,
    Round,
    Way,
)
from netstorm.observe.log import Counters
from netstorm.protocol.codecs import ELEMENT_BYTES, UNDETERMINED_FORM
from netstorm.protocol.frames import (
    Buffer,
    Checksum,
    Peer,
    bits_from_wire,
    bits_to_wire,
    constant_payload,
    ranks_in,
)
from netstorm.protocol.messages import (
    ANY_RULE,
    CallsWaiting,
    CallTimedOut,
    LossTerms,
    Message,
    Part,
    Phase,
    RoundBegun,
    WaitingCall,
)
from netstorm.pslite.machine import Charge, Order, Send, TakeBack, WaitingBytes
from netstorm.topology.policy import Plan, Policy

__all__ = ["Aggregation", "EarlyPart", "TopologyRequests", "check_part", "check_result"]


_log = logging.getLogger(__name__)

_CHUNKS_LOOKED_AT: Final = 64
"""Of a round, to say whom it waits for: enough to meet each tree, and quick."""

_RESULTS_AHEAD: Final = 1 << 62
"""Bytes that results are ahead of sums in rounds that may end without late sums: more than a job has."""


class Aggregation:
    """All open rounds of all keys on one node.

    The methods are in the order of a round: submit, begin, contribute, receive, forward, deliver, end. What
    extensions use has no underscore.

    Attributes:
        topology_requests: report to the scheduler which rounds have begun.
        completed_rounds: number of each round of a key that is complete here, until the owner of this object
            clears it.
        calls: reports collective calls that wait.
        loans: what results under way refer to of the user's memory.
        techniques: all that this node has; see `Extension`.
        extensions: those that the job asks for.
        keys: those that the scheduler has numbered, by number.
        rounds: the open ones.
        complete: which rounds are complete here.
        moved: by round, the chunks that have moved to later policies; of rounds that are not open here, too.
        early: parts that wait for what they refer to.
    """

    def __init__(
        self,
        rank: int,
        bindings: Bindings,
        outbox: Outbox,
        counters: Counters,
        *,
        waiting: WaitingBytes | None = None,
        reproducible: bool = False,
    ) -> None:
        self.topology_requests: Final = TopologyRequests()
        self.completed_rounds: Final[list[int]] = []
        self.calls: Final = WaitingCalls()
        self.loans: Final = Loans()
        self.techniques: tuple[Extension, ...] = ()
        self.extensions: tuple[Extension, ...] = ()
        self.rank: Final = rank
        self.bit: Final = 1 << rank
        self.bindings: Final = bindings
        self.outbox: Final = outbox
        self.counters: Final = counters
        self.keys: Final[dict[int, Key]] = {}
        self.rounds: Final[dict[Owner, Round]] = {}
        self.complete: Final = CompleteRounds()
        self.moved: Final[dict[Owner, dict[int, Plan]]] = {}
        self.early: Final = EarlyParts(counters, waiting or WaitingBytes())
        self._round_type: Final = OrderedRound if reproducible else Round
        self._waiting: Final = OperationQueue()
        self._changed: Final[deque[int]] = deque()
        """Keys of which something may begin now."""

    def extend(self, extension: Extension) -> None:
        """Plug a technique in, once. They are asked in the order of `techniques`."""
        if extension not in self.extensions:
            self.extensions = tuple(
                one for one in self.techniques if one is extension or one in self.extensions
            )
            for round in list(self.rounds.values()):
                extension.opened(round)

    def policy_known(self, policy: Policy) -> None:
        """Let techniques plug in that a policy asks for. Its `Bindings` know it."""
        for technique in self.techniques:
            technique.policy_known(policy)

    # ----------------------------------------------------------------------------------------- a round begins

    def add_key(self, key: Key) -> None:
        """Add a key that the scheduler has numbered; parts that came before are handled now."""
        self.keys[key.identity] = key
        self.complete.add_key(key.identity)
        for extension in self.extensions:
            extension.key_added(key)
        self.advance((key.identity,))

    def submit(self, operation: Operation, now: float) -> None:
        """Begin an operation, or queue it until its policy is here. Its key must be known."""
        operation.begun_at = now
        if operation.call is not None:
            self.calls.add(operation)
        self._waiting.add(operation)
        self.advance((operation.key.identity,))

    def advance(self, keys: Iterable[int] | None = None) -> None:
        """Begin what may begin, and handle early parts: something about `keys` (None: all) has changed."""
        self._changed.extend(self.keys if keys is None else keys)
        while self._changed:
            key = self._changed.popleft()
            if key not in self.keys:
                continue
            waiting = self._waiting.by_key.get(key)
            while waiting and (version := self._may_begin(waiting[0])) is not None:
                operation = waiting.pop(0)
                error = next(filter(None, (one.refuses(operation) for one in self.extensions)), None)
                if error is None:
                    self._begin(operation, version)
                else:
                    self.outbox.complete(operation.done, error)
            if waiting:
                self.topology_requests.request_all(key)
            if key in self.early.by_key:
                self.receive_early(key)

    def _may_begin(self, operation: Operation) -> int | None:
        """Return the policy version that an operation runs under, or None while it must wait."""
        key, number = operation.key, operation.round
        if number > self.complete.up_to[key.identity] + key.rounds_under_way:
            return None
        if not all(extension.may_begin(operation) for extension in self.extensions):
            return None
        version = self.bindings.version_of(key.identity, number)
        if version is None:
            versions = (extension.version_of(key.identity, number) for extension in self.extensions)
            return next((version for version in versions if version is not None), None)
        return version if version in self.bindings.plans else None

    def _begin(self, operation: Operation, version: int) -> None:
        key, form, owner = operation.key, operation.form, (operation.key.identity, operation.round)
        wrong = self.rounds.get(owner)
        if wrong is not None and not (wrong.version == version and wrong.accepts(form, operation.digest)):
            # Made by a part that came before our binding and names another policy, which no correct node
            # sends; or by a rank that pushes or calls something else, which the scheduler will report.
            self.topology_requests.request_all(key.identity)
            del self.rounds[owner]
            for extension in wrong.extensions:
                extension.dropped(wrong)
            self.counters.add("protocol_violations")
            was = f"policy {wrong.version} in codec {wrong.form.codec}"
            runs = f"policy {version} in codec {form.codec}"
            _log.warning("dropped parts of %s under %s; it runs under %s", operation, was, runs)
        round = self.open_round(key, operation.round, version, form, operation.digest)
        round.operation, round.priority = operation, operation.priority
        if round.form is not form:
            round.switch_form(form)
        if operation.loss is not None:
            self._terms_known()
            self._terms_came(round, operation.loss)
        for extension in self.extensions:
            extension.begins(round)
        begun = RoundBegun(key=key.identity, round=operation.round, rule=operation.rule)
        granted = self.bindings.granted_of(key.identity)
        self.topology_requests.record_begin(key, begun, operation.begun_at, granted)
        for chunk, known in enumerate(tuple(round.results)):
            if not known:
                self.contribute(round, chunk)
        if round.missing == 0 and owner not in self.complete:
            self.end_round(round)
        for extension in self.extensions:
            extension.begun(round)

    def open_round(self, key: Key, number: int, version: int, form: Form, call: int) -> Round:
        """Return a round of a key by number, policy version, form and call; it is made if there is none.

        Raises:
            ProtocolViolation: it is open, and one of them differs.
        """
        round = self.rounds.get((key.identity, number))
        if round is None:
            plan = self.bindings.plan(version, key.spec.members)
            assert plan is not None
            round = self.rounds[key.identity, number] = self._round_type(key, number, plan, form, call=call)
            if not plan.everybody & self.bit:
                self.ask_for_binding(key, number)
            for extension in self.extensions:
                extension.opened(round)
        elif round.version != version:
            raise ProtocolViolation(
                f"round {number} of key {key.name!r} runs under policy {round.version} here and under "
                f"{version} elsewhere"
            )
        elif not round.accepts(form, call):
            self.topology_requests.request_all(key.identity)
            codecs = f"codec {round.form.codec} here and {form.codec} elsewhere"
            differing = codecs if call == round.call else "one call here and another elsewhere"
            raise ProtocolViolation(f"round {number} of key {key.name!r} has {differing}")
        elif form.codec != round.form.codec:
            round.switch_form(form)
        return round

    def ask_for_binding(self, key: Key, round: int) -> None:
        """Ask what a rank that contributes nothing is not told otherwise: the policy of the next round."""
        self.topology_requests.record_begin(key, RoundBegun(key.identity, round, ANY_RULE), 0.0, round)

    def contribute(self, round: Round, chunk: int) -> None:
        """Add this rank's own contribution to a chunk, unless a result is to come, or it is silent."""
        if not round.plan_of(chunk).everybody & self.bit:
            return  # what others have sent through this rank has gone on already
        for extension in round.extensions:
            if not extension.adds_own(round, chunk):
                return
        total = round.sum_of(chunk)
        total.add_own(round.own_values(chunk), self.bit)
        for extension in round.extensions:
            extension.own_added(round, chunk)
        self._forward(round, chunk, total)

    # ----------------------------------------------------------------------------------- parts of other nodes

    def receive(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> None:
        """Handle a part of a tree neighbour.

        A part may come before what it refers to is known, and after what it was for is over. The former are
        kept, the latter are dropped; all others are checked against what the scheduler has fixed.

        Raises:
            ProtocolViolation: the part cannot belong to that.
            NoRoom: it would have to wait, and too much waits already.
        """
        self._receive(peer, part, payload, payload_crc)
        if self._changed:
            self.advance(())

    def _receive(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> None:
        for extension in self.extensions:
            if extension.intercepts(peer, part, payload, payload_crc):
                return
        key = self.keys.get(part.key)
        plan = None if key is None else self.bindings.plan(part.version, key.spec.members)
        if key is None or plan is None:
            self.early.keep(peer, part, payload, payload_crc)
        elif (part.key, part.round) in self.complete:
            self.counters.add("parts_of_complete_rounds")
        elif part.phase is Phase.RECOVERY:
            raise wrong_recovery(peer, part)  # an extension handles it if it was agreed on
        else:
            self._take(peer, part, payload, payload_crc, key=key, plan=plan)

    def _take(
        self,
        peer: Peer,
        part: Part,
        payload: Buffer | None,
        payload_crc: int | None,
        *,
        key: Key,
        plan: Plan,
    ) -> None:
        """Add a sum to that of this node, or take a result."""
        owner, chunk = (part.key, part.round), part.chunk
        if part.loss is not None:
            self._terms_known()
        bound = self.bindings.version_of(part.key, part.round)
        moved = self.moved[owner].get(chunk) if owner in self.moved else None
        form, contributors = check_part(
            peer,
            part,
            payload,
            key=key,
            plan=plan,
            complete=self.complete.up_to[part.key] + sum(one.lag(key, part, plan) for one in self.extensions),
            bound=bound if moved is None else moved.version,
        )
        version = part.version if bound is None else bound
        known = self.rounds.get(owner)
        if (
            known is not None
            and known.operation is None
            and not (known.version == version and known.accepts(form, part.call))
        ):  # the one that has come before may be wrong: that shows once this rank's operation is here
            self.early.keep(peer, part, payload, payload_crc)
            return
        round = self.open_round(key, part.round, version, form, part.call)
        way = round.way_of(chunk)
        if part.version != way[0].version:  # it has moved just now
            self.counters.add("parts_of_moved_chunks")
        elif part.phase is Phase.REDUCE:
            if part.loss is not None:
                self._terms_came(round, part.loss)
            for extension in round.extensions:
                if not extension.counts(round, part, contributors):
                    return
            total = round.sum_of(chunk)
            if total.contributors & contributors:
                self.counters.add("contributions_counted_before")
                return
            total.add_received(payload, contributors)
            for extension in round.extensions:
                extension.accepted(round, part)
            self._forward(round, chunk, total)
        elif round.results[chunk]:
            self.counters.add("results_known_before")
        elif part.loss is not None and not contributors:
            self._terms_came(round, part.loss)
            self.send_down(round, chunk, None, way=way, priority=part.priority, contributors=0)
        else:
            check_sum_is_in(peer, part, round, way[0])
            if part.loss is not None:
                self._terms_came(round, part.loss)
            for extension in round.extensions:
                extension.accepted(round, part)
            self.send_down(
                round,
                chunk,
                payload,
                way=way,
                crc=payload_crc,
                priority=part.priority,
                contributors=contributors,
            )
            self.deliver(round, chunk, payload, contributors)

    def receive_early(self, key: int) -> None:
        """Handle the parts of a key that came before something about it had changed."""
        for early in self.early.take(key):
            self.early.begin_again(early)
            try:
                self._receive(early.peer, early.part, early.payload, early.payload_crc)
            except ProtocolViolation as error:
                self.counters.add("protocol_violations")
                _log.warning("dropped a part that rank %d sent early: %s", early.peer, error)

    def _terms_known(self) -> None:
        for technique in self.techniques:
            technique.terms_known()

    def _terms_came(self, round: Round, terms: LossTerms) -> None:
        for extension in self.extensions:
            extension.terms_came(round, terms)

    # --------------------------------------------------------------------------------------- sums and results

    def _forward(self, round: Round, chunk: int, total: Sum) -> None:
        """Send a chunk's sum to the parent, if it is complete for this subtree and not withheld. At the root
        it is the result.
        """
        plan, tree = round.way_of(chunk)
        expected = plan.expected[tree]
        passed = 0 if round.loss is None else round.loss.passed(chunk, plan.version)
        if not expected or round.results[chunk]:
            return
        if total.contributors | passed != expected:
            for extension in round.extensions:
                extension.incomplete(round, chunk)
        elif plan.reduce_parent[tree] < 0:
            for extension in round.extensions:
                extension.completed(round, chunk)
            own = round.lendable(chunk, total)
            result: Buffer | None
            if own is None or round.operation is None:
                result = total.to_keep()
            else:
                result = self.loans.lend(round.operation, own)
            self.send_down(round, chunk, result, way=(plan, tree), contributors=expected)
            self.deliver(round, chunk, result, expected)
        else:
            for extension in round.extensions:
                if extension.withholds(round, chunk):
                    return
            self.send_up(round, chunk, (plan, tree))

    def send_up(self, round: Round, chunk: int, way: Way) -> None:
        """Send a chunk's sum, which is complete for this subtree, to the parent in its tree."""
        plan, tree = way
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
        )
        round.sums[chunk] = SENT

    def send_down(
        self,
        round: Round,
        chunk: int,
        payload: Buffer | None,
        *,
        way: Way,
        contributors: int,
        crc: int | None = None,
        priority: int | None = None,
    ) -> None:
        """Send a chunk's result to the children.

        Args:
            round: the chunk's.
            chunk: its number.
            payload: the result; None: zeros.
            way: the chunk's.
            contributors: bit set of the ranks that are in the result; 0: the round has only begun.
            crc: its checksum; None: not known.
            priority: the root's; None: this node is the root.
        """
        plan, tree = way
        children = plan.broadcast_children[tree]
        if not children:
            return
        receivers = round.receivers_of(chunk)
        if payload is not None:
            payload = constant_payload(payload)
        checksum = Checksum(payload) if crc is None and payload is not None else crc
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
                priority=round.priority if priority is None else priority,
            )

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
    ) -> None:
        layout, key = round.layout, round.key
        offsets = layout.offsets
        if round.loss is not None and round.loss.offsets is not None:
            offsets = round.loss.offsets
        part = Part(
            key=key.identity,
            round=round.round,
            chunk=chunk,
            phase=phase,
            version=plan.version,
            tree=tree,
            contributors=bits_to_wire(contributors),
            dtype=key.spec.dtype,
            priority=priority,
            codec=round.form.codec,
            call=round.call,
            settled=round.settled.get(chunk, -1),
            loss=loss,
        )
        # A result must arrive; what is late of a sum need not.
        ahead = _RESULTS_AHEAD if loss is not None and phase is Phase.BROADCAST else 0
        order: Order = (-priority, round.round, offsets[chunk] - ahead)
        tag = PartTag(key.identity, round.round, chunk, phase, plan.version, layout.slots[chunk], to)
        send = Send(
            peer=Peer(to),
            message=part,
            payload=payload,
            order=order,
            payload_crc=None if payload is None else crc,
            tag=tag,
        )
        for extension in self.extensions:
            if extension.reroutes(send, tag, plan):
                return
        self.outbox.add(send)

    def deliver(self, round: Round, chunk: int, payload: Buffer | None, contributors: int) -> None:
        """Write a chunk's result to the user's destination."""
        for extension in round.extensions:
            extension.delivers(round, chunk, payload, contributors)
        round.store(chunk, payload, contributors)
        self.topology_requests.record_result(round)
        for extension in round.extensions:
            extension.delivered(round, chunk)
        if round.missing == 0 and round.operation is not None:
            self.end_round(round)
        elif round.missing == 0:
            self._changed.append(round.key.identity)
            for extension in self.extensions:
                extension.complete_without_operation(round)

    def end_round(self, round: Round, error: NodeLost | None = None) -> None:
        """Complete the operation of a round whose results are all written, or cannot be."""
        operation, key = round.operation, round.key.identity
        self.topology_requests.request_now(key)
        del self.rounds[key, round.round]
        for extension in round.extensions:
            extension.dropped(round)
            extension.ended(round)
        self.complete.add(key, round.round)
        self.bindings.forget_before(key, self.complete.up_to[key] + 1)
        self._changed.append(key)
        if operation is None:
            return
        self.counters.add("rounds")
        if not operation.for_others:
            self.completed_rounds.append(round.round)
        if error is None and operation.lent:
            self.loans.ending[operation] = None
        else:
            self._complete(operation, error)

    def _complete(self, operation: Operation, error: NodeLost | None) -> None:
        if operation.call is not None:
            self.calls.remove(operation)
        self.outbox.complete(operation.done, error)

    # ---------------------------------------------------------------------------- parts that are on their way

    def take_back(
        self, wanted: Callable[[Hashable], bool], then: Callable[[list[Send]], None] | None = None
    ) -> None:
        """Take back the parts whose tag is `wanted`, as far as they have not left.

        Args:
            wanted: called with tags (`PartTag` for parts of trees).
            then: called with what waits here and, later, with what waits at links; None: drop it.
        """
        taken = [send for extension in self.extensions for send in extension.taken_back(wanted)]
        if then is not None:
            then(taken)
        self.outbox.add(TakeBack(wanted=wanted, then=then))

    def relay(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> bool:
        """Forward a part along its auxiliary path, without looking into it; False if the path ends here.

        Raises:
            Overloaded: too much of `peer`, which has sent it, or of all waits here to be forwarded.
        """
        key = self.keys.get(part.key)
        offset = 0 if key is None else key.offset_of(part.chunk)
        order = (-part.priority, part.round, offset)
        send = forwarded_send(part, payload, payload_crc, order, peer=peer, counts=self.outbox.forwarded)
        if send is None:
            return False
        if not any(extension.queues(send) for extension in self.extensions):
            self.outbox.add(send)
        self.counters.add("relayed")
        return True

    def is_obsolete(self, part: Part) -> bool:
        """Return whether a sum need not be sent: its result is here, or its chunk has moved."""
        owner = part.key, part.round
        if owner in self.complete:
            return True
        moved = self.moved.get(owner, {}).get(part.chunk)
        if moved is not None and part.version < moved.version:
            return True
        round = self.rounds.get(owner)
        return round is not None and round.results[part.chunk]

    # ----------------------------------------------------------------------------------------- for the driver

    def outstanding(self) -> Iterator[Operation]:
        """Yield the operations that are not complete and that this rank's program waits for."""
        return (operation for operation in self._operations() if not operation.for_others)

    def _operations(self) -> Iterator[Operation]:
        yield from self._waiting
        for round in self.rounds.values():
            if round.operation is not None:
                yield round.operation
        yield from self.loans.ending

    def tick(self, now: float) -> None:
        """Do what is due."""
        for extension in self.extensions:
            extension.tick(now)
        self.calls.tick(now)
        self.topology_requests.tick(now)
        if self.loans.returned:
            for operation in self.loans.take_ended():
                self._complete(operation, None)
        if self._changed:
            self.advance(())

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        if self.loans.returned:
            return -math.inf
        due = min(self.calls.next_tick(), self.topology_requests.due)
        return min(due, *(extension.next_tick() for extension in self.extensions)) if self.extensions else due

    def fail_all(self, error: Exception) -> None:
        """Fail every operation and forget every round."""
        operations = list(self._operations())
        self.calls.clear()
        self._waiting.clear()
        self.rounds.clear()
        self.topology_requests.clear()
        self.early.clear()
        self.loans.ending.clear()
        for technique in self.techniques:
            technique.clear()
        for operation in operations:
            self.outbox.complete(operation.done, error)

    def waiting_text_of(self, operation: Operation) -> str:
        """Return what an operation waits for, for a person."""
        round = self.rounds.get((operation.key.identity, operation.round))
        if operation in self.loans.ending:
            return f"{operation}: other ranks have not received all of this rank's values"
        if round is None or round.operation is None:
            return f"{operation}: not begun; it waits for earlier rounds, or for the scheduler's answer"
        return f"{operation}: {round.waiting_text()}"

    def awaited(self) -> tuple[set[int], set[int]]:
        """Return the ranks and the neighbours that the oldest operation waits for (`Round.awaited`)."""
        oldest = min(self.outstanding(), key=lambda operation: operation.begun_at, default=None)
        round = None if oldest is None else self.rounds.get((oldest.key.identity, oldest.round))
        return (set(), set()) if round is None else round.awaited(_CHUNKS_LOOKED_AT)

    def oldest(self) -> float:
        """Return when the oldest outstanding operation was submitted (inf: none is)."""
        return min((operation.begun_at for operation in self.outstanding()), default=math.inf)


# Checks of received parts: each must agree with what the scheduler has fixed.


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
    _check_payload(part, payload, contributors, key=key, form=form, layout=layout)
    return form, contributors


def check_result(part: Part, payload: Buffer | None, key: Key, plan: Plan) -> tuple[Form, int]:
    """Return the form and the contributors, as `check_part` does, of a result that comes outside the trees.

    Raises:
        ProtocolViolation: no correct node sends it.
    """
    form, contributors = _form(part, key, plan), bits_from_wire(part.contributors)
    layout = key.layout_of(form)
    if not 0 <= part.chunk < layout.chunks or part.dtype != key.spec.dtype or not contributors:
        raise ProtocolViolation(f"{_name(part, key)}, of {part.dtype}, is none that this key can have")
    if contributors >> plan.policy.size:
        raise ProtocolViolation(f"{_name(part, key)} counts ranks that the job does not have")
    _check_payload(part, payload, contributors, key=key, form=form, layout=layout)
    return form, contributors


def wrong_recovery(peer: Peer, part: Part) -> ProtocolViolation:
    """Return the error for a result that comes outside the trees, from a rank that was not to send it."""
    return ProtocolViolation(
        f"rank {peer} sends a result of round {part.round} of key {part.key} (chunk {part.chunk}) by "
        f"policy {part.version}, which was not agreed on"
    )


def check_sum_is_in(peer: Peer, part: Part, round: Round, plan: Plan) -> None:
    """Check that a result from a tree's parent can have the sum that this node sends to its parent.

    Raises:
        NotAuthorised: that sum has not been sent, so the result was made up.
    """
    expected = plan.expected[part.tree] if part.loss is None else 0
    if expected and round.sums[part.chunk] is not SENT:
        raise NotAuthorised(
            f"{_name(part, round.key)} comes from rank {peer} before rank {plan.rank} has sent its sum of "
            f"ranks {ranks_in(expected)}: nobody can have it"
        )


def _check_payload(
    part: Part, payload: Buffer | None, contributors: int, *, key: Key, form: Form, layout: ChunkLayout
) -> None:
    if payload is not None:
        start, end = layout.bounds[part.chunk]
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
    without the others; or nobody, if the part only says from above that such a round has begun.
    """
    contributors = bits_from_wire(part.contributors)
    some = part.loss is not None and not contributors & ~expected
    some = some and (contributors > 0 or part.phase is Phase.BROADCAST)
    if contributors != expected and not some:
        whose = "the sender's subtree" if part.phase is Phase.REDUCE else "all ranks of the policy"
        raise ProtocolViolation(f"{_name(part, key)} counts ranks {ranks_in(contributors)}, not {whose}")
    return contributors


def _name(part: Part, key: Key) -> str:
    return f"{part.phase.name.lower()} part of chunk {part.chunk}, round {part.round} of key {key.name!r}"


# Parts that came before what they refer to is known here: a key, a policy, or a moved chunk.
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
    """The early parts of one node, by key. Their bytes are bounded (`pslite.machine.WaitingBytes`)."""

    def __init__(self, counters: Counters, waiting: WaitingBytes) -> None:
        self._counters: Final = counters
        self._waiting: Final = waiting
        self.by_key: Final[dict[int, list[EarlyPart]]] = {}
        """Empty: all were refused."""

    def keep(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> None:
        """Keep a part until `take`.

        Raises:
            NoRoom: too much waits already.
        """
        size = 0 if payload is None else memoryview(payload).nbytes
        parts = self.by_key.setdefault(part.key, [])  # also for what is refused: `take` asks for it again
        charge = self._waiting.take(size, part.key, f"keys that are new here, as {part.key} is, or a policy")
        parts.append(EarlyPart(peer, part, payload, payload_crc, charge))
        self._counters.add("parts_kept_early")

    def take(self, key: int) -> list[EarlyPart]:
        """Return the parts of a key, once. The caller handles each, after `begin_again`."""
        self._waiting.ready(key)
        taken = self.by_key.pop(key, [])
        for early in taken:
            self._waiting.give_back(early.charge)
        return taken

    def begin_again(self, early: EarlyPart) -> None:
        """Charge its sender for a part that has waited, if it has to wait again."""
        self._waiting.begin(early.charge.peer, again=True)

    def clear(self) -> None:
        """Drop all parts."""
        for key in list(self.by_key):
            self.take(key)
        self._waiting.all_ready()


# The user's memory that results under way refer to.
#
# A root that alone has contributed to a chunk, as that of a broadcast, need not copy it: what it sends is the
# user's own memory. Its operation ends once nothing refers to that any more, wherever that was: when every
# child has acknowledged it, or was sent a copy.


class Loans:
    """What one node has lent.

    Attributes:
        ending: operations whose rounds are complete, of which something is still lent; in order.
        returned: of which a chunk is lent no more; appended to on any thread.
    """

    def __init__(self) -> None:
        self.ending: Final[dict[Operation, None]] = {}
        self.returned: Final[deque[Operation]] = deque()

    def lend(self, operation: Operation, values: Array) -> Buffer:
        """Return a payload that is this rank's own values of a chunk, a view that nobody else has."""
        operation.lent += 1
        weakref.finalize(values, self.returned.append, operation).atexit = False
        return values.data

    def take_ended(self) -> Iterator[Operation]:
        """Yield the operations of which nothing is lent any more, and that have only waited for this."""
        while self.returned:
            operation = self.returned.popleft()
            operation.lent -= 1
            if not operation.lent and operation in self.ending:
                del self.ending[operation]
                yield operation


# Collective calls that wait, for the scheduler to compare: ranks whose calls differ wait for each other.
#
# A call that other ranks do not make never completes. So a rank reports what has waited for a second, and the
# scheduler, which hears of both sides, can name them. A call that reaches its time-out ends the job, and the
# scheduler names the ranks that have not made it. What completes sooner costs nothing.

_PATIENCE_S: Final = 1.0
"""How long a call waits before it is reported. Rounds over slow links take longer: a report is a few
bytes."""


class WaitingCalls:
    """The collective calls of one node that have not completed.

    Attributes:
        reports: to the scheduler, to be taken.
    """

    def __init__(self) -> None:
        self._new: Final[dict[int, Operation]] = {}
        """By identity, in order of submission: those that have not been reported."""
        self._reported: Final[dict[int, Operation]] = {}
        self._deadline = math.inf
        """The first time-out among them, or of one that has completed since."""
        self.reports: Final[list[Message]] = []

    def add(self, operation: Operation) -> None:
        """Record that an operation has been submitted that carries out a call."""
        self._new[id(operation)] = operation
        self._deadline = min(self._deadline, _deadline(operation))

    def remove(self, operation: Operation) -> None:
        """Record that it has completed."""
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
            self.reports.append(CallsWaiting(calls=tuple(due)))
        if now >= self._deadline:
            self._time_out(now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        first = next(iter(self._new.values()), None)
        return self._deadline if first is None else min(self._deadline, first.begun_at + _PATIENCE_S)

    def take_reports(self) -> list[Message]:
        """Return the reports to the scheduler, once."""
        taken = list(self.reports)
        self.reports.clear()
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
        self.reports.clear()
        self._deadline = math.inf

    def _time_out(self, now: float) -> None:
        operations = [*self._reported.values(), *self._new.values()]
        for operation in operations:
            call = operation.call
            if call is not None and now >= _deadline(operation):
                self.reports.append(
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


# Topology requests (TRP): when to report that a round has begun, which requests the next policy.
#
# The later the request, the newer is the policy that the next round gets; but the answer must be here before
# any rank waits for it. So where rounds take long, the request is sent shortly before the end of a round. How
# long the first one takes nobody knows; its end is waited for, since what is learnt of a network in it is the
# most there ever is to learn (docs/measurements/awareness.md, "The second round"). And where many rounds of a
# key may be under way, or they are short, the scheduler has granted many: one request serves several.

_AHEAD_S: Final = 0.5
"""How long before the expected end of a round the next policy is requested: far more than an answer takes."""

_PART: Final = 3
"""A request waits for rounds until only this many times as many may begin after them: they last for several
answers."""

_LONGEST_S: Final = 0.25
"""How long a report waits for others: a mismatch of calls should be found while it can still be
understood."""


class TopologyRequests:
    """The topology requests of one node, for all keys.

    Attributes:
        round_s: duration of the last round, in s; set from outside. 0: none has ended.
        pending: to be sent now.
        due: when `tick` has something to do.
    """

    def __init__(self) -> None:
        self.round_s = 0.0
        self.pending: list[RoundBegun] = []
        self.due = math.inf
        self._deferred: Final[dict[int, RoundBegun]] = {}
        """By key: to be sent shortly before the end of the round."""
        self._gathered: Final[dict[int, list[RoundBegun]]] = {}
        """By key: to be sent when there are enough of them."""
        self._recent: Final[dict[int, deque[RoundBegun]]] = {}
        """The last ones, by key."""

    def record_begin(self, key: Key, round: RoundBegun, now: float, granted: int) -> None:
        """Record that a round of a key has begun here; `granted` is the last one that may begin."""
        recent = self._recent.setdefault(round.key, deque(maxlen=key.rounds_under_way + 1))
        recent.append(round)
        enough = (granted - round.round) // _PART
        # Collective calls may differ between ranks, which only reports show.
        is_first = self.round_s == 0.0 and round.round == 0 and not key.is_collective
        if is_first or self.round_s > 2 * _AHEAD_S:
            self.request_now(round.key)
            self._deferred[round.key] = round
        elif enough > 1:
            gathered = self._gathered.setdefault(round.key, [])
            gathered.append(round)
            self.due = min(self.due, now + _LONGEST_S)
            if len(gathered) >= enough:
                self.request_gathered()
        else:
            self.request_all(round.key)
            self.pending.append(round)

    def record_result(self, round: Round) -> None:
        """Record that one more result of a round is here."""
        if self._deferred and self.round_s and self.round_s * round.missing <= _AHEAD_S * len(round.sums):
            self.request_now(round.key.identity)

    def request_now(self, key: int) -> None:
        """Defer the request for the next round of a key no longer."""
        begun = self._deferred.pop(key, None)
        if begun is not None:
            self.pending.append(begun)

    def request_all(self, key: int) -> None:
        """Report everything of a key now: a round waits for the answer, or for the scheduler's comparison."""
        self.pending += self._gathered.pop(key, ())
        self.request_now(key)
        if not self._gathered:
            self.due = math.inf

    def tick(self, now: float) -> None:
        """Report what has waited long enough for others."""
        if now >= self.due:
            self.request_gathered()

    def request_gathered(self) -> None:
        """Report what waits for others now."""
        for key in list(self._gathered):
            self.request_all(key)

    def take(self) -> tuple[RoundBegun, ...]:
        """Return the requests to send now, once."""
        taken, self.pending = self.pending, []
        return tuple(taken)

    def recent(self) -> tuple[RoundBegun, ...]:
        """Return all that a restarted scheduler must know; it includes what is pending."""
        self.clear()
        return tuple(begun for recent in self._recent.values() for begun in recent)

    def clear(self) -> None:
        """Drop all requests."""
        self.pending = []
        self._deferred.clear()
        self._gathered.clear()
        self.due = math.inf
