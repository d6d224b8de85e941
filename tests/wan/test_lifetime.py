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
from tests.wan.traces import NETSTORM, ROOT, network, traces

OWNER = """
import sys, time
from netstorm.lab.emulation import Wan
from tests.wan.traces import network
wan = Wan.up(network(), name=sys.argv[1])
print("up", wan.pid, flush=True)
time.sleep(60)
"""


def wait_until(true, seconds: float = 20.0) -> None:
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
    assert sleeper.wait(5) == -signal.SIGTERM
    assert not traces() - before
    wan.down()


def test_an_exception_takes_it_down():
    before = traces()
    with pytest.raises(ZeroDivisionError), Wan.up(network()):
        raise ZeroDivisionError
    assert not traces() - before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_network_goes_with_the_process_that_made_it_however_that_ends(number):
    before = traces()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, "owned"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith(b"up")
        owner.send_signal(number)
        owner.wait(20)
    wait_until(lambda: not traces() - before)


def test_what_a_killed_daemon_leaves_is_removed_at_the_next_start():
    before = traces()
    dead = Wan.up(network(), name="dead")
    os.kill(dead.pid, signal.SIGKILL)
    wait_until(lambda: "dead" not in running())
    assert traces() - before
    with Wan.up(network(), name="next"):
        assert not any("dead" in trace for trace in traces())
    dead.down()


def test_remove_stale_leaves_networks_that_are_up_alone():
    with Wan.up(network(), name="alive") as wan:
        assert "alive" not in remove_stale()
        assert len(wan.status()) == 2


def test_two_networks_of_one_name_cannot_be_up_but_two_of_different_names_can():
    with Wan.up(network(), name="one"), Wan.up(network(), name="two"):
        assert {"one", "two"} <= set(running())
        with pytest.raises(UsageError, match="'one' is up already"):
            Wan.up(network(), name="one")
        assert len(Wan.attach("one").status()) == 2


def test_a_congestion_control_that_the_kernel_has_not_is_refused_and_nothing_is_left():
    with pytest.raises(UsageError, match="congestion control 'nonsense': this kernel has"):
        Wan.up(network(), congestion="nonsense")


def test_ctrl_c_ends_wan_up_in_the_foreground():
    before = traces()
    file = ROOT / "examples/networks/internet2.yaml"
    words = [*NETSTORM, "wan", "up", str(file), "--foreground", "--name", "front"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    with process:
        assert process.stdout is not None
        assert b"9 nodes, 28 links" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert not traces() - before


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_times_up_and_down_leave_nothing_behind():
    before = traces()
    devices = {path.name for path in Path("/sys/class/net").iterdir()}
    for number in range(20):
        with Wan.up(network(), name=f"again{number % 2}"):
            pass
        assert not traces() - before
    assert {path.name for path in Path("/sys/class/net").iterdir()} == devices
