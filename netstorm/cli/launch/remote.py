"""Run by ssh on another host for `netstorm launch --hosts`: completes the environment, then supervises.

The command, the variables and the job's key come over standard input as JSON. So they pass through no shell,
and do not show in the list of processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from netstorm.cli.launch.supervisor import CANNOT_RUN, Supervisor, read_start_message
from netstorm.cli.launch.variables import KEY_FILE, hold_key, is_free, threads_each
from netstorm.cli.support import USAGE_ERROR
from netstorm.errors import SettingsError
from netstorm.settings import child_environment

__all__ = ["environment_here", "main"]


def environment_here(variables: dict[str, str], nodes_here: int) -> dict[str, str]:
    """Return this host's environment with a node's variables.

    The folder of this interpreter comes first in PATH: ssh sets a minimal one, and `python` in the command
    must be the interpreter that has NetStorm.

    Raises:
        SettingsError: a variable that this version of NetStorm does not accept.
    """
    environment = child_environment(None, **variables)
    if "PATH" not in variables:
        folders = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
        environment["PATH"] = os.pathsep.join(folders)
    environment.setdefault("OMP_NUM_THREADS", str(threads_each(nodes_here)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def main() -> int:
    """Read what to run, and run it."""
    read = read_start_message(0)
    if read is None:
        return CANNOT_RUN
    message: dict[str, Any] = read[0]
    try:
        environment = environment_here(message["variables"], message["nodes_here"])
        if message["key"] is not None:
            environment[KEY_FILE] = hold_key(message["key"])
    except SettingsError as error:
        print(f"netstorm: {error}", file=sys.stderr)
        return USAGE_ERROR
    port = environment.get("MASTER_PORT", "")
    if environment.get("RANK") == "0" and port and not is_free(int(port)):
        print(
            f"netstorm: TCP port {port} is taken on the host of rank 0, so no PyTorch script can start: "
            "choose another one with --env MASTER_PORT=PORT",
            file=sys.stderr,
        )
    reads = bool(message.get("reads"))
    return Supervisor(0, read[1]).run(message["command"], message["folder"], environment, reads=reads)


if __name__ == "__main__":
    sys.exit(main())
