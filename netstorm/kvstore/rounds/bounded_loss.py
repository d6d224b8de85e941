"""Rounds that may end without the smallest contributions, if those come too late. Pure.

This is MLT's bounded loss (Wang et al., NSDI 2024, section 4.3) on trees. A node counts the time of a round
from the first contribution that it has of it. When most of the deadline is over, an inner node sends up what
it has of each chunk, and then, part by part, what comes later. When all of it is over, the root ends the
chunks that lack contributions, as soon as what all of them lack is within the bound. So the root alone
decides, each result names who is in it, and a rank that is not keeps its contribution for its next one.

The bound holds for each root and step: for all chunks that a node is the root of, of all keys of a store, in
rounds of one number. Nothing is ended unless everything that is late can be: a step waits for all its chunks,
so ending some of them alone would lose without gaining.

A program that is behind joins the round that others have begun, if it hears of it in time (`DiLoCo`'s
quorum). A leaf hears nothing before the result. So a root that lacked somebody in a chunk's last result sends
word down its tree when the next round begins: a result of nobody.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.kvstore.forms import STORED, Array, Collective, Dense, Form, Key, Values, widened
from netstorm.kvstore.rounds.aggregation import Aggregation
from netstorm.kvstore.rounds.round import Extension, Owner, PartTag, Round, RoundLoss
from netstorm.protocol.frames import Buffer, ranks_in
from netstorm.protocol.messages import LossTerms, Part
from netstorm.topology.policy import Plan

__all__ = [
    "MOST_MISSED",
    "BoundedLoss",
    "EndedChunks",
    "Importance",
    "MissedRounds",
    "OpenChunk",
    "all_ended",
    "mass_of",
    "mass_of_payload",
]


# Which chunks matter: DGT's ranking (Zhou et al., FGCS 121, 2021), by results.
#
# DGT ranks the blocks of each sender by a moving mean of their absolute values. Trees add blocks of all
# ranks, so all ranks must send the same chunks first: they are ranked by their sums, which are the same
# everywhere.


class Importance:
    """The means of all chunks of all keys of one node."""

    def __init__(self) -> None:
        self._means: Final[dict[int, npt.NDArray[np.float64]]] = {}
        """By key; NaN: not known."""
        self._first: Final[dict[int, float]] = {}
        """By key: the mean of all its chunks when they were first known."""

    def record(self, key: int, chunk: int, chunks: int, mean: float, newest: float = 0.3) -> None:
        """Record the mean absolute value of a chunk's result, of a key with so many chunks; `newest`: its
        weight in the moving mean (DGT_CONTRIBUTION_ALPHA).
        """
        means = self._means.get(key)
        if means is None or len(means) != chunks:
            means = self._means[key] = np.full(chunks, np.nan)
        known = means[chunk]
        means[chunk] = mean if math.isnan(known) else (1 - newest) * known + newest * mean
        if key not in self._first and np.isfinite(means).all():
            self._first[key] = float(means.mean())

    def share(self, keys: Iterable[int], terms: LossTerms) -> float:
        """Return the share of a step's chunks that are important: it falls with their means, from that of the
        first results on (ADAPTIVE_K_FLAG), or stays.

        DGT's reason holds: small gradients, late in the training, harm less if some of them are late.
        """
        known = [key for key in keys if key in self._first]
        first = sum(self._first[key] for key in known)
        if terms.least < 0 or not first > 0:
            return terms.important
        now = sum(float(self._means[key].mean()) for key in known)
        return min(terms.important, max(terms.least, terms.important * now / first))

    def order(self, key: int, chunks: int) -> list[int] | None:
        """Return the places of a key's chunks, the most important first; None: not all are known."""
        means = self._means.get(key)
        if means is None or len(means) != chunks or not np.isfinite(means).all():
            return None
        places = np.empty(chunks, np.int64)
        places[np.argsort(-means, kind="stable")] = np.arange(chunks)
        found: list[int] = places.tolist()
        return found

    def chosen(self, keys: Iterable[int], fraction: float) -> set[tuple[int, int]] | None:
        """Return which chunks of a step are the most important ones, as (key, chunk); None: all are, since
        not all means are known. Of equal chunks, the first ones are.

        Args:
            keys: of the step.
            fraction: of their chunks that are important.
        """
        if not fraction:
            return set()
        places: list[tuple[int, int]] = []
        known = []
        for key in keys:
            means = self._means.get(key)
            if means is None or not np.isfinite(means).all():
                return None
            known.append(means)
            places.extend((key, chunk) for chunk in range(len(means)))
        order = np.argsort(-np.concatenate(known), kind="stable") if known else np.empty(0, np.int64)
        return {places[place] for place in order[: math.ceil(fraction * len(places))]}

    def clear(self) -> None:
        """Forget everything."""
        self._means.clear()
        self._first.clear()


# When a root may end chunks without some contributions: what is missing is a small share of all.
#
# What counts are a step's own gradients: those of earlier steps, which a contribution may contain, were
# counted as late before. How large a gradient is that has not come is not known. It is taken to be as large
# as those of the same chunk that have come, on average; and if those are zeros, as those of the whole step
# for as many elements.


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """A chunk whose sum is not complete."""

    elements: int
    arrived: int
    """How many ranks are in the sum."""
    gradients: int
    """How many gradients their contributions consist of, those of earlier steps included."""
    missing: int
    """How many ranks are not in it."""
    mass: float
    """How large the contributions in the sum are: the sum of their absolute values."""


@dataclass(frozen=True, slots=True)
class EndedChunks:
    """Chunks that have been ended, or could be."""

    mass: float = 0.0
    """Of the step's gradients in them, those that are missing included."""
    lost: float = 0.0
    """Of those that are missing."""

    def __add__(self, other: EndedChunks) -> EndedChunks:
        """Return both together."""
        return EndedChunks(self.mass + other.mass, self.lost + other.lost)

    @property
    def share(self) -> float:
        """The share that is missing; NaN: it is not known, which is within no bound."""
        return self.lost / self.mass if self.mass > 0 and math.isfinite(self.mass) else math.nan


def all_ended(chunks: Iterable[OpenChunk]) -> list[EndedChunks]:
    """Return what each of some chunks would count, if it ended now."""
    chunks = list(chunks)
    weight = sum(chunk.gradients * chunk.elements for chunk in chunks)
    usual = sum(chunk.mass for chunk in chunks) / weight if weight else math.nan
    ended = []
    for chunk in chunks:
        known = chunk.gradients and chunk.mass
        mean = chunk.mass / chunk.gradients if known else chunk.elements * usual
        lost = chunk.missing * mean if chunk.missing else 0.0
        ended.append(EndedChunks((chunk.arrived * mean if known else chunk.mass) + lost, lost))
    return ended


_PASS_ON: Final = 7 / 8
"""Part of the deadline after which inner nodes pass on what they have: the rest is for its way to the root.
Earlier, a sum that is not late at all would travel in two parts."""

_STEPS_KEPT: Final = 64
"""Steps whose losses are remembered: more than can be under way."""

_Step: TypeAlias = tuple[int, int]
"""A store's namespace, and the number of its rounds."""

_Late: TypeAlias = list[tuple[Round, int, OpenChunk]]


class BoundedLoss(Extension):
    """The rounds of one node that may end without some contributions."""

    keeps_results = True

    def __init__(self, rounds: Aggregation) -> None:
        self._rounds: Final = rounds
        self._new: Final[list[Owner]] = []
        """Rounds whose time begins with the next tick."""
        self._deadlines: Final[list[tuple[float, bool, Owner]]] = []
        """Heap; True: all of the deadline is over."""
        self._changed: Final[set[_Step]] = set()
        """Steps that may end now."""
        self._ended: Final[dict[_Step, EndedChunks]] = {}
        self._missed: Final = MissedRounds()
        self._importance: Final = Importance()

    # ----------------------------------------------------------------------------------- rounds as they come

    def terms_known(self) -> None:
        """Plug in with the first such round."""
        self._rounds.extend(self)

    def terms_came(self, round: Round, terms: LossTerms) -> None:
        """Let a round end without some contributions; its time begins, unless it has begun before."""
        if round.loss is not None:
            return
        round.loss = RoundLoss(terms)
        round.join(self, first=True)  # whoever is not in a result may not have completed any round
        self._new.append(round.owner)
        places = None
        if terms.important:
            places = self._importance.order(round.key.identity, round.layout.chunks)
        if places is not None:
            round.loss.offsets = [round.layout.offsets[place] for place in places]

    def lag(self, key: Key, part: Part, plan: Plan) -> int:
        """Return how many rounds more than other nodes this one may be behind, as it may be missing."""
        return 0 if part.loss is None else MOST_MISSED + key.rounds_under_way

    def begins(self, round: Round) -> None:
        """Write the results that came before the operation of a round."""
        if round.loss is not None:
            for chunk, (payload, contributors) in round.loss.early.items():
                round.write(chunk, payload, contributors)
            round.loss.early.clear()

    def own_added(self, round: Round, chunk: int) -> None:
        """Record how large this rank's own contribution is."""
        loss = round.loss
        if loss is not None:
            start, end = round.layout.bounds[chunk]
            mass = mass_of(round.own_values(chunk), round.form, end - start)
            loss.add_mass(chunk, round.plan_of(chunk).version, mass)

    def counts(self, round: Round, part: Part, contributors: int) -> bool:
        """Record how large a sum of a child is; return whether it may still be in the result."""
        loss = round.loss
        if loss is None or part.loss is None:
            return True
        if round.results[part.chunk]:
            self._rounds.counters.add("contributions_too_late")
            return False
        if loss.passed(part.chunk, part.version) & contributors:
            self._rounds.counters.add("contributions_counted_before")
            return False
        if not round.sum_of(part.chunk).contributors & contributors:
            loss.add_mass(part.chunk, part.version, part.loss.mass)
        return True

    def incomplete(self, round: Round, chunk: int) -> None:
        """Handle a sum to which something has been added, and that lacks contributions of this subtree."""
        loss, total = round.loss, round.sums[chunk]
        if loss is None or total is None or total.contributors <= 0:
            return
        plan, tree = round.way_of(chunk)
        if plan.reduce_parent[tree] < 0:
            if loss.overdue:
                self._changed.add(_step(round))
        elif loss.passes_on:
            contributors = total.contributors
            self._rounds.counters.add("sums_passed_on")
            self._rounds.send_up(round, chunk, (plan, tree))
            loss.record_passed(chunk, plan.version, contributors)
            round.sums[chunk] = None

    def completed(self, round: Round, chunk: int) -> None:
        """Record that this root has a complete sum."""
        if round.loss is not None:
            self._add_ended(_step(round), all_ended([self._open_chunk(round, round.loss, chunk)])[0])
            if round.loss.overdue:
                self._changed.add(_step(round))

    def delivers(self, round: Round, chunk: int, payload: Buffer | None, contributors: int) -> None:
        """Prepare for a result that is here, and may be without some ranks."""
        loss = round.loss
        if loss is None:
            return
        if round.operation is None:
            loss.early[chunk] = payload, contributors
        if loss.terms.important:
            start, end = round.layout.bounds[chunk]
            mean = mass_of_payload(payload, round.form, end - start) / max(1, end - start)
            self._importance.record(round.key.identity, chunk, round.layout.chunks, mean, loss.terms.newest)
        key, missing = round.key.identity, round.plan_of(chunk).everybody & ~contributors
        self._missed.record(key, chunk, missing)
        if missing:
            round.settled[chunk] = -1  # who is not in it may not have completed any round
            self._take_back(round, chunk)

    # ----------------------------------------------------------------------------------------- time passes

    def tick(self, now: float) -> None:
        """Do what is due: pass on incomplete sums, end chunks that are late."""
        if self._is_held():
            return
        for owner in self._new:
            round = self._rounds.rounds.get(owner)
            if round is not None and round.loss is not None:
                deadline_s = round.loss.terms.deadline_s
                heapq.heappush(self._deadlines, (now + _PASS_ON * deadline_s, False, owner))
                heapq.heappush(self._deadlines, (now + deadline_s, True, owner))
                self._announce(round)
        self._new.clear()
        while self._deadlines and (
            self._deadlines[0][0] <= now or self._deadlines[0][2] not in self._rounds.rounds
        ):
            _, over, owner = heapq.heappop(self._deadlines)
            round = self._rounds.rounds.get(owner)
            if round is not None and round.loss is not None:
                self._time_over(round, round.loss, over=over)
        while self._changed:
            self._try_end(self._changed.pop())

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        if self._is_held():
            return math.inf
        if self._new or self._changed:
            return 0.0
        return self._deadlines[0][0] if self._deadlines else math.inf

    def clear(self) -> None:
        """Forget everything."""
        self._new.clear()
        self._deadlines.clear()
        self._changed.clear()
        self._ended.clear()
        self._missed.clear()
        self._importance.clear()

    # ------------------------------------------------------------------------------------------------- inside

    def _is_held(self) -> bool:
        return any(extension.holds_ends() for extension in self._rounds.extensions)

    def _announce(self, round: Round) -> None:
        """Say that a round has begun to those below this root, if somebody was late for its last result."""
        for chunk, is_here in enumerate(round.results):
            plan, tree = round.way_of(chunk)
            late = not is_here and self._missed.has_missed(round.key.identity, chunk)
            if late and plan.root[tree] == self._rounds.rank:
                self._rounds.send_down(round, chunk, None, way=(plan, tree), contributors=0)
                return  # one of its trees reaches everybody

    def _time_over(self, round: Round, loss: RoundLoss, *, over: bool) -> None:
        if over:
            loss.overdue = True
            self._changed.add(_step(round))
            return
        loss.passes_on = True
        for extension in round.extensions:
            extension.hurry(round)  # what is withheld waits for what is late
        for chunk in range(len(round.sums)):
            self.incomplete(round, chunk)

    def _try_end(self, step: _Step) -> None:
        """End all chunks of a step that are late here, if what they lack together is within the bound."""
        late = self._late(step)
        if not late:
            return
        bound = min(round.loss.terms.bound for round, _, _ in late if round.loss is not None)
        ended = all_ended(chunk for _, _, chunk in late)
        if not sum(ended, self._ended.get(step, EndedChunks())).share <= bound:  # NaN is within no bound
            return
        for (round, chunk, _), one in zip(late, ended, strict=True):
            self._add_ended(step, one)
            self._end(round, chunk)

    def _late(self, step: _Step) -> _Late:
        """Return the chunks of a step that are late here; none, if one of them must not end yet."""
        late: _Late = []
        rounds = [
            round for round in self._rounds.rounds.values() if round.loss is not None and _step(round) == step
        ]
        important: set[tuple[int, int]] | None = set()
        if rounds and rounds[0].loss is not None:
            identities = [round.key.identity for round in rounds]
            share = self._importance.share(identities, rounds[0].loss.terms)
            important = self._importance.chosen(identities, share)
        for round in rounds:
            loss = round.loss
            if loss is None or not loss.overdue:
                continue
            for chunk in range(len(round.results)):
                plan, tree = round.way_of(chunk)
                if plan.root[tree] != self._rounds.rank or round.results[chunk] or not plan.expected[tree]:
                    continue
                total = round.sums[chunk]
                if total is None or not total.contributors:
                    return []
                missing = plan.expected[tree] & ~total.contributors
                if not self._missed.may_miss(round.key.identity, chunk, missing):
                    return []
                if missing and (important is None or (round.key.identity, chunk) in important):
                    return []
                late.append((round, chunk, self._open_chunk(round, loss, chunk)))
        return late

    def _open_chunk(self, round: Round, loss: RoundLoss, chunk: int) -> OpenChunk:
        """Describe a chunk of which this node is the root."""
        (plan, tree), total = round.way_of(chunk), round.sum_of(chunk)
        missing = plan.expected[tree] & ~total.contributors
        start, end = round.layout.bounds[chunk]
        return OpenChunk(
            elements=end - start,
            arrived=total.contributors.bit_count(),
            gradients=self._missed.gradients(round.key.identity, chunk, total.contributors),
            missing=missing.bit_count(),
            mass=loss.mass(chunk, plan.version),
        )

    def _end(self, round: Round, chunk: int) -> None:
        """End a chunk at its root: its sum is the result."""
        total = round.sum_of(chunk)
        contributors, result = total.contributors, total.to_keep()
        self._rounds.counters.add("chunks_ended_early")
        round.settled[chunk] = -1
        self._rounds.send_down(round, chunk, result, way=round.way_of(chunk), contributors=contributors)
        self._rounds.deliver(round, chunk, result, contributors)

    def _add_ended(self, step: _Step, ended: EndedChunks) -> None:
        if step not in self._ended:
            namespace, number = step
            old = [one for one in self._ended if one[0] == namespace and one[1] < number - _STEPS_KEPT]
            for one in old:
                del self._ended[one]
        self._ended[step] = self._ended.get(step, EndedChunks()) + ended

    def _take_back(self, round: Round, chunk: int) -> None:
        """Take back the part that this node has queued for a chunk which has ended without it."""
        owner = round.owner

        def late(tag: Hashable) -> bool:
            return isinstance(tag, PartTag) and tag.chunk == chunk and tag.is_sum_of(owner)

        self._rounds.take_back(late)


def _step(round: Round) -> _Step:
    return round.key.spec.namespace, round.round


# How often in a row ranks were missing from the results of each chunk.
#
# What was not counted is added to a rank's next contribution, which is the larger the longer that goes on,
# and the older. All nodes see all results, so whoever becomes a chunk's root knows.

MOST_MISSED: Final = 4
"""Results in a row that a rank may be missing from. Its gradients are at most so many steps old, its program
is behind by a few steps more at most, and others keep results for it for as long."""


class MissedRounds:
    """The ranks that were missing from the last results, as one node has seen them."""

    def __init__(self) -> None:
        self._missed: Final[dict[tuple[int, int], dict[int, int]]] = {}
        """By key and chunk: results in a row without a rank. Most chunks have no entry."""

    def record(self, key: int, chunk: int, missing: int) -> None:
        """Record a result, in which some ranks (a bit set) are missing."""
        if not missing:
            self._missed.pop((key, chunk), None)
        else:
            known = self._missed.get((key, chunk), {})
            self._missed[key, chunk] = {rank: known.get(rank, 0) + 1 for rank in ranks_in(missing)}

    def has_missed(self, key: int, chunk: int) -> bool:
        """Return whether somebody was missing from the last result."""
        return (key, chunk) in self._missed

    def may_miss(self, key: int, chunk: int, missing: int) -> bool:
        """Return whether all of some ranks (a bit set) may be missing from the next result."""
        known = self._missed.get((key, chunk))
        return known is None or all(known.get(rank, 0) < MOST_MISSED for rank in ranks_in(missing))

    def gradients(self, key: int, chunk: int, ranks: int) -> int:
        """Return how many gradients the next contributions of some ranks (a bit set) consist of."""
        known = self._missed.get((key, chunk))
        extra = 0 if known is None else sum(known.get(rank, 0) for rank in ranks_in(ranks))
        return ranks.bit_count() + extra

    def clear(self) -> None:
        """Forget everything."""
        self._missed.clear()


# How large the values of a chunk are: the sum of their absolute values (DGT's contribution of a block,
# Zhou et al. 2021, is their mean).


def mass_of(values: Values | None, form: Form, elements: int) -> float:
    """Return the sum of absolute values of a chunk; of forms other than dense floats, its elements.

    Args:
        values: as the form has them; None: zeros.
        form: of the round.
        elements: of the chunk.
    """
    if values is None:
        return 0.0
    if not isinstance(values, np.ndarray):
        return float(elements)
    dense: Array = widened(values, form.signature.element) if isinstance(form, Collective) else values
    if not np.issubdtype(dense.dtype, np.floating):
        return float(elements)
    with np.errstate(all="ignore"):
        return float(np.abs(dense).sum(dtype=np.float64))


def mass_of_payload(payload: Buffer | None, form: Form, elements: int) -> float:
    """Return the same of a chunk's values as they travel."""
    if payload is None:
        return 0.0
    if isinstance(form, Collective):
        return mass_of(np.frombuffer(payload, STORED[form.signature.element]), form, elements)
    if isinstance(form, Dense):
        return mass_of(np.frombuffer(payload, form.dtype), form, elements)
    return float(elements)
