"""Admission control of jobs: whether a scheduler of several opens one more, and with which settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from netstorm.errors import SettingsError
from netstorm.settings import JOB_WIDE, Settings, declarations

__all__ = ["check_room", "job_settings"]

_MOST_NODES: Final = 1024
"""Nodes of a job whose size the scheduler does not know: a bound on what a process can ask for."""

_LISTED: Final = 12
"""Most jobs that one text names."""


def check_room(settings: Settings, name: str, present: Sequence[str], *, ended: int, stopping: bool) -> None:
    """Check that there is room for one more job.

    Args:
        settings: the scheduler's.
        name: of the job.
        present: names of the jobs that have not ended.
        ended: how many jobs have ended.
        stopping: no further job may begin.

    Raises:
        SettingsError: there is none; says why, and what to do.
    """
    if stopping:
        raise SettingsError(f"job {_short(name)} cannot begin: this scheduler is being stopped")
    names = ", ".join(present[:_LISTED]) + (", …" if len(present) > _LISTED else "")
    if len(present) >= settings.most_jobs:
        raise SettingsError(
            f"no room for job {_short(name)}: this scheduler serves {len(present)} jobs ({names}), as many "
            "as it may at once (NETSTORM_MOST_JOBS at the scheduler); wait for one of them to end, or start "
            "another scheduler"
        )
    if settings.jobs and ended + len(present) >= settings.jobs:
        raise SettingsError(
            f"no room for job {_short(name)}: this scheduler was started for {settings.jobs} jobs (--jobs, "
            f"NETSTORM_JOBS); {ended} have ended, and {len(present)} are here"
            + (f" ({names})" if present else "")
        )


def job_settings(
    settings: Settings, name: str, size: int, first_node: Mapping[str, str], *, network_nodes: int
) -> Settings:
    """Return the settings of a job: the scheduler's own, and those of the first node where these have the
    default.

    Args:
        settings: the scheduler's.
        name: of the job.
        size: how many nodes it has, as the first node says.
        first_node: settings that were given to the first node, by variable.
        network_nodes: how many nodes NETSTORM_NETWORK describes; 0: there is no such file.

    Raises:
        SettingsError: no job can have these settings.
    """
    any_size = settings.source("num_workers") == "default"
    if any_size and not 1 <= size <= _MOST_NODES:
        raise SettingsError(
            f"the first node of job {_short(name)} says DMLC_NUM_WORKER={size}: expected 1 to {_MOST_NODES}; "
            "for larger jobs tell the scheduler DMLC_NUM_WORKER, too"
        )
    given = {
        attribute: first_node[variable]
        for attribute in JOB_WIDE
        if (variable := declarations()[attribute].variable) in first_node
        and settings.source(attribute) == "default"
    }
    size = size if any_size else settings.num_workers
    return settings.changed(
        job=name,
        num_workers=size,
        rank=-1,
        network_file=None if size == network_nodes else "",
        **given,
    )


def _short(name: str) -> str:
    return repr(name[:64])
