"""The lanes of one process: what peers may have here."""

from __future__ import annotations

import random

from netstorm.errors import NoRoom
from netstorm.lab.testing.recorder import part
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Peer, encode_body
from netstorm.pslite.datagram.lane import OF_MESSAGE
from netstorm.pslite.datagram.lanes import LaneOptions, Lanes, Packet
from netstorm.pslite.datagram.packets import DATA, HEAD, KEY_BYTES, fragment, new_cipher, seal_packet
from tests.unit.pslite.world import connected

KEY = bytes(range(KEY_BYTES))
SIZE = 1000


class Packets:
    """Has what a test puts there."""

    ports: tuple[int, ...] = (7,)

    def __init__(self) -> None:
        self.come: list[Packet] = []

    def transmit(self, channel: int, packet: bytes, host: str, port: int, dscp: int) -> None: ...

    def take(self) -> list[Packet]:
        taken, self.come = self.come, []
        return taken


def test_messages_for_which_the_process_has_no_room_are_bounded_in_bytes_and_come_later():
    world, _, there = connected()
    packets, counters = Packets(), Counters()
    room = 10 * (SIZE + OF_MESSAGE)
    lanes = there.endpoint.lanes = Lanes(
        LaneOptions(room=room), packets, counters=counters, tokens=random.Random(1)
    )
    session = there.endpoint._sessions.accepted[Peer(0)]
    lanes.offered(session, m.LaneOffer(number=5, key=KEY, channels=1))
    (lane,) = lanes._incoming
    cipher, numbers = new_cipher(KEY), iter(range(1, 10_000))

    def come(message: int) -> None:
        for offset, values in ((HEAD, encode_body(part(message))), (0, bytes(SIZE))):
            content = fragment(message, 1, offset, SIZE, values)
            packet = seal_packet(cipher, DATA, lane, next(numbers), content)
            packets.come.append(Packet(0, packet, "host0", 9))
        world.run(0.001)

    def refuse(message: m.Message) -> None:
        raise NoRoom("none", "anything")

    there.machine.on_receive = refuse
    for message in range(1, 31):
        come(message)
    kept = 30 - counters.get("lane_no_room") // 2
    assert kept == 10
    there.machine.on_receive = lambda _: None
    world.run(1)
    assert there.machine.numbers() == list(range(11)), "0 has come over the session"
    for message in range(11, 31):
        come(message)
    assert there.machine.numbers() == list(range(31))
