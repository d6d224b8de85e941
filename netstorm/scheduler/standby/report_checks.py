"""Checks of what a node reports of its job: whether the parts fit together, and are the node's own. Pure.

A node could still report a job that never was. A standby scheduler goes on only with a majority of the newest
view's members, each of which has reported itself.
"""

from __future__ import annotations

from itertools import pairwise

from netstorm.errors import ProtocolViolation
from netstorm.protocol.codecs import ITEM_BYTES
from netstorm.protocol.messages import JobReport, Resume
from netstorm.scheduler.rounds.key_registry import MOST_KEYS

__all__ = ["check_report"]


def check_report(message: Resume, incarnation: int, user: str, places: int) -> None:
    """Check a node's report of its job, if there is one.

    Args:
        message: the node's.
        incarnation: of the node's process.
        user: text of the key that it has; empty: the job has none.
        places: most nodes that the job can have.

    Raises:
        ProtocolViolation: no correct node sends it.
    """
    report = message.job
    if report is None:
        return
    if (incarnation, user) not in {(one.incarnation, one.user) for one in report.members if one.port}:
        raise ProtocolViolation("a node reports a job that it is not a member of")
    problem = _problem(message, report, places)
    if problem:
        raise ProtocolViolation(f"a node reports a job with {problem}")


def _problem(message: Resume, report: JobReport, places: int) -> str:
    """Return what does not fit together; empty: nothing."""
    size = len(report.members)
    ranks = range(size)
    if size != places or [member.rank for member in report.members] != list(ranks):
        return f"{size} members: expected ranks 0 to {places - 1}, in order"
    present = [member.incarnation for member in report.members if member.port]
    if len(set(present)) < len(present):
        return "one process at two places"
    if report.policy.size != size or message.view < 0 or report.barriers < 0:
        return f"policy for {report.policy.size} nodes, view {message.view} and {report.barriers} barriers"
    names = [(spec.namespace, spec.name) for spec in report.specs]
    if [(one.namespace, one.name) for one in report.grants] != names or len(set(names)) < len(names):
        return f"{len(names)} keys and {len(report.grants)} numbers of others"
    if any(one.key >= other.key for one, other in pairwise(report.grants)):
        return "keys that are not in the order of their numbers"
    if any(min(one.key, one.offset, one.first_slot, one.chunk_size - 1) < 0 for one in report.grants):
        return "keys without a number or a place"
    if any(one.key >= MOST_KEYS for one in report.grants):
        return f"a key with a number of {MOST_KEYS} or more"
    if any(spec.dtype not in ITEM_BYTES or min(spec.shape, default=0) < 0 for spec in report.specs):
        return f"keys that cannot be summed: the types that can be are {', '.join(ITEM_BYTES)}"
    versions = {policy.version for policy in (report.policy, *report.policies)}
    if any(policy.size != size for policy in report.policies) or any(
        not rows or any(start < 0 or version not in versions for start, version in rows)
        for rows in report.rows.values()
    ):
        return "rounds under policies that it does not describe, or that are for another number of nodes"
    if min(report.granted, default=0) < 0 or not set(report.finished) <= set(ranks):
        return f"finished ranks {list(report.finished)[:16]}"
    return ""
