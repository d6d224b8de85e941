"""Examines several hosts: starts a doctor on each through ssh, or finds those that people have started."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

import msgspec

from netstorm.addresses import host_port
from netstorm.cli.doctor.facts import IMPORT_S
from netstorm.cli.doctor.pairs import ExaminedHost, targets_of
from netstorm.cli.doctor.wire import (
    MAGIC,
    Ask,
    Begin,
    DoctorMessage,
    Done,
    ProbeTarget,
    Results,
    TryPorts,
    Wire,
)
from netstorm.cli.launch.hosts import OPTIONS, Placement
from netstorm.errors import NetStormError

__all__ = ["examine", "hosts_of", "ssh_words"]

_START_S: Final = 30.0
"""ssh's handshake, and Python's start on a cold disk."""
_FACTS_S: Final = IMPORT_S + 30.0
_PROBE_S: Final = 60.0
"""All ports of one host's peers, of which some do not answer; more peers have more."""
_END_S: Final = 5.0

Progress = Callable[[str], None]
_Failures: Final = (OSError, EOFError, NetStormError, asyncio.TimeoutError)


def hosts_of(placements: Sequence[Placement]) -> list[tuple[ExaminedHost, Placement]]:
    """Return the hosts of a host file, each once, with the placement of its first node."""
    found: dict[str, tuple[ExaminedHost, Placement]] = {}
    for placement in sorted(placements, key=lambda placement: placement.rank):
        if placement.host in found:
            found[placement.host][0].nodes += 1
        else:
            host = ExaminedHost(name=placement.host, site=placement.site or "")
            found[placement.host] = (host, placement)
    return list(found.values())


async def examine(
    hosts: Sequence[ExaminedHost],
    *,
    key: bytes,
    rates: bool,
    timeout: float,
    progress: Progress,
    begin: Mapping[str, tuple[Sequence[str], Begin]] | None = None,
) -> None:
    """Fill in what hosts are like, and what they have found of each other.

    Args:
        hosts: to examine.
        key: of doctors that people have started.
        rates: whether to measure rates, too.
        timeout: of one connection, in s.
        progress: is told what is done.
        begin: how a doctor is started on each host, and what it is told; None: they run already.
    """
    async with contextlib.AsyncExitStack() as stack:
        wires: list[Wire | None] = []

        async def reach(host: ExaminedHost) -> Wire | None:
            try:
                if begin is None:
                    wire = await stack.enter_async_context(_connected(host, key, timeout))
                    first: DoctorMessage = Ask()
                else:
                    words, first = begin[host.name]
                    wire = await stack.enter_async_context(_started(words))
                done = await wire.ask(first, Done, _FACTS_S)
            except _Failures as error:
                host.problem = str(error) or f"no answer within {_FACTS_S:g} s"
                return None
            assert isinstance(done, Done)
            host.facts = done.facts
            return wire

        progress(f"looking at {len(hosts)} hosts")
        wires = list(await asyncio.gather(*map(reach, hosts)))
        progress(f"trying all ports of {len(hosts)} hosts from each other")
        every = [targets_of(hosts, number, timeout=timeout) for number in range(len(hosts))]
        await asyncio.gather(*map(_probe, hosts, wires, every))
        # In each step every host sends to one other and receives from one, so that no access line is shared.
        for step in range(len(hosts)):
            what = "measuring rates" if rates else "sending full-sized packets"
            progress(f"{what}, step {step + 1} of {len(hosts)}")
            await asyncio.gather(
                *(
                    _send_much(host, wires[number], every[number], (number + step) % len(hosts), rate=rates)
                    for number, host in enumerate(hosts)
                )
            )


async def _probe(host: ExaminedHost, wire: Wire | None, targets: list[ProbeTarget]) -> None:
    if wire is None or not targets:
        return
    try:
        answer = await wire.ask(TryPorts(targets=targets), Results, _PROBE_S + 2 * len(targets))
    except _Failures as error:
        host.problem = f"it has not said what it finds: {str(error) or 'no answer in time'}"
        return
    assert isinstance(answer, Results)
    asked = {(target.rank, host_port(target.host, target.port)) for target in targets}
    host.results = [one for one in answer.results if (one.rank, one.place) in asked]


async def _send_much(
    host: ExaminedHost, wire: Wire | None, targets: list[ProbeTarget], other: int, *, rate: bool
) -> None:
    """Let a host send much to another one, if it reaches that."""
    target = next((one for one in targets if one.rank == other and one.main), None)
    if wire is None or target is None:
        return
    place = host_port(target.host, target.port)
    before = next((one for one in host.results if one.place == place and one.rank == other), None)
    if before is None or before.problem:
        return
    order = TryPorts(targets=[msgspec.structs.replace(target, bulk=True, rate=rate, udp=False)])
    with contextlib.suppress(*_Failures):
        answer = await wire.ask(order, Results, _PROBE_S)
        if isinstance(answer, Results) and answer.results:
            sent = answer.results[0]
            measured = msgspec.structs.replace(
                before, stalls=sent.stalls, rate=sent.rate, problem=sent.problem, text=sent.text
            )
            host.results[host.results.index(before)] = measured


@contextlib.asynccontextmanager
async def _connected(host: ExaminedHost, key: bytes, timeout: float) -> AsyncIterator[Wire]:
    assert host.given is not None
    wire = None
    try:
        try:
            opened = asyncio.open_connection(*host.given)
            reader, writer = await asyncio.wait_for(opened, timeout)
            wire = Wire(reader, writer, key=key, is_server=False)
            await asyncio.wait_for(wire.greet(), timeout)
        except (asyncio.TimeoutError, TimeoutError):
            raise OSError(f"no doctor answers within {timeout:g} s") from None
        yield wire
    finally:
        if wire is not None:
            wire.close()


@contextlib.asynccontextmanager
async def _started(words: Sequence[str]) -> AsyncIterator[Wire]:
    """Start a doctor through ssh; the end of its standard input ends it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read(1 << 20))
    try:
        try:
            await asyncio.wait_for(_skip_to_greeting(process.stdout), _START_S)
        except (EOFError, ValueError):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(errors), _END_S)
            said = errors.result().decode(errors="replace").strip() if errors.done() else ""
            raise OSError(
                f"no doctor there: {said.splitlines()[-1] if said else 'it says nothing'}"
            ) from None
        except (asyncio.TimeoutError, TimeoutError):
            raise OSError(f"no doctor there within {_START_S:g} s (ssh)") from None
        wire = Wire(process.stdout, process.stdin, key=b"", is_server=False)
        await asyncio.wait_for(wire.greet(), _START_S)
        yield wire
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        errors.cancel()


async def _skip_to_greeting(reader: asyncio.StreamReader) -> None:
    """Read what a login shell says before the doctor does."""
    await reader.readuntil(MAGIC + b"\n")


def ssh_words(ssh: Sequence[str], host: str, python: str) -> list[str]:
    """Return the command that starts a doctor on a host."""
    remote = shlex.join([python, "-m", "netstorm", "doctor", "--serve", "--stdio"])
    return [*ssh, *OPTIONS, host, remote]
