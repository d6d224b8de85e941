"""Judges what one machine is like. Pure: facts in, findings out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

from netstorm.addresses import is_loopback
from netstorm.cli.doctor.facts import Door, Facts
from netstorm.cli.doctor.findings import Finding, Row, Severity, findings_at
from netstorm.units import format_bytes

__all__ = ["CLOCK_S", "judge_machine"]

_PYTHON: Final = (3, 10)
_KERNEL: Final = (4, 18)
"""Since then Linux says how much TCP has delivered, on which measured rates rest."""

_TCP_INFO_BYTES: Final = 196
"""Up to tcpi_delivered (`pslite/tcp_info.py`)."""

_FEW_FILES, _TOO_FEW_FILES = 4096, 256
"""A connection is a file; half of the files are for sessions (guides/security.md)."""

_SHM_NAME: Final = "/dev/shm"  # noqa: S108 -- its name alone
_LEAST_SHM: Final = 256 << 20
"""Docker gives 64 MiB, with which PyTorch's data loaders end by SIGBUS."""

_LEAST_MEMORY: Final = 1 << 30
"""PyTorch alone takes a quarter of it, before there is a model."""

CLOCK_S: Final = 1.0
"""Logs and checkpoints of different hosts can then no longer be compared."""


def judge_machine(facts: Facts, *, alone: bool = True) -> list[Finding]:
    """Return a finding for each thing that was looked at.

    Args:
        facts: of the machine.
        alone: this machine alone is looked at; others are not known to take part.
    """
    parts = (_software(facts), _settings(facts), _kernel(facts), _limits(facts), _names(facts, alone=alone))
    return findings_at(facts.host, itertools.chain(*parts))


def _ok(check: str, what: str) -> Row:
    return Severity.OK, check, what, ""


def _software(facts: Facts) -> Iterator[Row]:
    if tuple(map(int, re.findall(r"[0-9]{1,6}", facts.python)[:2])) < _PYTHON:
        yield Severity.ERROR, "python", f"Python {facts.python}", "install Python 3.10 or later"
    for name, problem in facts.too_old.items():
        yield Severity.ERROR, "packages", f"{name} {problem}", f"pip install --upgrade {name}"
    if not facts.too_old:
        yield _ok("packages", ", ".join(f"{name} {version}" for name, version in facts.versions.items()))
    for name, problem in facts.frameworks.items():
        if problem:
            extra = f"pip install --force-reinstall {name}, in the environment that has NetStorm"
            yield Severity.ERROR, name, f"{name} is installed, and cannot be imported: {problem}", extra
        else:
            yield _ok(name, "can be imported")


def _settings(facts: Facts) -> Iterator[Row]:
    if facts.settings_problem:
        yield Severity.ERROR, "settings", facts.settings_problem, "netstorm env shows where values are from"
    for note in facts.settings_notes:
        yield Severity.WARNING, "settings", note, "correct the variable, or unset it"
    if facts.key_problem:
        do = _command_in(facts.key_problem, "netstorm keys new job.key")
        yield Severity.ERROR, "key", facts.key_problem, do
    for problem in facts.files_problem:
        yield Severity.ERROR, "files", problem, _command_in(problem, "correct the file, or the variable")
    if not (facts.settings_problem or facts.settings_notes or facts.key_problem or facts.files_problem):
        yield _ok("settings", "all known, and none contradicts another")


def _command_in(text: str, otherwise: str) -> str:
    """Return the command that an error message names."""
    match = re.search(r"`(chmod [^`]+)`", text)
    return match[1] if match else otherwise


def _kernel(facts: Facts) -> Iterator[Row]:
    version = tuple(map(int, re.findall(r"[0-9]{1,6}", facts.kernel)[:2]))
    lacks = []
    if version < _KERNEL or facts.tcp_info_bytes < _TCP_INFO_BYTES:
        lacks.append("how much TCP has delivered, so rates are measured by the busy time of links")
    if not facts.memfd:
        lacks.append(
            "memfd_create, so ranks of one machine send values over TCP, and `netstorm launch` has no key"
        )
    if lacks:
        what = f"Linux {facts.kernel} lacks {'; '.join(lacks)}"
        yield Severity.WARNING, "kernel", what, "use Linux 4.18 or later"
    else:
        yield _ok("kernel", f"Linux {facts.kernel}")
    if facts.congestion == "bbr":
        yield _ok("bbr", "is what connections use")
    elif facts.chooses_bbr:
        yield _ok("bbr", f"is what NetStorm's connections use; other programs' use {facts.congestion}")
    elif "bbr" in facts.congestions:
        what = f"connections use {facts.congestion}: a stream with losses gets a part of what bbr gets"
        yield Severity.WARNING, "bbr", what, "sudo sysctl -w net.ipv4.tcp_congestion_control=bbr"
    else:
        what = f"bbr is not loaded; the kernel has {' '.join(facts.congestions) or 'nothing'}"
        command = "sudo modprobe tcp_bbr && sudo sysctl -w net.ipv4.tcp_congestion_control=bbr"
        yield Severity.WARNING, "bbr", what, command
    if facts.clock_offset is None:
        return
    if abs(facts.clock_offset) > CLOCK_S:
        how = "behind" if facts.clock_offset > 0 else "ahead of"
        what = (
            f"this clock is {abs(facts.clock_offset):.3g} s {how} that of the scheduler at {facts.scheduler}"
        )
        yield Severity.WARNING, "clock", what, "sudo timedatectl set-ntp true, on both"
    else:
        yield _ok("clock", f"{1000 * facts.clock_offset:.3g} ms from that of the scheduler")


def _limits(facts: Facts) -> Iterator[Row]:
    limit = facts.files_limit
    if 0 <= limit < _FEW_FILES:
        severity = Severity.ERROR if limit < _TOO_FEW_FILES else Severity.WARNING
        what = f"ulimit -Hn is {limit}: at most {limit // 2} sessions with other processes"
        yield severity, "open files", what, "ulimit -n 65536 as root, or nofile in /etc/security/limits.conf"
    else:
        yield _ok("open files", f"up to {limit if limit >= 0 else 'any number'}")
    if facts.shm_bytes < 0:
        what = "is not there, or cannot be written"
        yield Severity.WARNING, _SHM_NAME, what, "sudo mount -t tmpfs tmpfs /dev/shm"
    elif facts.shm_bytes < _LEAST_SHM:
        what = f"has {format_bytes(facts.shm_bytes)}: workers of PyTorch's data loaders end by SIGBUS"
        do = "docker run --shm-size=1g, or sudo mount -o remount,size=1g /dev/shm"
        yield Severity.WARNING, _SHM_NAME, what, do
    else:
        yield _ok(_SHM_NAME, f"{facts.shm_bytes / 1e9:.3g} GB")
    if facts.memory_bytes < _LEAST_MEMORY:
        what = f"{format_bytes(facts.memory_bytes)} of memory are free"
        do = "end what else runs here (ps aux --sort -rss | head), or use a larger host"
        yield Severity.WARNING, "memory", what, do
    else:
        yield _ok("memory", f"{facts.memory_bytes / 1e9:.3g} GB are free")


def _names(facts: Facts, *, alone: bool) -> Iterator[Row]:
    usual = facts.addresses[0] if facts.addresses else "ADDRESS"
    local = bool(facts.own_name) and all(map(is_loopback, facts.own_name))
    if facts.name_problem:
        yield (Severity.WARNING, "own name", facts.name_problem,
               f"echo '{usual} {facts.host}' | sudo tee -a /etc/hosts")  # fmt: skip
    elif local and facts.host not in {"localhost", ""}:
        by_name = facts.scheduler == facts.host or not (alone or facts.secured)
        severity = Severity.WARNING if by_name else Severity.OK
        what = f"{facts.host} means {facts.own_name[0]} here, at which no other host reaches this one"
        hint = f"name this host by its address, {usual}, in DMLC_PS_ROOT_URI, MASTER_ADDR and host files"
        yield severity, "own name", what, hint
    else:
        yield _ok("own name", f"{facts.host} means {', '.join(facts.own_name)}")
    if facts.scheduler_problem:
        is_route = facts.scheduler_problem.startswith("no route")
        yield (Severity.ERROR, "route" if is_route else "DNS",
               f"DMLC_PS_ROOT_URI={facts.scheduler}: {facts.scheduler_problem}",
               "ip route get the address: a VPN or IPv6 may be down" if is_route else
               "give the scheduler's address in figures, or a line in /etc/hosts")  # fmt: skip
    if facts.advertised_problem:
        do = "set DMLC_NODE_HOST to this host's address that the others reach"
        yield Severity.ERROR, "address", facts.advertised_problem, do
    yield _ok("IPv6", "yes" if facts.ipv6 else "no: hosts with IPv6 alone cannot be in a job with this one")
    for door in facts.doors:
        yield _door(facts, door)


def _door(facts: Facts, door: Door) -> Row:
    who, variable = ("the scheduler", "DMLC_PS_ROOT_PORT") if door.scheduler else ("a node", "NETSTORM_PORT")
    if not door.problem and not door.advertised_port:
        return _ok("ports", f"{who} listens at any free port of {door.advertised}: NETSTORM_PORT fixes it")
    if not door.problem:
        return _ok("ports", f"{who} can listen, and is found at {door.place()}")
    what = f"{who} cannot listen at {door.place()}: {door.problem}"
    if "NetStorm scheduler" in door.problem:
        do = f"end that one, or set {variable} to another port at all hosts"
        return Severity.ERROR, "two schedulers", what, do
    if "assign" in door.problem:
        what = f"{what}: this host has no such address ({', '.join(facts.addresses)})"
        return Severity.ERROR, "address", what, "behind a NAT set NETSTORM_BIND='*'; else correct the address"
    do = f"ss -tulpn 'sport = :{door.port}' shows who; or set {variable} to another port"
    return Severity.ERROR, "port in use", what, do
