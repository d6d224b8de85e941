"""Settings for several jobs on one scheduler: how many, and their shares of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from netstorm.settings.kinds import setting, whole

__all__ = ["JOB_WIDE", "JobsSettings"]

JOB_WIDE: Final = (
    "chunk_size",
    "largest_chunk",
    "num_roots",
    "topology",
    "hub",
    "uneven",
    "elastic",
    "standbys",
    "staleness",
    "loss_bound",
    "deadline_s",
    "dgt",
    "dgt_important",
    "reproducible",
    "job_weight",
)
"""Settings of the whole job, by attribute. The scheduler's value counts; a node that was given another one is
refused. A scheduler of several jobs takes a value that it was not given from each job's first node.
"""

_LARGEST_DSCP: Final = 63
"""Six bits (RFC 2474)."""


@dataclass(frozen=True, kw_only=True)
class JobsSettings:
    """Several jobs on one scheduler: how many, and their shares of the network."""

    jobs: int = setting(
        "NETSTORM_JOBS",
        whole(0),
        1,
        "jobs",
        "number of jobs that the scheduler serves before it ends, at the same time or in turn; NETSTORM_JOB "
        "names the job of a node; 0: no limit, the scheduler runs until it is stopped",
    )
    most_jobs: int = setting(
        "NETSTORM_MOST_JOBS",
        whole(1),
        16,
        "jobs",
        "largest number of jobs that a scheduler serves at the same time; further jobs are refused",
    )
    job_weight: int = setting(
        "NETSTORM_JOB_WEIGHT",
        whole(1, 1000),
        1,
        "",
        "weight of this node's job among the jobs of its scheduler: its trees are planned with this share of "
        "each link in NETSTORM_NETWORK; it affects planning only, no traffic is throttled",
    )
    dscp: int = setting(
        "NETSTORM_DSCP",
        whole(0, _LARGEST_DSCP),
        0,
        "",
        "DSCP mark (differentiated services code point) on the packets that this node exchanges with other "
        "nodes, for networks with traffic classes; 0: no mark",
    )
