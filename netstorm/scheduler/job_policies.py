"""The policies of one job: which one is in force, when a new one is wanted, and what replaces it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

from netstorm.observe.log import Counters
from netstorm.scheduler.job import Job
from netstorm.scheduler.observe.policy_history import PolicyHistory
from netstorm.scheduler.policies.assumptions import InitialAssumptions, workload_of
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.scheduler.policies.policy_check import check_policy, placeholder_policy
from netstorm.topology.policy import Policy

__all__ = ["FirstPolicy", "JobPolicies"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPolicy:
    """The policy that a job begins under, if it was formed only once all nodes had joined."""

    policy: Policy
    planned: InitialAssumptions
    """What it was formed for, and later policies are."""
    aware: bool
    """Later policies follow what is measured."""
    link_share: float = 1.0
    """The part of each link's rate that the job plans with."""


class JobPolicies:
    """The policy in force, from before the job begins to its end.

    Attributes:
        ready: the first policy is known; if not, it is formed once all nodes have joined.
        assumed: what policies that follow measurements are formed for; None: policies do not follow them.
        planned: what policies are formed for when links fail, even if nothing is `assumed`.
        link_share: the part of each link's rate that the job plans with.
        history: when the policy in force was installed, and those before it.
    """

    def __init__(
        self,
        first: Policy | None,
        *,
        nodes: int,
        assumed: InitialAssumptions | None,
        planned: InitialAssumptions | None,
        counters: Counters,
        now: float,
    ) -> None:
        """Begin.

        Args:
            first: the policy that the job begins under, formed for what is `assumed`. None: see `set_first`.
            nodes: of the job.
            assumed: see the attribute.
            planned: see the attribute.
            counters: count the policies that are installed.
            now: the time.

        Raises:
            UsageError: the policy is for another number of nodes.
        """
        self.ready = first is not None
        self.assumed = assumed
        self.planned = planned
        self.link_share = 1.0
        self._nodes: Final = nodes
        self._counters: Final = counters
        self._first = placeholder_policy(nodes) if first is None else first
        check_policy(self._first, nodes=nodes, after=-1)
        self.history = PolicyHistory(self._first, now)
        self._job: Job | None = None

    @property
    def in_force(self) -> Policy:
        """The policy of all rounds that no node has been granted yet."""
        return self._first if self._job is None else self._job.rounds.policy

    def set_first(self, first: FirstPolicy, now: float) -> None:
        """Set the policy that the job begins under.

        Raises:
            UsageError: the policy is for another number of nodes.
        """
        check_policy(first.policy, nodes=self._nodes, after=-1)
        self.ready = True
        self._first, self.link_share = first.policy, first.link_share
        self.assumed, self.planned = first.planned if first.aware else None, first.planned
        self.history = PolicyHistory(first.policy, now)

    def begin(self, job: Job) -> None:
        """Go on with the policies of a job whose nodes have all joined."""
        self._job = job

    def install(self, policy: Policy, now: float) -> None:
        """Let a new policy apply, in each key, from the first round that no node has been granted.

        Raises:
            UsageError: its version is not newer than all before, or it is for another number of nodes.
        """
        job = self._job
        if job is None:
            check_policy(policy, nodes=self._nodes, after=self._first.version)
            self._first = policy
        else:
            job.rounds.install(policy)
            if job.reproducible:
                _log.warning(
                    "policy version %d (%s): sums are rounded otherwise from here on than in a run without "
                    "this (NETSTORM_REPRODUCIBLE)",
                    policy.version,
                    policy.reason,
                )
        self.history.installed(policy, now)
        self._counters.add("policies")

    def set_link_share(self, share: float, why: str) -> None:
        """Plan with another part of each link's rate from now on; `why`: for a person."""
        self.link_share = share
        if self._job is not None and self._job.awareness is not None:
            self._job.awareness.set_link_share(share, why)

    def due(self) -> float:
        """Return when `check` may have something to do."""
        job = self._job
        if job is None:
            return math.inf
        due = job.link_failures.due()
        return due if job.awareness is None else min(due, job.awareness.due())

    def check(self, now: float) -> FormationRequest | None:
        """Return the formation to ask for, if a new policy is wanted. One that needs none is installed."""
        if self._job is None:
            return None
        wanted = _wanted(self._job, now)
        if isinstance(wanted, Policy):
            self.install(wanted, now)
            return None
        return wanted

    def formed(self, answer: FormationResult, now: float) -> None:
        """Install the result of a formation, if it is worth it."""
        job = self._job
        if job is None:
            return
        in_force, found = job.rounds.policy, None
        if answer.number < 0:  # `LinkFailures` numbers its formations below 0
            found = job.link_failures.formed(answer, in_force)
        elif job.awareness is not None:
            found = job.awareness.decide(answer, in_force)
            if found is not None and not job.link_failures.usable(found):
                return
        if found is not None:
            self.install(found, now)


def _wanted(job: Job, now: float) -> Policy | FormationRequest | None:
    """Return the policy to install or the formation to ask for, if there is one. Failed links come first."""
    awareness, policy = job.awareness, job.rounds.policy
    if job.link_failures.due() <= now:
        estimate = None if awareness is None else awareness.collector.estimate(now)
        restoring = awareness is None or not awareness.active
        return job.link_failures.check(policy, workload_of(job.rounds.keys), estimate, restoring=restoring)
    return None if awareness is None else awareness.poll(policy, job.rounds.keys, now)
