"""Whole jobs of real processes: who may join, who is out, and an attacker on the path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from netstorm.lab.testing.tcp_proxy import TcpProxy
from netstorm.pslite.keys import JobKey, NodeKey
from tests.integration.failures.scripts import PLAIN_JOIN, PLAIN_PROLOGUE
from tests.integration.forking import ROOT
from tests.integration.jobs import Job, free_port, run_netstorm

SHORT = {"NETSTORM_LINK_TIMEOUT": 1, "PS_HEARTBEAT_INTERVAL": 0.2, "PS_HEARTBEAT_TIMEOUT": 5}

JOIN_ONLY = PLAIN_PROLOGUE + "runtime_of_this_process()"

TRAIN = (
    PLAIN_PROLOGUE
    + PLAIN_JOIN
    + """
for number in range(int(os.environ["STEPS"])):
    step()
    assert (out == runtime.size).all(), out
    if number % 10 == 9:
        show("steps", number + 1)
runtime.finish()
show("all sums were right", {name: n for name, n in runtime.counters.snapshot().items() if "refused" in name})
"""
)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    JobKey.create(tmp_path / "job.key")
    return tmp_path / "job.key"


# ----------------------------------------------------------------------------------- secure by default


def test_without_a_key_nothing_listens_where_others_can_reach_it_and_one_line_says_what_to_do(tmp_path):
    ended = run_netstorm(tmp_path, "scheduler", "--bind", "*", "--port", "0")
    assert ended.code == 2
    [line] = ended.err.splitlines()
    assert line.startswith("netstorm: listening on * needs a key")
    assert "`netstorm keys new job.key`" in line
    assert "NETSTORM_SECURITY=off" in line


# ------------------------------------------------------------------------------------------ mixed jobs


@pytest.mark.parametrize("case", ["plain node", "plain scheduler", "key of another job"])
def test_a_mixed_job_is_refused_by_name(tmp_path: Path, key_file: Path, case: str) -> None:
    JobKey.create(tmp_path / "other.key")
    scheduler = {} if case == "plain scheduler" else {"NETSTORM_KEY_FILE": key_file}
    node = {"plain node": "", "plain scheduler": str(key_file)}.get(case, str(tmp_path / "other.key"))
    said = {
        "plain node": "requires a key, and this process has none: set NETSTORM_KEY_FILE",
        "plain scheduler": "is not encrypted, but this process has a key (NETSTORM_KEY_FILE)",
        "key of another job": "it has another key than this process (NETSTORM_KEY_FILE)",
    }[case]
    with Job(tmp_path, 1, **SHORT, **scheduler) as job:
        job.start(0, JOIN_ONLY, NETSTORM_KEY_FILE=node)
        ended = job.end(0)
        assert ended.code != 0
        error = ended.err.strip().splitlines()[-1]
        assert f"JoinRefused: cannot join the scheduler at {job.address}: " in error
        # Who closes before its greeting has been read cannot be told from who has another key.
        closed = "closed the connection: it has another key than this process (NETSTORM_KEY_FILE), or none"
        assert said in error or (case == "plain scheduler" and closed in error)
        job.wait_until_said(-1, "refused a connection from ")


# ---------------------------------------------------------------------------------------- removed keys


def test_a_node_whose_key_is_removed_is_out_at_once_and_all_say_why(tmp_path: Path, key_file: Path) -> None:
    nodes = [NodeKey.create(tmp_path / f"{name}.key", name) for name in ("tokyo", "paris")]
    allow = tmp_path / "allow"
    allow.write_text("".join(f"{node.line}\n" for node in nodes))
    patient = {**SHORT, "NETSTORM_KEY_FILE": key_file, "NETSTORM_ALLOW": allow, "PS_HEARTBEAT_TIMEOUT": 60}
    with Job(tmp_path, 2, **patient) as job:
        for rank, node in enumerate(nodes):
            own = tmp_path / f"{node.name}.key"
            job.start(rank, TRAIN, STEPS=1_000_000, NETSTORM_NODE_KEY=own)
        for rank in range(2):
            job.wait_until_said(rank, "steps 20\n")
        allow.write_text(f"{nodes[0].line}\n")
        ended = job.end_all(timeout_s=30)
        scheduler = job.said(-1)
    assert "removed: paris" in scheduler
    assert "the key of paris was removed (NETSTORM_ALLOW)" in ended[0].err, "NodeLost says why"
    assert "NodeLost" in ended[0].err
    assert "NETSTORM_ALLOW" in ended[1].err
    assert all(end.code for end in ended)


# ----------------------------------------------------------------------------------------- on the path


class Attacker:
    """Changes every 15th piece of data that passes, once in each way."""

    def __init__(self) -> None:
        self.ways = ["flip", "replay", "reorder", "truncate"]
        self._pieces = 0
        self._held = b""

    def __call__(self, data: bytes) -> bytes:
        self._pieces += 1
        if self._held:
            data, self._held = data + self._held, b""
        elif self.ways and self._pieces % 15 == 0:
            way = self.ways.pop(0)
            if way == "flip":
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            elif way == "replay":
                data += data
            elif way == "reorder":
                data, self._held = b"", data
            else:
                data = data[:-7]
        return data


def test_training_goes_on_with_right_sums_while_an_attacker_changes_what_passes(
    tmp_path: Path, key_file: Path
) -> None:
    """Each attack that leaves a message without its end takes some 6 s: the sender asks after 2 s, and gives
    the connection up when nothing has been acknowledged for as long as a slow link may take.
    """
    port = free_port()
    attacker = Attacker()
    settings = {
        "NETSTORM_LINK_TIMEOUT": 2,
        "NETSTORM_KEY_FILE": key_file,
        "NETSTORM_SHARED_MEMORY": 0,  # or hardly anything would pass the attacker
        "STEPS": 50,
    }
    with TcpProxy("127.0.0.1", port) as proxy, Job(tmp_path, 2, **settings) as job:
        proxy.alters = attacker
        job.start(0, TRAIN)
        job.start(1, TRAIN, NETSTORM_PORT=port, NETSTORM_ADVERTISED_PORT=proxy.port)
        ended = job.end_all()
    assert [end.code for end in ended] == [0, 0], [end.text for end in ended]
    assert all("all sums were right" in end.out for end in ended)
    assert attacker.ways == []
    assert proxy.connections > len(Attacker().ways), "whoever reads what was changed gives the connection up"


# ---------------------------------------------------------------------------------------- handing over


def test_a_key_for_other_hosts_comes_over_standard_input_and_is_on_no_command_line(tmp_path: Path) -> None:
    JobKey.create(tmp_path / "job.key")
    secret = (tmp_path / "job.key").read_text()
    fake_ssh = Path(__file__).parents[1] / "launch" / "fake_ssh.py"
    (tmp_path / "hosts").write_text("tokyo\n")
    program = (
        "import os, sys, time; path = os.environ['NETSTORM_KEY_FILE']; "
        "print(path, open(path).read() == open('job.key').read(), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-m", "netstorm", "launch", "--no-scheduler", "--hosts", "hosts"]
    command += ["--key", "job.key", "--ssh", f"{sys.executable} {fake_ssh}", "--python", sys.executable]
    command += ["--grace", "1", "--", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    try:
        assert process.stdout is not None
        _, path, same = process.stdout.readline().split()
        assert path.startswith("/proc/")
        assert same == "True"
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                shown = line.read_bytes()
            except OSError:
                continue
            assert secret.split('"')[-2].encode() not in shown
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert not Path(path).exists()
