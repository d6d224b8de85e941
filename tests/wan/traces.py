"""What emulated networks leave on a machine, and small networks to try."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
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


os.environ["TESTS_OF_NETWORKS"] = str(os.getpid())
_OURS = f"TESTS_OF_NETWORKS={os.getpid()}".encode()
"""In the environment of all that these tests start: other programs emulate networks on this machine, too."""

_others: set[str] = set()
"""Names of networks that other programs had up when somebody looked."""

_SETTLE_S = 10.0
"""In which networks of others go down that nobody has seen up."""


def traces() -> set[str]:
    """Return our namespaces, their folders, state files and daemons, and all network devices."""
    found = {f"device {path.name}" for path in Path("/sys/class/net").iterdir()}
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        is_alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if "netstorm.lab.emulation.daemon" in words and is_alive and _is_ours(process.pid):
            found.add(f"process {process.pid}")
    _look_for_others()
    for folder in map(Path, ("/run/netns", "/etc/netns", "/run/netstorm-wan")):
        names = []
        with contextlib.suppress(FileNotFoundError):  # a daemon removes the folder with what was last in it
            names = [path.name for path in folder.iterdir()]
        found |= {f"{folder}/{name}" for name in names if folder.name != "netns" or "netstorm-" in name}
    of_others = [text for name in _others for text in (f"netstorm-{name}-", f"netstorm-wan/{name}.")]
    return {trace for trace in found if not any(text in trace for text in of_others)}


def nothing_left_since(before: set[str]) -> bool:
    """Return whether what is there was there before, now or soon: networks of others go down meanwhile."""
    deadline = time.monotonic() + _SETTLE_S
    while traces() - before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _look_for_others() -> None:
    with contextlib.suppress(FileNotFoundError):
        for file in Path("/run/netstorm-wan").glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                entry = json.loads(file.read_text())
                if not _is_ours(entry["pid"]):
                    _others.add(entry["name"])


def _is_ours(pid: int) -> bool:
    """Return whether a process may be one that these tests have started: so are those that are gone."""
    try:
        return _OURS in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return True


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
