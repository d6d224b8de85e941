"""Adapt the policy to the network: why a policy is formed anew, and whether the result is installed. Pure.

Every `UPDATE_TIME` seconds a policy is formed if a link has changed by more than `UPDATE_RATE`, and by more
than the error of measuring it, since the last time. A large change need not wait for that. A policy is also
formed as soon as the job's workload is known, if it is not what was assumed. Of a network about which nothing
was known, enough must be measured first. The result is installed if it is clearly better (`acceptance`).
"""

from __future__ import annotations

import math
import statistics
from typing import Final

import msgspec

from netstorm.scheduler.awareness.collector import Collector
from netstorm.scheduler.awareness.network_change import largest_change
from netstorm.scheduler.awareness.network_estimate import NetworkEstimate
from netstorm.scheduler.policies.acceptance import Takeover, is_better
from netstorm.scheduler.policies.assumptions import InitialAssumptions, Workload
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult, tree_pairs
from netstorm.scheduler.policies.update_schedule import SETTLE_S, UpdateSchedule
from netstorm.topology.policy import Policy
from netstorm.units import format_bytes, format_duration

__all__ = ["Adaptation"]

_ENOUGH: Final = 2 / 3
"""Part of the links in use that must be measured before the first policy for measured rates: the others are
planned as the slower ones of these (docs/measurements/awareness.md, "Without any knowledge: simulated
networks").
"""

_LONG_ENOUGH: Final = 3
"""Update times after which fewer will do: links may carry chunks too small to measure them."""

_LARGE: Final = 3.0
"""A change of so many times UPDATE_RATE need not wait for UPDATE_TIME."""


class Adaptation:
    """Decides; its owner has policies formed and installs what `decide` returns.

    Attributes:
        reason: why a policy was last formed, or what became of it; for a person.
    """

    def __init__(
        self, assumptions: InitialAssumptions, collector: Collector, first: Policy, now: float
    ) -> None:
        """Begin with the policy that was formed before anything was measured.

        Args:
            assumptions: what `first` was formed for.
            collector: where reports go.
            first: the policy in force.
            now: the time.
        """
        self.reason = ""
        self._settings: Final = assumptions.settings
        self._collector: Final = collector
        self._known: Final = assumptions.known
        self._trusted: Final = assumptions.known and assumptions.trusted
        self._workload = assumptions.workload
        self._workload_changes_at = math.inf
        """When a changed workload has settled; inf: it is the one that was planned for."""
        self._planned: NetworkEstimate | None = collector.estimate(now) if assumptions.known else None
        """The network that was last planned for; None: not enough of it was measured."""
        self._routed: frozenset[tuple[int, int]] = frozenset()
        """Its pairs that are no links."""
        self._takeover: Final = Takeover(self._planned.network if self._planned else None, first)
        self._schedule: Final = UpdateSchedule(
            assumptions.settings.update_time_s, len(assumptions.network.links), now
        )
        self._first_report_at = math.inf
        self._reports = 0
        """Reports when a policy was last formed."""
        self._requested = ""
        """Why a policy is to be formed at once; empty: it is not."""
        self._asked: FormationRequest | None = None
        self._asked_for: NetworkEstimate | None = None
        """The network of that request."""
        self._routes_are_new = False
        """For the policy in force, pairs were taken for links that are none."""
        self._number = 0
        self._frozen: Final = first if assumptions.settings.freeze_roots else None

    @property
    def urgent(self) -> bool:
        """Whether a policy is to be formed at once."""
        return bool(self._requested)

    @property
    def forming(self) -> bool:
        """Whether a result is awaited."""
        return self._asked is not None

    @property
    def workload_changed(self) -> bool:
        """Whether the policy in force is for another workload."""
        return self._workload_changes_at < math.inf

    def due(self) -> float:
        """Return the time of the next `poll`."""
        if self._asked is not None:
            return math.inf
        if self._requested:
            return -math.inf
        if self.workload_changed:
            return self._schedule.due_for_keys(self._workload_changes_at)
        return self._schedule.due(self._collector.changes, self._collector.latency_changed_at)

    def record_workload(self, workload: Workload, now: float) -> None:
        """Record what the job sums by now."""
        if self._planned is not None:
            similar = workload.is_similar(self._workload)
            self._workload_changes_at = math.inf if similar else now + SETTLE_S

    def request(self, why: str) -> None:
        """Form a policy at once: another network is assumed."""
        self._requested = why

    def poll(self, policy: Policy, workload: Workload | None, now: float) -> FormationRequest | None:
        """Return a request to form a policy, if one is needed.

        Args:
            policy: the one in force.
            workload: what the job sums; None: not known yet.
            now: the time.
        """
        if now < self.due():
            return None
        self._schedule.polled(now)
        if self._collector.reports and self._first_report_at == math.inf:
            self._first_report_at = now
        estimate = self._collector.prior_estimate() if self._trusted else self._collector.estimate(now)
        workload = workload or self._workload
        why = self._requested or self._reason(estimate, policy, workload, now)
        if not why:
            return None
        self._requested, self.reason = "", why
        self._schedule.formed_at = now
        self._reports = self._collector.reports
        if self._planned is not None or self._measured_enough(estimate, policy, now):
            self._planned = estimate
        self._routes_are_new = bool(estimate.routed) and not self._routed
        self._routed = estimate.routed
        self._workload, self._workload_changes_at = workload, math.inf
        self._number += 1
        self._asked_for = estimate
        self._asked = self._request(estimate, policy)
        return self._asked

    def decide(self, result: FormationResult, policy: Policy) -> Policy | None:
        """Return the policy that follows `policy`, now in force, if the result is worth it."""
        asked, estimate = self._asked, self._asked_for
        if asked is None or estimate is None or result.number != asked.number:
            return None  # of a formation that was given up
        self._asked = None
        found = result.policy
        if found is None:
            self.reason += f"; no new policy: {result.problem}"
            self._schedule.came_to(something=False)
            return None
        if result.only_detours:
            self.reason += "; the same trees, other auxiliary paths"
            return self._next(found, policy)
        times = (
            f"{format_duration(result.seconds)} instead of {format_duration(result.seconds_before)} predicted"
            if result.seconds_before < math.inf
            else f"{format_duration(result.seconds)} predicted"
        )
        better = (
            result.seconds
            < result.seconds_before  # rates and errors were measured beside pairs that are no links
            if self._routes_are_new
            else is_better(result, statistics.median(asked.errors))
        )
        self._schedule.came_to(something=better)
        if not better:
            self.reason += f"; no new policy: {times}, within what is uncertain of the estimates"
            return None
        self.reason += f"; {times}"
        return self._next(self._takeover.applied(result, found, estimate.network), policy)

    # ------------------------------------------------------------------------------------------------ inside

    def _request(self, estimate: NetworkEstimate, policy: Policy) -> FormationRequest:
        explores = self._settings.explore and not self._trusted  # what is trusted need not be measured
        # Links that no tree uses change, too: measuring them once is not enough.
        unmeasured = (
            sorted(estimate.network.linked_pairs(), key=estimate.measured.__contains__) if explores else ()
        )
        return FormationRequest.of(
            estimate,
            number=self._number,
            topology=self._settings.topology,
            options=self._settings.options(
                self._workload,
                known=self._known or bool(estimate.measured),
                unmeasured=unmeasured,
                measured=estimate.measured if explores else (),
            ),
            in_force=policy,
            frozen=self._frozen,
        )

    def _next(self, found: Policy, policy: Policy) -> Policy:
        return msgspec.structs.replace(
            found, version=policy.version + 1, reason=f"{self.reason}; {found.reason}"
        )

    def _reason(self, estimate: NetworkEstimate, policy: Policy, workload: Workload, now: float) -> str:
        """Return why a policy is to be formed, for a person; empty: it is not."""
        if estimate.routed != self._routed and self._schedule.allows(now, large=True):
            every = len(estimate.routed) + len(estimate.network.links)
            return f"by latencies, {len(estimate.routed)} of {every} pairs of nodes are routes over others"
        if self._planned is None:
            may = self._schedule.allows_first(now) or self._routed
            return self._measured_enough(estimate, policy, now) if may else ""
        if now >= self._workload_changes_at and not workload.is_similar(self._workload):
            return (
                f"the job sums {format_bytes(workload.bytes)}, and the policy is for "
                f"{format_bytes(self._workload.bytes)}"
            )
        if self._collector.reports == self._reports:
            return ""
        rate = self._settings.update_rate
        change, what = largest_change(self._planned, estimate, rate, workload.chunk_bytes)
        large = change > math.log1p(_LARGE * rate)
        return what if self._schedule.allows(now, large=large) else ""

    def _measured_enough(self, estimate: NetworkEstimate, policy: Policy, now: float) -> str:
        """Return, for a person, that enough is measured to plan for it; empty: it is not."""
        used = tree_pairs(policy) - estimate.routed
        measured = len(used & estimate.measured)
        long = now - self._first_report_at >= _LONG_ENOUGH * self._settings.update_time_s
        if not measured or (measured < _ENOUGH * len(used) and not long):
            return ""
        return f"{len(estimate.measured)} of {len(estimate.network.links)} links are measured"
