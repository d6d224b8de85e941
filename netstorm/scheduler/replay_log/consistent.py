"""Whether what a replay log says can be one job. Pure.

Checksums find damage. This finds logs that another program has written, or somebody: a scheduler that went on
with one would fail later, and say less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

from netstorm.protocol.codecs import ITEM_BYTES
from netstorm.protocol.messages import KeySpec, Member
from netstorm.scheduler.replay_log import records as r
from netstorm.topology.policy import Policy

__all__ = ["contradiction"]

_MOST: Final = 2**48
"""Of rounds, barriers and views: no job lasts as long."""


class JobState(Protocol):
    """What is checked of a replayed job; see `ReplayedJob`."""

    @property
    def began(self) -> r.Began: ...

    @property
    def policies(self) -> Mapping[int, Policy]: ...

    @property
    def version(self) -> int: ...

    @property
    def keys(self) -> Sequence[tuple[int, KeySpec]]: ...

    @property
    def rows(self) -> Sequence[Sequence[tuple[int, int]]]: ...

    @property
    def granted(self) -> Sequence[int]: ...

    @property
    def members(self) -> Sequence[Member]: ...

    @property
    def barriers(self) -> Sequence[int]: ...

    @property
    def finished(self) -> Collection[int]: ...


def contradiction(job: JobState) -> str:
    """Return what cannot be in a job's state; empty: nothing."""
    size = len(job.members)
    present = [member.incarnation for member in job.members if member.port]
    smallest, largest, enough = job.began.chunks
    if [member.rank for member in job.members] != list(range(size)) or len(set(present)) < len(present):
        return "members that are not one process a rank"
    if any(policy.size != size for policy in job.policies.values()):
        return f"policies for other numbers of nodes than {size}"
    if job.version not in job.policies:
        return f"no policy {job.version}, which is in force"
    if not 0 < smallest <= largest < _MOST or enough < 1:
        return f"chunks of {smallest} to {largest} bytes, of which {enough} are enough"
    if job.began.owners and (len(job.began.owners) != size or min(job.began.owners) < 0):
        return f"{len(job.began.owners)} owners' weights for {size} nodes"
    if not set(job.finished) <= set(range(size)) or not _are_counts(job.barriers):
        return "ranks that there are not, or counts of barriers that nobody reaches"
    names = [(spec.namespace, spec.name) for _, spec in job.keys]
    if len(set(names)) < len(names) or any(_is_odd(spec, size) for _, spec in job.keys):
        return "keys that no node registers"
    if not all(rows and _are_counts([start for start, _ in rows]) for rows in job.rows):
        return "keys without a policy"
    if any(version < 0 for rows in job.rows for _, version in rows) or not _are_counts(job.granted):
        return "rounds that nobody reaches"
    return ""


def _are_counts(numbers: Sequence[int]) -> bool:
    return all(0 <= number < _MOST for number in numbers)


def _is_odd(spec: KeySpec, size: int) -> bool:
    ranks = list(spec.members)
    return (
        spec.dtype not in ITEM_BYTES
        or min(spec.shape, default=0) < 0
        or ranks != sorted(set(ranks))
        or not set(ranks) <= set(range(size))
    )
