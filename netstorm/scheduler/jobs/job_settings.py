"""Whether a scheduler of several jobs opens one more, and with which settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from netstorm.errors import SettingsError
from netstorm.settings import JOB_WIDE, Settings, declarations

__all__ = ["check_room", "settings_of"]

_MOST_NODES: Final = 1024
"""Of a job whose number of nodes the scheduler was not told: whoever asks could ask for anything."""

_SHOWN: Final = 12


def check_room(settings: Settings, name: str, here: Sequence[str], *, ended: int, stopping: bool) -> None:
    """Check that there is room for one more job.

    Args:
        settings: the scheduler's.
        name: of the job.
        here: the names of those that have not ended.
        ended: how many have.
        stopping: no further one may begin.

    Raises:
        SettingsError: there is none; says why, and what to do.
    """
    if stopping:
        raise SettingsError(f"job {_short(name)} cannot begin: this scheduler is being stopped")
    names = ", ".join(here[:_SHOWN]) + (", …" if len(here) > _SHOWN else "")
    if len(here) >= settings.most_jobs:
        raise SettingsError(
            f"no room for job {_short(name)}: this scheduler serves {len(here)} jobs ({names}), as many as "
            "it may at once (NETSTORM_MOST_JOBS at the scheduler); wait for one of them to end, or start "
            "another scheduler"
        )
    if settings.jobs and ended + len(here) >= settings.jobs:
        raise SettingsError(
            f"no room for job {_short(name)}: this scheduler was started for {settings.jobs} jobs (--jobs, "
            f"NETSTORM_JOBS); {ended} have ended, and {len(here)} are here" + (f" ({names})" if here else "")
        )


def settings_of(
    settings: Settings, name: str, size: int, said: Mapping[str, str], *, described: int
) -> Settings:
    """Return the settings of a job: the scheduler's, and where it was not told, those of the first node.

    Args:
        settings: the scheduler's.
        name: of the job.
        size: how many nodes it has, as the first one says.
        said: what was given to that node, by variable.
        described: how many nodes NETSTORM_NETWORK has; 0: there is no such file.

    Raises:
        SettingsError: no job can be like that.
    """
    untold = settings.source("num_workers") == "default"
    if untold and not 1 <= size <= _MOST_NODES:
        raise SettingsError(
            f"the first node of job {_short(name)} says DMLC_NUM_WORKER={size}: expected 1 to {_MOST_NODES}; "
            "for larger jobs tell the scheduler DMLC_NUM_WORKER, too"
        )
    given = {
        attribute: said[variable]
        for attribute in JOB_WIDE
        if (variable := declarations()[attribute].variable) in said
        and settings.source(attribute) == "default"
    }
    size = size if untold else settings.num_workers
    return settings.changed(
        job=name,
        num_workers=size,
        rank=-1,
        network_file=None if size == described else "",
        **given,
    )


def _short(name: str) -> str:
    return repr(name[:64])
