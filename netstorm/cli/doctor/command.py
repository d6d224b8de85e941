"""`netstorm doctor`: its options, what it does with them, and how findings are printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from netstorm.addresses import is_loopback
from netstorm.cli.support import exit_on_usage_error, split_address
from netstorm.errors import UsageError

if TYPE_CHECKING:
    from netstorm.cli.doctor.findings import Finding
    from netstorm.cli.doctor.hosts import Progress
    from netstorm.cli.doctor.pairs import ExaminedHost

__all__ = ["doctor"]

_SERVE_S: Final = 600.0
"""A doctor that is forgotten closes its ports after this."""

_INTERRUPTED: Final = 130
_TEXTS: Final = ("where", "what", "do")


def doctor(
    logs: Annotated[
        list[Path] | None, typer.Argument(metavar="LOGS", help="Logs of a failed job, or folders of them.")
    ] = None,
    *,
    hosts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Examine these hosts and all ways between them, by ssh."),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT,...", help="The same, where `netstorm doctor --serve` runs by hand."),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Let a doctor elsewhere examine this host, at the ports of the job."),
    ] = False,
    rates: Annotated[
        bool, typer.Option("--rates", help="Measure the rate of each pair, too: some seconds for each host.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measure rates, and write a network file of all that was measured."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for one connection.")
    ] = 5.0,
    serve_for: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="When --serve ends by itself.")
    ] = _SERVE_S,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="With --serve: let whoever reaches this host ask, without a key."),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Do not try to import MXNet and PyTorch.")] = False,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="With --hosts: their Python. Default: this one's path.")
    ] = None,
    ssh: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="With --hosts: such as 'ssh -p 2222'. Default: ssh.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    stdio: Annotated[bool, typer.Option("--stdio", hidden=True)] = False,
) -> None:
    """Find what is wrong with hosts, or between them, or was with a job; and what to do.

    \b
      netstorm doctor                             # this machine
      netstorm doctor --hosts cluster.txt         # before a job on several hosts
      netstorm doctor logs/                       # after a job: netstorm launch --log-dir logs
      netstorm doctor --serve                     # by hand, on each host: in containers, without ssh
      netstorm doctor --peers 10.0.0.1:9100,10.1.0.1:9100

    Settings are those of the job: set the same variables. Each host's doctor listens at the ports at which
    the job's processes would, and tries those of all others, so that each pair is tried in both directions.
    Nothing is changed on any host. Doctors prove to each other that they have the job's key
    (NETSTORM_KEY_FILE; with --hosts a fresh one is handed out as by `netstorm launch`).

    The exit code is 0 if all is well, 1 if there are errors or warnings, 2 if the arguments are wrong, 130
    after Ctrl-C.
    """
    logging.getLogger("netstorm").addHandler(logging.NullHandler())  # warnings about settings are findings
    with exit_on_usage_error():
        chosen = [
            option
            for option, given in (("LOGS", logs), ("--hosts", hosts), ("--peers", peers), ("--serve", serve))
            if given
        ]
        if len(chosen) > 1:
            raise UsageError(f"{' with '.join(chosen)}: expected one of them")
        if (rates or write) and not (hosts or peers):
            raise UsageError("--rates and --write need other hosts: give --hosts or --peers")
        if serve:
            _serve(serve_for, insecure=insecure, frameworks=not quick, stdio=stdio)
            return
        examined: list[ExaminedHost] = []
        try:
            with _progress() as progress:
                if logs:
                    from netstorm.cli.doctor.logs import explain, read_logs

                    findings = explain(read_logs(logs))
                elif hosts or peers:
                    from netstorm.cli.doctor.pairs import judge_hosts

                    how: dict[str, Any] = {
                        "rates": bool(rates or write),
                        "timeout": timeout,
                        "progress": progress,
                    }
                    examined = (
                        _by_ssh(hosts, ssh, python, frameworks=not quick, **how)
                        if hosts
                        else _by_hand(peers or "", **how)
                    )
                    findings = judge_hosts(examined)
                else:
                    findings = _this_machine(progress, frameworks=not quick)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        if as_json:
            _print_json(findings, examined)
        else:
            _print(findings)
        if write:
            _write(write, examined)
    raise typer.Exit(any(finding.severity.value != "ok" for finding in findings))


def _this_machine(progress: Progress, *, frameworks: bool) -> list[Finding]:
    from netstorm.cli.doctor.facts import gather
    from netstorm.cli.doctor.machine import judge_machine
    from netstorm.settings import child_environment

    progress("looking at this machine")
    return judge_machine(gather(child_environment(), frameworks=frameworks)[0])


def _serve(serve_for: float, *, insecure: bool, frameworks: bool, stdio: bool) -> None:
    from netstorm.cli.doctor.facts import gather
    from netstorm.cli.doctor.probes import Doctor, serve_standard_streams
    from netstorm.settings import child_environment

    if stdio:
        asyncio.run(serve_standard_streams())
        return

    gathered = gather(child_environment(), frameworks=frameworks)

    async def run() -> None:
        async with Doctor(*gathered, insecure=insecure) as doctor:
            places = [door.place() for door in doctor.facts.doors if not door.problem]
            if not places:
                problems = [door.problem for door in doctor.facts.doors] or [doctor.facts.scheduler_problem]
                raise UsageError(f"no port to listen at ({problems[0]}): `netstorm doctor` says why")
            typer.echo(f"netstorm doctor: listening at {', '.join(places)} for {serve_for:g} s", err=True)
            if all(is_loopback(door.advertised) for door in doctor.facts.doors):
                hint = "set DMLC_PS_ROOT_URI to the address of the job's scheduler"
                typer.echo(f"netstorm doctor: other hosts cannot reach it there: {hint}", err=True)
            await asyncio.sleep(serve_for)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


def _by_ssh(
    file: Path,
    ssh: str | None,
    python: str | None,
    *,
    frameworks: bool,
    rates: bool,
    timeout: float,
    progress: Progress,
) -> list[ExaminedHost]:
    from netstorm.cli.doctor.hosts import examine, hosts_of, ssh_words
    from netstorm.cli.doctor.wire import Begin
    from netstorm.cli.launch.hosts import passed_on, read_hostfile
    from netstorm.cli.launch.job import find_command
    from netstorm.cli.launch.variables import KEY_FILE, fresh_or_given
    from netstorm.settings import child_environment

    hosts = hosts_of(read_hostfile(file))
    environment = child_environment()
    words = shlex.split(ssh or "ssh") or ["ssh"]
    find_command(words, Path.cwd(), environment)
    key = fresh_or_given(environment, with_scheduler=True)
    common = {name: value for name, value in passed_on(environment, {}).items() if name != KEY_FILE}
    first = hosts[0][1]
    common["DMLC_PS_ROOT_URI"] = first.address or first.host.rpartition("@")[2]  # as the launcher does
    begin = {
        host.name: (
            ssh_words(words, host.name, python or sys.executable),
            Begin(
                variables=common | ({"DMLC_NODE_HOST": placement.address} if placement.address else {}),
                key="" if key is None else key.file_text(),
                nodes=host.nodes,
                schedules=number == 0,
                frameworks=frameworks,
            ),
        )
        for number, (host, placement) in enumerate(hosts)
    }
    examined = [host for host, _ in hosts]
    asyncio.run(examine(examined, key=b"", rates=rates, timeout=timeout, progress=progress, begin=begin))
    return examined


def _by_hand(peers: str, *, rates: bool, timeout: float, progress: Progress) -> list[ExaminedHost]:
    from netstorm.cli.doctor.hosts import examine
    from netstorm.cli.doctor.pairs import ExaminedHost
    from netstorm.cli.doctor.wire import key_of
    from netstorm.pslite.admission import job_key_of
    from netstorm.settings import Settings

    examined = [
        ExaminedHost(name=place, given=split_address(place, "--peers")) for place in peers.split(",") if place
    ]
    key = key_of(job_key_of(Settings.from_environment(elastic="")))
    asyncio.run(examine(examined, key=key, rates=rates, timeout=timeout, progress=progress))
    return examined


def _write(file: Path, hosts: Sequence[ExaminedHost]) -> None:
    from netstorm.cli.doctor.pairs import network_of
    from netstorm.topology.files import dump_network, parse_network

    text = dump_network(network_of(hosts))
    try:
        parse_network(text, str(file))  # what was not measured may leave it in two parts
        file.write_text(f"# measured by netstorm doctor: {', '.join(host.name for host in hosts)}\n{text}")
    except (OSError, UsageError) as error:
        raise UsageError(f"--write: {file} is not written: {error}") from None
    typer.echo(f"netstorm: {file}: the network as it was measured", err=True)


# What is printed: a table on a terminal, two lines a finding in a pipe.


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield what shows on standard error what is being done."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.file.isatty():
        yield lambda text: typer.echo(f"netstorm doctor: {text}", err=True)
        return
    with console.status("netstorm doctor") as status:
        yield status.update


def _print(findings: Sequence[Finding]) -> None:
    counts = [sum(one.severity.value == name for one in findings) for name in ("error", "warning", "ok")]
    import msgspec

    from netstorm.protocol.frames import printable

    lines = [
        msgspec.structs.replace(
            one, **{name: printable(" ".join(getattr(one, name).split())) for name in _TEXTS}
        )
        for one in findings
    ]
    ordered = sorted(lines, key=lambda one: ("error", "warning", "ok").index(one.severity.value))
    summary = f"errors: {counts[0]}, warnings: {counts[1]}, well: {counts[2]}"
    if not sys.stdout.isatty():
        for one in ordered:
            typer.echo(f"{one.severity.value}: {one.where}: {one.check}: {one.what}")
            if one.do and one.severity.value != "ok":
                typer.echo(f"  do: {one.do}")
        typer.echo(summary)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("", "where", "check", "what, and what to do"):
        table.add_column(heading, overflow="fold", no_wrap=heading in {"", "check"})
    styles = {"error": "bold red", "warning": "yellow", "ok": "green"}
    for one in ordered:
        text = Text(one.what)
        if one.do and one.severity.value != "ok":
            text.append(f"\n{one.do}", style="bold")
        severity = Text(one.severity.value, style=styles[one.severity.value])
        table.add_row(severity, Text(one.where), Text(one.check), text)
    Console().print(table)
    typer.echo(summary)


def _print_json(findings: Sequence[Finding], hosts: Sequence[ExaminedHost]) -> None:
    import msgspec

    document: dict[str, Any] = {"findings": msgspec.to_builtins(list(findings))}
    if hosts:
        document["hosts"] = [
            {
                "name": host.name,
                "problem": host.problem,
                "facts": msgspec.to_builtins(host.facts),
                "pairs": [
                    {"to": hosts[result.rank].name, **msgspec.to_builtins(result)} for result in host.results
                ],
            }
            for host in hosts
        ]
    typer.echo(json.dumps(document, indent=2))
