"""What doctors on different hosts say to each other: bounded MessagePack frames under the job's key.

Both sides begin with a greeting: magic, a random number, and the name of their key. Each frame then has a
code under a key that follows from the job's and both numbers (BLAKE2b), so that nobody can forge, repeat or
reorder frames. They are not encrypted: facts hold no secret. Probes hold zeros, and have no code.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from hashlib import blake2b
from typing import Annotated, Final, TypeAlias

import msgspec

from netstorm.cli.doctor.facts import Facts, Port
from netstorm.errors import NotAuthorised, PeerError
from netstorm.protocol.frames import clean
from netstorm.pslite.keys import JobKey

__all__ = [
    "BULK_BYTES",
    "GREETING_S",
    "MAGIC",
    "PIECE",
    "Ask",
    "Begin",
    "DoctorMessage",
    "Done",
    "Echo",
    "Echoed",
    "NotDone",
    "ProbeResult",
    "ProbeTarget",
    "Results",
    "Sink",
    "Sunk",
    "TryPorts",
    "Wire",
    "datagram_answer",
    "datagram_probe",
    "datagram_size",
    "decode",
    "key_of",
]

MAGIC: Final = b"netstorm-doctor1"
_NUMBER: Final = 16
_NAME: Final = 4
_GREETING: Final = len(MAGIC) + _NUMBER + _NAME
_CODE: Final = 16
_MOST: Final = 1 << 20
"""Bytes of a frame: facts have some kB, and the results of a host for 500 others 200 kB."""

BULK_BYTES: Final = 64 << 20
"""Most zeros in one probe."""
PIECE: Final = 64 << 10

GREETING_S: Final = 5.0
"""A stranger that says less than a greeting and a frame is dropped after this."""

_PERSON: Final = b"netstorm doctor"
_NO_KEY: Final = bytes(_NAME)


Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class DoctorMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="is"):
    """Base of all messages."""


class Begin(DoctorMessage, frozen=True, tag="begin"):
    """To a doctor that ssh has started: the job, and this host's part of it."""

    variables: dict[str, str]
    key: str = ""
    """Contents of the job's key file."""
    nodes: int = 1
    schedules: bool = False
    frameworks: bool = True


class Ask(DoctorMessage, frozen=True, tag="ask"):
    """Wants the other host's `Facts`."""


class Done(DoctorMessage, frozen=True, tag="facts"):
    """Answers `Ask` and `Begin`: the facts, and where the doctor listens, if not where it should."""

    facts: Facts


class ProbeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A port to try."""

    rank: int
    """Which host of the doctor's list."""
    identity: str
    """That its answer must have; empty: any."""
    host: str
    port: Port
    udp: bool = True
    """Whether to try datagrams, too."""
    main: bool = False
    """Whether it is that port of its host over which much is sent, later."""
    bulk: bool = False
    """Whether to do that now."""
    rate: bool = False
    """Whether to send so much that it says a rate."""
    timeout: Seconds = 5.0


class TryPorts(DoctorMessage, frozen=True, tag="probe"):
    """Orders a doctor to try ports of others."""

    targets: list[ProbeTarget]


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one target. Times in s, rates in bit/s; None: not measured."""

    rank: int
    place: str
    problem: str = ""
    """refused, silent, unreachable, key, stranger, other, or empty; `text` explains."""
    text: str = ""
    udp: bool | None = None
    rtt: Seconds | None = None
    clock_offset: float | None = None
    """Of the target's clock less the prober's."""
    interface_mtu: Size | None = None
    path_mtu: Size | None = None
    """Largest packet that arrived and was answered; None: datagrams are not answered."""
    stalls: bool | None = None
    """Whether full-sized segments did not arrive."""
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | None = None


class Results(DoctorMessage, frozen=True, tag="results"):
    """Answers `TryPorts`."""

    results: list[ProbeResult]


class Echo(DoctorMessage, frozen=True, tag="echo"):
    """Wants the time."""


class Echoed(DoctorMessage, frozen=True, tag="echoed"):
    """Answers `Echo`."""

    wall: float
    identity: str


class Sink(DoctorMessage, frozen=True, tag="sink"):
    """Announces zeros, which follow without frames."""

    size: int


class Sunk(DoctorMessage, frozen=True, tag="sunk"):
    """They have all come."""

    seconds: Seconds
    """From the first piece to the last."""
    size: Size
    """Bytes that came in that time."""


class NotDone(DoctorMessage, frozen=True, tag="not done"):
    """Answers what was not done."""

    text: str


_decoder: Final = msgspec.msgpack.Decoder(
    Begin | Ask | Done | TryPorts | Results | Echo | Echoed | Sink | Sunk | NotDone
)


def decode(body: bytes) -> DoctorMessage:
    """Return the message of a frame; what others say of themselves is printable.

    Raises:
        PeerError: it is none.
    """
    try:
        message: DoctorMessage = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise PeerError(f"a message that this release cannot read: {error}") from None
    return message if isinstance(message, Begin) else clean(message)  # the key's text has lines


def key_of(job: JobKey | None) -> bytes:
    """Return the key of the doctors of a job; empty: it has none."""
    return b"" if job is None else job.derive("doctor")


def _name_of(key: bytes) -> bytes:
    return blake2b(b"name", key=key, digest_size=_NAME, person=_PERSON).digest() if key else _NO_KEY


class Wire:
    """One connection, after its greetings."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: bytes, is_server: bool
    ) -> None:
        self.reader: Final = reader
        self.writer: Final = writer
        self._key: Final = key
        self._is_server: Final = is_server
        self._session = b""
        self._sent = self._received = 0

    async def greet(self) -> None:
        """Exchange greetings.

        Raises:
            PeerError: the other side is no doctor.
            NotAuthorised: it has another key.
        """
        own = secrets.token_bytes(_NUMBER)
        self.writer.write(MAGIC + own + _name_of(self._key))
        await self.writer.drain()
        first = await self.reader.read(_GREETING)
        if not first or not (MAGIC.startswith(first) or first.startswith(MAGIC)):
            what = "ZeroMQ, as a running job does" if first.startswith(b"\xff") else repr(first[:40])
            raise PeerError(f"something else listens there: it says {what}" if first else "it hangs up")
        rest = first + await self.reader.readexactly(_GREETING - len(first))
        number, name = rest[len(MAGIC) : -_NAME], rest[-_NAME:]
        if name != _name_of(self._key):
            here, there = ("no key" if n == _NO_KEY else "a key" for n in (_name_of(self._key), name))
            raise NotAuthorised(
                f"it has {there if here != there else 'another key'}, and this host has {here}"
            )
        numbers = number + own if self._is_server else own + number
        self._session = blake2b(numbers, key=self._key, digest_size=32, person=_PERSON).digest()

    async def send(self, message: DoctorMessage) -> None:
        """Send a message."""
        body = msgspec.msgpack.encode(message)
        code = self._code(body, self._sent, by_server=self._is_server)
        self._sent += 1
        self.writer.write(len(body).to_bytes(4, "big") + code + body)
        await self.writer.drain()

    async def receive(self) -> DoctorMessage:
        """Return the next message.

        Raises:
            PeerError: it does not decode, is too long, or whoever sent it does not have the key.
            OSError, asyncio.IncompleteReadError: the connection has ended.
        """
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        if size > _MOST:
            raise PeerError(f"a frame of {size} bytes: expected at most {_MOST}")
        code = await self.reader.readexactly(_CODE)
        body = await self.reader.readexactly(size)
        if not hmac.compare_digest(code, self._code(body, self._received, by_server=not self._is_server)):
            raise NotAuthorised("a frame without the job's key")
        self._received += 1
        return decode(body)

    async def ask(self, message: DoctorMessage, kind: type[DoctorMessage], timeout_s: float) -> DoctorMessage:
        """Send a message and return its answer.

        Raises:
            PeerError: it is of another kind.
            TimeoutError: it has not come in time.
        """
        await self.send(message)
        answer = await asyncio.wait_for(self.receive(), timeout_s)
        if not isinstance(answer, kind):
            raise PeerError(
                answer.text if isinstance(answer, NotDone) else f"it answers {type(answer).__name__}"
            )
        return answer

    def close(self) -> None:
        """Close the connection; what is not sent yet is lost."""
        transport = self.writer.transport
        if isinstance(transport, asyncio.Transport) and transport.get_extra_info("socket") is not None:
            transport.abort()
        else:
            self.writer.close()

    def _code(self, body: bytes, number: int, *, by_server: bool) -> bytes:
        text = bytes([by_server]) + number.to_bytes(8, "big") + body
        return blake2b(text, key=self._session, digest_size=_CODE, person=_PERSON).digest()


# Datagrams, which measure the path: kind, number, size, a code of these, and zeros up to the size. An answer
# is as long as the shortest probe, so that forged probes gain nobody bytes.

_ASKS, _ANSWERS = b"NSD?", b"NSD!"
_DATAGRAM: Final = 4 + 8 + 4 + _CODE


def datagram_probe(key: bytes, number: bytes, size: int) -> bytes:
    """Return a probe whose payload has `size` bytes, or a few if that is less."""
    return _datagram(key, _ASKS + number + size.to_bytes(4, "big")).ljust(size, b"\0")


def datagram_answer(key: bytes, data: bytes) -> bytes | None:
    """Return the answer to a probe; None: it is none, or nobody with the key has sent it."""
    head = data[: _DATAGRAM - _CODE]
    if data[:4] != _ASKS or not hmac.compare_digest(data[:_DATAGRAM], _datagram(key, head)):
        return None
    return _datagram(key, _ANSWERS + head[4:12] + len(data).to_bytes(4, "big"))


def datagram_size(key: bytes, number: bytes, data: bytes) -> int | None:
    """Return how many bytes have arrived, by the answer to a probe; None: it is no answer to it."""
    head = data[: _DATAGRAM - _CODE]
    if head[:12] != _ANSWERS + number or not hmac.compare_digest(data, _datagram(key, head)):
        return None
    return int.from_bytes(head[12:], "big")


def _datagram(key: bytes, head: bytes) -> bytes:
    return head + blake2b(head, key=key, digest_size=_CODE, person=_PERSON).digest()
