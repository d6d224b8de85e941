"""What emulated networks leave on a machine, and small networks to try."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

from netstorm.lab.emulation import Wan
from netstorm.topology.files import parse_network

ROOT = Path(__file__).resolve().parents[2]
NETSTORM = [sys.executable, "-m", "netstorm"]
PAIR = """
nodes: {0: {}, 1: {}}
links: [{between: [0, 1], rate: 50Mbit, latency: 5ms}]
"""
LINE = """
nodes: {0: {site: a}, 1: {site: b}, 2: {}}
links:
  - {between: [0, 1], rate: 50Mbit, latency: 5ms}
  - {between: [1, 2], rate: 40Mbit, latency: 10ms}
"""


def network(text: str = PAIR):
    return parse_network(text)


def traces() -> set[str]:
    """Return our namespaces, their folders, state files and daemons, and all network devices."""
    found = {f"device {path.name}" for path in Path("/sys/class/net").iterdir()}
    for folder in map(Path, ("/run/netns", "/etc/netns", "/run/netstorm-wan")):
        names = []
        with contextlib.suppress(FileNotFoundError):  # a daemon removes the folder with what was last in it
            names = [path.name for path in folder.iterdir()]
        found |= {f"{folder}/{name}" for name in names if folder.name != "netns" or "netstorm-" in name}
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "netstorm.lab.emulation.daemon" in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.add(f"process {process.pid}")
    return found


def run(wan: Wan, rank: int, code: str, *words: str, timeout: float = 60) -> str:
    """Run Python code in a rank's namespace, and return what it prints."""
    done = subprocess.run(
        wan.command(rank, [sys.executable, "-c", code, *words]),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def netstorm(*words: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*NETSTORM, *words], capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT
    )
