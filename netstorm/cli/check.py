"""`netstorm check`: does this installation train? Two ranks form a sum, with each framework that is there."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Final

import typer

__all__ = ["check", "versions"]

_STOP_S: Final = 20.0
"""How long a launcher that is told to end may take to end its processes."""

_LAST_LINES: Final = 15
"""Of what a failed job said."""

_CORE: Final = """
import numpy as np
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.protocol.messages import ANY_RULE

runtime = runtime_of_this_process()
key = runtime.register(runtime.open_namespace(), "check", (1000,), "float32")
total, own = np.zeros(1000, np.float32), np.full(1000, runtime.rank + 1, np.float32)
runtime.allreduce(
    Operation(key=key, round=key.take_round(), source=own, destination=total, done=print, rule=ANY_RULE)
)
assert (total == 3).all(), total
"""

_PYTORCH: Final = """
import torch
import torch.distributed as dist

dist.init_process_group("netstorm")
total = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(total)
assert (total == 3).all(), total
dist.destroy_process_group()
"""

_MXNET: Final = """
import netstorm.frontends.mxnet
import mxnet as mx

kv = mx.kv.create("dist_sync_netstorm")
kv.init("check", mx.nd.zeros((1000,)))
total = mx.nd.zeros((1000,))
kv.pushpull("check", mx.nd.full((1000,), kv.rank + 1), out=total)
assert (total.asnumpy() == 3).all(), total
"""

_CHECKS: Final = (
    ("transport", "netstorm", _CORE, ""),
    ("PyTorch", "torch", _PYTORCH, "pip install 'netstorm[torch]'"),
    ("MXNet", "mxnet", _MXNET, "pip install 'netstorm[mxnet]'"),
)
"""Each with its package, its program, and how to install it."""

_PACKAGES: Final = ("pyzmq", "msgspec", "numpy", "scipy", "networkx")
"""Whose versions a problem report needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """What came of one framework."""

    name: str
    version: str | None
    """None: it is not installed."""
    ok: bool | None
    """Whether both ranks got the sum; None: not tried."""
    seconds: float | None
    problem: str = ""


def check(
    *,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="Longest time for each framework.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check an installation: two ranks form a sum, with each framework that is installed.

    Each is a job of `netstorm launch` on this machine, encrypted as any other. A framework that is not
    installed is named and is no failure.

    The exit code is 0 if all sums were right, else 1.
    """
    present = dict(versions())
    if not as_json:
        typer.echo(", ".join(f"{name} {version}" for name, version in present.items()))
    results = []
    for name, package, program, install in _CHECKS:
        version = _version_of(package)
        if version is None:
            result = _Checked(name=name, version=None, ok=None, seconds=None, problem=install)
        else:
            if not as_json:
                typer.echo(f"{name} {version}: two ranks form a sum ... ", nl=False)
            result = _run(name, version, program, timeout)
        results.append(result)
        if not as_json:
            _print(result)
    if as_json:
        typer.echo(json.dumps({"versions": present, "checks": [asdict(one) for one in results]}, indent=2))
    raise typer.Exit(any(one.ok is False for one in results))


def versions() -> Iterator[tuple[str, str]]:
    """Yield what a problem report needs: names and versions."""
    from netstorm import __version__
    from netstorm.protocol.frames import PROTOCOL_VERSION

    yield "NetStorm", f"{__version__} (protocol {PROTOCOL_VERSION})"
    yield "Python", platform.python_version()
    for package in _PACKAGES:
        yield package, _version_of(package) or "(missing)"
    yield "on", f"{platform.system()} {platform.release()}, {platform.machine()}"


def _version_of(package: str) -> str | None:
    if package == "netstorm":
        from netstorm import __version__

        return __version__
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _run(name: str, version: str, program: str, timeout_s: float) -> _Checked:
    """Run a job of two ranks; nothing of it is left afterwards."""
    from netstorm import clock

    began = clock.monotonic()
    command = [sys.executable, "-m", "netstorm", "launch", "-n", "2", "--", sys.executable, "-c", program]
    problem = ""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            said, _ = launcher.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            said = _stop(launcher)
            problem = f"no sum within {timeout_s:g} s (--timeout)\n"
        except KeyboardInterrupt:  # the launcher has got it, too
            _stop(launcher)
            raise
    if launcher.returncode or problem:
        problem += "\n".join(said.splitlines()[-_LAST_LINES:])
    return _Checked(
        name=name,
        version=version,
        ok=not problem and launcher.returncode == 0,
        seconds=round(clock.monotonic() - began, 1),
        problem=problem,
    )


def _stop(launcher: subprocess.Popen[str]) -> str:
    """End a launcher and its processes; return what they said."""
    launcher.send_signal(signal.SIGTERM)
    try:
        return launcher.communicate(timeout=_STOP_S)[0]
    except subprocess.TimeoutExpired:
        launcher.kill()
        return launcher.communicate()[0]


def _print(result: _Checked) -> None:
    if result.version is None:
        typer.echo(f"{result.name}: not installed ({result.problem})")
    elif result.ok:
        typer.echo(f"right, {result.seconds} s")
    else:
        typer.echo(f"FAILED after {result.seconds} s")
        typer.echo(result.problem, err=True)
