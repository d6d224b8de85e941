"""Checks of a request to join: whether a node can be in this job, whichever other nodes there are."""

from __future__ import annotations

import re
from typing import Final

from netstorm.protocol.messages import Join
from netstorm.scheduler.membership.member_texts import format_address
from netstorm.scheduler.options import SchedulerOptions

__all__ = ["join_problem"]

_NAME: Final = re.compile(r"[A-Za-z0-9_.:%-]{1,255}", re.ASCII)
_SITE: Final = re.compile(r"[^\s,;/]{0,64}")
_LAST_PORT: Final = 65_535
_SHOWN: Final = 100


def join_problem(join: Join, options: SchedulerOptions) -> str | None:
    """Return why a node cannot be in a job with these options; None if it can."""
    if not (_NAME.fullmatch(join.host) and 1 <= join.port <= _LAST_PORT and _SITE.fullmatch(join.site)):
        return (
            f"a node says that it can be reached at host {join.host[:_SHOWN]!r}, port {join.port}, site "
            f"{join.site[:_SHOWN]!r}: no node can use that; check its DMLC_NODE_HOST, "
            "NETSTORM_ADVERTISED_PORT and NETSTORM_SITE"
        )
    name = format_address(join.host, join.port, join.site)
    if join.release != options.release:
        return (
            f"the node at {name} runs NetStorm {join.release or '(unknown)'}, the scheduler "
            f"{options.release or '(unknown)'}: install the same release everywhere"
        )
    nodes = options.begin_with or options.num_workers
    if join.num_workers != nodes:
        return (
            f"the node at {name} was started with DMLC_NUM_WORKER={join.num_workers}, "
            f"{options.settings_from} with DMLC_NUM_WORKER={nodes}: give both the same number "
            "of nodes"
        )
    if not -1 <= join.asked_rank < options.num_workers:
        return (
            f"the node at {name} asks for rank {join.asked_rank} (NETSTORM_RANK) in a job of "
            f"{options.num_workers} nodes (the scheduler's "
            f"{'NETSTORM_ELASTIC' if options.elastic else 'DMLC_NUM_WORKER'}): ranks are 0 to "
            f"{options.num_workers - 1}, or -1 for any"
        )
    differing = [
        f"{variable}={value} at the node at {name}, {options.job_wide[variable]} at {options.settings_from}"
        for variable, value in sorted(join.must_agree.items())
        if options.job_wide.get(variable, value) != value
    ]
    if differing:
        return (
            "; ".join(differing) + ": this holds for the whole job; set it at the scheduler, and at nodes "
            "to the same or not at all"
        )
    return None
