from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from netstorm.errors import UsageError
from netstorm.lab.emulation import Wan
from netstorm.lab.emulation.namespaces import remove_stale, running
from tests.wan.traces import NETSTORM, ROOT, network, nothing_left_since, traces

OWNER = """
import sys, time
from netstorm.lab.emulation import Wan
from tests.wan.traces import network
wan = Wan.up(network(), name=sys.argv[1])
print("up", wan.pid, flush=True)
time.sleep(60)
"""


def wait_until(true, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_down_takes_what_still_runs_in_it_along_and_twice_does_no_harm():
    before = traces()
    wan = Wan.up(network())
    assert traces() - before
    sleeper = subprocess.Popen(wan.command(0, ["sleep", "60"]))
    wait_until(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text() == "sleep\n")
    wan.down()
    assert sleeper.wait(60) == -signal.SIGTERM
    assert nothing_left_since(before)
    wan.down()


def test_an_exception_takes_it_down():
    before = traces()
    with pytest.raises(ZeroDivisionError), Wan.up(network()):
        raise ZeroDivisionError
    assert nothing_left_since(before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_network_goes_with_the_process_that_made_it_however_that_ends(number):
    before = traces()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, f"owned{os.getpid()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith(b"up")
        owner.send_signal(number)
        owner.wait(60)
    wait_until(lambda: not traces() - before)


def test_what_a_killed_daemon_leaves_is_removed_at_the_next_start_and_networks_that_are_up_stay():
    before = traces()
    dead, one, two = (f"{name}{os.getpid()}" for name in ("d", "o", "t"))  # the names are the machine's
    killed = Wan.up(network(), name=dead)
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: dead not in running())
    assert traces() - before
    with Wan.up(network(), name=one) as first, Wan.up(network(), name=two):
        assert not any(dead in trace for trace in traces())
        assert not {one, two} & {*remove_stale()}
        assert {one, two} <= set(running())
        with pytest.raises(UsageError, match=f"'{one}' is up already"):
            Wan.up(network(), name=one)
        assert len(first.status()) == len(Wan.attach(one).status()) == 2
    killed.down()


def test_ctrl_c_ends_wan_up_in_the_foreground():
    before = traces()
    file = ROOT / "examples/networks/internet2.yaml"
    words = [*NETSTORM, "wan", "up", str(file), "--foreground", "--name", f"f{os.getpid()}"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    with process:
        assert process.stdout is not None
        assert b"9 nodes, 28 links" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert nothing_left_since(before)
