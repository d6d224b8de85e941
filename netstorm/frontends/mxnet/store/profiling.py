"""`mx.profiler` with `profile_process="server"` in a job that has no servers.

The calls profile the process that makes them. The file's name begins with the rank, as those of MXNet's
servers do: `rank0_profile.json`. MXNet has one profiler in each process. So if a script configures both
"worker" and "server", everything is in one file, the one that was named last.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Final

from netstorm.frontends.mxnet.compat import mx

__all__ = ["profile_here"]

_DEFAULT_FILE: Final = "profile.json"  # MXNet's


class _Profiler:
    rank: int | None = None
    """None: this process has no store of ours, and MXNet's functions do what they always do."""
    written = ""
    """The `profile_process` whose dump has ended the profile; there is nothing left for the other one."""


def profile_here(rank: int) -> None:
    """From now on `profile_process="server"` means this process."""
    _Profiler.rank = rank


def _redirected(original: Callable[..., object]) -> Callable[..., object]:
    parameters, name = inspect.signature(original), original.__name__

    @functools.wraps(original)
    def call(*arguments: object, **named: object) -> object:
        if _Profiler.rank is None:
            return original(*arguments, **named)
        given = parameters.bind(*arguments, **named)
        given.apply_defaults()
        options = given.arguments
        if name == "set_config":
            options = options["kwargs"]
        process = options.pop("profile_process", "worker")
        if name == "dump":
            if _Profiler.written not in ("", process):
                return None
            _Profiler.written = process if options["finished"] else ""
        elif name == "set_state":
            _Profiler.written = ""
        elif name == "set_config" and process == "server":
            path = Path(options.get("filename", _DEFAULT_FILE))
            options["filename"] = str(path.with_name(f"rank{_Profiler.rank}_{path.name}"))
        return original(**options)

    return call


for _name in ("set_config", "set_state", "dump", "pause", "resume"):
    setattr(mx.profiler, _name, _redirected(getattr(mx.profiler, _name)))
