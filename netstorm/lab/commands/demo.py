"""`netstorm demo`: trains between four data centres that are emulated on this machine."""

from __future__ import annotations

import os
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from netstorm.cli.support import exit_on_usage_error, has_dashboard
from netstorm.lab.emulation.links import available_congestion_controls
from netstorm.lab.emulation.namespaces import unmet_requirements

__all__ = ["demo"]

_WAN = """\
Four data centres, each a network namespace of this machine, and emulated links of 15 to 120 Mbit/s.
Each node trains on its own samples, adds up gradients and forwards them: there is no server. After
20 s a link is nearly gone, and the scheduler forms other trees."""
_LOOPBACK = """\
Four nodes on this machine. Each trains on its own samples, adds up gradients and forwards them:
there is no server. Links are as fast as loopback. Slow ones, which change, are emulated as soon as
this is there: {missing}"""
_NEXT = """
What next:
  netstorm new train.py                       a script to start from
  netstorm launch -n 3 -- python train.py     runs it, on three nodes"""


def demo(
    *,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", min=1.0, help="Time to train for.")
    ] = 60.0,
) -> None:
    """Train between four data centres that are emulated on this machine, or say what that needs.

    It needs neither a checkout nor a framework, and root only where users may not have namespaces of their
    own; without either it trains on loopback. With the extra netstorm[dashboard], on a terminal, it prints
    the address of a page that shows it.

    The exit code is that of netstorm launch.
    """
    files = Path(str(resources.files("netstorm.cli") / "templates"))
    missing = unmet_requirements(own_namespaces=True)
    if "bbr" not in available_congestion_controls():
        missing.append("TCP's congestion control bbr (sudo modprobe tcp_bbr)")
    typer.echo(_LOOPBACK.format(missing="; ".join(missing)) if missing else _WAN)
    if not has_dashboard():
        typer.echo("A page shows a job like this one: pip install 'netstorm[dashboard]'")
    typer.echo(_NEXT + "\n")
    network = files / "demo.yaml"
    words = ["-n", "4"] if missing else [f"--wan={network}", "--env=ENABLE_AWARENESS=1"]
    words += [f"--network={network}", f"--env=DEMO_SECONDS={seconds:g}", "--env=OMP_NUM_THREADS=1"]
    words += ["--", sys.executable, str(files / "demo.txt")]
    sys.stdout.flush()
    with exit_on_usage_error():
        os.execv(sys.executable, [sys.executable, "-m", "netstorm", "launch", *words])
