"""A process that has imported what takes long, and forks processes that need it: the part that they share.

It reads requests from standard input, one JSON object a line, and answers each with one:

    {...} (what `fork` takes) -> PID
    "ended" -> {PID: EXIT CODE, ...} of processes that have ended since
    "end": kills what is left, and ends
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

gc.disable()  # what is imported here is no garbage, and looking for it takes a third of the time


def serve(run: Callable[[dict[str, Any]], object], prepare: Callable[[dict[str, Any]], object] = id) -> None:
    """Serve until "end", or until standard input ends; then kill what is left.

    A request is for one process: it has the files `out` and `err` that the process writes to, perhaps the
    `folder` that it runs in, and what `run` needs. `run` is called in that process, which ends as a script
    would. `prepare` is called before, in this one: what it imports is imported once for all. An error there
    comes again in the process, which shows it.
    """
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if request == "end":
            break
        if request == "ended":
            answer: Any = {pid: code for pid in sorted(alive) if (code := _exit_code(pid)) is not None}
            alive -= answer.keys()
        else:
            with contextlib.suppress(Exception):
                prepare(request)
            # Collections of garbage in the process pass over what was imported here, which is none of its
            # own: the end of one that has PyTorch then takes 0.4 s of processor time, and not 1.2 s.
            gc.freeze()
            ready, became = os.pipe()
            answer = os.fork()
            if answer == 0:
                _become(request)
                os.close(ready)
                os.close(became)
                run(request)
                return
            os.close(became)
            os.read(ready, 1)  # until then its files are those of a process before it, and no signal finds it
            os.close(ready)
            alive.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _exit_code(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _become(request: dict[str, Any]) -> None:
    """Become a process of its own: a session, a folder, and standard streams."""
    gc.enable()
    os.setsid()
    os.chdir(request.get("folder", "."))
    for number, name in ((1, "out"), (2, "err")):
        to = os.open(Path(request[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(to, number)
        os.close(to)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
