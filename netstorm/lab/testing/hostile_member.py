"""A member of a simulated job that sends what no correct one would: "a Byzantine neighbour".

Its sessions are correct, so whatever it says reaches the machines of the others: messages of earlier rounds,
messages that others have sent, valid messages with other numbers in them, messages of every kind that nobody
asked for, acknowledgements of what was never sent. It may also speak for others: along paths that begin at
them, and in sessions that it opens under their names. All of it follows from the seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import msgspec

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.testing.decoders import example, message_classes, mutate_value
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Buffer, Peer, bits_to_wire, decode_body, encode_body, seal
from netstorm.pslite.machine import Connect, Instruction, Send
from netstorm.pslite.van import Connection
from netstorm.topology.policy import Plan

__all__ = ["HostileMember"]

_REMEMBERED: Final = 300
"""Messages that it may send again."""

_MOST_PAYLOAD: Final = 4096

_FOR_OTHERS: Final = 0.3
"""Part of its messages that are in another one's name, if it impersonates."""

_FIRST_OWN: Final = 10**9
"""Connections that it opens past its endpoint are numbered from here on."""

_ROUTED: Final = tuple(kind for kind in message_classes() if issubclass(kind, get_args(m.Routed)))
_LEAVING: Final = (m.Failed(reason="in another's name"), m.Leave(), m.Finished(last_rounds={}))


class HostileMember:
    """Makes one node of a simulated cluster hostile, beside what it does as a correct member.

    Attributes:
        sent: number of hostile messages so far, by the name of their class.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        rank: int,
        *,
        seed: int,
        forges_parts: bool,
        impersonates: bool = False,
        most: int = 1000,
        every_s: float = 0.0005,
        spares: tuple[type[m.Message], ...] = (),
    ) -> None:
        """Begin as soon as the node has joined.

        Args:
            cluster: whose nodes have started.
            rank: of the hostile node.
            seed: decides on everything.
            forges_parts: it sends parts of its own making, with values of its own. Otherwise it only repeats
                parts, and the sums of the others must be right.
            impersonates: it speaks for others, too, and sends parts in their names. Their sums must be right
                all the same.
            most: hostile messages that it sends; it is a correct member after that.
            every_s: virtual seconds between two of them.
            spares: kinds of messages that it never sends: those that end the job, for one.
        """
        self.sent: Final[dict[str, int]] = {}
        self._cluster: Final = cluster
        self._node: Final = cluster.started(rank)
        self._rank: Final = rank
        self._every_s: Final = every_s
        self._impersonates: Final = impersonates
        self._spares: Final = spares
        self._never_makes: Final = (*spares, m.SessionMessage, *(() if forges_parts else (m.Part,)))
        self._chance: Final = random.Random(f"hostile {seed}")
        self._known: Final[deque[tuple[m.Message, bytes | None]]] = deque(maxlen=_REMEMBERED)
        """Messages that it has sent or received, with their payloads."""
        self._ahead: Final[list[Instruction]] = []
        self._left = most
        self._opened = 0
        self._listen()
        cluster.at(cluster.now + every_s, self._turn)

    # ---------------------------------------------------------------------------------------------- listening

    def _listen(self) -> None:
        machine: Any = self._node.machine
        take, receive, link_lost = machine.take_instructions, machine.receive, machine.link_lost

        def take_instructions() -> list[Instruction]:
            taken: list[Instruction] = take()
            for one in taken:
                if isinstance(one, Send):
                    self._note(one.message, one.payload)
            ahead = self._ahead[:]
            self._ahead.clear()
            return taken + ahead

        def note_and_receive(
            peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
        ) -> None:
            self._note(message, payload)
            receive(peer, message, payload, payload_crc, now)

        def own_link_lost(peer: Peer, reason: str, undelivered: Sequence[Send], now: float) -> None:
            try:
                link_lost(peer, reason, undelivered, now)
            except Exception:  # noqa: BLE001 -- its own machine gets back what it would never send
                self._left = 0
                self._node.process.die()

        machine.link_lost = own_link_lost
        machine.take_instructions = take_instructions
        machine.receive = note_and_receive

    def _note(self, message: m.Message, payload: Buffer | None) -> None:
        self._known.append((message, None if payload is None else bytes(payload)))

    # ------------------------------------------------------------------------------------------------ sending

    def _turn(self) -> None:
        if not self._left or not self._node.alive or self._node.failure is not None:
            return
        if self._node.joined.ended and not self._node.has_left:
            self._left -= 1
            if self._impersonates and self._chance.random() < _FOR_OTHERS:
                self._speak_for_another()
            elif self._chance.random() < 0.1:
                self._send_in_a_session(self._any_session_message())
            else:
                self._send(*self._any_message())
        self._cluster.at(self._cluster.now + self._every_s, self._turn)

    def _any_message(self) -> tuple[m.Message, bytes | None]:
        while True:
            kind = self._chance.random()
            if kind < 0.4 and self._known:
                message, payload = self._chance.choice(self._known)
                if not isinstance(message, self._spares):
                    return message, payload
            else:
                message, payload = self._changed() if kind < 0.75 and self._known else self._forged()
                if not isinstance(message, self._never_makes):
                    return message, payload

    def _changed(self) -> tuple[m.Message, bytes | None]:
        message, payload = self._chance.choice(self._known)
        other = self._chance.choice(self._known)[0]
        return self._mutated(_value_of(message), _value_of(other)[1:], payload)

    def _forged(self) -> tuple[m.Message, bytes | None]:
        chance = self._chance
        kind = chance.choice(message_classes())
        value = example(kind, chance.randrange(3))
        payload = chance.randbytes(chance.randrange(_MOST_PAYLOAD)) if chance.random() < 0.5 else None
        return self._mutated(value, [0, 1, self._rank, "w"], payload)

    def _mutated(self, value: list[Any], other: Any, payload: bytes | None) -> tuple[m.Message, bytes | None]:
        """Return a message of the same kind with other fields; what does not decode becomes a heartbeat."""
        try:
            fields = mutate_value(self._chance, value[1:], other)
            message = decode_body(msgspec.msgpack.encode([value[0], *fields]))
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
            message = m.Heartbeat()
        return message, payload if isinstance(message, m.DataMessage) else None

    def _send(self, message: m.Message, payload: bytes | None) -> None:
        self._send_to(self._chance.choice([SCHEDULER, *self._others()]), message, payload)

    def _send_to(self, target: Peer, message: m.Message, payload: bytes | None) -> None:
        self._count(message)
        if target != SCHEDULER:
            member = self._node.machine.members[target]
            self._ahead.append(Connect(peer=target, host=member.host, port=member.port))
        self._ahead.append(
            Send(peer=target, message=message, payload=None if payload is None else bytearray(payload))
        )
        self._node.process.call(lambda _: None)

    def _others(self) -> list[Peer]:
        return [
            Peer(member.rank)
            for member in self._node.machine.members
            if member.rank != self._rank and member.port
        ]

    # -------------------------------------------------------------------------------------- in another's name

    def _speak_for_another(self) -> None:
        """Say something in the name of another member: along a path that begins there, or in a session."""
        chance = self._chance
        victim, target = chance.sample(self._others(), 2)
        kind = chance.random()
        if kind < 0.4:
            self._open_session(victim, chance.choice([target, SCHEDULER]))
            return
        found = self._part_of(victim, target) if kind < 0.8 else None
        payload: bytes | None = None
        if found is not None:
            message: m.Message = found
            payload = chance.randbytes(chance.choice([4 * 64, 4 * 44]))
        else:
            message, payload = self._mutated(example(chance.choice(_ROUTED), 1), [0, 1, "w"], b"")
            if not isinstance(message, _ROUTED):
                return
        along = msgspec.structs.replace(message, path=(victim, self._rank, target), hop=2)
        self._send_to(target, along, payload if isinstance(message, m.DataMessage) else None)

    def _part_of(self, victim: Peer, target: Peer) -> m.Part | None:
        """Return a part that a member could send to another one, as if it came along an auxiliary path."""
        parts = [message for message, _ in self._known if isinstance(message, m.Part) and not message.is_aux]
        policy = self._node.machine.policy
        if not parts or policy is None:
            return None
        part = self._chance.choice(parts)
        tree = part.tree % len(policy.trees)
        return msgspec.structs.replace(
            part,
            is_aux=True,
            round=part.round + self._chance.randrange(3),
            version=policy.version,
            tree=tree,
            phase=self._chance.choice([m.Phase.REDUCE, m.Phase.BROADCAST]),
            contributors=bits_to_wire(Plan(policy, target).mask_of(tree, victim)),
        )

    def _open_session(self, victim: Peer, target: Peer) -> None:
        """Open a session as another member, whose number all members know, and say something in it."""
        process, machine = self._node.process, self._node.machine
        member, receiver = machine.members[victim], machine.members[target]
        host, port = receiver.host, receiver.port
        if target == SCHEDULER:
            host, port = machine.options.scheduler_host, machine.options.scheduler_port
        self._opened += 1
        connection = Connection(_FIRST_OWN + self._opened)
        process.van.open(connection, host, port)
        hello = m.Hello(
            job=process.stack.endpoint.process.job,
            sender=victim,
            incarnation=member.incarnation,
            receiver=target,
            session=self._chance.randrange(1 << 60),
            received=0,
        )
        said = self._chance.choice(_LEAVING) if target == SCHEDULER else self._part_of(victim, target)
        for sequence, message in enumerate((hello, said)):
            if message is not None:
                self._count(message)
                header = seal(encode_body(message), sequence=sequence, sent_at=1, payload_crc=None)
                process.van.transmit(connection, header, None)

    # ----------------------------------------------------------------------------------------------- sessions

    def _any_session_message(self) -> m.Message:
        chance = self._chance
        kinds: tuple[Callable[[], m.Message], ...] = (
            lambda: m.Ack(received=chance.randrange(1 << 40), beyond=tuple(range(chance.randrange(50)))),
            lambda: m.Ack(received=chance.randrange(-5, 50)),
            lambda: m.Nack(sequence=chance.randrange(-5, 100)),
            lambda: m.Query(number=chance.randrange(-5, 1 << 40)),
            m.Reserve,
            lambda: m.Welcome(incarnation=chance.randrange(9), session=chance.randrange(9), received=7),
            lambda: m.Hello(
                job=chance.choice(("job", "netstorm", "")),
                sender=chance.choice(self._others()),
                incarnation=chance.randrange(1 << 60),
                receiver=chance.choice(self._others()),
                session=chance.randrange(9),
                received=chance.randrange(9),
            ),
        )
        return chance.choice(kinds)()

    def _send_in_a_session(self, message: m.Message) -> None:
        """Send a message as a frame of its own, past the session's own state."""
        process = self._node.process
        connections = process.stack.endpoint.connections()
        if connections:
            self._count(message)
            header = seal(encode_body(message), sequence=0, sent_at=1, payload_crc=None)
            process.van.transmit(self._chance.choice(list(connections.values())), header, None)

    def _count(self, message: m.Message) -> None:
        name = type(message).__name__
        self.sent[name] = self.sent.get(name, 0) + 1


def _value_of(message: m.Message) -> list[Any]:
    value: list[Any] = msgspec.msgpack.decode(encode_body(message))
    return value
