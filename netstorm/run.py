"""`python -m netstorm.run train.py …`: run an unedited MXNet or PyTorch script over NetStorm.

In MXNet `dist_sync`, `dist_device_sync`, `dist_sync_device`, `dist` and `dist_async` mean NetStorm. In
PyTorch the backends `gloo`, `mpi` and `nccl` do, or those that NETSTORM_TORCH_BACKENDS lists, and processes
that the script starts by itself use NetStorm, too.

MXNet's launchers also start a process for each server and one for the scheduler, all with the same command: a
server has nothing to do and ends, and the scheduler is NetStorm's. Of GeoMX's launch scripts the processes of
the global level and the master worker end, too.

`mpirun -n 4 python -m netstorm.run train.py` and `srun python -m netstorm.run train.py` need no variables:
the launcher says which rank a process is, and rank 0 starts the scheduler, unless DMLC_PS_ROOT_URI names one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from netstorm.addresses import host_port
from netstorm.errors import NetStormError, UsageError
from netstorm.frontends.import_hook import on_import
from netstorm.launchers import place_of_this_process, settings_below, take_place
from netstorm.pslite.admission import job_key_of
from netstorm.settings import Settings, foreign_variable, set_for_children

__all__ = ["main"]

_USAGE: Final = "usage: python -m netstorm.run [-m MODULE | SCRIPT] [ARGUMENTS …]"

_RUNNERS: Final = frozenset({__file__, runpy.__file__, "<frozen runpy>"})
"""Files whose frames begin a script's traceback, and mean nothing to its user."""


_FRONTEND: Final = "netstorm.frontends.mxnet"

_TORCH_BACKENDS: Final = "gloo,mpi,nccl"
"""What scripts name. Most hard-code nccl, which has to work on machines that have none, too; inside a site
PyTorch's own is `real_nccl`.
"""


class _CannotTakeOver(UsageError):
    """The script's framework is not as NetStorm needs it."""


def main(arguments: list[str]) -> int:
    """Run a script or module; return the exit code if it does not set its own."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(
            f"{_USAGE}\n\n{__doc__.strip()}" if arguments else _USAGE,
            file=sys.stdout if arguments else sys.stderr,
        )
        return 0 if arguments else 2
    try:
        place, scheduler = place_of_this_process(), None
        settings = Settings.from_environment() if place is None else settings_below(place)
        if (idle := _without_work(settings)) is not None:
            print(f"netstorm: {idle} has nothing to do, since every node aggregates; this process ends")
            return 0
        if place is not None and settings.role != "scheduler":
            scheduler = take_place(place, settings)
            settings = Settings.from_environment()  # with the variables that are set now
        _check_all_workers(settings)
        if settings.role == "scheduler":
            from netstorm.scheduler.process.scheduler_process import run_scheduler

            return run_scheduler(settings)
        set_for_children(NETSTORM_TORCH_BACKENDS=settings.torch_backends or _TORCH_BACKENDS)
    except UsageError as error:
        return _refuse(str(error))
    if arguments[0] == "-m":
        if len(arguments) == 1:
            return _refuse("-m needs the name of a module")
    elif not Path(arguments[0]).exists():
        return _refuse(f"no script {arguments[0]!r}")
    if scheduler is not None:
        try:
            _start_scheduler(settings, *scheduler)
        except NetStormError as error:
            return _refuse(str(error))
    if arguments[0] == "-m":
        return _as_script(lambda: _run_module(arguments[1:]))
    return _as_script(lambda: _run_script(arguments))


def _start_scheduler(settings: Settings, host: str, port: int) -> None:
    """Start the job's scheduler, and have this process end after it."""
    from netstorm.scheduler.process.scheduler_child import start_scheduler

    plain = "plain: no NETSTORM_KEY_FILE" if job_key_of(settings) is None else "encrypted"
    print(
        f"netstorm: rank 0 of {settings.num_workers} starts the scheduler of job {settings.job} at "
        f"{host_port(host, port)}; connections are {plain}",
        file=sys.stderr,
        flush=True,
    )
    child = start_scheduler(settings, host, port)
    # Functions are called in reverse order: the job's, registered later, leaves it first. An elastic job goes
    # on without rank 0, but not without its scheduler.
    atexit.register(child.wait, *((None,) if settings.elastic else ()))


def _without_work(settings: Settings) -> str | None:
    """Return which variable makes this process one that has nothing to do; None: it has."""
    if settings.role == "server":
        return "DMLC_ROLE=server"
    for name in ("DMLC_ROLE_GLOBAL", "DMLC_ROLE_MASTER_WORKER"):
        if (value := foreign_variable(name)) not in (None, "", "0"):
            return f"{name}={value}"
    return None


def _check_all_workers(settings: Settings) -> None:
    """Raise `UsageError` if variables would make a job of each of GeoMX's data centres."""
    text = foreign_variable("DMLC_NUM_ALL_WORKER")
    if text and text != str(settings.num_workers):
        raise UsageError(
            f"DMLC_NUM_ALL_WORKER={text} with DMLC_NUM_WORKER={settings.num_workers}: the nodes of all data "
            f"centres are one job, with one scheduler: set DMLC_NUM_WORKER={text} and the same "
            "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT on all of them, and name each one's data centre in "
            "NETSTORM_SITE"
        )


def _run_module(arguments: list[str]) -> None:
    sys.argv = arguments  # runpy replaces the first one by the module's file
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _run_script(arguments: list[str]) -> None:
    sys.argv = arguments
    folder = str(Path(arguments[0]).resolve().parent)
    if getattr(
        sys.flags, "safe_path", False
    ):  # python -P: sys.path does not begin with the working directory
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    runpy.run_path(arguments[0], run_name="__main__")


def _as_script(run: Callable[[], None]) -> int:
    """Run a script as Python does; an uncaught exception is shown without our own frames."""
    on_import({"mxnet": _import_mxnet, _FRONTEND: _import_mxnet, "torch": _import_torch})
    try:
        run()
    except _CannotTakeOver as error:
        return _refuse(str(error))
    except Exception as error:  # noqa: BLE001 -- Python shows any exception, and ends with exit code 1
        trace = _own_frames(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _import_mxnet() -> None:
    if _FRONTEND in sys.modules:  # the script has imported that first: what was called for it goes on below
        importlib.import_module("mxnet")
        return
    try:
        from netstorm.frontends.mxnet import take_over_dist_types

        take_over_dist_types()
    except UsageError as error:  # another version of MXNet or NumPy
        raise _CannotTakeOver(str(error)) from None
    _leave_out_of_collections()


def _import_torch() -> None:
    # PyTorch calls it by itself, unless its automatic loading is off, or NetStorm is not installed but on the
    # path.
    from netstorm.frontends.torch.autoload import autoload

    try:
        autoload()
    except (UsageError, RuntimeError) as error:
        reason = error if isinstance(error, UsageError) else error.__cause__  # PyTorch raises its own error
        if isinstance(reason, UsageError):
            raise _CannotTakeOver(str(reason)) from None
        raise
    _leave_out_of_collections()


def _leave_out_of_collections() -> None:
    """Keep the objects that there are out of all later collections.

    A framework makes 100 000 objects that stay. Each full collection would traverse them, and stop every
    thread for 70 to 100 ms. The script has made few yet.
    """
    gc.freeze()


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the script's first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:
        trace = trace.tb_next
    return trace


def _refuse(reason: str) -> int:
    print(f"netstorm: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
