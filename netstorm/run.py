"""`python -m netstorm.run train.py …`: run an unedited MXNet script with NetStorm as its distributed store.

There `dist_sync`, `dist_device_sync`, `dist_sync_device` and `dist` mean NetStorm. Old launchers start one
process more for each server and one for the scheduler, all with the same command: a server has nothing to do
and says so, and the scheduler is ours.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from netstorm.errors import SettingsError
from netstorm.settings import Settings

__all__ = ["main"]

_USAGE = "usage: python -m netstorm.run [-m MODULE | SCRIPT] [ARGUMENTS …]"


def main(arguments: list[str]) -> int:
    """Run a script or module; return the exit code if it does not set its own."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(__doc__.strip() if arguments else _USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        role = Settings.from_environment().role
    except SettingsError as error:
        print(f"netstorm: {error}", file=sys.stderr)
        return 2
    if role == "server":
        print("netstorm: DMLC_ROLE=server has nothing to do, since every node aggregates; this process ends")
        return 0
    if role == "scheduler":
        from netstorm.scheduler.process import run_scheduler

        return run_scheduler(Settings.from_environment())
    from netstorm.frontends.mxnet import take_over_dist_types

    take_over_dist_types()
    if arguments[0] == "-m":
        if len(arguments) < 2:
            print(_USAGE, file=sys.stderr)
            return 2
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    sys.argv = arguments
    script = arguments[0]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except FileNotFoundError as error:
        if error.filename != script:
            raise
        print(f"netstorm: no script {script!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
