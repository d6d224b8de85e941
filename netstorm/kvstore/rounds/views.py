"""Changes of the view: how rounds under way end, the same at all ranks, when nodes leave or join. Pure.

A chunk whose result a member has keeps that result. Every other chunk is summed anew among the members, from
contributions that their operations still hold: a rank whose operation has completed has all results of its
round. So that a result cannot come up after all:

1. The scheduler announces the view (`NewView`). From then on a node takes no part of the view before, and
   begins nothing. It reports which results it has.
2. Once all members have reported, the scheduler says who sends which results to whom (`ViewAgreed`).
3. All other chunks move to the policy of the view. Parts that name an earlier policy are dropped.

If another node is lost meanwhile, a newer view begins all over. This is the flush of virtual synchrony
(Birman and Joseph, 1987), with the scheduler as coordinator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from netstorm.errors import NodeLost, ProtocolViolation
from netstorm.kvstore.forms import Form, Key
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.rounds.aggregation import Aggregation, check_result, wrong_recovery
from netstorm.kvstore.rounds.round import Extension, PartTag, Round
from netstorm.protocol.frames import Buffer, Peer, bits_from_wire, bits_of, bits_to_wire, ranks_in
from netstorm.protocol.messages import NewView, Part, Phase, Recovery, RoundResults, ViewAgreed, ViewReport
from netstorm.pslite.machine import Send
from netstorm.topology.policy import Plan, Policy

__all__ = ["KeptResult", "KeptResults", "Receipts", "RoundOfResults", "ViewChanges", "lost_error"]


_log = logging.getLogger(__name__)

_LAG: Final = 64
"""Rounds that a rank which has just caught up may be behind: others do not wait until it contributes."""

_ANY_LAG: Final = 1 << 40
"""The same of a silent rank, which has every result since it joined, and waits for the state before."""


class ViewChanges(Extension):
    """The changes of the view as one node takes part in them.

    Attributes:
        kept: results that others may need.
        changing: a new view was announced, and is not agreed on: nothing may begin or be taken.
        version: of the policy of the view; -1: no view has replaced the first one.
        fresh: this rank has joined later, and has taken part in no view before.
        silent: this rank contributes nothing yet.
        receipts: what other silent members have.
        contributes_to: keys to which a rank that joined later contributes by now.
        begins_at: by key, the first round of the program of a rank that joined later, whose state has all
            before.
        caught_up: this rank was silent, and now waits for the same round as the others; not reported yet.
    """

    keeps_results = True

    def __init__(self, rounds: Aggregation) -> None:
        self.kept: Final = KeptResults()
        self.version = -1
        self.changing = self.caught_up = self.silent = self.fresh = False
        self._rounds: Final = rounds
        self.receipts: Final = Receipts()
        self.contributes_to: Final[set[int]] = set()
        self.begins_at: Final[dict[int, int]] = {}
        self._lost: Final[dict[int, set[int]]] = {}
        """By key: rounds of which this rank has no operation yet, and that have results that nobody has."""
        self._view = 0
        self._expected: dict[tuple[int, int], dict[int, int]] = {}
        """By key and round: the rank from which each chunk's result comes."""

    def begin(self, message: NewView) -> ViewReport:
        """Stop, and return which results are here.

        Raises:
            ProtocolViolation: the view is not newer than the last one.
        """
        if message.view <= self._view:
            raise ProtocolViolation(f"view {message.view} comes after view {self._view}")
        self._view = message.view
        self._rounds.bindings.install(message.policy)
        self._rounds.policy_known(message.policy)
        self.version = message.policy.version
        self.changing = True
        self._expected.clear()
        for rank in message.arrivals:
            self.receipts.forget(rank)
        self.set_members(message.policy)

        def outdated(tag: Hashable) -> bool:
            return isinstance(tag, PartTag) and tag.version < self.version

        self._rounds.take_back(outdated)
        return ViewReport(
            view=message.view,
            fresh=self.fresh,
            complete={key: self._rounds.complete.up_to[key] for key in self._rounds.keys},
            results=tuple(
                RoundResults(
                    key,
                    number,
                    bits_to_wire(bits_of(kept.chunks)),
                    bits_to_wire(bits_of(kept.known)),
                    self._rounds.keys[key].layout_of(kept.form).chunks,
                )
                for key, number, kept in self.kept
            ),
            begins=dict(self.begins_at),
        )

    def join_again(self) -> None:
        """Begin as in the first view: this rank has no state yet, and who has it now may be further behind
        than who had it before.
        """
        self.fresh = True
        self._rounds.complete.clear()

    def agree(self, message: ViewAgreed) -> bool:
        """Send the results that others lack, and move all other chunks to the view's policy. Return whether
        this ends the change; if not, a newer view was announced.
        """
        if message.view != self._view or not self.changing:
            return False
        self.changing = False
        self._expect_results(message)
        if self.fresh:
            self.fresh = False
            for key, first in message.first_rounds.items():
                self._rounds.complete.begin_at(key, first)
        if self.silent:
            self._lost.clear()  # what is lost is named again
        self._fail_lost(message)
        self._rounds.bindings.begin_view(self.version)
        for extension in self._rounds.extensions:
            extension.view_begins(self.version)
        for round in list(self._rounds.rounds.values()):
            self._rebase(round)
        for recovery in message.recoveries:
            if recovery.source == self._rounds.rank:
                self._send_results(recovery)
        for round in list(self._rounds.rounds.values()):
            if round.operation is not None:
                for chunk in range(len(round.results)):
                    if not round.results[chunk]:
                        self._rounds.contribute(round, chunk)
        return True

    def take_caught_up(self) -> bool:
        """Return whether this rank has caught up, once."""
        found, self.caught_up = self.caught_up, False
        return found

    def _expect_results(self, message: ViewAgreed) -> None:
        for recovery in message.recoveries:
            if recovery.target == self._rounds.rank:
                expected = self._expected.setdefault((recovery.key, recovery.round), {})
                expected.update(dict.fromkeys(ranks_in(bits_from_wire(recovery.chunks)), recovery.source))

    def _fail_lost(self, message: ViewAgreed) -> None:
        """Fail the operations that wait for results that no member has any more."""
        for lost in message.lost:
            round = self._rounds.rounds.get((lost.key, lost.round))
            if round is None or round.operation is None:
                if (lost.key, lost.round) not in self._rounds.complete:
                    self._lost.setdefault(lost.key, set()).add(lost.round)
                continue
            missing = bits_from_wire(lost.chunks) if lost.chunks else -1
            if any(not known and missing >> chunk & 1 for chunk, known in enumerate(round.results)):
                self._rounds.end_round(round, lost_error(round.operation))
        for key in list(self._lost):
            self.give_up_lost(key)

    def give_up_lost(self, key: int) -> None:
        """Wait no more for results that nobody has, and that this rank's program does not need."""
        lost = self._lost.get(key, set())
        for number in [number for number in lost if number < self.begins_at.get(key, 0)]:
            lost.discard(number)
            round = self._rounds.rounds.get((key, number))
            if round is not None:
                self._rounds.end_round(round, None)
            elif (key, number) not in self._rounds.complete:
                self._rounds.complete.add(key, number)

    def _rebase(self, round: Round) -> None:
        """Begin an open round anew under the view's policy, apart from the results that are here."""
        plan = self._rounds.bindings.plan(self.version, round.key.spec.members)
        assert plan is not None
        for extension in round.extensions:
            extension.restarted(round)
        anew = round.begin_anew(plan)
        self._rounds.counters.add("chunks_summed_anew", anew)

    def _send_results(self, recovery: Recovery) -> None:
        kept, key = self.kept.of(recovery.key, recovery.round), self._rounds.keys.get(recovery.key)
        plan = None if key is None else self._rounds.bindings.plan(self.version, key.spec.members)
        if kept is None or key is None or plan is None:
            raise ProtocolViolation(
                f"the scheduler has this rank send results of round {recovery.round} of key {recovery.key}, "
                "which are not here"
            )
        layout = key.layout_of(kept.form)
        for chunk in ranks_in(bits_from_wire(recovery.chunks)):
            result = kept.chunks[chunk]
            part = Part(
                key=recovery.key,
                round=recovery.round,
                chunk=chunk,
                phase=Phase.RECOVERY,
                version=self.version,
                tree=plan.tree_of(layout.slots[chunk]),
                contributors=bits_to_wire(result.contributors),
                dtype=key.spec.dtype,
                codec=kept.form.codec,
                call=kept.call,
            )
            self._rounds.counters.add("results_recovered")
            self._rounds.outbox.add(
                Send(
                    peer=Peer(recovery.target),
                    message=part,
                    payload=result.payload,
                    order=(0, recovery.round, layout.offsets[chunk]),
                )
            )

    def _settled(self, round: Round, chunk: int, contributors: int) -> int:
        """Return the round up to which nobody needs results any more, as the result of a chunk says."""
        key = round.key.identity
        needed: float = self._rounds.complete.up_to[key]
        if not round.key.spec.members:  # nobody takes the place of a rank that leaves a group
            needed = min(self.receipts.limit(key, contributors), needed)  # a silent rank's program is behind
        return int(min(round.settled.get(chunk, -1), needed))

    def set_members(self, policy: Policy) -> None:
        """Record who is in the job, and which members are silent, under the newest policy."""
        self.silent = self._rounds.rank in policy.silent
        silent = [rank for rank in policy.silent if rank != self._rounds.rank]
        self.receipts.set_members(policy.members or range(policy.size), silent)

    def received(self) -> dict[int, int]:
        """Return the round up to which all results are here, used by the program or not, by key to which this
        rank does not contribute.
        """
        found = {}
        for key in self._rounds.keys.keys() - self.contributes_to:
            last = self._rounds.complete.up_to[key]
            while (round := self._rounds.rounds.get((key, last + 1))) is not None and not round.missing:
                last += 1
            found[key] = last
        return found

    # ------------------------------------------------------------------------------------- the way of a round

    def may_begin(self, operation: Operation) -> bool:
        """Return whether the view does not change."""
        return not self.changing

    def holds_ends(self) -> bool:
        """Return whether the view changes: this node has reported which results it has."""
        return self.changing

    def refuses(self, operation: Operation) -> NodeLost | None:
        """Return an error if a result of a round was lost before this rank had it."""
        lost = operation.round in self._lost.get(operation.key.identity, ())
        return lost_error(operation) if lost else None

    def intercepts(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> bool:
        """Drop a part of a view before, keep one that comes while the view changes, and take a result from a
        rank that has it.
        """
        rounds, key = self._rounds, self._rounds.keys.get(part.key)
        if part.version < self.version:
            rounds.counters.add("parts_of_former_views")
            return True
        if self.changing:
            rounds.early.keep(peer, part, payload, payload_crc)
            return True
        if part.phase is not Phase.RECOVERY or key is None or (part.key, part.round) in rounds.complete:
            return False
        plan = rounds.bindings.plan(part.version, key.spec.members)
        if plan is None:
            return False
        source = self._expected.get((part.key, part.round), {}).get(part.chunk)
        if source != int(peer) or part.version != self.version:
            raise wrong_recovery(peer, part)
        form, contributors = check_result(part, payload, key, plan)
        round = rounds.open_round(key, part.round, part.version, form, part.call)
        if not round.results[part.chunk]:
            rounds.deliver(round, part.chunk, payload, contributors)
        return True

    def lag(self, key: Key, part: Part, plan: Plan) -> int:
        """Return how many rounds more than other nodes this one may be behind."""
        return _LAG if plan.everybody & self._rounds.bit else _ANY_LAG

    def opened(self, round: Round) -> None:
        """Take part in every round."""
        round.join(self)

    def begins(self, round: Round) -> None:
        """Write the results that came before the operation of a round."""
        kept = self.kept.of(round.key.identity, round.round)
        for chunk, result in () if kept is None else kept.chunks.items():
            round.write(chunk, result.payload, result.contributors)

    def begun(self, round: Round) -> None:
        """Record that this rank's program waits for the same round as the others', or contributes by now."""
        contributes = round.plan.everybody & self._rounds.bit
        if round.missing and not contributes:
            self.caught_up = True
        if self.begins_at and contributes:
            self.contributes_to.add(round.key.identity)

    def adds_own(self, round: Round, chunk: int) -> bool:
        """Return whether no member has the result of a chunk, and sends it here: it is not summed again."""
        return not self._expected or chunk not in self._expected.get(round.owner, ())

    def own_added(self, round: Round, chunk: int) -> None:
        """Record up to which round this rank has completed all."""
        self._record_settled(round, chunk, self._rounds.complete.up_to[round.key.identity])

    def accepted(self, round: Round, part: Part) -> None:
        """Record up to which round a subtree has, or all have, completed all."""
        if part.phase is Phase.REDUCE:
            self._record_settled(round, part.chunk, part.settled)
        else:
            round.settled[part.chunk] = part.settled

    @staticmethod
    def _record_settled(round: Round, chunk: int, settled: int) -> None:
        round.settled[chunk] = min(round.settled.get(chunk, settled), settled)

    def delivers(self, round: Round, chunk: int, payload: Buffer | None, contributors: int) -> None:
        """Keep a result that others may need, and drop those that nobody needs any more."""
        own = round.own_copy(chunk, contributors) if payload is None else None
        if own is not None:
            payload = own.copy()
        self.kept.add(
            round.key.identity,
            round.round,
            chunk,
            KeptResult(payload, contributors) if own is not None or round.wants_result(chunk) else None,
            form=round.form,
            call=round.call,
            settled=self._settled(round, chunk, contributors),
        )
        expected = self._expected.get(round.owner)
        if expected is not None:
            expected.pop(chunk, None)
            if not expected:
                del self._expected[round.owner]

    # ----------------------------------------------- where the program of a rank begins that has joined later

    def begin_at(self, rounds: Mapping[int, int]) -> None:
        """Go on with these rounds, by key: the program has the state of all before.

        Of those before, the results still come here: other nodes may need them from this one. Keys that are
        not named keep the results that came meanwhile.
        """
        self._rounds.extend(self)
        self.begins_at.update(rounds)
        for key, first in rounds.items():
            if key in self._rounds.keys:
                for round in [round for round in self._rounds.rounds.values() if round.key.identity == key]:
                    if not round.missing:
                        self.complete_without_operation(round)
                self.give_up_lost(key)
                self._rounds.ask_for_binding(self._rounds.keys[key], max(0, first - 1))

    def key_added(self, key: Key) -> None:
        """Go on with a key that was not known when the state came."""
        if key.identity in self.begins_at:
            self.begin_at({key.identity: self.begins_at[key.identity]})

    def complete_without_operation(self, round: Round) -> None:
        """End a round of which all results are here, if the program's state has them already."""
        if round.operation is None and round.round < self.begins_at.get(round.key.identity, 0):
            self._rounds.end_round(round)

    def version_of(self, key: int, round: int) -> int | None:
        """Return the policy version of a round of which all results are here; None: some are missing.

        The scheduler does not tell a rank that is behind of what all others have begun long ago.
        """
        known = self._rounds.rounds.get((key, round))
        return None if known is None or known.missing or key not in self.begins_at else known.version


def lost_error(operation: Operation) -> NodeLost:
    """Return the error of an operation whose result nobody has any more."""
    return NodeLost(f"{operation}: its result was lost with a rank that has left the job")


# Results that a node keeps for others, in jobs that nodes may leave.
#
# A node that has a result may be the only one: the others' copies were lost with the node that forwarded
# them. So each keeps its results until all contributors are known to have completed the round. Results are
# the payloads that were received or are forwarded, so they cost memory, and no copy.


@dataclass(frozen=True, slots=True)
class KeptResult:
    """The result of one chunk."""

    payload: Buffer | None
    """None: zeros."""
    contributors: int
    """Bit set of the ranks that are in it."""


@dataclass(slots=True)
class RoundOfResults:
    """What is kept of one round."""

    form: Form
    call: int
    chunks: dict[int, KeptResult] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    """Chunks whose results were formed and are not here, since no rank wants them from here."""


class KeptResults:
    """The results that one node keeps, by key and round."""

    def __init__(self) -> None:
        self._rounds: Final[dict[int, dict[int, RoundOfResults]]] = {}
        self._settled: Final[dict[int, int]] = {}

    def add(
        self,
        key: int,
        round: int,
        chunk: int,
        result: KeptResult | None,
        *,
        form: Form,
        call: int,
        settled: int,
    ) -> None:
        """Keep a result, and drop those of rounds up to `settled`, which all contributors have completed.

        Args:
            key: the key.
            round: its round.
            chunk: the chunk.
            result: None: it has been formed, and is not here.
            form: of the round.
            call: digest of the collective call; 0: none.
            settled: up to this round, all contributors have completed all.
        """
        rounds = self._rounds.setdefault(key, {})
        found = rounds.get(round)
        if found is None:
            found = rounds[round] = RoundOfResults(form, call)
        found.form = form
        if result is None:
            found.known.add(chunk)
        else:
            found.chunks[chunk] = result
        if settled > self._settled.get(key, -1):
            self._settled[key] = settled
            for old in [number for number in rounds if number <= settled]:
                del rounds[old]

    def of(self, key: int, round: int) -> RoundOfResults | None:
        """Return what is kept of a round; None: nothing."""
        return self._rounds.get(key, {}).get(round)

    def __iter__(self) -> Iterator[tuple[int, int, RoundOfResults]]:
        for key, rounds in self._rounds.items():
            for number, kept in rounds.items():
                yield key, number, kept

    def clear(self) -> None:
        """Drop everything."""
        self._rounds.clear()


# Up to which round silent members have all results: until then the others keep them.
#
# A silent member contributes nothing, so that nothing waits for it. But nothing that others send up the trees
# says what it has, either. So it tells them. What it has said counts until it is among the contributors of
# results, which then say so.


class Receipts:
    """What the silent members of one job have."""

    def __init__(self) -> None:
        self._of: Final[dict[int, dict[int, int]]] = {}
        """By rank that is or was silent, and key: the round up to which it has all results."""

    def set_members(self, members: Collection[int], silent: Iterable[int]) -> None:
        """Record who is in the job, and which of them are silent."""
        for rank in self._of.keys() - set(members):
            del self._of[rank]
        for rank in silent:
            self._of.setdefault(rank, {})

    def record(self, rank: int, rounds: Mapping[int, int]) -> None:
        """Record what a silent member says that it has; of other ranks, nothing is recorded."""
        known = self._of.get(rank)
        if known is not None:
            known.update(rounds)

    def forget(self, rank: int) -> None:
        """Record that a rank has nothing: it is another process now."""
        if rank in self._of:
            self._of[rank] = {}

    def limit(self, key: int, contributors: int) -> float:
        """Return the round of a key up to which all have all results that are or were silent, but those among
        the contributors (a bit set); inf: there are none.
        """
        return min(
            (rounds.get(key, -1) for rank, rounds in self._of.items() if not contributors >> rank & 1),
            default=math.inf,
        )
