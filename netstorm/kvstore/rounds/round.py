"""The state of one round of one key on this node. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from netstorm.errors import NodeLost
from netstorm.kvstore.forms import (
    Array,
    ChunkLayout,
    ChunkSum,
    Collective,
    Dense,
    Form,
    Key,
    Sum,
    Values,
    ZeroSum,
)
from netstorm.kvstore.operations import Operation
from netstorm.protocol.codecs import UNDETERMINED_FORM, Element
from netstorm.protocol.frames import Buffer, Peer, ranks_in
from netstorm.protocol.messages import LossTerms, Part, Phase
from netstorm.pslite.machine import Send
from netstorm.topology.policy import Plan, Policy

__all__ = [
    "SENT",
    "CompleteRounds",
    "Extension",
    "OrderedRound",
    "Owner",
    "PartTag",
    "Round",
    "RoundLoss",
    "Way",
]


Owner: TypeAlias = tuple[int, int]
"""Key and number of a round."""


Way: TypeAlias = tuple[Plan, int]
"""A plan, and the index of a tree in it."""


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

    def is_sum_of(self, owner: Owner) -> bool:
        """Return whether the part is a sum of a round."""
        return self.phase is Phase.REDUCE and (self.key, self.round) == owner


class Extension:
    """A technique that does more than rounds, trees and sums need, at some points of a round's way.

    `Aggregation.techniques` are all that a node has. One that its job asks for plugs itself in
    (`Aggregation.extend`): then it is asked about all rounds. It takes part in those that it joins
    (`Round.join`): then it is asked about their chunks, too. In a plain job, nothing is plugged in. What a
    technique does not define does nothing.
    """

    __slots__ = ()

    keeps_results = False
    """It keeps results of the rounds that it takes part in, for longer than their operation."""

    # -------------------------------------------------------------------------------------- of all techniques

    def policy_known(self, policy: Policy) -> None:
        """A policy is known: plug in if it asks for this."""

    def terms_known(self) -> None:
        """An operation or a part says that its round may end without some contributions: the same."""

    def clear(self) -> None:
        """The job has failed: forget everything."""

    # --------------------------------------------------------------------------- of those that are plugged in

    def key_added(self, key: Key) -> None:
        """A key is known."""

    def may_begin(self, operation: Operation) -> bool:
        """Return whether an operation may begin now."""
        return True

    def holds_ends(self) -> bool:
        """Return whether no result may come up now: nobody would hear of it."""
        return False

    def version_of(self, key: int, round: int) -> int | None:
        """Return the policy version of a round that the scheduler has bound to none."""
        return None

    def refuses(self, operation: Operation) -> NodeLost | None:
        """Return why an operation that may begin cannot complete."""
        return None

    def intercepts(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> bool:
        """Drop a part, keep it for later, or handle it; return False to leave it as it is."""
        return False

    def lag(self, key: Key, part: Part, plan: Plan) -> int:
        """Return how many rounds more than other nodes this one may be behind."""
        return 0

    def opened(self, round: Round) -> None:
        """A round is open, and nothing is in it: join it, or not."""

    def terms_came(self, round: Round, terms: LossTerms) -> None:
        """An operation or a part says so of a round: the same."""

    def begins(self, round: Round) -> None:
        """A round has its operation."""

    def begun(self, round: Round) -> None:
        """It has this rank's contributions."""

    def complete_without_operation(self, round: Round) -> None:
        """All results of a round are here before its operation."""

    def reroutes(self, send: Send, tag: PartTag, plan: Plan) -> bool:
        """Send a part of a chunk that `plan` sums in another way; return False to send it to its peer."""
        return False

    def queues(self, send: Send) -> bool:
        """Keep a part that this node only forwards; return False to send it."""
        return False

    def taken_back(self, wanted: Callable[[Hashable], bool]) -> list[Send]:
        """Return what is kept of parts whose tag is `wanted`, and forget it."""
        return []

    def view_begins(self, version: int) -> None:
        """Everything moves to the policy of a new view."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return math.inf

    # --------------------------------------------------------------------- of those that take part in a round

    def adds_own(self, round: Round, chunk: int) -> bool:
        """Return whether this rank contributes to a chunk."""
        return True

    def own_added(self, round: Round, chunk: int) -> None:
        """This rank's contribution is in the sum of a chunk."""

    def counts(self, round: Round, part: Part, contributors: int) -> bool:
        """Return whether a sum of a child counts."""
        return True

    def accepted(self, round: Round, part: Part) -> None:
        """A sum of a child has been added, or a result is about to be delivered."""

    def incomplete(self, round: Round, chunk: int) -> None:
        """Something has been added to a sum, and it lacks contributions of this subtree."""

    def completed(self, round: Round, chunk: int) -> None:
        """This rank is the root, and has a complete sum."""

    def withholds(self, round: Round, chunk: int) -> bool:
        """Return whether a complete sum is not sent to the parent now."""
        return False

    def hurry(self, round: Round) -> None:
        """Withhold nothing of a round any more."""

    def delivers(self, round: Round, chunk: int, payload: Buffer | None, contributors: int) -> None:
        """A result is about to be written to the user's destination."""

    def delivered(self, round: Round, chunk: int) -> None:
        """It has been written."""

    def dropped(self, round: Round) -> None:
        """A round is forgotten, since it ends or was wrong."""

    def ended(self, round: Round) -> None:
        """A round ends, complete or not."""

    def restarted(self, round: Round) -> None:
        """All that has no result is summed anew: a new view begins."""


_LEAST_LENT: Final = 4 * 2**20
"""Bytes of a round from which on its root waits until all have its values, instead of copying them."""

_LEAST_LENT_CHUNK: Final = 65_536
"""Bytes of a chunk that is not copied: acknowledgements of smaller ones may wait (`Session`)."""

SENT: Final = ChunkSum(Element.FLOAT32)
"""Stands for a sum that has gone to the parent: all its contributors have been counted."""
SENT.contributors = -1


class Round:
    """One round of one key under one policy: a sum for each chunk of which something has come."""

    __slots__ = (
        "call",
        "extensions",
        "form",
        "key",
        "layout",
        "loss",
        "missing",
        "moved",
        "operation",
        "plan",
        "priority",
        "results",
        "round",
        "settled",
        "sums",
        "version",
    )

    def __init__(self, key: Key, round: int, plan: Plan, form: Form, *, call: int = 0) -> None:
        self.key = key
        self.layout: Final[ChunkLayout] = key.layout_of(form)
        self.form = form
        """The operation's, once that is here; before, one with the codec of the parts that have come."""
        self.call: Final = call
        """Digest of the collective call; 0: none."""
        self.round = round
        self.version = plan.version
        self.plan = plan
        self.extensions: tuple[Extension, ...] = ()
        """The techniques that take part, in the order in which they are asked."""
        self.moved: dict[int, Plan] = {}
        """Chunks that have moved to later policies (`takeover`)."""
        self.operation: Operation | None = None
        """The user's; None while only other ranks' data is here."""
        self.priority = 0
        """The operation's, once that is here."""
        self.missing = self.layout.chunks
        """Chunks whose result has not arrived."""
        self.sums: list[Sum | None] = [None] * self.missing
        self.results = [False] * self.missing
        self.settled: dict[int, int] = {}
        """By chunk: up to which round of the key all contributors so far have completed all."""
        self.loss: RoundLoss | None = None
        """The round may end without some contributions (`bounded_loss`); None: it waits for all."""

    @property
    def owner(self) -> Owner:
        """Its key and number."""
        return self.key.identity, self.round

    def join(self, extension: Extension, *, first: bool = False) -> None:
        """Have a technique take part, once; `first`: before those that do."""
        if extension not in self.extensions:
            self.extensions = (extension, *self.extensions) if first else (*self.extensions, extension)

    def plan_of(self, chunk: int) -> Plan:
        """Return the plan that a chunk is summed by."""
        return self.moved.get(chunk, self.plan) if self.moved else self.plan

    def way_of(self, chunk: int) -> Way:
        """Return the plan that a chunk is summed by, and the index of its tree there."""
        plan = self.moved.get(chunk, self.plan) if self.moved else self.plan
        return plan, plan.tree_of(self.layout.slots[chunk])

    def accepts(self, form: Form, call: int) -> bool:
        """Return whether parts in this form, of a collective call (0: of none), may belong to this round."""
        if call != self.call:
            return False
        return form.codec == self.form.codec or UNDETERMINED_FORM in (form.codec, self.form.codec)

    def switch_form(self, form: Form) -> None:
        """Continue in a form that the round `accepts`. The undetermined form is replaced by any other."""
        if form.codec == UNDETERMINED_FORM:
            return
        sums = self.sums if self.form.codec == UNDETERMINED_FORM else ()
        self.form = form
        for chunk, total in enumerate(sums):
            if isinstance(total, ZeroSum):
                self.sums[chunk] = None
                self.sum_of(chunk).add_received(None, total.contributors)

    def begin_anew(self, plan: Plan) -> int:
        """Forget all sums: what has no result is summed under another plan. Return how many chunks."""
        self.plan, self.version = plan, plan.version
        self.moved.clear()
        self.settled.clear()
        self.sums = [None] * len(self.sums)
        return self.missing

    def sum_of(self, chunk: int) -> Sum:
        """Return the sum of a chunk; it is made if there is none."""
        found = self.sums[chunk]
        if found is None:
            found = self.sums[chunk] = self.form.new_sum()
        return found

    def is_under_way(self, chunk: int) -> bool:
        """Return whether another rank has contributed to a chunk that this rank is the root of."""
        total = self.sums[chunk]
        return total is not None and bool(total.contributors & ~(1 << self.plan.rank))

    def own_values(self, chunk: int) -> Values | None:
        """Return what this rank contributes to a chunk, in the round's form; None: zeros, or unwanted."""
        operation = self.operation
        if operation is None or operation.source is None or self.receivers_of(chunk) == 0:
            return None
        if operation.from_lowest:
            everybody = self.plan_of(chunk).everybody
            if everybody & -everybody != 1 << self.plan.rank:
                return None
        start, end = self.layout.bounds[chunk]
        return self.form.own(operation.source, start, end)

    def own_copy(self, chunk: int, contributors: int) -> Array | None:
        """Return the result of a chunk if it is what this rank has contributed, a view of the user's memory:
        one of values that are copied, which does not come back to the rank that has them.
        """
        operation, form = self.operation, self.form
        if operation is None or not isinstance(form, Collective) or not form.copies:
            return None
        if operation.source is None or not contributors >> self.plan.rank & 1:
            return None
        return form.own(operation.source, *self.layout.bounds[chunk])

    def lendable(self, chunk: int, total: Sum) -> Array | None:
        """Return the result of a chunk of which this rank is the root if it may be sent from the user's
        memory: nobody else has contributed, nothing else is written there, and nothing keeps it when the
        operation has ended.
        """
        own = total.alone if isinstance(total, ChunkSum) else None
        if own is None or own.nbytes * len(self.results) < _LEAST_LENT or own.nbytes < _LEAST_LENT_CHUNK:
            return None
        operation = self.operation
        assert operation is not None
        if any(extension.keeps_results for extension in self.extensions):
            return None
        target = operation.destination
        if target is not None:
            target = self.form.own(target, *self.layout.bounds[chunk])
        if target is None or not np.may_share_memory(target, own):
            return own
        # An initial value is written where it is: what has as many elements is the same if it begins there.
        in_place = isinstance(self.form, Dense) and target.ctypes.data == own.ctypes.data
        return own if in_place else None

    def receivers_of(self, chunk: int) -> int | None:
        """Return the bit set of the ranks that want a chunk's result; None: all."""
        operation = self.operation
        if operation is None or not operation.receivers:
            return None
        return operation.receivers[chunk * len(operation.receivers) // len(self.results)]

    def wants_result(self, chunk: int) -> bool:
        """Return whether the values of a chunk's result come here, not only the news that there is one."""
        receivers = self.receivers_of(chunk)
        if receivers is None:
            return True
        plan, tree = self.way_of(chunk)
        return plan.reduce_parent[tree] < 0 or bool(receivers & plan.broadcast_mask[tree][plan.rank])

    def store(self, chunk: int, payload: Buffer | None, contributors: int) -> None:
        """Write the result of a chunk, with the contributions of some ranks, to the user's destination."""
        self.results[chunk] = True
        self.missing -= 1
        self.sums[chunk] = None
        self.write(chunk, payload, contributors)

    def write(self, chunk: int, payload: Buffer | None, contributors: int) -> None:
        """Write a result that is here; without an operation, do nothing."""
        operation = self.operation
        if operation is None:
            return
        operation.record_result(chunk, contributors)
        start, end = self.layout.bounds[chunk]
        if operation.destination is not None:
            if payload is None:
                payload = self.own_copy(chunk, contributors)
            self.form.write(operation.destination, start, end, payload, contributors)
        if operation.loss is not None and contributors >> self.plan.rank & 1:
            operation.record_counted(start, end)

    def awaited(self, most: int) -> tuple[set[int], set[int]]:
        """Return the ranks whose contributions are missing here, and the neighbours from whom sums or results
        are to come: of the first `most` chunks without a result.
        """
        ranks: set[int] = set()
        neighbours: set[int] = set()
        for chunk in itertools.islice((at for at, done in enumerate(self.results) if not done), most):
            total = self.sums[chunk]
            plan, tree = self.way_of(chunk)
            lacking = 0
            if total is not None and total is not SENT:
                lacking = plan.expected[tree] & ~total.contributors & ~(1 << plan.rank)
            if lacking:
                ranks.update(ranks_in(lacking))
                children = plan.reduce_children[tree]
                neighbours.update(child for child in children if plan.mask_of(tree, child) & lacking)
            elif plan.broadcast_parent[tree] >= 0:
                neighbours.add(plan.broadcast_parent[tree])
        return ranks, neighbours

    def waiting_text(self) -> str:
        """Return what is missing, for a person."""
        ranks: set[int] = set()
        parents: set[int] = set()
        roots: set[int] = set()
        for chunk, done in enumerate(self.results):
            total = self.sums[chunk]
            plan, tree = self.way_of(chunk)
            if not done and total is not None and total is not SENT:
                ranks.update(ranks_in(plan.expected[tree] & ~total.contributors))
            if not done and plan.broadcast_parent[tree] >= 0:
                parents.add(plan.broadcast_parent[tree])
                roots.add(plan.root[tree])
        waited = f"results of ranks {sorted(roots)}"
        if ranks:
            waited = f"contributions of ranks {sorted(ranks)}"
        elif parents - roots:
            waited += f", which come through ranks {sorted(parents)}"
        return f"{self.missing} of {len(self.results)} chunks wait for {waited}"


class OrderedRound(Round):
    """A round whose results are the same bits in each run: contributions are added in a fixed order."""

    __slots__ = ()

    def sum_of(self, chunk: int) -> Sum:
        """Return the sum of a chunk: its own values, then those of children by rank."""
        found = self.sums[chunk]
        if found is None:
            found = super().sum_of(chunk)
            if not isinstance(found, ZeroSum):
                plan, tree = self.way_of(chunk)
                children = (plan.mask_of(tree, child) for child in sorted(plan.reduce_children[tree]))
                found = self.sums[chunk] = OrderedSum(found, (1 << plan.rank & plan.everybody, *children))
        return found


class OrderedSum:
    """Contributions to one chunk, added in a fixed order, whatever the order in which they come. See `Sum`.

    Floating-point addition is not associative: added as they come, they give other bits in each run. The
    price is memory, and time: what comes early waits for what is before it.
    """

    __slots__ = ("_added", "_order", "_sum", "_waiting", "contributors")

    def __init__(self, total: Sum, order: tuple[int, ...]) -> None:
        """Begin without contributions.

        Args:
            total: an empty sum, of the form that the values have.
            order: the bit sets of the contributions to come, in the order in which they are added: this
                rank's bit, then the ranks of each child's subtree.
        """
        self.contributors = 0
        self._sum: Final = total
        self._order: Final = order
        self._added = 0
        """How many of these have been added."""
        self._waiting: dict[int, tuple[Values, bool]] = {}
        """By bit set: what has come early, and whether it is this rank's own."""

    def add_own(self, values: Values | None, bit: int) -> None:
        """Add this rank's contribution (None: zeros)."""
        self._take(values, bit, own=True)

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: zeros), whose memory the sum may change from now on."""
        self._take(payload, contributors, own=False)

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: zeros."""
        return self._sum.to_send()

    def to_keep(self) -> Buffer | None:
        """Return the root's result in private memory."""
        return self._sum.to_keep()

    def _take(self, values: Values | Buffer | None, bits: int, *, own: bool) -> None:
        self.contributors |= bits
        if values is None:  # adding zeros changes nothing, so they need no turn
            self._sum.add_received(None, bits)
        else:
            self._waiting[bits] = (values, own)
        while self._added < len(self._order) and self._order[self._added] & ~self.contributors == 0:
            turn = self._order[self._added]
            self._added += 1
            if turn in self._waiting:
                values, is_own = self._waiting.pop(turn)
                add = self._sum.add_own if is_own else self._sum.add_received
                add(values, turn)


# Which rounds of each key are complete on this node. They complete in any order.


class CompleteRounds:
    """The complete rounds of all keys: all up to a round, and a few beyond it.

    Attributes:
        up_to: by key, the last round up to which all are complete; -1: the first is not.
    """

    def __init__(self) -> None:
        self.up_to: Final[dict[int, int]] = {}
        self._beyond: Final[dict[int, set[int]]] = {}

    def add_key(self, key: int) -> None:
        """Begin to count a key's rounds; a known key changes nothing."""
        self.up_to.setdefault(key, -1)

    def begin_at(self, key: int, round: int) -> None:
        """Count no round before `round`, as a node that has joined later does."""
        beyond = self._beyond.setdefault(key, set())
        self.up_to[key] = max(self.up_to.get(key, -1), round - 1)
        beyond -= {number for number in beyond if number <= self.up_to[key]}
        self._advance(key, beyond)

    def clear(self) -> None:
        """Count no round of the known keys as complete."""
        self.up_to.update(dict.fromkeys(self.up_to, -1))
        self._beyond.clear()

    def __contains__(self, key_and_round: tuple[int, int]) -> bool:
        """Return whether a round, given as (key, number), is complete."""
        key, round = key_and_round
        return round <= self.up_to.get(key, -1) or round in self._beyond.get(key, ())

    def add(self, key: int, round: int) -> None:
        """Record that a round of a known key is complete."""
        beyond = self._beyond.setdefault(key, set())
        beyond.add(round)
        self._advance(key, beyond)

    def _advance(self, key: int, beyond: set[int]) -> None:
        while self.up_to[key] + 1 in beyond:
            self.up_to[key] += 1
            beyond.remove(self.up_to[key])


# What one node knows of a round that may end without some contributions.
#
# A sum that has gone up without some of its subtree is followed by what comes later, in parts of their own.
# All that is counted here belongs to a policy: if a chunk moves to another one, its sum begins anew.


class RoundLoss:
    """The state of one round at one node.

    Attributes:
        terms: what may be missing, and from when on.
        passes_on: an inner node passes on what comes from now on, complete or not.
        overdue: the deadline is over: the root may end the round.
        early: results that came before this rank's operation, by chunk, with their contributors.
        offsets: by chunk: its place on links, if that is not the place of its elements.
    """

    __slots__ = ("_masses", "_passed", "early", "offsets", "overdue", "passes_on", "terms")

    def __init__(self, terms: LossTerms) -> None:
        self.terms: Final = terms
        self.passes_on = False
        self.overdue = False
        self.early: Final[dict[int, tuple[Buffer | None, int]]] = {}
        self.offsets: list[int] | None = None
        self._passed: Final[dict[int, tuple[int, int]]] = {}
        self._masses: Final[dict[int, tuple[int, float]]] = {}

    def passed(self, chunk: int, version: int) -> int:
        """Return the bit set of the ranks whose contributions have gone up by a policy, without the others of
        this subtree.
        """
        known, contributors = self._passed.get(chunk, (version, 0))
        return contributors if known == version else 0

    def record_passed(self, chunk: int, version: int, contributors: int) -> None:
        """Record that an incomplete sum has gone up; what comes next is another part."""
        self._passed[chunk] = version, self.passed(chunk, version) | contributors
        self._masses.pop(chunk, None)

    def add_mass(self, chunk: int, version: int, mass: float) -> None:
        """Record how large a contribution, or several, is that is added to a sum by a policy."""
        self._masses[chunk] = version, self.mass(chunk, version) + mass

    def mass(self, chunk: int, version: int) -> float:
        """Return how large the contributions in a sum are together."""
        known, mass = self._masses.get(chunk, (version, 0.0))
        return mass if known == version else 0.0

    def terms_of(self, chunk: int, version: int) -> LossTerms:
        """Return the terms as the part with the sum of a chunk carries them."""
        return msgspec.structs.replace(self.terms, mass=self.mass(chunk, version))
