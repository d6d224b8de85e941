"""`netstorm wan`: emulates a network file in network namespaces on this machine, for any program."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from netstorm.cli.support import check_job, exit_on_usage_error
from netstorm.errors import UsageError
from netstorm.lab.emulation.check import LinkCheck
from netstorm.lab.emulation.messages import NetworkReport
from netstorm.units import format_bytes, format_duration, format_fraction, format_rate

if TYPE_CHECKING:
    from netstorm.lab.emulation.wan import Wan


wan: Final = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Emulate a network on this machine: namespaces, in which any program runs. Needs root.",
)

_Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the network.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_DEFAULT_NAME: Final = "wan"
_INTERRUPTED: Final = 130
_OPTIONS_FIRST: Final = {"allow_interspersed_args": False}
"""For typer: options after the first argument belong to the command that is run."""


@wan.command()
def up(
    network: Annotated[Path, typer.Argument(metavar="NETWORK.yaml", help="The network file.")],
    *,
    name: _Name = _DEFAULT_NAME,
    backend: Annotated[
        str,
        typer.Option(metavar="NAME", help="netem (the kernel's), relay (NetStorm's own), or auto."),
    ] = "auto",
    congestion: Annotated[
        str, typer.Option(metavar="NAME", help="TCP congestion control of all namespaces.")
    ] = "bbr",
    queues: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="fifo, or dscp: priorities and selective dropping by code point (relay)."
        ),
    ] = "fifo",
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay, and take the network down at Ctrl-C or SIGTERM.")
    ] = False,
) -> None:
    """Bring up the network, and leave it up until `netstorm wan down`.

    \b
      sudo netstorm wan up examples/networks/internet2.yaml
      sudo netstorm wan exec 0 -- ping r8

    Each rank gets a namespace; r0, r1, … are the ranks' host names in each. What crashed networks have left
    is removed first. The changes in the file begin at once.
    """
    from netstorm.lab.emulation.wan import Wan
    from netstorm.topology.files import load_network

    with exit_on_usage_error():
        made = Wan.up(
            load_network(network),
            name=name,
            backend=backend,
            congestion=congestion,
            queues=queues,
            detached=not foreground,
        )
        if not foreground:
            print(up_text(made))
            return
        with made:
            _stay(made, up_text(made))


def _stay(made: Wan, text: str) -> None:
    """Print that the network is up, and wait for a signal."""
    import signal

    from netstorm import clock
    from netstorm.lab.emulation.namespaces import running

    # Not `sigtimedwait`: the kernel may hand a signal to another thread, which has not blocked it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        print(text, flush=True)
        while made.name in running():
            clock.sleep(1.0)
        raise UsageError(f"the emulated network {made.name!r} has ended")


@wan.command()
def down(
    *,
    name: _Name = _DEFAULT_NAME,
    everything: Annotated[bool, typer.Option("--all", help="All networks that are up.")] = False,
) -> None:
    """Take the network down, with the programs in it, and remove what crashed networks have left."""
    from netstorm.lab.emulation.namespaces import check_requirements, remove_stale, running
    from netstorm.lab.emulation.wan import Wan

    with exit_on_usage_error():
        check_requirements()
        for stale in remove_stale():
            print(f"removed what {stale!r} had left behind")
        for network in running() if everything else [name]:
            Wan.attach(network).down()
            print(f"{network} is down")


@wan.command("exec", context_settings=_OPTIONS_FIRST)
def run_in(
    rank: Annotated[int, typer.Argument(metavar="RANK", help="Rank in whose namespace the command runs.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What to run.")],
    *,
    name: _Name = _DEFAULT_NAME,
) -> None:
    """Run a command in a rank's namespace; its exit code is the command's."""
    from netstorm.lab.emulation.wan import Wan

    with exit_on_usage_error():
        words = Wan.attach(name).command(rank, command[command[0] == "--" :])
        sys.stdout.flush()
        try:
            os.execvp(words[0], words)
        except OSError as error:
            raise UsageError(f"cannot run {words[0]}: {error.strerror}") from None


@wan.command("set")
def change(
    *,
    between: Annotated[
        tuple[int, int] | None, typer.Option(metavar="RANK RANK", help="Both directions of a link.")
    ] = None,
    source: Annotated[
        int | None, typer.Option("--from", metavar="RANK", help="One direction of a link: its source.")
    ] = None,
    target: Annotated[
        int | None, typer.Option("--to", metavar="RANK", help="One direction of a link: its target.")
    ] = None,
    rate: Annotated[str | None, typer.Option(metavar="RATE", help="New rate, such as 40Mbit.")] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="New latency, one way, such as 15ms.")
    ] = None,
    loss: Annotated[str | None, typer.Option(metavar="PERCENT", help="New loss, such as 0.02%.")] = None,
    name: _Name = _DEFAULT_NAME,
) -> None:
    """Change a link at once.

    \b
      netstorm wan set --between 0 1 --rate 40Mbit
      netstorm wan set --from 2 --to 3 --latency 50ms --loss 1%
    """
    from netstorm.lab.emulation.wan import Wan
    from netstorm.units import parse_duration, parse_fraction, parse_rate

    with exit_on_usage_error():
        values = {
            "rate": _read(rate, parse_rate),
            "latency": _read(latency, parse_duration),
            "loss": _read(loss, parse_fraction),
        }
        if all(value is None for value in values.values()):
            raise UsageError("nothing to set: expected --rate, --latency or --loss")
        if between is not None and source is None and target is None:
            ends = [between, (between[1], between[0])]
        elif between is None and source is not None and target is not None:
            ends = [(source, target)]
        else:
            raise UsageError("which link? Expected --between RANK RANK, or --from RANK --to RANK")
        running = Wan.attach(name)
        for source_rank, target_rank in ends:
            running.set(source_rank, target_rank, **values)


def _read(text: str | None, parse: Callable[[object], float]) -> float | None:
    return None if text is None else parse(text)


@wan.command()
def status(*, name: _Name = _DEFAULT_NAME, as_json: _Json = False) -> None:
    """Print the present values of each link, and its traffic, drops and losses so far."""
    import json

    from netstorm.lab.emulation.wan import Wan

    with exit_on_usage_error():
        running = Wan.attach(name)
        report = running.report()
        print(json.dumps(report, indent=1) if as_json else status_text(running, report))


@wan.command()
def record(
    recording: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="What `netstorm record` has written of a job.")
    ],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="NETWORK.yaml", help="The network file.")],
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="The job, if the recording has several.")
    ] = None,
) -> None:
    """Make a network file of a recorded job: what its links were measured to carry, with their changes.

    \b
      netstorm record night.jsonl
      netstorm wan record night.jsonl -o network.yaml
      netstorm simulate --network network.yaml --model 244MB

    Links that no sum has crossed are left out. An existing file is not overwritten. This needs no root.
    """
    from netstorm.dashboard.recording import read_recording
    from netstorm.lab.emulation.recorded import recorded_network
    from netstorm.topology.files import dump_network

    with exit_on_usage_error():
        statuses = list(read_recording(recording))
        names = sorted({status.job for status in statuses})
        if job is None and len(names) > 1:
            raise UsageError(f"{recording} has {len(names)} jobs: {', '.join(names)}; say which: --job NAME")
        check_job(job, names, f"in {recording}")
        network = recorded_network(status for status in statuses if job in {None, status.job})
        try:
            with output.open("x") as file:
                file.write(
                    f"# Measured by job {names[0] if job is None else job!r}.\n{dump_network(network)}"
                )
        except OSError as error:
            raise UsageError(f"--output {output}: cannot be written: {error.strerror}") from None
        measured, changes = len(network.links), len(network.changes)
        print(f"{output}: {network.size} nodes, {measured} links, {changes} changes")


@wan.command()
def check(
    network: Annotated[
        Path | None,
        typer.Argument(metavar="NETWORK.yaml", help="Network file, brought up for the check only."),
    ] = None,
    *,
    name: _Name = _DEFAULT_NAME,
    together: Annotated[bool, typer.Option("--all", help="Load all links at once, both ways.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.2,
            help="Duration of each measurement after the warm-up. Default: 2; with --all 6.",
            show_default=False,
        ),
    ] = None,
    warm_up: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Warm-up before that, for TCP to find the rate.")
    ] = 1.5,
    backend: Annotated[str, typer.Option(metavar="NAME", help="As for `wan up`.")] = "auto",
    congestion: Annotated[str, typer.Option(metavar="NAME", help="As for `wan up`.")] = "bbr",
    as_json: _Json = False,
) -> None:
    """Measure the network against its file: rate, round trip and loss of each link.

    Links are loaded one at a time; a rate must be within 3 %, with --all within 10 %, a round trip within
    1 ms. Rates are compared on the wire: TCP's goodput is lower, because of headers
    (docs/guides/emulated-wan.md).

    The exit code is 1 if anything is out of tolerance.
    """
    from netstorm.lab.emulation.wan import Wan
    from netstorm.topology.files import load_network

    with exit_on_usage_error(), contextlib.ExitStack() as stack:
        if network is None:
            checked = Wan.attach(name)
        else:
            checked = stack.enter_context(
                Wan.up(load_network(network), backend=backend, congestion=congestion, start_changes=False)
            )
        try:
            measured = seconds or (6.0 if together else 2.0)
            good = _check(checked, together=together, warm_up=warm_up, seconds=measured, as_json=as_json)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
    raise typer.Exit(0 if good else 1)


def _check(checked: Wan, *, together: bool, warm_up: float, seconds: float, as_json: bool) -> bool:
    import json

    from netstorm.lab.emulation.check import check as measure
    from netstorm.lab.emulation.namespaces import raise_priority

    raise_priority()  # else other programs of a busy machine disturb the measurement
    rows = []
    if not as_json:
        print(CHECK_HEAD)
    for row in measure(checked, together=together, warm_up_s=warm_up, measure_s=seconds):
        rows.append(row)
        if not as_json:
            print(check_line(row), flush=True)
    report = checked.report()
    if as_json:
        print(json.dumps(check_json(report, rows), indent=1))
    else:
        print(check_summary(report, rows))
    return not any(row.out_of_tolerance for row in rows)


# The output of `netstorm wan`: text for people, JSON for programs.

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
    """Return what `netstorm wan check --json` prints."""
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
