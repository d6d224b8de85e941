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
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from netstorm.errors import NodeLost, ProtocolViolation
from netstorm.kvstore.forms import Form, Key
from netstorm.kvstore.operations import Operation, Outbox
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.outgoing import ChunkTakeover, OutgoingParts, Owner, PartTag, WithheldSums
from netstorm.kvstore.rounds.round import CompleteRounds, Round
from netstorm.observe.log import Counters
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


class ViewChanges:
    """The changes of the view as one node takes part in them.

    Attributes:
        active: nodes may leave the job and join it.
        kept: results that others may need.
        changing: a new view was announced, and is not agreed on: nothing may begin or be taken.
        version: of the policy of the view; -1: no view has replaced the first one.
        fresh: this rank has joined later, and has taken part in no view before.
        silent: this rank contributes nothing yet.
        receipts: what other silent members have.
        contributes_to: keys to which a rank that joined later contributes by now.
        begins: by key, the first round of the program of a rank that joined later: its state has all before.
        caught_up: this rank was silent, and now waits for the same round as the others; not reported yet.
    """

    def __init__(
        self,
        rank: int,
        *,
        active: bool,
        keys: dict[int, Key],
        rounds: dict[Owner, Round],
        complete: CompleteRounds,
        bindings: Bindings,
        takeover: ChunkTakeover,
        withheld: WithheldSums,
        outgoing: OutgoingParts,
        outbox: Outbox,
        counters: Counters,
        contribute: Callable[[Round, int], None],
        fail: Callable[[Round, NodeLost | None], None],
    ) -> None:
        """Begin in the first view.

        Args:
            rank: this node's.
            active: nodes may leave the job.
            keys: by number; `Aggregation` adds to them.
            rounds: the open rounds; `Aggregation` changes them.
            complete: which rounds are complete here.
            bindings: which policy a round runs under.
            takeover: which chunks have moved.
            withheld: sums that wait for the look-ahead.
            outgoing: takes parts back that have not left.
            outbox: takes what is to be sent.
            counters: of the process.
            contribute: adds this rank's contribution to a chunk whose sum is empty, if it has an operation.
            fail: ends a round whose operation, if it has one, cannot complete.
        """
        self.active: Final = active
        self.kept: Final = KeptResults()
        self.version = -1
        self.changing = self.caught_up = self.silent = self.fresh = False
        self._rank: Final = rank
        self._keys: Final = keys
        self._rounds: Final = rounds
        self._complete: Final = complete
        self._bindings: Final = bindings
        self._takeover: Final = takeover
        self._withheld: Final = withheld
        self._outgoing: Final = outgoing
        self._outbox: Final = outbox
        self._counters: Final = counters
        self._contribute: Final = contribute
        self._fail: Final = fail
        self.receipts: Final = Receipts()
        self.contributes_to: Final[set[int]] = set()
        self.begins: Final[dict[int, int]] = {}
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
        self._bindings.install(message.policy)
        self.version = message.policy.version
        self.changing = True
        self._expected.clear()
        for rank in message.arrivals:
            self.receipts.forget(rank)
        self.set_members(message.policy)

        def outdated(tag: Hashable) -> bool:
            return isinstance(tag, PartTag) and tag.version < self.version

        self._outgoing.take_back(outdated)
        return ViewReport(
            view=message.view,
            fresh=self.fresh,
            complete={key: self._complete.up_to(key) for key in self._keys},
            results=tuple(
                RoundResults(
                    key,
                    number,
                    bits_to_wire(bits_of(kept.chunks)),
                    bits_to_wire(bits_of(kept.known)),
                    self._keys[key].layout_of(kept.form).chunks,
                )
                for key, number, kept in self.kept
            ),
            begins=dict(self.begins),
        )

    def agree(self, message: ViewAgreed) -> bool:
        """Send the results that others lack, and move all other chunks to the view's policy. Return whether
        this ends the change; if not, a newer view was announced.
        """
        if message.view != self._view or not self.changing:
            return False
        self.changing = False
        for recovery in message.recoveries:
            if recovery.target == self._rank:
                expected = self._expected.setdefault((recovery.key, recovery.round), {})
                expected.update(dict.fromkeys(ranks_in(bits_from_wire(recovery.chunks)), recovery.source))
        if self.fresh:
            self.fresh = False
            for key, first in message.first_rounds.items():
                self._complete.begin_at(key, first)
        if self.silent:
            self._lost.clear()  # what is lost is named again
        self._fail_lost(message)
        self._bindings.begin_view(self.version)
        self._takeover.begin_view(self.version)
        for round in list(self._rounds.values()):
            self._rebase(round)
        for recovery in message.recoveries:
            if recovery.source == self._rank:
                self._send_results(recovery)
        for round in list(self._rounds.values()):
            if round.operation is not None:
                for chunk in range(len(round.results)):
                    if not round.results[chunk]:
                        self._contribute(round, chunk)
        return True

    def lag(self, plan: Plan) -> int:
        """Return how many rounds more than other nodes this one may be behind."""
        if not self.active:
            return 0
        return _LAG if plan.everybody >> self._rank & 1 else _ANY_LAG

    def take_caught_up(self) -> bool:
        """Return whether this rank has caught up, once."""
        found, self.caught_up = self.caught_up, False
        return found

    def awaits_result(self, key: int, round: int, chunk: int) -> bool:
        """Return whether a member has the result of a chunk, and sends it here: it is not summed again."""
        return bool(self._expected) and chunk in self._expected.get((key, round), ())

    def check_recovery(self, peer: Peer, part: Part) -> None:
        """Check that a result comes from the rank that was to send it.

        Raises:
            ProtocolViolation: it was not agreed on.
        """
        source = self._expected.get((part.key, part.round), {}).get(part.chunk)
        if source != int(peer) or part.version != self.version:
            raise ProtocolViolation(
                f"rank {peer} sends a result of round {part.round} of key {part.key} (chunk {part.chunk}) by "
                f"policy {part.version}, which was not agreed on"
            )

    def _expects_no_more(self, key: int, round: int, chunk: int) -> None:
        if self._expected:
            expected = self._expected.get((key, round), {})
            expected.pop(chunk, None)
            if not expected:
                self._expected.pop((key, round), None)

    def clear(self) -> None:
        """Forget everything: the job has failed."""
        self.kept.clear()
        self._expected.clear()
        self.changing = False

    def _fail_lost(self, message: ViewAgreed) -> None:
        """Fail the operations that wait for results that no member has any more."""
        for lost in message.lost:
            round = self._rounds.get((lost.key, lost.round))
            if round is None or round.operation is None:
                if (lost.key, lost.round) not in self._complete:
                    self._lost.setdefault(lost.key, set()).add(lost.round)
                continue
            missing = bits_from_wire(lost.chunks) if lost.chunks else -1
            if any(not known and missing >> chunk & 1 for chunk, known in enumerate(round.results)):
                self._fail(round, lost_error(round.operation))
        for key in list(self._lost):
            self.give_up_lost(key)

    def give_up_lost(self, key: int) -> None:
        """Wait no more for results that nobody has, and that this rank's program does not need."""
        lost = self._lost.get(key, set())
        for number in [number for number in lost if number < self.begins.get(key, 0)]:
            lost.discard(number)
            round = self._rounds.get((key, number))
            if round is not None:
                self._fail(round, None)
            elif (key, number) not in self._complete:
                self._complete.add(key, number)

    def _rebase(self, round: Round) -> None:
        """Begin an open round anew under the view's policy, apart from the results that are here."""
        plan = self._bindings.plan(self.version, round.key.spec.members)
        assert plan is not None
        self._withheld.drop(round)  # it is summed anew
        anew = round.begin_anew(plan)
        self._counters.add("chunks_summed_anew", anew)

    def _send_results(self, recovery: Recovery) -> None:
        kept, key = self.kept.of(recovery.key, recovery.round), self._keys.get(recovery.key)
        plan = None if key is None else self._bindings.plan(self.version, key.spec.members)
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
            self._counters.add("results_recovered")
            self._outbox.add(
                Send(
                    peer=Peer(recovery.target),
                    message=part,
                    payload=result.payload,
                    order=(0, recovery.round, layout.offsets[chunk]),
                )
            )

    def keep(self, round: Round, chunk: int, payload: Buffer | None, contributors: int) -> None:
        """Keep a result that others may need, and drop those that nobody needs any more."""
        if self.active:
            self.kept.add(
                round.key.identity,
                round.round,
                chunk,
                KeptResult(payload, contributors) if round.wants_result(chunk) else None,
                form=round.form,
                call=round.call,
                settled=self._settled(round, chunk, contributors),
            )
            self._expects_no_more(round.key.identity, round.round, chunk)

    def _settled(self, round: Round, chunk: int, contributors: int) -> int:
        """Return the round up to which nobody needs results any more, as the result of a chunk says."""
        key = round.key.identity
        needed: float = self._complete.up_to(key)
        if not round.key.spec.members:  # nobody takes the place of a rank that leaves a group
            needed = min(self.receipts.limit(key, contributors), needed)  # a silent rank's program is behind
        return int(min(round.settled.get(chunk, -1), needed))

    def set_members(self, policy: Policy) -> None:
        """Record who is in the job, and which members are silent, under the newest policy."""
        self.silent = self._rank in policy.silent
        silent = [rank for rank in policy.silent if rank != self._rank]
        self.receipts.set_members(policy.members or range(policy.size), silent)

    def received(self) -> dict[int, int]:
        """Return the round up to which all results are here, used by the program or not, by key to which this
        rank does not contribute.
        """
        found = {}
        for key in self._keys.keys() - self.contributes_to:
            last = self._complete.up_to(key)
            while (round := self._rounds.get((key, last + 1))) is not None and not round.missing:
                last += 1
            found[key] = last
        return found

    def is_lost(self, key: int, round: int) -> bool:
        """Return whether a result of a round was lost before this rank had it."""
        return round in self._lost.get(key, ())

    def write_kept(self, round: Round) -> None:
        """Write the results that came before the operation of a round."""
        kept = self.kept.of(round.key.identity, round.round)
        for chunk, result in () if kept is None else kept.chunks.items():
            round.write(chunk, result.payload, result.contributors)


def lost_error(operation: Operation) -> NodeLost:
    """Return the error of an operation whose result nobody has any more."""
    return NodeLost(f"{operation}: its result was lost with a rank that has left the job")


# Results that a node keeps for others, in jobs that nodes may leave. Pure.
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

    def forget_before(self, key: int, round: int) -> None:
        """Drop the results of all rounds of a key before `round`."""
        rounds = self._rounds.get(key, {})
        for old in [number for number in rounds if number < round]:
            del rounds[old]

    def __iter__(self) -> Iterator[tuple[int, int, RoundOfResults]]:
        for key, rounds in self._rounds.items():
            for number, kept in rounds.items():
                yield key, number, kept

    def clear(self) -> None:
        """Drop everything."""
        self._rounds.clear()


# Up to which round silent members have all results: until then the others keep them. Pure.
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
