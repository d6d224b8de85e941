"""Explains the logs of a failed job: what failed first, of which rank, on which host, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from netstorm.cli.doctor.findings import Finding, Severity
from netstorm.errors import UsageError

__all__ = ["explain", "read_logs"]

_MOST: Final = 16 << 20
"""Bytes of a log that are read, from its end: there the failure is."""

_ESCAPES: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_PREFIX: Final = re.compile(r"^(?:\[(launch|scheduler|\d+|rank\d+)\]:? )")
_TIME: Final = re.compile(r"^\d\d:\d\d:\d\d netstorm (\w+) (.*)")
_FILE_RANK: Final = re.compile(r"rank[-_]?(\d+)")

_VERDICT: Final = re.compile(
    r"(?:the job ends|JoinRefused: the job has already ended): "
    r"rank (\d+) \(([^)]*)\) (?:ended before all nodes had joined: )?(.*)"
)
"""The scheduler's; the second is what a rank hears that comes to join when another one has failed already."""
_ENDS: Final = re.compile(r"(?:the job ends: |netstorm-verdict -1 )(.*)")
_LAUNCHER: Final = re.compile(
    r"rank (\d+)(?: on (\S+))? ((?:was killed|failed with).*?)"
    r"(?:; (?:ranks? [\d, -]+ ha(?:ve|s) |the job goes on|it is started).*)?$"
)
_SINCE: Final = re.compile(r"netstorm: ended by the launcher \(\w+\), since (.*)")
"""What the launcher writes in the name of a rank that it ends."""
_EXCEPTION: Final = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Lost|Failed|Refused|Timeout|Rounds"
    r"|Disagreement|Mismatch|Authorised|Removed))(?:: ?(.*))?$"
)
_SCRIPT_LINE: Final = re.compile(r'^  File "([^"]+)", line (\d+)')

_ECHOES: Final = ("NodeLost", "NodeFailed", "SchedulerLost", "NodeRemoved")
"""Errors by which a rank hears of another one's failure: never the first cause, if there is another."""

_CAUSES: Final = (
    (r"out of memory|MemoryError|not enough memory|oom-kill",
     "memory ran out",
     "use smaller batches, or fewer ranks a host; `netstorm doctor` there shows what is free"),
    (r"SIGKILL|signal 9\b",
     "a process was killed: by the kernel, for want of memory, or by a person or a batch system",
     "sudo dmesg -T | grep -i 'killed process', on that host"),
    (r"SIGBUS|[Bb]us error",
     "shared memory ran out (/dev/shm)",
     "docker run --shm-size=1g; `netstorm doctor` shows its size"),
    (r"SIGSEGV|SIGABRT|SIGILL|Segmentation fault",
     "a library crashed",
     "netstorm check, and python -X faulthandler train.py"),
    (r"SIGTERM|SIGINT|SIGHUP|KeyboardInterrupt",
     "it was told to end",
     "look who did: a batch system's time limit, Ctrl-C, or a spot machine that is taken away"),
    (r"its process has ended",
     "its process ended before the others had finished",
     "let every rank run to the end (dist.destroy_process_group()); look for sys.exit and os._exit"),
    (r"No module named",
     "a package is missing",
     "pip install it, in the environment of that host"),
    (r"No space left on device|Disk quota", "a disk is full", "df -h, on that host"),
    (r"Too many open files", "there are too few file descriptors", "ulimit -n 65536"),
    (r"ssh's own code|Permission denied \(publickey",
     "ssh did not get there, or lost the connection",
     "ssh HOST true must work without a question"),
    (r"needs a key|requires a key|another key|no key\b|without a key",
     "processes do not have the same key",
     "set NETSTORM_KEY_FILE to copies of one file at all hosts"),
    (r"speaks (?:version|protocol)|protocol version|another version",
     "releases of NetStorm differ between hosts",
     "netstorm --version on each; install one release"),
    (r"[Aa]ddress already in use|port \d+ is taken|cannot listen on",
     "a port is taken, or the address is not this host's",
     "netstorm doctor, on that host"),
    (r"no address for that name|Name or service not known|name resolution",
     "a name has no address",
     "use addresses in figures; netstorm doctor, on that host"),
    (r"cannot be reached|no route to|no answer from|no connection to|refuses connections|not every|not here:",
     "processes do not reach each other",
     "netstorm doctor --hosts HOSTFILE, before the next try"),
    (r"Python has not run|NETSTORM_WAIT_TIMEOUT",
     "a rank was alive and did nothing for the job",
     "py-spy dump --pid PID, at that rank"),
    (r"same calls in the same order|UnevenRounds|has finished without|Disagreement|KeyMismatch",
     "ranks did not do the same",
     "let all ranks make the same calls with the same shapes; NETSTORM_COMPARE finds where they part"),
    (r"SettingsError|there is no setting of that name|: expected .*",
     "a setting is wrong",
     "netstorm env"),
    (r"^failed with exit code", "a process has failed", "its own output, before its end, says why"),
    (r"JoinRefused", "a process was not let into the job", "its message says why"),
)  # fmt: skip
"""What a text means, in words, and what to do about it; the first that matches counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One file."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """A line that says how something failed."""

    order: int
    """What counts for more is smaller: what a process says of itself, the launcher's, the scheduler's."""
    rank: int | None
    host: str
    text: str
    place: str = ""
    """File and line of the script."""
    echo: bool = False


def read_logs(paths: Sequence[Path]) -> list[Log]:
    """Return the logs of files, and of all files of folders.

    Raises:
        UsageError: a file cannot be read, or there is none.
    """
    files = [
        file
        for path in paths
        for file in (sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path])
    ]
    if not files:
        raise UsageError(f"{', '.join(map(str, paths))}: no files there")
    logs = []
    for path in files:
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _MOST))
                text = file.read(_MOST).decode(errors="replace")
        except OSError as error:
            raise UsageError(f"{path}: cannot read the log: {error.strerror}") from None
        logs.append(Log(name=str(path), lines=tuple(_ESCAPES.sub("", text).splitlines())))
    return logs


def explain(logs: Sequence[Log]) -> list[Finding]:
    """Return the first cause of a failure, then what followed from it; one that says so if there is none."""
    evidence = [one for log in logs for one in _evidence(log)]
    if not evidence:
        what = f"no failure in {sum(len(log.lines) for log in logs)} lines of {len(logs)} files"
        return [Finding(severity=Severity.OK, check="logs", where=logs[0].name, what=what)]
    verdict = next((one for one in evidence if one.order == 2 and one.rank is not None), None)
    launcher = next((one for one in evidence if one.order == 1), None)
    blamed = verdict or launcher
    causes = [one for one in evidence if not one.echo] or evidence
    if blamed is not None:  # of that rank's own words the last count: it ended with them
        own = [one for one in causes if one.rank == blamed.rank and one.order == 0]
        is_killed = re.search(r"killed by", blamed.text)  # then its own words are not the cause
        causes = [blamed] if is_killed else own[-1:] or [blamed]
    first = min(causes, key=lambda one: one.order) if blamed is None else causes[0]
    host = first.host or next((one.host for one in evidence if one.host and one.rank == first.rank), "")
    found = [_finding(Severity.ERROR, "first cause", first, host)]
    others = sorted({one.rank for one in evidence if one.echo and one.rank not in {None, first.rank}})
    if others:
        what = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} ended because of it"
        do = "nothing: they are well"
        found.append(Finding(severity=Severity.OK, check="followed", where="other ranks", what=what, do=do))
    return found


def _finding(severity: Severity, check: str, evidence: _Evidence, host: str) -> Finding:
    who = "the job" if evidence.rank is None else f"rank {evidence.rank}"
    cause, do = next(
        ((cause, do) for pattern, cause, do in _CAUSES if re.search(pattern, evidence.text)),
        ("the script raised an exception", "correct the script"),
    )
    at = f", at {evidence.place}" if evidence.place else ""
    text = evidence.text if len(evidence.text) <= 400 else evidence.text[:400] + "..."
    return Finding(
        severity=severity,
        check=check,
        where=f"{who} on {host}" if host else who,
        what=f"{cause}: {text}{at}",
        do=do,
    )


def _evidence(log: Log) -> Iterator[_Evidence]:
    named = _FILE_RANK.search(Path(log.name).name)
    own_rank = int(named[1]) if named else None
    place = ""
    for line in log.lines:
        rank, rest, by = own_rank, line, ""
        while match := _PREFIX.match(rest):
            by, rest = match[1], rest[match.end() :]
            rank = int(by.removeprefix("rank")) if by.removeprefix("rank").isdigit() else rank
        timed = _TIME.match(rest)
        rest = timed[2] if timed else rest
        if match := _SCRIPT_LINE.match(rest):
            is_own = not re.search(r"/(?:site|dist)-packages/|/lib/python|/netstorm/", match[1])
            place = f"{match[1]}:{match[2]}" if is_own else place
        elif match := _VERDICT.search(rest):
            how = match[3]
            text = f"failed with {how}" if how.startswith("exit code") else how
            yield _Evidence(order=2, rank=int(match[1]), host=_host_in(match[2]), text=text)
        elif match := _ENDS.search(rest):
            yield _Evidence(order=2, rank=None, host="", text=match[1])
        elif match := _LAUNCHER.match(_SINCE.sub(r"\1", rest)):
            yield _Evidence(order=1, rank=int(match[1]), host=match[2] or "", text=match[3])
        elif match := _EXCEPTION.match(rest):
            text, echo = match[0], match[1].rpartition(".")[2] in _ECHOES
            yield _Evidence(order=0, rank=rank, host="", text=text, place=place, echo=echo)
            place = ""
        elif rest.startswith("netstorm: ") and by != "launch":  # a usage error ends a process so
            yield _Evidence(order=0, rank=rank, host="", text=rest.removeprefix("netstorm: "))


def _host_in(place: str) -> str:
    """Return the host of "HOST:PORT, SITE", as nodes are named; a rank that has not joined has no port."""
    address = place.partition(",")[0]
    host, _, _ = address.rpartition(":")
    return host if host and (host.endswith("]") or ":" not in host) else address
