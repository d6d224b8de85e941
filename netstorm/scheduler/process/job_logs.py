"""The replay logs of a scheduler of several jobs: one file for each job, in one folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from netstorm.errors import UsageError
from netstorm.scheduler.jobs.job_settings import job_settings
from netstorm.scheduler.jobs.job_slot import LoggedJob
from netstorm.scheduler.policies.initial_policy import initial_assumptions
from netstorm.scheduler.process.state_file import StateFile
from netstorm.settings import Settings

__all__ = ["JobLogs"]

_log = logging.getLogger(__name__)


class JobLogs:
    """The logs in one folder. It must be closed."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if it is missing.

        Raises:
            UsageError: the folder cannot be used.
        """
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"NETSTORM_STATE_DIR={str(folder)!r}: {error.strerror}; it must be a folder in which files "
                "can be written"
            ) from None
        self._folder: Final = folder
        self._files: dict[Path, StateFile] = {}

    def open(self, job: str) -> StateFile:
        """Open the log of a job that has none open; see `StateFile`."""
        file = StateFile(self._folder, job)
        self._files[file.path] = file
        return file

    def resumed(self, settings: Settings, network_nodes: int) -> list[LoggedJob]:
        """Return the jobs to go on with.

        A log that cannot be used is left as it is. Nodes that ask for a job of that name are told why it
        cannot be opened.

        Args:
            settings: the scheduler's.
            network_nodes: how many nodes NETSTORM_NETWORK describes; 0: there is no such file.
        """
        jobs = []
        for path in sorted(self._folder.glob("*.log")):
            try:
                file = self.open(path.stem)
                job = file.replayed
                if job is None:
                    file.close()
                    continue
                own = job_settings(
                    settings,
                    job.began.job,
                    len(job.members),
                    job.began.first_node_settings,
                    network_nodes=network_nodes,
                )
                jobs.append(LoggedJob(file, job, own, initial_assumptions(own)))
            except UsageError as error:
                _log.error("%s", error)
        return jobs

    def close(self) -> None:
        """Close all logs."""
        for file in self._files.values():
            file.close()
