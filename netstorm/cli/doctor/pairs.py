"""Judges several hosts and the ways between them. Pure: facts and measured pairs in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from netstorm.addresses import is_loopback
from netstorm.cli.doctor.facts import Door, Facts
from netstorm.cli.doctor.findings import Finding, Row, Severity, findings_at, firewall_hint
from netstorm.cli.doctor.machine import CLOCK_S, judge_machine
from netstorm.cli.doctor.wire import ProbeResult, ProbeTarget
from netstorm.topology.network import Link, Network, Node, Rank
from netstorm.units import format_duration, format_rate, rounded

__all__ = ["ExaminedHost", "judge_hosts", "network_of", "targets_of"]


@dataclass(kw_only=True)
class ExaminedHost:
    """One host, what it is like, and what it has found of the others."""

    name: str
    given: tuple[str, int] | None = None
    """Where its doctor listens, if a person has said it."""
    nodes: int = 1
    site: str = ""
    facts: Facts | None = None
    problem: str = ""
    """Why it has no facts, or no results."""
    results: list[ProbeResult] = field(default_factory=list)

    @property
    def doors(self) -> list[Door]:
        """Where its doctor listens; the one that is measured comes first."""
        doors = [door for door in (self.facts.doors if self.facts else ()) if not door.problem]
        return sorted(doors, key=lambda door: door.scheduler)


def targets_of(hosts: Sequence[ExaminedHost], source: int, *, timeout: float = 5.0) -> list[ProbeTarget]:
    """Return what a host is to try: each port of each other one."""
    targets = []
    for number, host in enumerate(hosts):
        if number == source and host.nodes == 1:
            continue
        places = [(door.advertised, door.advertised_port) for door in host.doors]
        if host.facts is None and host.given is not None:
            places = [host.given]
        targets += [
            ProbeTarget(
                rank=number,
                identity=host.facts.identity if host.facts else "",
                host=place[0],
                port=place[1],
                main=first == 0,
                timeout=timeout,
            )
            for first, place in enumerate(places)
        ]
    return targets


_SMALL_MTU: Final = 1280
"""Every path of IPv6 has it (RFC 8200)."""

_ONE_KEY: Final = "set NETSTORM_KEY_FILE to copies of one file at all hosts"


def judge_hosts(hosts: Sequence[ExaminedHost]) -> list[Finding]:
    """Return the findings about all hosts, and about each pair of them in both directions."""
    found = []
    for host in hosts:
        if host.facts is not None:
            judged = judge_machine(host.facts, alone=False)
            found += [finding for finding in judged if finding.severity != Severity.OK]
        if host.problem:
            by_ssh = "ssh must get there without a question, and find NetStorm (--python)"
            do = "`netstorm doctor --serve` must run there, with the same key" if host.given else by_ssh
            found += findings_at(host.name, [(Severity.ERROR, "host", host.problem, do)])
    known = [host for host in hosts if host.facts is not None]
    for where, row in (*_differences(known), *_schedulers(known), *_clocks(hosts)):
        found += findings_at(where, [row])
    for source in hosts:
        for result in source.results:
            where = f"{source.name} -> {hosts[result.rank].name}"
            found += findings_at(where, _pair(hosts, source, result))
    return found


def _facts(host: ExaminedHost) -> Facts:
    assert host.facts is not None
    return host.facts


def _differences(known: Sequence[ExaminedHost]) -> Iterator[tuple[str, Row]]:
    """Compare each host with the first one."""
    one = "install one release at all hosts"
    compared: list[tuple[Severity, str, Callable[[Facts], str], str]] = [
        (Severity.ERROR, "protocol", lambda f: f"protocol {f.protocol} of NetStorm {f.release}", one),
        (Severity.WARNING, "release", lambda f: f"NetStorm {f.release}", one),
        (Severity.WARNING, "python", lambda f: f"Python {f.python.rpartition('.')[0]}", "use one version"),
        (Severity.WARNING, "torch", lambda f: f"torch {f.versions.get('torch')}", "install one version"),
        (Severity.WARNING, "mxnet", lambda f: f"mxnet {f.versions.get('mxnet')}", "install one version"),
        (Severity.ERROR, "settings", _job_wide, "set these alike at all hosts"),
        (Severity.ERROR, "key", lambda f: "a key, or security off" if f.secured else "no key", _ONE_KEY),
    ]
    for severity, check, value, do in compared:
        for host in known[1:]:
            first, here = value(_facts(known[0])), value(_facts(host))
            if first != here and (check != "protocol" or _facts(known[0]).protocol != _facts(host).protocol):
                yield host.name, (severity, check, f"{here}, and {known[0].name} has {first}", do)


def _job_wide(facts: Facts) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(facts.job_wide.items())) or "the defaults"


def _schedulers(known: Sequence[ExaminedHost]) -> Iterator[tuple[str, Row]]:
    having = [host for host in known if any(door.scheduler for door in _facts(host).doors)]
    if len(having) > 1:
        names = " and ".join(host.name for host in having)
        what = f"{names} each take DMLC_PS_ROOT_URI={_facts(having[0]).scheduler} for an address of their own"
        do = "set it to the address of one host, at all hosts"
        yield names, (Severity.ERROR, "two schedulers", what, do)
    meanings = {
        host.name: {one for one in _facts(host).scheduler_addresses if not is_loopback(one)} for host in known
    }
    named = {name: meant for name, meant in meanings.items() if meant}
    for name, meant in list(named.items())[1:]:
        first, others = next(iter(named.items()))
        if not meant & others:
            what = (
                f"the scheduler's name means {', '.join(sorted(meant))} here, "
                f"and {', '.join(sorted(others))} at {first}"
            )
            yield name, (Severity.ERROR, "two schedulers", what, "give the scheduler's address in figures")


def _clocks(hosts: Sequence[ExaminedHost]) -> Iterator[tuple[str, Row]]:
    """Compare each clock with the first host's, as far as one of both has measured it."""
    offsets: dict[int, tuple[float, float]] = {}
    for number, host in enumerate(hosts):
        for result in host.results:
            if result.clock_offset is None or result.rtt is None or 0 not in {number, result.rank}:
                continue
            other, sign = (result.rank, 1) if number == 0 else (number, -1)
            offsets.setdefault(other, (sign * result.clock_offset, result.rtt / 2))
    for other, (offset, bound) in sorted(offsets.items()):
        if abs(offset) - bound > CLOCK_S:
            how = "ahead of" if offset > 0 else "behind"
            what = f"its clock is {abs(offset):.3g} s {how} that of {hosts[0].name}"
            do = "sudo timedatectl set-ntp true, at all hosts"
            yield hosts[other].name, (Severity.WARNING, "clock", what, do)


def _pair(hosts: Sequence[ExaminedHost], source: ExaminedHost, result: ProbeResult) -> Iterator[Row]:
    target = hosts[result.rank]
    door = next((door for door in target.doors if door.place() == result.place), None)
    if not result.problem:
        yield from _udp(source, target, result, door)
        yield from _segments(source, target, result)
        return
    back = [one for one in target.results if hosts[one.rank] is source]
    works = ", though the other direction works" if back and not any(one.problem for one in back) else ""
    is_nat = door is not None and door.port != door.advertised_port
    port = _port(result)
    if door is not None and is_loopback(door.advertised):
        what = f"{target.name} advertises {result.place}, which means {source.name} itself there"
        do = f"set DMLC_NODE_HOST at {target.name} to an address that others reach"
        yield Severity.ERROR, "address", what, do
    elif result.problem == "key":
        yield Severity.ERROR, "key", f"{result.place}: {result.text}", _ONE_KEY
    elif result.problem == "stranger":
        who = f"ss -tlpn 'sport = :{port}' at {target.name} shows who; no two hosts may have one address"
        do = "correct the NAT's forwarding, or the address" if is_nat else who
        yield Severity.ERROR, "address", f"{result.place}: {result.text}", do
    elif result.problem == "unreachable":
        has = ", ".join(target.facts.addresses) if target.facts else "unknown addresses"
        right = f"set DMLC_NODE_HOST at {target.name}, which has {has}, to one that {source.name} reaches"
        do = f"{right}; or let the firewall that refuses it pass"
        yield Severity.ERROR, "address", f"no way to {result.place}: {result.text}{works}", do
    elif is_nat and door is not None:
        what = f"{result.place}, which {target.name} advertises: {result.text}{works}"
        forward = f"let the NAT forward TCP {door.advertised_port} to port {door.port} of {target.name}"
        yield Severity.ERROR, "NAT", what, f"{forward}, or correct NETSTORM_ADVERTISED_PORT"
    else:
        what = f"TCP {result.place} is closed: {result.text}{works}"
        yield Severity.ERROR, "TCP port", what, _hint(source, target, "tcp", port)


def _port(result: ProbeResult) -> int:
    return int(result.place.rpartition(":")[2])


def _hint(source: ExaminedHost, target: ExaminedHost, protocol: str, port: int) -> str:
    firewalls = target.facts.firewalls if target.facts else []
    address = next(iter(source.facts.addresses), "") if source.facts else ""
    return f"at {target.name}: {firewall_hint(firewalls, protocol, port, address)}"


def _udp(source: ExaminedHost, target: ExaminedHost, result: ProbeResult, door: Door | None) -> Iterator[Row]:
    is_scheduler = door is not None and door.scheduler
    if result.udp is False and (is_scheduler or (target.facts is not None and target.facts.udp_needed)):
        lost = "the time cannot be asked for" if is_scheduler else "late sums go by TCP, which is slower"
        what = f"UDP {result.place} is closed: {lost}"
        yield Severity.WARNING, "UDP port", what, _hint(source, target, "udp", _port(result))


def _segments(source: ExaminedHost, target: ExaminedHost, result: ProbeResult) -> Iterator[Row]:
    measured, sent = result.path_mtu, result.interface_mtu
    if result.stalls and measured is not None and measured == sent:
        what = (
            "64 kB do not arrive within 6 s, and full-sized packets do: the line is very slow, or loses much"
        )
        yield Severity.WARNING, "rate", what, f"at {source.name}: ping -c 100 {target.name} shows the loss"
    elif result.stalls:
        what = "64 kB do not arrive within 6 s, and small messages do"
        if measured is not None:
            what = f"packets of more than {measured} bytes are lost, and {source.name} sends {sent}"
        do = (
            f"at {source.name}: sudo ip link set dev DEVICE mtu {measured or _SMALL_MTU}, or "
            "sudo sysctl -w net.ipv4.tcp_mtu_probing=1; or let ICMP pass on the way"
        )
        yield Severity.ERROR, "MTU", f"TCP stalls: {what}", do
    elif result.rtt is not None and result.stalls is False:
        rate = f", {format_rate(result.rate)}" if result.rate else ""
        packets = f", packets of {measured} bytes" if measured else ""
        yield Severity.OK, "way", f"round trip {format_duration(result.rtt)}{rate}{packets}", ""


def network_of(hosts: Sequence[ExaminedHost]) -> Network:
    """Return the network of pairs whose rate was measured; ranks are in the order of the hosts."""
    ranks: list[list[Rank]] = []
    count = 0
    for host in hosts:
        ranks.append([Rank(rank) for rank in range(count, count + host.nodes)])
        count += host.nodes
    links = []
    seen = set()
    for number, host in enumerate(hosts):
        for result in host.results:
            if result.rtt is None or result.rate is None or (number, result.rank) in seen:
                continue
            seen.add((number, result.rank))
            rate, latency = rounded(result.rate, 3), rounded(result.rtt / 2, 3)
            links += [
                Link(source=a, target=b, rate=rate, latency=latency)
                for a in ranks[number]
                for b in ranks[result.rank]
                if a != b
            ]
    nodes = tuple(
        Node(rank=rank, site=host.site) for host, own in zip(hosts, ranks, strict=True) for rank in own
    )
    return Network(nodes=nodes, links=tuple(links))
