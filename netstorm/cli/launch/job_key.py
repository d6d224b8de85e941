"""The key of a launched job: fresh for each job, and handed over without a trace.

It is in memory alone (memfd_create(2)), and its path, /proc/PID/fd/N, is what NETSTORM_KEY_FILE says. Only
this user can open that, and it vanishes with the process that holds it: the launcher, or on another host the
supervisor, which reads the key from its standard input.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from netstorm.errors import SettingsError
from netstorm.pslite.keys import JobKey

__all__ = ["KEY_FILE", "fresh_or_given", "hold_key"]

KEY_FILE: Final = "NETSTORM_KEY_FILE"


def fresh_or_given(environment: Mapping[str, str], *, with_scheduler: bool) -> JobKey | None:
    """Return the key of a job that is about to be started; None: its connections are plain.

    Args:
        environment: of its processes. A key file there wins over a fresh key.
        with_scheduler: whether the scheduler is started here; one that runs already knows no fresh key.

    Raises:
        SettingsError: the key file there cannot be used.
    """
    if environment.get("NETSTORM_SECURITY", "").strip().lower() == "off":
        return None
    given = environment.get(KEY_FILE, "").strip()
    if given:
        return JobKey.load(Path(given))
    return JobKey.fresh() if with_scheduler else None


def hold_key(text: str) -> str:
    """Keep a key file's contents in memory, and return the path at which this user's processes find it.

    Raises:
        SettingsError: the system has no files in memory (it is not Linux).
    """
    try:
        descriptor = os.memfd_create("netstorm-job-key", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise SettingsError(
            f"no file in memory for the job's key: {error}; make one with `netstorm keys new`, and set "
            f"{KEY_FILE}"
        ) from None
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"
