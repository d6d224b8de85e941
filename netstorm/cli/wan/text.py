"""The output of `netstorm wan`: text for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from netstorm.emulation.check import LinkCheck
from netstorm.emulation.reports import NetworkReport
from netstorm.units import format_bytes, format_duration, format_fraction, format_rate

if TYPE_CHECKING:
    from netstorm.emulation.wan import Wan

__all__ = ["CHECK_HEAD", "check_json", "check_line", "check_summary", "status_text", "up_text"]

CHECK_HEAD: Final = (
    f"{'link':>7} {'rate':>11} {'measured':>12} {'off':>7} {'goodput':>12} {'RTT':>8} {'measured':>9} "
    f"{'loss':>7} {'measured':>9}"
)


def up_text(wan: Wan) -> str:
    """Return the state of a network that has come up, and what to do with it."""
    network = wan.network
    return (
        f"{wan.name} is up: {network.size} nodes, {len(network.links)} links; backend: {wan.backend_why}; "
        f"congestion control: {wan.congestion}\n"
        f"r0 is {wan.address(0)}, in the namespace {wan.namespace(0)}; run something there: "
        f"netstorm wan exec --name {wan.name} 0 -- COMMAND"
    )


def status_text(wan: Wan, report: NetworkReport) -> str:
    """Return a table of all links."""
    cpu = ", ".join(f"{relay['cpu_s']:.1f} s of CPU (process {relay['pid']})" for relay in report["relays"])
    made_by = (
        f"{wan.name}: backend {report['backend']} ({report['backend_why']}), "
        f"congestion control {report['congestion']} (pinned by {report['pinned_by']})"
    )
    head = (
        f"{'link':>7} {'rate':>11} {'latency':>8} {'loss':>7} {'carried':>9} {'segments':>9} "
        f"{'dropped':>8} {'lost':>6}"
    )
    lines = [made_by + (f"; relays: {cpu}" if cpu else ""), head]
    lines += [
        f"{link['source']}→{link['target']:<3}".rjust(7)
        + f" {format_rate(link['rate']):>11} {format_duration(link['latency']):>8} "
        f"{format_fraction(link['loss']):>7} {format_bytes(link['bytes']):>9} {link['packets']:>9} "
        f"{link['dropped']:>8} {link['lost']:>6}"
        for link in report["links"]
    ]
    if report["changes_ahead"]:
        since = report["changes_for_s"]
        begun = "not begun" if since is None else f"begun {since:.0f} s ago"
        lines.append(f"changes: {report['changes_ahead']} ahead, {begun}")
    return "\n".join(lines)


def check_line(row: LinkCheck) -> str:
    """Return a line of the table under `CHECK_HEAD`."""
    wrong = f"  WRONG: {', '.join(row.out_of_tolerance)}" if row.out_of_tolerance else ""
    return (
        f"{row.source}→{row.target}".rjust(7)
        + f" {format_rate(row.rate):>11} {format_rate(row.measured_rate):>12} {row.rate_error:>+7.1%} "
        f"{format_rate(row.goodput):>12} {row.round_trip * 1e3:>6.1f}ms "
        f"{row.measured_round_trip * 1e3:>7.2f}ms "
        f"{row.loss:>7.2%} {row.measured_loss:>9.3%}{wrong}"
    )


def check_summary(report: NetworkReport, rows: Sequence[LinkCheck]) -> str:
    """Return the largest errors, and how the network is emulated."""
    rate = max(rows, key=lambda row: abs(row.rate_error))
    trip = max(rows, key=lambda row: abs(row.round_trip_error))
    wrong = sum(1 for row in rows if row.out_of_tolerance)
    return (
        f"worst rate {rate.rate_error:+.1%} (allowed {rate.allowed:.0%}), worst round trip "
        f"{trip.round_trip_error * 1e3:+.2f} ms (allowed 1 ms); {wrong} of {len(rows)} out of tolerance\n"
        f"backend: {report['backend_why']}; congestion control: {report['congestion']}; "
        f"relays used up to {max(row.relay_cpu for row in rows):.0%} of a core"
    )


def check_json(report: NetworkReport, rows: Sequence[LinkCheck]) -> dict[str, object]:
    """Return the check as JSON."""
    return {
        "backend": report["backend"],
        "backend_why": report["backend_why"],
        "congestion": report["congestion"],
        "pinned_by": report["pinned_by"],
        "links": [
            {
                **asdict(row),
                "rate_error": row.rate_error,
                "round_trip_error": row.round_trip_error,
                "wrong": row.out_of_tolerance,
            }
            for row in rows
        ],
    }
