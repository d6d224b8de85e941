"""`mx.profiler` with `profile_process="server"`, where there are no servers: every node is one.

The calls profile the process that makes them, and the file's name gets the rank in front, as MXNet's servers
put it: `rank0_profile.json`. MXNet has one profiler a process, so if a script configures both "worker" and
"server" here, all is in one file, the one that was named last.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from netstorm.frontends.mxnet.compat import mx

__all__ = ["profile_here"]

_DEFAULT_FILE: Final = "profile.json"  # MXNet's


class _Profiler:
    rank: int | None = None
    """None: no store of ours is here, and everything is MXNet's own."""
    written = ""
    """The process whose dump has ended the profile: the other one's has nothing more to write."""


def profile_here(rank: int) -> None:
    """From now on this process is what `profile_process="server"` means."""
    _Profiler.rank = rank


def _redirected(original: Callable[..., Any]) -> Callable[..., Any]:
    parameters, name = inspect.signature(original), original.__name__

    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
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
