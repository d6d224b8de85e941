"""What a node knows of its job: all that another scheduler needs to take it over without a log. Pure."""

from __future__ import annotations

from netstorm.kvstore.node.lifecycle import Lifecycle
from netstorm.protocol.messages import JobReport

__all__ = ["job_report"]


def job_report(lifecycle: Lifecycle) -> JobReport:
    """Return the report of a node that has joined."""
    joined, roster = lifecycle.require_joined(), lifecycle.roster
    keys = sorted(lifecycle.registration.granted_keys(), key=lambda key: key.identity)
    rows = {} if roster.elastic else joined.bindings.rows()
    older = {version for table in rows.values() for _, version in table} - {joined.policy.version}
    plans = (joined.bindings.plan(version) for version in sorted(older))
    return JobReport(
        members=roster.members,
        policy=joined.policy,
        specs=tuple(key.spec for key in keys),
        grants=tuple(key.grant for key in keys),
        granted=joined.bindings.granted(),
        finished=roster.finished(),
        barriers=lifecycle.barriers.entered,
        rows=rows,
        policies=tuple(plan.policy for plan in plans if plan is not None),
        majority=lifecycle.scheduler.majority,
        reproducible=joined.reproducible,
    )
