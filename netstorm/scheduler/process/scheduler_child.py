"""The scheduler that rank 0 starts beside itself if none is named, as a child process.

It outlives rank 0, so that it can tell the others if rank 0 dies. It ends by itself with the job, and with
rank 0 if that ends before the job has begun: its standard input is a pipe that rank 0 holds.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from netstorm import clock
from netstorm.errors import SchedulerLost
from netstorm.pslite.admission import load_credentials
from netstorm.settings import Settings, child_environment

__all__ = ["SchedulerChild", "start_scheduler"]

_COMMAND: Final = (sys.executable, "-m", "netstorm", "scheduler")

_START_S: Final = 60.0
"""Longest start: on a busy machine Python takes seconds to import what it needs."""

_END_S: Final = 10.0
"""Longest end, once all ranks have left."""

_SLICE_S: Final = 0.02


class SchedulerChild:
    """A scheduler under way.

    Attributes:
        address: HOST:PORT at which nodes reach it.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.address: Final = address
        self._process: Final = process

    def wait(self, limit_s: float | None = _END_S) -> None:
        """Wait for its end, which comes when all ranks have left; stop it if it does not come."""
        self._let_go()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.stop()

    def stop(self) -> None:
        """Stop it, and with it the job."""
        self._let_go()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _let_go(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def start_scheduler(settings: Settings, host: str, port: int = 0) -> SchedulerChild:
    """Start a scheduler for a job with these settings, at an address of this host.

    Args:
        settings: of the job.
        host: name or address at which nodes reach it.
        port: 0: any that is free.

    Raises:
        SchedulerLost: it does not start; its error output says why.
        SettingsError: an address that does not exist, or that others can reach while there is no key.
    """
    load_credentials(settings, host)  # here it is an error of the program; the scheduler would only exit
    with tempfile.TemporaryDirectory(prefix="netstorm-") as folder:
        ready = Path(folder) / "ready"
        process = subprocess.Popen(  # noqa: S603 -- our own command
            [*_COMMAND, "--host", host, "--port", str(port), "--ready-file", str(ready), "--beside-ranks"],
            env=child_environment(DMLC_ROLE=None, DMLC_NUM_WORKER=settings.num_workers, NETSTORM_RANK=None),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the ranks; the scheduler hears of it from them
        )
        deadline = clock.monotonic() + _START_S
        while not (ready.exists() and (address := ready.read_text().strip())):
            try:
                code = process.wait(_SLICE_S)
            except subprocess.TimeoutExpired:
                if clock.monotonic() < deadline:
                    continue
                SchedulerChild(process, "").stop()
                raise SchedulerLost(
                    f"the scheduler that rank 0 started at {host} was not ready within {_START_S:g} s; start "
                    "one by hand (netstorm scheduler) and name it in DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
                ) from None
            SchedulerChild(process, "").wait()
            raise SchedulerLost(
                f"the scheduler that rank 0 started at {host} has ended with exit code {code}; its output "
                "above says why"
            )
    return SchedulerChild(process, address)
