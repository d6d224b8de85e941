"""Several jobs on one scheduler, and what each of them may take of the network."""

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
    "staleness",
    "job_weight",
)
"""Settings of the whole job, by attribute. What the scheduler was told counts, and a node that was told
something else is refused; a scheduler of several jobs takes what it was not told from each job's first node.
"""

_LARGEST_DSCP: Final = 63
"""Six bits (RFC 2474)."""


@dataclass(frozen=True, kw_only=True)
class JobsSettings:
    """Several jobs on one scheduler, and what each of them may take of the network."""

    jobs: int = setting(
        "NETSTORM_JOBS",
        whole(0),
        1,
        "jobs",
        "how many jobs the scheduler serves, at once and one after another, until it ends; nodes say by "
        "NETSTORM_JOB which one is theirs; 0: any number, it ends when it is stopped",
    )
    most_jobs: int = setting(
        "NETSTORM_MOST_JOBS",
        whole(1),
        16,
        "jobs",
        "how many jobs a scheduler of several serves at once; one more is refused",
    )
    job_weight: int = setting(
        "NETSTORM_JOB_WEIGHT",
        whole(1, 1000),
        1,
        "",
        "weight of this node's job among those of its scheduler: trees are planned with its share of each "
        "link that NETSTORM_NETWORK describes; it is planning only, nobody is slowed down",
    )
    dscp: int = setting(
        "NETSTORM_DSCP",
        whole(0, _LARGEST_DSCP),
        0,
        "",
        "mark (differentiated services code point) of the packets that this node and other nodes exchange, "
        "for networks that treat marks differently; 0: none",
    )
