"""Doctors on hosts: one that answers and tries others, and how it tries a port. Every wait has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import sys
from typing import Final, cast

import msgspec

from netstorm import clock
from netstorm.addresses import host_port, is_loopback
from netstorm.cli.doctor.facts import Door, Facts, gather
from netstorm.cli.doctor.wire import (
    BULK_BYTES,
    GREETING_S,
    MAGIC,
    PIECE,
    Ask,
    Begin,
    DoctorMessage,
    Done,
    Echo,
    Echoed,
    NotDone,
    ProbeResult,
    ProbeTarget,
    Results,
    Sink,
    Sunk,
    TryPorts,
    Wire,
    datagram_answer,
    datagram_probe,
    datagram_size,
    key_of,
)
from netstorm.cli.launch.variables import KEY_FILE, hold_key
from netstorm.errors import NetStormError, NotAuthorised, PeerError, UsageError
from netstorm.pslite.admission import job_key_of
from netstorm.pslite.host_addresses import tcp_listener, udp_address, udp_socket
from netstorm.settings import Settings, child_environment

__all__ = ["Doctor", "serve_standard_streams", "try_port"]

_MOST_CONNECTIONS: Final = 128
"""At once; more are closed at once. Strangers are dropped after `GREETING_S`."""

_IDLE_S: Final = 600.0
"""A connection on which nothing is asked for so long is closed."""

_AT_ONCE: Final = 8
"""Ports that are tried at the same time: full-sized probes of more would fill a slow line."""

_ECHOES: Final = 5
_SMALL: Final = PIECE
"""Bytes that show whether full-sized segments pass: some congestion windows, half a second at 1 Mbit/s."""
_STALL_S: Final = 6.0
_RATE_S: Final = 1.0
"""A probe that took so long says a rate: by then windows have grown over round trips of 100 ms."""
_DATAGRAM_S: Final = 0.3
"""Longest wait for an answer beyond the round trip."""
_TRIES: Final = 3
_LEAST_MTU: Final = 576
_IP_MTU, _IPV6_MTU, _PROBE = 14, 24, 3
"""Linux's IP_MTU, IPV6_MTU and IP_PMTUDISC_PROBE: Python has no names for them."""

_ENDS: Final = (OSError, EOFError, NetStormError, asyncio.TimeoutError)
"""How a connection may end."""

_WORDS: Final = {
    errno.ECONNREFUSED: "refused",
    errno.ENETUNREACH: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
    errno.EACCES: "unreachable",
    errno.EINVAL: "unreachable",
}


class Doctor:
    """Answers other doctors, at the ports of the job. A context manager within a running event loop."""

    def __init__(self, facts: Facts, settings: Settings, *, insecure: bool = False) -> None:
        self.key: Final = key_of(job_key_of(settings))
        self._facts = facts
        self._insecure: Final = insecure or settings.security == "off"
        self._servers: list[asyncio.Server] = []
        self._datagrams: list[asyncio.DatagramTransport] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def facts(self) -> Facts:
        """Of this machine, with the ports at which it listens."""
        return self._facts

    async def __aenter__(self) -> Doctor:  # noqa: PYI034 -- Self is Python 3.11's
        doors = [await self._open(door) for door in self._facts.doors]
        self._facts = msgspec.structs.replace(self._facts, doors=doors)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for server in self._servers:
            server.close()
        for datagrams in self._datagrams:
            datagrams.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _open(self, door: Door) -> Door:
        """Listen at one port, or at all addresses if that one is not this machine's, as behind a NAT."""
        for host in dict.fromkeys((door.host, "*")):
            if not (self.key or self._insecure or is_loopback(host)):
                if host != door.host:
                    break
                raise UsageError(
                    f"listening at {host_port(host, door.port)} needs a key, since others can reach it: "
                    "set NETSTORM_KEY_FILE (`netstorm keys new job.key` makes one), or give --insecure"
                )
            try:
                listener = tcp_listener(host, door.port)
            except OSError:
                continue
            port = int(listener.getsockname()[1])
            self._servers.append(await asyncio.start_server(self._accept, sock=listener))
            await self._listen_for_datagrams(host, port)
            return msgspec.structs.replace(door, port=port, advertised_port=door.advertised_port or port)
        return door

    async def _listen_for_datagrams(self, host: str, port: int) -> None:
        listener = udp_socket(host)
        try:
            listener.bind(udp_address(host, port, listener.family))
        except OSError:  # a scheduler's, for one; nobody answers then, and that is found
            listener.close()
            return
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Answers(self.key), sock=listener)
        self._datagrams.append(transport)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, key=self.key, is_server=True)
        try:
            with contextlib.suppress(*_ENDS):
                await asyncio.wait_for(wire.greet(), GREETING_S)
                await self.answer_all(wire, first_s=GREETING_S)
        finally:
            wire.close()

    async def answer_all(self, wire: Wire, *, first_s: float = _IDLE_S) -> None:
        """Answer one connection to its end; whatever its other side says, this returns."""
        limit_s = first_s
        with contextlib.suppress(*_ENDS):
            while True:
                message = await asyncio.wait_for(wire.receive(), limit_s)
                await wire.send(await self._answer(wire, message))
                limit_s = _IDLE_S

    async def _answer(self, wire: Wire, message: DoctorMessage) -> DoctorMessage:
        if isinstance(message, Echo):
            return Echoed(wall=clock.wall(), identity=self._facts.identity)
        if isinstance(message, Ask):
            return Done(facts=self._facts)
        if isinstance(message, Sink) and 0 < message.size <= BULK_BYTES:
            return await asyncio.wait_for(_swallow(wire, message.size), 2 * _STALL_S)
        if isinstance(message, TryPorts):
            return await self._probe(message.targets)
        return NotDone(text=f"{type(message).__name__} is nothing that this doctor does")

    async def _probe(self, targets: list[ProbeTarget]) -> Results:
        places = asyncio.Semaphore(_AT_ONCE)

        async def try_one(target: ProbeTarget) -> ProbeResult:
            async with places:
                return await try_port(target, self.key)

        return Results(results=list(await asyncio.gather(*map(try_one, targets))))


async def serve_standard_streams() -> None:
    """Answer a doctor that has started this one through ssh, until its standard input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop=loop), os.fdopen(os.dup(1), "wb")
    )
    os.dup2(2, 1)  # what libraries print must not come between frames
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    writer.write(MAGIC + b"\n")  # a login shell may have said something before
    wire = Wire(reader, writer, key=b"", is_server=True)
    await asyncio.wait_for(wire.greet(), _IDLE_S)
    begin = await asyncio.wait_for(wire.receive(), _IDLE_S)
    if not isinstance(begin, Begin):
        raise PeerError(f"{type(begin).__name__}: expected Begin")
    environment = {**child_environment(), **begin.variables}
    if begin.key:  # in memory alone
        environment[KEY_FILE] = hold_key(begin.key)
    gathered = await asyncio.to_thread(
        gather, environment, nodes=begin.nodes, schedules=begin.schedules, frameworks=begin.frameworks
    )
    try:
        async with Doctor(*gathered) as doctor:
            await wire.send(Done(facts=doctor.facts))
            await doctor.answer_all(wire)
    except NetStormError as error:
        await wire.send(NotDone(text=str(error)))


class _Answers(asyncio.DatagramProtocol):
    """Answers datagrams of whoever has the key."""

    def __init__(self, key: bytes) -> None:
        self._key: Final = key

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # not its class before Python 3.12

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = datagram_answer(self._key, data)
        if answer is not None:
            self._transport.sendto(answer, addr)


async def _swallow(wire: Wire, size: int) -> Sunk:
    began, timed = 0.0, 0
    while size > 0:
        piece = await wire.reader.read(min(size, PIECE))
        if not piece:
            raise EOFError("the connection ended")
        timed += len(piece) if began else 0
        began = began or clock.monotonic()
        size -= len(piece)
    return Sunk(seconds=clock.monotonic() - began, size=timed)


async def try_port(target: ProbeTarget, key: bytes) -> ProbeResult:
    """Try one port of another host, and measure the way to it."""
    place = host_port(target.host, target.port)
    found = ProbeResult(rank=target.rank, place=place)
    try:
        opened = asyncio.open_connection(target.host, target.port)
        reader, writer = await asyncio.wait_for(opened, target.timeout)
    except (asyncio.TimeoutError, TimeoutError):
        return _failed(found, "silent", f"no answer within {target.timeout:g} s")
    except OSError as error:
        return _failed(found, _WORDS.get(error.errno or 0, "other"), error.strerror or str(error))
    wire = Wire(reader, writer, key=key, is_server=False)
    try:
        await asyncio.wait_for(wire.greet(), target.timeout)
        found = await asyncio.wait_for(_times(wire, found), 2 * target.timeout)
        echoed = await wire.ask(Echo(), Echoed, target.timeout)
        if target.identity and isinstance(echoed, Echoed) and echoed.identity != target.identity:
            return _failed(found, "stranger", "a doctor of another host answers there")
        if target.udp:
            found = await _datagrams(target, found, key)
        if target.bulk:
            found = await _bulk(wire, found, rate=target.rate)
    except NotAuthorised as error:
        return _failed(found, "key", str(error))
    except PeerError as error:
        return _failed(found, "stranger", str(error))
    except (asyncio.TimeoutError, TimeoutError):
        return _failed(found, "silent", "it accepts connections and says nothing")
    except (OSError, EOFError) as error:
        return _failed(found, "other", f"the connection ended: {error}")
    finally:
        wire.close()
    return found


def _failed(found: ProbeResult, problem: str, text: str) -> ProbeResult:
    return msgspec.structs.replace(found, problem=problem, text=text)


async def _times(wire: Wire, found: ProbeResult) -> ProbeResult:
    """Measure the round trip and the clock: the shortest of some says most (RFC 5905, section 10)."""
    trips = []
    for _ in range(_ECHOES):
        asked, began = clock.wall(), clock.monotonic()
        echoed = await wire.ask(Echo(), Echoed, _STALL_S)
        trip = clock.monotonic() - began
        if isinstance(echoed, Echoed):
            trips.append((trip, echoed.wall - asked - trip / 2))
    trip, offset = min(trips)
    return msgspec.structs.replace(found, rtt=trip, clock_offset=offset)


async def _bulk(wire: Wire, found: ProbeResult, *, rate: bool) -> ProbeResult:
    """See whether full-sized segments pass and, if it is asked for, how fast."""
    size = _SMALL
    measured: float | None = None
    while True:
        try:
            sunk = await asyncio.wait_for(_send_zeros(wire, size), _STALL_S)
        except (asyncio.TimeoutError, TimeoutError):
            return msgspec.structs.replace(found, stalls=size == _SMALL, rate=measured)
        if sunk.size and sunk.seconds:
            measured = 8 * sunk.size / sunk.seconds
        if not rate or sunk.seconds >= _RATE_S or size >= BULK_BYTES:
            return msgspec.structs.replace(found, stalls=False, rate=measured if rate else None)
        size *= 4


async def _send_zeros(wire: Wire, size: int) -> Sunk:
    await wire.send(Sink(size=size))
    piece = bytes(PIECE)
    for _ in range(size // PIECE):
        wire.writer.write(piece)
        await wire.writer.drain()
    sunk = await wire.receive()
    if not isinstance(sunk, Sunk):
        raise PeerError(f"it answers {type(sunk).__name__}")
    return sunk


async def _datagrams(target: ProbeTarget, found: ProbeResult, key: bytes) -> ProbeResult:
    """See whether datagrams are answered, and how large they may be, with the bit that forbids fragments."""
    loop = asyncio.get_running_loop()
    limit_s = _DATAGRAM_S + 2 * (found.rtt or 0)
    with udp_socket(target.host) as client:
        client.setblocking(False)
        client.connect((target.host, target.port))
        is_v6 = client.family == socket.AF_INET6
        level, head = (socket.IPPROTO_IPV6, 48) if is_v6 else (socket.IPPROTO_IP, 28)
        with contextlib.suppress(OSError):
            client.setsockopt(level, 23 if is_v6 else 10, _PROBE)  # IPV6_MTU_DISCOVER, IP_MTU_DISCOVER

        async def passes(size: int) -> bool:
            for _ in range(_TRIES):
                number = secrets.token_bytes(8)
                with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                    client.send(datagram_probe(key, number, size))
                    data = await asyncio.wait_for(loop.sock_recv(client, 2048), limit_s)
                    if datagram_size(key, number, data) == max(size, len(data)):
                        return True
            return False

        if not await passes(0):
            return msgspec.structs.replace(found, udp=False)
        try:
            mtu = int(client.getsockopt(level, _IPV6_MTU if is_v6 else _IP_MTU))
        except OSError:
            return msgspec.structs.replace(found, udp=True)
        mtu = min(mtu, 9000)  # loopback has 65536, and no path between hosts more than jumbo frames
        low, high = _LEAST_MTU, mtu
        if await passes(mtu - head):
            low = mtu
        while high - low > 8 and low < mtu:
            middle = (low + high) // 2
            low, high = (middle, high) if await passes(middle - head) else (low, middle)
    return msgspec.structs.replace(found, udp=True, interface_mtu=mtu, path_mtu=low)
