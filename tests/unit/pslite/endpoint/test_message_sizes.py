"""Nobody can have more decoded than he needs."""

from __future__ import annotations

import pytest

from netstorm.errors import FrameError
from netstorm.protocol.frames import SCHEDULER, Peer, check_size
from netstorm.protocol.messages import Failed, Finished, Hello, Leave, Message
from netstorm.pslite.van import Connection, Received
from tests.unit.pslite.endpoint.test_endpoint import established, frame, hello
from tests.unit.pslite.world import World

HALF, SOME, MUCH = 500_000, 1_500_000, 5_000_000


def of_size(size: int, message: Message) -> bytes:
    return bytes(frame(message)).ljust(size, b"x")


LEAVE, FINISHED = Leave(), Finished(last_rounds={})


@pytest.mark.parametrize(
    ("size", "message", "sender", "own_rank"),
    [
        (SOME, hello(), None, -1),
        (SOME, hello(), None, 3),
        (HALF, FINISHED, None, -1),
        (HALF, LEAVE, Peer(2), -1),
        (SOME, FINISHED, Peer(2), 3),
        (MUCH, FINISHED, Peer(2), -1),
    ],
)
def test_what_is_too_much_is_refused(size: int, message: Message, sender: Peer | None, own_rank: int) -> None:
    with pytest.raises(FrameError, match=f"{size} bytes before the payload"):
        check_size(of_size(size, message), sender, own_rank)


@pytest.mark.parametrize(
    ("size", "message", "sender", "own_rank"),
    [
        (HALF, hello(), None, -1),
        (HALF, FINISHED, Peer(2), 3),
        (SOME, FINISHED, Peer(2), -1),
        (MUCH, LEAVE, SCHEDULER, 3),
        (MUCH, LEAVE, SCHEDULER, -1),
    ],
)
def test_the_scheduler_may_say_much_and_be_told_some(
    size: int, message: Message, sender: Peer | None, own_rank: int
) -> None:
    check_size(of_size(size, message), sender, own_rank)


def test_a_hello_of_megabytes_begins_no_session() -> None:
    world = World(1)
    [process] = world.processes
    large = Hello(
        **{name: getattr(hello(), name) for name in Hello.__struct_fields__} | {"job": "x" * 2_000_000}
    )
    process.stack.handle(Received(Connection(-1), (frame(large),)), 0.0)
    assert process.endpoint.counters.get("dropped_frame") == 1
    assert process.endpoint.links() == {}


def test_megabytes_from_a_node_are_dropped_and_the_session_lives() -> None:
    _, _, there, connection = established()
    there.stack.handle(Received(connection, (frame(Failed(reason="x" * 2_000_000), sequence=2),)), 0.0)
    assert there.endpoint.counters.get("dropped_frame") == 1
    assert len(there.machine.got) == 1
    there.stack.handle(Received(connection, (frame(Failed(reason="x"), sequence=2),)), 0.0)
    assert len(there.machine.got) == 2
