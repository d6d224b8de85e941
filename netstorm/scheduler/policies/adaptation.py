"""When a policy is formed anew, and whether it is taken.

Every `UPDATE_TIME` seconds, if since the last look some link has moved by more than `UPDATE_RATE`, and by
more than the error of measuring it; and as soon as it is known what the job sums, if that is not what was
assumed. Of a network of which nothing was known enough must be measured first. What is formed (`forming`) is
taken if it should be better than the policy in force, on the network as it is now, by more than the errors of
the estimates explain: or noise would change policies for ever.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Final

import msgspec

from netstorm.protocol.chunks import ChunkSizes
from netstorm.scheduler.awareness.collector import Collector
from netstorm.scheduler.awareness.network_change import moved, rates_of
from netstorm.scheduler.awareness.network_estimate import NetworkEstimate
from netstorm.scheduler.policies.formation import Formation, Formed, pairs_of
from netstorm.topology.networks.network import Network
from netstorm.topology.policy import Policy
from netstorm.units import format_bytes, format_duration

__all__ = ["Adaptation", "Assumed", "Plan", "Summed"]

_ENOUGH: Final = 2 / 3
"""Part of the links in use that must be measured before the assumption that all are equal goes: the others
get what the slower ones of these have."""

_LONG_ENOUGH: Final = 3
"""Update times after which less will do: links may carry chunks too small to measure them."""

_SURE: Final = 1.0
"""Standard errors by which a policy must be better."""

_LEAST_GAIN: Final = 0.1
"""What is not better by that is not worth a change: on real links a policy that was predicted to be 8 %
faster was slower, and real changes of links cost more.
"""

_OTHER_SIZE: Final = 0.25
"""A job that sums so much more or less may want other trees."""

_MOST_PATIENCE: Final = 8
"""Update times between two formations, if those before have come to nothing: forming costs seconds."""

_LARGE: Final = 3.0
"""A move of so many times UPDATE_RATE is worth a formation whatever became of those before, and at once:
links that have changed together are noticed one after the other.
"""

_LEAST_PATIENCE: Final = 2
"""Looks between two formations for such moves, if those before have come to nothing, and no link has changed
since."""

_MOVING_GAIN: Final = 1.5
"""What a policy must be predicted to gain, as a factor, to be worth it that chunks of rounds under way are
sent once more. Else only those go over of which nothing has come to their root.
"""

_MOVING_S: Final = 0.3
"""What it must gain in s to take over at all. It takes some round trips."""

_SLOW: Final = 0.7
"""Of its rate a link or access line must have left, or what is under way over it goes another way."""

_LOOKS: Final = 5
"""How often the network is looked at within an update time, so that a change need not wait for one."""

_TOGETHER_S: Final = 0.3
_SETTLED_S: Final = 1.0
"""After a link is noticed to have changed, others that have changed with it are waited for, until none has
for the former, but no longer than the latter: each policy moves chunks that are under way. After a key has
come, more keys are waited for.
"""

_MOST_LINKS: Final = 1000
"""Of larger networks one look takes tens of ms, and one within an update time must do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What policies are formed for, besides the network."""

    topology: str = "fapt"
    update_time_s: float = 5.0
    update_rate: float = 0.1
    num_roots: int = 0
    hub: int = -1
    custom: str = ""
    seed: int = 0
    freeze_roots: bool = False
    """The paper's: roots and their shares stay as in the first policy."""
    auxiliary: bool = False
    """Policies have auxiliary paths."""
    explore: bool = False
    """Some of them lead over links that have not been measured."""


@dataclass(frozen=True, slots=True)
class Summed:
    """What a job sums in an iteration."""

    tensors: tuple[int, ...]
    """Bytes of each, in order of priority."""
    chunk_bytes: int

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What the first policy is formed for."""

    network: Network
    known: bool
    """Its rates come from somebody who should know them; else they are made up."""
    described: bool = False
    """Somebody has said which links there are."""
    trusted: bool = False
    """Rates that are known are believed, whatever is measured."""
    find_routes: bool = False
    """Of links that nobody has described some may be routes over others."""
    plan: Plan
    summed: Summed
    chunks: ChunkSizes | None = None
    """Sizes that slow links ask for; None: those that the settings say."""
    link_share: float = 1.0
    """Of each rate that is known: other jobs have the rest."""

    @property
    def planned(self) -> Network:
        """The network that policies are formed for."""
        return (
            self.network if self.link_share == 1.0 or not self.known else self.network.scaled(self.link_share)
        )


class Adaptation:
    """Decides; whoever owns it has the formations done and installs what `formed` returns."""

    def __init__(self, assumed: Assumed, collector: Collector, first: Policy, now: float) -> None:
        """Begin with the policy that was formed before anything was measured.

        Args:
            assumed: what `first` was formed for.
            collector: where reports go.
            first: the policy in force.
            now: the time.
        """
        self.reason = ""
        """Why the last formation was asked for, or what became of it; for a person."""
        self._plan: Final = assumed.plan
        self._collector: Final = collector
        self._summed = assumed.summed
        self._summed_anew_at = math.inf
        """From when on what the job sums is worth a formation; inf: it is what was planned for."""
        self._known: Final = assumed.known
        self._believes: Final = assumed.known and assumed.trusted
        self._looked: NetworkEstimate | None = collector.picture(now) if assumed.known else None
        """The network that was last planned for; None: not enough of it was measured."""
        self._routed: frozenset[tuple[int, int]] = frozenset()
        """Its pairs that are no links."""
        self._planned = rates_of(self._looked.network, pairs_of(first)) if self._looked else {}
        """By (source, target): the highest rate that policies were formed for since one took over what was
        under way, too.
        """
        looks = _LOOKS if len(assumed.network.links) <= _MOST_LINKS else 1
        self._look_every_s: Final = assumed.plan.update_time_s / looks
        self._look_at = now + assumed.plan.update_time_s
        self._asked_at = self._looked_at = now
        self._first_report_at = math.inf
        self._reports = 0
        self._patience = 1
        """Update times between two formations."""
        self._doubtful = False
        """The last one might be better, if the estimates are right."""
        self._replan = ""
        """Why one is to be formed at once; empty: it need not."""
        self._asked: Formation | None = None
        self._planned_for: NetworkEstimate | None = None
        """The network that it is for."""
        self._other_network = False
        """Until then pairs were taken for links that are none."""
        self._number = 0
        self._roots = tuple(tree.root for tree in first.trees) if assumed.plan.freeze_roots else ()
        self._weights = first.weights if assumed.plan.freeze_roots else ()
        self._leads = first.leads if assumed.plan.freeze_roots else ()

    @property
    def urgent(self) -> bool:
        """Whether a policy is to be formed at once."""
        return bool(self._replan)

    @property
    def forming(self) -> bool:
        """Whether an answer is awaited."""
        return self._asked is not None

    def due(self) -> float:
        """Return when `look` may have something to ask."""
        if self._asked is not None:
            return math.inf
        if self._replan:
            return -math.inf
        if self._summed_anew_at < math.inf:
            return min(self._look_at, self._summed_anew_at)
        changes, routes_at = self._collector.changes, self._collector.routes_at
        if routes_at > self._looked_at:
            return min(self._look_at, routes_at + _TOGETHER_S)
        if not changes or changes[-1] <= self._looked_at:
            return self._look_at
        first = next(at for at in changes if at > self._looked_at)
        settled = min(changes[-1] + _TOGETHER_S, first + _SETTLED_S)
        return max(settled, self._asked_at + self._look_every_s)

    @property
    def summed_anew(self) -> bool:
        """Whether the policy in force is for another size of the job."""
        return self._summed_anew_at < math.inf

    def sums(self, summed: Summed, now: float) -> None:
        """Take note of what the job sums by now."""
        if self._looked is not None:
            self._summed_anew_at = math.inf if _alike(summed, self._summed) else now + _TOGETHER_S

    def replan(self, why: str) -> None:
        """What is assumed is another network: form at once."""
        self._replan = why

    def look(self, policy: Policy, summed: Summed | None, now: float) -> Formation | None:
        """Return what is to be formed, if anything is.

        Args:
            policy: the one in force.
            summed: what the job sums; None: not known yet.
            now: the time.
        """
        if now < self.due():
            return None
        self._look_at = now + self._look_every_s
        self._looked_at = now
        if self._collector.reports and self._first_report_at == math.inf:
            self._first_report_at = now
        picture = self._collector.assumed() if self._believes else self._collector.picture(now)
        summed = summed or self._summed
        why = self._replan or self._why(picture, policy, summed, now)
        if not why:
            return None
        self._replan = ""
        self._asked_at = now
        self._reports = self._collector.reports
        if self._looked is not None or self._enough(picture, policy, now):
            self._looked = picture
        self._planned_for = picture
        self._other_network = bool(picture.routed) and not self._routed
        self._routed = picture.routed
        self._summed, self._summed_anew_at = summed, math.inf
        self._number += 1
        self.reason = why
        explores = self._plan.explore and not self._believes  # what is believed need not be measured
        self._asked = Formation.of(
            picture,
            number=self._number,
            topology=self._plan.topology,
            in_force=policy,
            tensors=summed.tensors,
            chunk_bytes=summed.chunk_bytes,
            num_roots=self._plan.num_roots,
            hub=self._plan.hub,
            custom=self._plan.custom,
            seed=self._plan.seed,
            known=self._known or bool(picture.measured),
            auxiliary=self._plan.auxiliary,
            # What no tree uses changes, too, and nobody would see it: to have measured it once is not enough.
            unmeasured=sorted(picture.network.linked_pairs(), key=picture.measured.__contains__)
            if explores
            else (),
            measured=tuple(picture.measured) if explores else (),
            frozen_roots=self._roots,
            frozen_weights=self._weights,
            frozen_leads=self._leads,
        )
        return self._asked

    def formed(self, answer: Formed, policy: Policy, now: float) -> Policy | None:
        """Return the policy that is to follow `policy`, now in force, if what was formed is worth it."""
        asked = self._asked
        if asked is None or answer.number != asked.number:
            return None  # of a formation that was given up
        self._asked = None
        why = self.reason
        found = answer.policy
        if found is None:
            self.reason = f"{why}; no new policy: {answer.problem}"
            self._in_vain()
            return None
        if answer.only_detours:
            self.reason = f"{why}; the same trees, other auxiliary paths"
            return self._next(found, policy)
        takes_over = _is_worth_moving(answer)
        keeps_begun = takes_over and answer.seconds_before <= _MOVING_GAIN * answer.seconds
        found = msgspec.structs.replace(found, takes_over=takes_over, keeps_begun=keeps_begun)
        times = (
            f"{format_duration(answer.seconds)} instead of {format_duration(answer.seconds_before)} predicted"
            if answer.seconds_before < math.inf
            else f"{format_duration(answer.seconds)} predicted"
        )
        errors = [link.error for link in asked.links]
        better = (
            answer.seconds < answer.seconds_before  # what was measured says nothing, and its errors neither
            if self._other_network
            else _is_better(answer, statistics.median(errors))
        )
        if not better:
            self._in_vain()
            self._doubtful = answer.seconds_before > (1 + _LEAST_GAIN) * answer.seconds
            self.reason = f"{why}; no new policy: {times}, within what is uncertain of the estimates"
            return None
        self._patience, self._doubtful = 1, False
        self.reason = f"{why}; {times}"
        assert self._planned_for is not None
        rates = rates_of(self._planned_for.network, pairs_of(found) | self._planned.keys())
        if takes_over:
            slow = sorted(pair for pair, was in self._planned.items() if rates[pair] < _SLOW * was)
            found = msgspec.structs.replace(found, slow=tuple(slow))
        if takes_over and not keeps_begun:
            self._planned = rates
        else:
            self._planned = {pair: max(rate, self._planned.get(pair, 0.0)) for pair, rate in rates.items()}
        return self._next(found, policy)

    def go_back(self, before: Policy, before_s: float, after_s: float, policy: Policy) -> Policy:
        """Return the policy that is to follow `policy`, now in force: the one before, which was better.

        Args:
            before: that one.
            before_s: what rounds took under it, in s.
            after_s: what they take under `policy`.
            policy: the one in force.
        """
        self._in_vain()
        times = f"rounds take {format_duration(after_s)}, and took {format_duration(before_s)}"
        self.reason = f"back to the trees of version {before.version}: {times}"
        return msgspec.structs.replace(
            before, version=policy.version + 1, reason=self.reason, takes_over=False
        )

    # ------------------------------------------------------------------------------------------------ inside

    def _in_vain(self) -> None:
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._doubtful = False

    def _next(self, found: Policy, policy: Policy) -> Policy:
        return msgspec.structs.replace(
            found, version=policy.version + 1, reason=f"{self.reason}; {found.reason}"
        )

    def _why(self, picture: NetworkEstimate, policy: Policy, summed: Summed, now: float) -> str:
        """Return what speaks for a look, for a person; empty: nothing."""
        early = now < self._asked_at + self._plan.update_time_s
        if picture.routed != self._routed and now >= self._asked_at + self._look_every_s:
            every = len(picture.routed) + len(picture.network.links)
            return f"{len(picture.routed)} of {every} pairs of nodes talk by way of others, say latencies"
        if self._looked is None:
            return "" if early and not self._routed else self._enough(picture, policy, now)
        if now >= self._summed_anew_at and not _alike(summed, self._summed):
            return (
                f"the job sums {format_bytes(summed.bytes)}, and the policy is for "
                f"{format_bytes(self._summed.bytes)}"
            )
        if self._collector.reports == self._reports:
            return ""
        change, what = moved(self._looked, picture, self._plan.update_rate, summed.chunk_bytes)
        changed = bool(self._collector.changes) and self._collector.changes[-1] > self._asked_at
        patience = 1 if changed else min(self._patience, _LEAST_PATIENCE)
        at_once = now >= self._asked_at + patience * self._look_every_s
        if change > math.log1p(_LARGE * self._plan.update_rate) and (at_once or not early):
            return what
        if early or now < self._asked_at + self._patience * self._plan.update_time_s:
            return ""
        return what or ("the estimates are better now" if self._doubtful else "")

    def _enough(self, picture: NetworkEstimate, policy: Policy, now: float) -> str:
        """Return that the network is known well enough to plan for it, if it is."""
        used = pairs_of(policy) - picture.routed
        measured = len(used & picture.measured)
        long = now - self._first_report_at >= _LONG_ENOUGH * self._plan.update_time_s
        if not measured or (measured < _ENOUGH * len(used) and not long):
            return ""
        return f"{len(picture.measured)} of {len(picture.network.links)} links are measured"


def _is_better(answer: Formed, error: float) -> bool:
    """Return whether a new policy is better by more than noise explains; `error`: of a typical link."""
    if answer.seconds_before == math.inf:
        return True
    least = (1 + max(_LEAST_GAIN, error)) * answer.seconds
    return answer.seconds_before > least and answer.gain > _SURE * answer.doubt


def _is_worth_moving(answer: Formed) -> bool:
    """Return whether rounds that are under way should go over to the new policy, too."""
    return answer.seconds + _MOVING_S < answer.seconds_before < math.inf


def _alike(one: Summed, other: Summed) -> bool:
    """Return whether what is best for one should do for the other."""
    large, small = max(one.bytes, other.bytes), min(one.bytes, other.bytes)
    return large <= (1 + _OTHER_SIZE) * small and one.chunk_bytes == other.chunk_bytes
