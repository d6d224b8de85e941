"""Deliberate misconfigurations, each made for real in namespaces, and each named by `netstorm doctor`.

What no namespace can make is patched into the process, and said here: another clock, release and protocol.
The kernel's own tables (bbr, meminfo) are covered by files that are mounted over them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from netstorm.lab.emulation import Wan
from netstorm.pslite.keys import JobKey, NodeKey
from netstorm.topology.files import load_network
from tests.integration.docs.pages import blocks
from tests.integration.forking import ROOT, Forker
from tests.wan.doctor_hosts import PLAIN_HOSTS, Doctors, Host
from tests.wan.traces import NETSTORM
from tests.wan.traces import network as emulated


def later(seconds: int) -> str:
    """Return what sets the clocks of a process."""
    return (
        "import netstorm.clock as c\nw, n = c.wall, c.wall_ns\n"
        f"c.wall, c.wall_ns = lambda: w() + {seconds}, lambda: n() + {seconds} * 10**9\n"
    )


TAKE_9100 = "import builtins, socket; builtins.taken = socket.create_server(('', 9100))"
FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
UNAME26 = "import ctypes, platform; platform._uname_cache = None; ctypes.CDLL(None).personality(0x20000)\n"
CONTROLS = "/proc/sys/net/ipv4/tcp_congestion_control"
AVAILABLE = "/proc/sys/net/ipv4/tcp_available_congestion_control"
NO_CHOICE = (("NETSTORM_CONGESTION", "system"),)
"""Root may choose bbr, whatever those files say."""
RUN = "import sys; sys.argv[:2] = ['netstorm']; from netstorm.cli.main import app; app()"
MEMORY = (
    "MemTotal: 4000000 kB\nMemFree: 90000 kB\nMemAvailable: 100000 kB\nBuffers: 1 kB\nCached: 1 kB\n"
    "Active: 1 kB\nInactive: 1 kB\nShmem: 1 kB\n"
)
BAD_NETWORK = "nodes: {0: {}, 1: {}}\nlinks:\n  - {between: [0, 1], rate: fast}\n"


@dataclass(frozen=True)
class Alone:
    """A misconfiguration of one machine. Those of a group are made together, in one run."""

    name: str
    group: str
    check: str
    says: str
    host: Host = field(default_factory=Host)


ALONE = [
    # ------------------------------------------------------------------------------ settings, keys and files
    Alone(
        "a setting that is misspelled",
        "1",
        "settings",
        "NETSTORM_PROT: there is no setting",
        Host((("NETSTORM_PROT", "9100"),)),
    ),
    Alone(
        "a setting with a wrong value",
        "2",
        "settings",
        "DMLC_PS_ROOT_PORT='abc'",
        Host((("DMLC_PS_ROOT_PORT", "abc"),)),
    ),
    Alone(
        "settings that contradict each other",
        "4",
        "settings",
        "with NETSTORM_SECURITY=off",
        Host((("NETSTORM_SECURITY", "off"), ("NETSTORM_KEY_FILE", "{folder}/job.key"))),
    ),
    Alone(
        "a key that others can read",
        "1",
        "key",
        "mode 0644 lets others read",
        Host((("NETSTORM_KEY_FILE", "{folder}/open.key"),)),
    ),
    Alone(
        "a key that is not there",
        "5",
        "key",
        "/no/such.key: cannot read",
        Host((("NETSTORM_KEY_FILE", "/no/such.key"),)),
    ),
    Alone(
        "a node's key for the job's",
        "6",
        "key",
        "it is a node key",
        Host((("NETSTORM_KEY_FILE", "{folder}/node.key"),)),
    ),
    Alone(
        "an allow list that everybody can write",
        "1",
        "files",
        "everybody may add keys",
        Host((("NETSTORM_ALLOW", "{folder}/nodes.allow"),)),
    ),
    Alone(
        "a network file that is wrong",
        "1",
        "files",
        "NETSTORM_NETWORK",
        Host((("NETSTORM_NETWORK", "{folder}/bad.yaml"),)),
    ),
    Alone(
        "a state folder that cannot be written",
        "1",
        "files",
        "NETSTORM_STATE_DIR",
        Host((("NETSTORM_STATE_DIR", "{folder}/bad.yaml/state"),)),
    ),
    # --------------------------------------------------------------------------------- packages and kernel
    Alone(
        "a package that is too old",
        "3",
        "packages",
        "pyzmq 20.0: expected 26",
        Host((("PYTHONPATH", "{folder}/stubs"),), options=("frameworks",)),
    ),
    Alone(
        "PyTorch that lacks a library",
        "3",
        "torch",
        "libcudart.so.12",
        Host((("PYTHONPATH", "{folder}/stubs"),), options=("frameworks",)),
    ),
    Alone(
        "MXNet that crashes",
        "3",
        "mxnet",
        "killed by signal 11",
        Host((("PYTHONPATH", "{folder}/stubs"),), options=("frameworks",)),
    ),
    Alone(
        "bbr not loaded",
        "1",
        "bbr",
        "bbr is not loaded; the kernel has reno cubic",
        Host(files=((CONTROLS, "cubic\n"), (AVAILABLE, "reno cubic\n")), variables=NO_CHOICE),
    ),
    Alone(
        "bbr not in use",
        "7",
        "bbr",
        "connections use cubic",
        Host(files=((CONTROLS, "cubic\n"),), variables=NO_CHOICE),
    ),
    Alone("an old kernel", "1", "kernel", "Linux 2.6", Host(patch=UNAME26)),
    # ------------------------------------------------------------------------------------------------ limits
    Alone("few open files", "1", "open files", "ulimit -Hn is 200", Host(patch=FEW_FILES)),
    Alone(
        "a small /dev/shm",
        "1",
        "/dev/shm",
        "has 1MiB",
        Host(shell="mount -t tmpfs -o size=1m tmpfs /dev/shm"),
    ),
    Alone(
        "a /dev/shm that is read-only",
        "7",
        "/dev/shm",
        "cannot be written",
        Host(shell="mount -t tmpfs -o ro tmpfs /dev/shm"),
    ),
    Alone("little memory", "1", "memory", "of memory are free", Host(files=(("/proc/meminfo", MEMORY),))),
    # --------------------------------------------------------------------------------- names and addresses
    Alone(
        "a host without its own name",
        "1",
        "own name",
        "no address for 'ghost'",
        Host(patch="import socket; socket.sethostname('ghost')\n"),
    ),
    Alone(
        "a host whose name means 127.0.1.1",
        "8",
        "own name",
        "nodea means 127.0.1.1",
        Host((("DMLC_PS_ROOT_URI", "nodea"),), (("/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 nodea\n"),)),
    ),
    Alone(
        "a scheduler's name that is unknown",
        "7",
        "DNS",
        "no address for 'scheduler.example'",
        Host((("DMLC_PS_ROOT_URI", "scheduler.example"),), (("/etc/resolv.conf", "\n"),)),
    ),
    Alone(
        "a DNS server that does not answer",
        "9",
        "DNS",
        "/etc/resolv.conf asks 10.78.1.99",
        Host(
            (("DMLC_PS_ROOT_URI", "scheduler.example"),), (("/etc/resolv.conf", "nameserver 10.78.1.99\n"),)
        ),
    ),
    Alone(
        "a scheduler without a route to it",
        "10",
        "route",
        "no route to fd99::1",
        Host((("DMLC_PS_ROOT_URI", "fd99::1"),)),
    ),
    Alone(
        "an interface that is not there",
        "11",
        "address",
        "DMLC_INTERFACE='wg9'",
        Host((("DMLC_INTERFACE", "wg9"),)),
    ),
    Alone(
        "a NAT's address, without NETSTORM_BIND",
        "12",
        "address",
        "this host has no such address",
        Host(
            (
                ("DMLC_NODE_HOST", "203.0.113.7"),
                ("DMLC_PS_ROOT_URI", "10.78.1.1"),
                ("NETSTORM_SECURITY", "off"),
            )
        ),
    ),
    # ------------------------------------------------------------------------------------- ports and clocks
    Alone(
        "a node's port that is taken",
        "8",
        "port in use",
        "a node cannot listen at 10.78.0.1:9100",
        Host(
            (("NETSTORM_PORT", "9100"), ("DMLC_NODE_HOST", "10.78.0.1"), ("NETSTORM_SECURITY", "off")),
            patch=TAKE_9100,
        ),
    ),
]


COMMON = (
    ("DMLC_PS_ROOT_URI", "10.78.0.1"),
    ("NETSTORM_PORT", "9100"),
    ("NETSTORM_KEY_FILE", "{folder}/job.key"),
)


def plain(*more: tuple[str, str], **others: object) -> Host:
    """Return a host that is well, but for some variables and the rest of a `Host`."""
    return replace(Host(tuple({**dict(COMMON), **dict(more)}.items())), **others)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Between:
    """A misconfiguration between two hosts."""

    name: str
    check: str
    where: str
    says: str
    a: Host = field(default_factory=plain)
    b: Host = field(default_factory=plain)
    network: tuple[tuple[str, str], ...] = ()
    """Commands of ip in the router, and how each is undone."""
    unserved: str = ""


def rule(words: str) -> tuple[str, str]:
    return f"rule add pref 10 {words}", "rule del pref 10"


BETWEEN = [
    Between(
        "a firewall that drops a port",
        "TCP port",
        "a -> b",
        "TCP 10.78.1.1:9100 is closed: no answer",
        network=(rule("from 10.78.0.1 ipproto tcp dport 9100 blackhole"),),
    ),
    Between(
        "a firewall in one direction",
        "TCP port",
        "b -> a",
        "though the other direction works",
        network=(rule("from 10.78.1.1 ipproto tcp dport 9100 blackhole"),),
    ),
    Between(
        "a firewall that refuses a port",
        "address",
        "a -> b",
        "no way to 10.78.1.1:9100",
        network=(rule("from 10.78.0.1 ipproto tcp dport 9100 prohibit"),),
    ),
    Between(
        "a scheduler's port that is closed",
        "TCP port",
        "b -> a",
        "TCP 10.78.0.1:9091 is closed",
        network=(rule("from 10.78.1.1 ipproto tcp dport 9091 blackhole"),),
    ),
    Between(
        "a firewall that drops the time",
        "UDP port",
        "b -> a",
        "UDP 10.78.0.1:9091 is closed",
        network=(rule("from 10.78.1.1 ipproto udp dport 9091 blackhole"),),
    ),
    Between(
        "an MTU that nobody is told",
        "MTU",
        "a -> b",
        "packets of more than 12",
        network=(("link set to-b mtu 1300", "link set to-b mtu 1500"), rule("ipproto icmp blackhole")),
    ),
    Between(
        "an advertised address of another network",
        "address",
        "a -> b",
        "10.99.0.1:9100",
        b=plain(("DMLC_NODE_HOST", "10.99.0.1"), ("NETSTORM_BIND", "*")),
    ),
    Between(
        "an advertised loopback address",
        "address",
        "a -> b",
        "which means 10.78.0.1:9100 itself",
        b=plain(("DMLC_NODE_HOST", "127.0.0.1"), ("NETSTORM_BIND", "*")),
    ),
    Between(
        "a NAT that does not forward",
        "NAT",
        "a -> b",
        "10.78.1.1:50001",
        b=plain(("NETSTORM_ADVERTISED_PORT", "50001")),
    ),
    Between(
        "an address that leads to another host",
        "address",
        "a -> b",
        "a doctor of another host answers",
        b=plain(("DMLC_NODE_HOST", "10.78.0.1"), ("NETSTORM_BIND", "*")),
    ),
    Between("a clock that is 10 s off", "clock", "b", "its clock is 10 s ahead of", b=plain(patch=later(10))),
    Between(
        "another release",
        "release",
        "b",
        "NetStorm 0.1.9",
        b=plain(patch="import netstorm; netstorm.__version__ = '0.1.9'"),
    ),
    Between(
        "another protocol",
        "protocol",
        "b",
        "protocol 1 of",
        b=plain(patch="import netstorm.cli.doctor.facts as f; f.PROTOCOL_VERSION = 1"),
    ),
    Between(
        "another key",
        "key",
        "a -> b",
        "it has another key",
        b=plain(("NETSTORM_KEY_FILE", "{folder}/other.key")),
    ),
    Between(
        "no key",
        "key",
        "a -> b",
        "it has no key, and this",
        b=plain(("NETSTORM_KEY_FILE", ""), options=("--insecure",)),
    ),
    Between("chunks of another size", "settings", "b", "CHUNK_SIZE=4096", b=plain(("CHUNK_SIZE", "4096"))),
    Between(
        "two schedulers by one loopback address",
        "two schedulers",
        "a and b",
        "DMLC_PS_ROOT_URI=127.0.0.1",
        a=plain(("DMLC_PS_ROOT_URI", "127.0.0.1"), ("DMLC_NODE_HOST", "10.78.0.1"), ("NETSTORM_BIND", "*")),
        b=plain(("DMLC_PS_ROOT_URI", "127.0.0.1"), ("DMLC_NODE_HOST", "10.78.1.1"), ("NETSTORM_BIND", "*")),
    ),
    Between(
        "a scheduler's name that means two hosts",
        "two schedulers",
        "b",
        "the scheduler's name means",
        a=plain(("DMLC_PS_ROOT_URI", "sched"), files=(("/etc/hosts", PLAIN_HOSTS + "10.78.0.1 sched\n"),)),
        b=plain(("DMLC_PS_ROOT_URI", "sched"), files=(("/etc/hosts", PLAIN_HOSTS + "10.78.1.1 sched\n"),)),
    ),
    Between("a host that is not there", "host", "b", "", unserved="b"),
]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctors]:
    folder = tmp_path_factory.mktemp("doctor")
    JobKey.create(folder / "job.key")
    JobKey.create(folder / "other.key")
    JobKey.create(folder / "open.key")
    NodeKey.create(folder / "node.key", "tokyo")
    (folder / "open.key").chmod(0o644)
    (folder / "bad.yaml").write_text(BAD_NETWORK)
    (folder / "nodes.allow").touch()
    (folder / "nodes.allow").chmod(0o666)
    stubs = {
        "torch/__init__.py": "raise ImportError('libcudart.so.12: cannot open shared object file')",
        "mxnet/__init__.py": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "pyzmq-20.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pyzmq\nVersion: 20.0\n",
    }
    for file, text in stubs.items():
        path = folder / "stubs" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with (
        Forker("tests.wan.doctor_forker", {"OMP_NUM_THREADS": "1"}) as forker,
        Doctors(folder, forker) as made,
    ):
        yield made


@pytest.fixture
def doctors(network: Doctors) -> Iterator[Doctors]:
    yield network
    network.end_all()


def filled(host: Host, folder: Path) -> Host:
    return replace(
        host, variables=tuple((name, text.replace("{folder}", str(folder))) for name, text in host.variables)
    )


def together(group: str) -> Host:
    """Return a host with all misconfigurations of a group."""
    hosts = [one.host for one in ALONE if one.group == group]
    return Host(
        tuple(dict(pair for host in hosts for pair in host.variables).items()),
        tuple(dict(pair for host in hosts for pair in host.files).items()),
        "\n".join(host.shell for host in hosts),
        "\n".join(host.patch for host in hosts),
        options=tuple({option for host in hosts for option in host.options}),
    )


_found: dict[str, list[dict[str, str]]] = {}


def found_alone(doctors: Doctors, group: str) -> list[dict[str, str]]:
    if group not in _found:
        _found[group] = doctors.findings("a", filled(together(group), doctors.folder))
    return _found[group]


def named(findings: list[dict[str, str]], check: str, says: str, where: str = "") -> list[dict[str, str]]:
    return [
        one
        for one in findings
        if one["severity"] != "ok"
        and one["check"] == check
        and says in one["what"]
        and one["do"]
        and (not where or one["where"] == where)
    ]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_the_doctor_names_what_is_wrong_with_a_machine(doctors, case):
    findings = found_alone(doctors, case.group)
    assert named(findings, case.check, case.says), findings
    well = found_alone(doctors, "none")
    assert not named(well, case.check, ""), well


def place(text: str) -> str:
    """Return how findings name a host, or a pair of them."""
    names = {"a": "10.78.0.1:9100", "b": "10.78.1.1:9100"}
    return " ".join(names.get(word, word) for word in text.split())


def found_between(doctors: Doctors, a: Host, b: Host, unserved: str = "") -> list[dict[str, str]]:
    serving = [
        doctors.start(name, filled(host, doctors.folder), "doctor", "--quick", "--serve", *host.options)
        for name, host in (("a", a), ("b", b))
        if name != unserved
    ]
    for started in serving:
        doctors.wait_until_said(started, "listening at")
    peers = ["--peers", ",".join((place("a"), place("b"))), "--timeout", "1"]
    return doctors.findings("r", filled(Host(COMMON), doctors.folder), *peers)


@pytest.mark.parametrize("case", BETWEEN, ids=lambda case: case.name)
def test_the_doctor_names_what_is_wrong_between_hosts(doctors, case):
    for command, _ in case.network:
        doctors.ip("r", command)
    try:
        findings = found_between(doctors, case.a, case.b, case.unserved)
    finally:
        for _, undo in case.network:
            doctors.ip("r", undo)
    assert named(findings, case.check, case.says, place(case.where)), findings


def test_the_doctor_finds_nothing_between_hosts_that_are_well(doctors):
    findings = found_between(doctors, plain(), plain())
    assert [one for one in findings if one["severity"] != "ok"] == [], findings
    assert len(named([{**one, "severity": "", "do": "-"} for one in findings], "way", "round trip")) == 2


def test_the_doctor_names_a_scheduler_that_has_the_port_and_a_clock_that_is_not_the_scheduler_s(doctors):
    variables = (("DMLC_PS_ROOT_URI", "10.78.0.1"), ("NETSTORM_SECURITY", "off"))
    words = [
        "nsenter",
        f"--net=/run/netns/{doctors.namespace('a')}",
        sys.executable,
        "-c",
        f"{later(20)}{RUN}",
    ]
    words += ["netstorm", "scheduler", "-n", "2", "--host", "10.78.0.1", "--ready-file", "/dev/stdout"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **dict(variables)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as scheduler:
        try:
            assert scheduler.stdout is not None
            assert b"10.78.0.1:9091" in scheduler.stdout.readline()
            findings = doctors.findings("a", Host(variables))
            assert named(findings, "two schedulers", f"a NetStorm scheduler, process {scheduler.pid}"), (
                findings
            )
            findings = doctors.findings("b", Host(variables))
            assert named(findings, "clock", "this clock is 20 s behind that of the scheduler"), findings
        finally:
            scheduler.kill()


NFT = "import netstorm.cli.doctor.facts as f; f._firewalls = lambda: ['nft']\n"


def test_the_sample_of_the_page_is_what_the_doctor_says(doctors):
    """The page's hosts: 0.1.9 on the second, whose clock is 10 s off, and whose firewall drops TCP 9100."""
    (sample,) = [block.text for block in blocks("console") if "netstorm doctor --peers 10.78" in block.text]
    command, *expected = sample.splitlines()
    hosts = {
        "a": plain(patch=f"{NFT}import netstorm; netstorm.__version__ = '0.2.0'"),
        "b": plain(patch=f"{NFT}{later(10)}import netstorm; netstorm.__version__ = '0.1.9'"),
    }
    drop, undo = rule("from 10.78.0.1 ipproto tcp dport 9100 blackhole")
    doctors.ip("r", drop)
    try:
        for name, host in hosts.items():
            serving = doctors.start(name, filled(host, doctors.folder), "doctor", "--quick", "--serve")
            doctors.wait_until_said(serving, "listening at")
        words = command.removeprefix("$ netstorm ").split()
        process, out, err = doctors.start("r", filled(Host(COMMON), doctors.folder), *words)
        assert process.wait() == 1, err.read_text()
    finally:
        doctors.ip("r", undo)
    printed = out.read_text().splitlines()
    assert [line for line in expected if line not in printed and line != "..."] == [], printed
    assert len([line for line in printed if not line.startswith("ok: ")]) == len(expected)


SSH = """#!/bin/sh
# Stands for ssh: the remote host is a namespace.
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
case $1 in 10.78.0.1) name=a ;; *) name=b ;; esac
shift
echo 'welcome to this host'  # as shells may say
cd / && exec nsenter --net=/run/netns/NAMESPACE-$name sh -c "$*"
"""


def test_hosts_of_a_host_file_are_examined_through_ssh_though_their_ports_are_closed(doctors):
    (doctors.folder / "hosts").write_text("10.78.0.1 site=tokyo\n10.78.1.1 site=paris\n")
    ssh = doctors.folder / "ssh"
    ssh.write_text(SSH.replace("NAMESPACE", doctors.namespace("")[:-1]))
    ssh.chmod(0o755)
    words = ["--hosts", str(doctors.folder / "hosts"), "--ssh", str(ssh), "--timeout", "1"]
    host = Host((("NETSTORM_PORT", "9100"),))
    drop, undo = rule("from 10.78.0.1 ipproto tcp dport 9100 blackhole")
    doctors.ip("r", drop)
    try:
        findings = doctors.findings("r", host, *words)
    finally:
        doctors.ip("r", undo)
    assert named(findings, "TCP port", "TCP 10.78.1.1:9100 is closed", "10.78.0.1 -> 10.78.1.1"), findings
    assert len([one for one in findings if one["severity"] == "error"]) == 1, findings
    file = doctors.folder / "measured.yaml"
    findings = doctors.findings("r", host, *words, "--write", str(file))
    assert {one["severity"] for one in findings} == {"ok"}, findings
    network = load_network(file)
    assert [node.site for node in network.nodes] == ["tokyo", "paris"]
    assert {(link.source, link.target) for link in network.links} == {(0, 1), (1, 0)}
    assert all(link.rate > 1e6 and 0 < link.latency < 1 for link in network.links)


def test_measured_rates_and_latencies_are_those_of_the_network(tmp_path):
    JobKey.create(tmp_path / "job.key")
    with Wan.up(emulated()) as wan:
        hosts = [wan.address(rank) for rank in (0, 1)]
        variables = {"NETSTORM_KEY_FILE": str(tmp_path / "job.key"), "NETSTORM_PORT": "9100"}
        variables |= {"DMLC_PS_ROOT_URI": hosts[0], "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        doctor = [*NETSTORM, "doctor", "--quick"]
        serving = [
            subprocess.Popen(wan.command(rank, [*doctor, "--serve"]), env=variables, stderr=subprocess.PIPE)
            for rank in (0, 1)
        ]
        try:
            for process in serving:
                assert process.stderr is not None
                assert b"listening at" in process.stderr.readline()
            file = tmp_path / "measured.yaml"
            words = [*doctor, "--peers", ",".join(f"{host}:9100" for host in hosts), "--write", str(file)]
            done = subprocess.run(
                wan.command(0, words), env=variables, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        finally:
            for process in serving:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=30)
        links = load_network(file).links
        assert [(link.source, link.target) for link in links] == [(0, 1), (1, 0)]
        for link in links:
            # A busy machine adds to what the network takes.
            assert 20e6 <= link.rate <= 60e6
            assert 0.0045 <= link.latency <= 0.05
