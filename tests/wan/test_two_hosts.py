"""Jobs of two hosts: network namespaces with hosts files of their own, and addresses of both families.

On Debian and Ubuntu a host's own name means 127.0.1.1, on that host alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.failures.scripts import PLAIN_JOIN, PLAIN_PROLOGUE
from tests.integration.jobs import SCHEDULER, Ended
from tests.wan.traces import NETSTORM

IPV4 = {"a": "10.77.0.1", "b": "10.77.0.2"}
IPV6 = {"a": "fd77::1", "b": "fd77::2"}
LIMIT_S = 90

SUMS = """
import os, sys, datetime, torch, torch.distributed as dist
rank = int(os.environ.get("RANK", 0))
for how in sys.argv[1:]:
    given = {} if how == "env://" else dict(init_method=how, rank=rank, world_size=2)
    dist.init_process_group("netstorm", timeout=datetime.timedelta(seconds=60), **given)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    print("sum", tensor[0].item(), flush=True)
"""

UNREACHABLE = """
if rank == 0:
    os.environ["DMLC_NODE_HOST"] = "10.99.0.1"
try:
    dist.init_process_group("netstorm", init_method=sys.argv[3] + "2", rank=rank, world_size=2)
except RuntimeError as error:
    print("refused:", error, flush=True)
"""

PLAIN_SUM = f"{PLAIN_PROLOGUE}{PLAIN_JOIN}step()\nshow('sum', out[0], runtime.node.options.host)\n"


class TwoHosts:
    """Two hosts, a and b, and processes on them. A context manager: nothing survives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder / "job.key"
        self._names = {host: f"two-hosts-{os.getpid()}-{host}" for host in "ab"}
        self._processes: list[tuple[subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> TwoHosts:  # noqa: PYI034 -- Self is Python 3.11's
        subprocess.run([*NETSTORM, "keys", "new", str(self.key)], check=True, capture_output=True)
        a, b = self._names["a"], self._names["b"]
        for line in (f"netns add {a}", f"netns add {b}", f"link add w netns {a} type veth peer w netns {b}"):
            subprocess.run(["ip", *line.split()], check=True)
        for host in "ab":
            self.ip(host, f"address add {IPV4[host]}/24 dev w")
            self.ip(host, f"address add {IPV6[host]}/64 dev w nodad")
            self.ip(host, "link set lo up")
            self.ip(host, "link set w up")
        return self

    def __exit__(self, *exception: object) -> None:
        for process, _ in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for name in self._names.values():
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in left.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False)
            folder = Path("/etc/netns", name)
            (folder / "hosts").unlink(missing_ok=True)
            if folder.is_dir():
                folder.rmdir()

    def ip(self, host: str, words: str) -> None:
        """Run the command `ip` on a host."""
        subprocess.run(["ip", "-n", self._names[host], *words.split()], check=True)

    def name(self, own: dict[str, str], other: dict[str, str]) -> None:
        """Write the hosts files: what each host's own name means there, and the other's."""
        for host, peer in ("ab", "ba"):
            folder = Path("/etc/netns", self._names[host])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{own[host]} node{host}\n{other[peer]} node{peer}\n"
            )

    def start(self, host: str, words: list[str], **variables: object) -> int:
        """Start a process on a host, whose name is its own."""
        output = self.folder / f"out{len(self._processes)}"
        inside = ["unshare", "-u", "sh", "-c", f'hostname node{host}; exec "$@"', "sh", *words]
        environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
        environment |= {"NETSTORM_KEY_FILE": str(self.key), "OMP_NUM_THREADS": "1"}
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], *inside],
                env={**environment, **{name: str(value) for name, value in variables.items()}},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append((process, output))
        return len(self._processes) - 1

    def end(self, number: int) -> Ended:
        """Wait for a process's end."""
        process, output = self._processes[number]
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            said = "\n".join(path.read_text(errors="replace") for _, path in self._processes)
            raise AssertionError(f"it does not end; all said: {said}") from None
        return Ended(code, output.read_text(errors="replace"), "")

    def wait_until_said(self, number: int, text: str) -> None:
        """Wait until a process has written `text`."""
        process, output = self._processes[number]
        deadline = time.monotonic() + LIMIT_S
        while True:
            has_ended = process.poll() is not None  # it may write, and end, at any moment
            if text in output.read_text(errors="replace"):
                return
            assert not has_ended, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)


DEBIAN = {"own": {"a": "127.0.1.1", "b": "127.0.1.1"}, "other": IPV4}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with TwoHosts(tmp_path) as two:
        yield two


def test_ranks_find_each_other_however_the_first_is_named_or_hear_that_they_cannot(hosts):
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    hosts.name(**DEBIAN)
    hosts.ip("a", "address add 10.99.0.1/32 dev lo")
    ways = ["env://", "tcp://10.77.0.1:29555", f"file://{hosts.folder}/store", "tcp://[fd77::1]:29556"]
    script = hosts.folder / "sums.py"
    script.write_text(SUMS + UNREACHABLE)
    for rank, host in enumerate("ab"):
        first = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "nodea", "MASTER_PORT": 29554}
        hosts.start(host, [sys.executable, str(script), *ways], **first)
    for ended in map(hosts.end, (0, 1)):
        assert ended.code == 0, ended.text
        assert ended.text.count("sum 2.0") == len(ways), ended.text
        assert "rank 1 (host nodeb) reaches none; set DMLC_NODE_HOST" in ended.text.split("refused:")[1]


@pytest.mark.slow
def test_ranks_find_each_other_under_torchrun_with_a_name_as_endpoint(hosts):
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    hosts.name(**DEBIAN)
    script = hosts.folder / "sums.py"
    script.write_text(SUMS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", "nodea:29557"]
    numbers = [hosts.start(host, [*torchrun, str(script), "env://", "env://"]) for host in "ab"]
    for ended in map(hosts.end, numbers):
        assert ended.code == 0, ended.text
        assert ended.text.count("sum 2.0") == 2, ended.text


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [(DEBIAN["own"], IPV4, IPV4), (IPV6, IPV6, IPV6)],
    ids=["the own name is loopback", "names are of IPv6"],
)
def test_a_job_whose_scheduler_has_a_name_is_one_of_both_hosts(hosts, own, other, expected):
    hosts.name(own, other)
    scheduler = hosts.start("a", [*SCHEDULER, "--host", "nodea"], DMLC_NUM_WORKER=2, DMLC_PS_ROOT_PORT=9091)
    hosts.wait_until_said(scheduler, "at nodea:9091")
    script = hosts.folder / "sum.py"
    script.write_text(PLAIN_SUM)
    numbers = [
        hosts.start(
            host,
            [sys.executable, str(script)],
            DMLC_ROLE="worker",
            DMLC_PS_ROOT_URI="nodea",
            DMLC_PS_ROOT_PORT=9091,
            DMLC_NUM_WORKER=2,
            NETSTORM_RANK=rank,
        )
        for rank, host in enumerate("ab")
    ]
    for host, ended in zip("ab", map(hosts.end, numbers), strict=True):
        assert ended.code == 0, ended.text
        assert f"sum 2.0 {expected[host]}" in ended.text, ended.text
    assert hosts.end(scheduler).code == 0


def test_a_node_that_advertises_loopback_to_another_host_is_refused_at_once(hosts):
    hosts.name(IPV4, IPV4)
    scheduler = hosts.start("a", [*SCHEDULER, "--host", "nodea"], DMLC_NUM_WORKER=2)
    hosts.wait_until_said(scheduler, "at nodea:9091")
    script = hosts.folder / "sum.py"
    script.write_text(PLAIN_SUM)
    common = {"DMLC_PS_ROOT_URI": "nodea", "DMLC_NUM_WORKER": 2}
    hosts.start("a", [sys.executable, str(script)], NETSTORM_RANK=0, **common)
    hosts.wait_until_said(scheduler, "the node at 10.77.0.1")
    hidden = {"DMLC_NODE_HOST": "127.0.0.1", **common}
    refused = hosts.end(hosts.start("b", [sys.executable, str(script)], NETSTORM_RANK=1, **hidden))
    assert refused.code == 1
    assert "set DMLC_NODE_HOST at the former" in refused.text
