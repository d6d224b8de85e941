"""What strangers can do to a TCP port: all of it at once, at bounded rates, until told to stop.

    python benchmarks/security/attacks.py PORT...

Attacks only ports of 127.0.0.1. Lines on standard input say `on` or `off`; its end ends the process. For each
`off` it writes a line: what was sent since `on`, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from netstorm.protocol import messages as m
from netstorm.protocol.frames import encode_body, seal
from netstorm.pslite import sntp

HOST: Final = "127.0.0.1"

IDLE: Final = 250
"""Connections to each port that send nothing: a thousand to a scheduler and three nodes."""
IDLE_AGAIN_S: Final = 5.0
"""Until one that was closed is opened again."""
SLOW: Final = 25
"""Connections to each port that send a byte now and then."""
SLOW_S: Final = 0.25
SHORT_EACH_S: Final = 0.1
"""Pause of each of the attacks that open connections and are refused."""
HELLOS_AT_ONCE: Final = 50
CLAIMED_PIECES: Final = 16
"""Of 64 KiB, sent of a frame that is said to have gigabytes."""
PACKETS_EACH_S: Final = 0.02

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_COMMAND, _LONG, _LONG_COMMAND = 4, 2, 6


class Attack:
    """All attacks on some ports."""

    def __init__(self, ports: list[int]) -> None:
        self.sent: Counter[str] = Counter()
        self._ports: Final = ports
        self._chance: Final = random.Random(1)

    async def run(self) -> None:
        """Attack until cancelled."""
        attacks: list[Awaitable[None]] = []
        for port in self._ports:
            attacks += [self._again(self._idle, port, IDLE_AGAIN_S) for _ in range(IDLE)]
            attacks += [self._again(self._slow, port, 0.5) for _ in range(SLOW)]
            for attack in (self._claim, self._hellos, self._http, self._noise, self._forged_handshake):
                attacks.append(self._again(attack, port, SHORT_EACH_S))
            attacks.append(self._packets(port))
        pending = {asyncio.ensure_future(attack) for attack in attacks}
        try:
            await asyncio.wait(pending)
        finally:
            while pending:  # `wait_for` loses a cancellation that comes at the same time as its result
                for one in pending:
                    one.cancel()
                _, pending = await asyncio.wait(pending, timeout=0.5)

    async def _again(self, attack: Callable[[int], Awaitable[None]], port: int, pause_s: float) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                await attack(port)
            await asyncio.sleep(pause_s * self._chance.uniform(0.5, 1.5))

    async def _send(self, port: int, *parts: bytes, then_read_s: float = 0.5, pause_s: float = 0.0) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                if pause_s:
                    await asyncio.sleep(pause_s)
            await asyncio.wait_for(reader.read(), then_read_s)
        finally:
            writer.transport.abort()

    async def _idle(self, port: int) -> None:
        self.sent["idle connections"] += 1
        await self._send(port, then_read_s=3600.0)

    async def _slow(self, port: int) -> None:
        self.sent["slow connections"] += 1
        await self._send(port, *(bytes([byte]) for byte in _GREETING), pause_s=SLOW_S)

    async def _claim(self, port: int) -> None:
        """Say that a frame of gigabytes follows, as a command of the handshake or after it; send a little."""
        self.sent["claims of gigabytes"] += 1
        size = self._chance.choice((60_000_000, 2**31, 2**40, 2**63 - 1))
        kind = self._chance.choice((_LONG_COMMAND, _LONG))
        begin = (
            _GREETING + (_command(_READY) if kind == _LONG else b"") + bytes([kind]) + struct.pack(">Q", size)
        )
        await self._send(port, begin, *([bytes(1 << 16)] * CLAIMED_PIECES), pause_s=0.01)

    async def _hellos(self, port: int) -> None:
        self.sent["hellos"] += HELLOS_AT_ONCE
        hellos = [
            m.Hello(
                job=self._chance.choice(("job", "default", "x" * 5000)),
                sender=self._chance.randrange(-1, 9),
                incarnation=self._chance.getrandbits(62),
                receiver=self._chance.randrange(-1, 4),
                session=self._chance.getrandbits(62),
                received=0,
                beyond=tuple(range(self._chance.randrange(20))),
            )
            for _ in range(HELLOS_AT_ONCE)
        ]
        frames = [seal(encode_body(hello), sequence=0, sent_at=1, payload_crc=None) for hello in hellos]
        await self._send(port, _GREETING, _command(_READY), b"".join(map(_message, frames)), then_read_s=1.0)

    async def _http(self, port: int) -> None:
        self.sent["HTTP requests"] += 1
        await self._send(port, b"GET /status.json HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000 + b"\r\n\r\n")

    async def _noise(self, port: int) -> None:
        self.sent["connections with noise"] += 1
        begin = self._chance.choice((b"", b"\x16\x03\x01\x02\x00\x01", _GREETING, _GREETING[:12]))
        await self._send(port, begin + self._chance.randbytes(5000))

    async def _forged_handshake(self, port: int) -> None:
        self.sent["forged handshakes"] += 1
        hello = b"\x05HELLO\x01\x00" + bytes(72) + self._chance.randbytes(32 + 8 + 80)
        await self._send(port, _CURVE_GREETING, _command(hello))

    async def _packets(self, port: int) -> None:
        """Ask for the time, and send what is no packet."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.setblocking(False)
            while True:
                asked = sntp.request(sntp.new_nonce(self._chance.getrandbits(52)))
                for data in (asked, self._chance.randbytes(self._chance.randrange(1200))):
                    self.sent["UDP packets"] += 1
                    with contextlib.suppress(OSError):
                        udp.sendto(data, (HOST, port))
                await asyncio.sleep(PACKETS_EACH_S)


def _command(body: bytes) -> bytes:
    return bytes([_COMMAND, len(body)]) + body


def _message(frame: bytes) -> bytes:
    return bytes([_LONG]) + struct.pack(">Q", len(frame)) + frame


async def _main() -> None:
    ports = [int(text) for text in sys.argv[1:]]
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        if line.strip() != b"on":
            continue
        attack = Attack(ports)
        running = asyncio.create_task(attack.run())
        await reader.readline()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        print(json.dumps(attack.sent), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
