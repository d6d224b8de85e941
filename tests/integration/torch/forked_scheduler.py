"""The scheduler that rank 0 starts, forked from it: a new interpreter would need half a second."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any


def fork_schedulers() -> None:
    """From now on, in this process and those forked from it."""
    for name in ("cli.main", "cli.scheduler", "scheduler.process.scheduler_process"):
        importlib.import_module(f"netstorm.{name}")
    child = importlib.import_module("netstorm.scheduler.process.scheduler_child")
    vars(child)["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": _fork})


def _fork(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Run `python -m netstorm ...` in a child process. It takes what `subprocess.Popen` does."""

    def run() -> None:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # whoever waits for the command to begin goes on, too
        os.environ.clear()
        os.environ.update(env)
        code: Any = 1
        try:
            importlib.import_module("netstorm.cli.main").app(command[3:], prog_name="netstorm")
        except SystemExit as end:
            code = end.code
        sys.stderr.flush()
        os._exit(code or 0)

    return subprocess.Popen(command, preexec_fn=run, **options)  # noqa: PLW1509 -- no thread holds a lock now
