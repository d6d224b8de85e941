"""Who becomes the scheduler of a running job while its own is away: over real, encrypted sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from netstorm import clock
from netstorm.kvstore.node import GeneralNode
from netstorm.kvstore.options import NodeOptions
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, encode_body, open_frames, seal
from netstorm.pslite.io_thread import Driver, start_driver
from netstorm.pslite.keys import JobKey
from netstorm.pslite.proofs import SchedulerSecret, proof_for_offer, proof_for_resume
from netstorm.pslite.van import Connection, Received
from netstorm.settings import Settings
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.integration.jobs import free_port
from tests.integration.security.vans import KeyedVan, events_of, poll_all

KEY = JobKey.fresh()
SECRET = SchedulerSecret(b"schedulers of this job have this")
MEMBERS = tuple(m.Member(rank, f"10.0.0.{rank}", 9, "", 100 + rank, f"key {rank}") for rank in range(3))
CHAIN = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 1)),), weights=(1,))

BLAMED = m.PeerGone(rank=1, kind="failed", reason="rank 1 has failed: somebody says so")


@pytest.fixture
def waiting(tmp_path) -> Iterator[Driver[GeneralNode]]:
    """Rank 0 of a job with a key, which has lost its scheduler and waits for another one."""
    KEY.write(tmp_path / "job.key")
    now = clock.monotonic()
    node = GeneralNode(
        NodeOptions(scheduler_host="127.0.0.1", scheduler_port=free_port(), host="h", port=1), now=now
    )
    joined = m.Joined(
        rank=0,
        members=MEMBERS,
        policy=CHAIN,
        heartbeat_interval_s=60.0,
        heartbeat_timeout_s=600.0,
        resume_s=600.0,
        proof_key=m.HiddenKey(SECRET.key_for("default", MEMBERS[0])),
    )
    node.receive(SCHEDULER, joined, None, None, now)
    driver = start_driver(
        lambda _: node,
        settings=Settings(key_file=str(tmp_path / "job.key"), link_timeout_s=0.5),
        counters=Counters(),
        bind_host="127.0.0.1",
        port=0,
        rank=0,
        ordered=lambda _: True,
        stamp=time.time_ns,
        name="waiting",
    )
    try:
        deadline = time.monotonic() + 60
        while not node.scheduler.is_away:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield driver
    finally:
        driver.thread.close(linger_s=0.0)


class Coming:
    """A process with the job's key that would be the scheduler."""

    def __init__(self, van: KeyedVan) -> None:
        self.van = van
        self.said = 0

    def say(self, connection: int, message: m.Message) -> None:
        session = isinstance(message, m.SessionMessage)
        self.said += not session
        frame = seal(encode_body(message), sequence=0 if session else self.said, sent_at=1, payload_crc=None)
        self.van.van.transmit(Connection(connection), frame, None)

    def heard(self, kind: type[m.Message]) -> list[tuple[int, m.Message]]:
        """Return the messages of a kind that have come so far, with their connections."""
        opened = [
            (event.connection, open_frames(event.frames[0], len(event.frames)).message)
            for event in events_of(self.van, Received)
        ]
        return [(connection, message) for connection, message in opened if isinstance(message, kind)]

    def offer(self, driver: Driver[GeneralNode], number: int, proof: bytes = b"") -> m.RecoverAnswer:
        """Offer the node at a port to take its job over; return its answer."""
        self.van.van.open(Connection(number), "127.0.0.1", driver.port)
        self.say(
            number,
            m.Hello(job="default", sender=-1, incarnation=number, receiver=-2, session=number, received=0),
        )
        poll_all(lambda: self.heard_on(number, m.Welcome), self.van, seconds=60.0)
        self.said = 0
        self.say(number, m.Recover(host="127.0.0.1", port=self.van.port, proof=proof))
        poll_all(lambda: self.heard_on(number, m.RecoverAnswer), self.van, seconds=60.0)
        (answer,) = self.heard_on(number, m.RecoverAnswer)
        assert isinstance(answer, m.RecoverAnswer)
        return answer

    def heard_on(self, connection: int, kind: type[m.Message]) -> list[m.Message]:
        return [message for where, message in self.heard(kind) if where == connection]


def dropped(driver: Driver[GeneralNode]) -> int:
    """Return how many messages the node has refused because their sender may not send them."""
    counted = driver.thread.call(
        lambda _: [counts.get("dropped_authority", 0) for counts in driver.endpoint.links().values()]
    )
    return sum(counted.result(60))


def test_a_holder_of_the_jobs_key_does_not_become_the_scheduler_and_blames_nobody(
    waiting: Driver[GeneralNode], keyed: Callable[..., KeyedVan]
) -> None:
    node, hostile = waiting.machine, Coming(keyed(KEY))
    key = SECRET.key_for("default", MEMBERS[0])
    others = SECRET.key_for("default", MEMBERS[1])  # what a member has
    wrong = (b"", b"x" * 32, proof_for_offer(others, "127.0.0.1", hostile.van.port))
    for number, proof in enumerate(wrong, start=1):
        answer = hostile.offer(waiting, number, proof)
        assert (answer.accepted, answer.unproven) == (False, True)
    assert not hostile.heard(m.Resume)

    right = Coming(hostile.van)
    answer = right.offer(waiting, 9, proof_for_offer(key, "127.0.0.1", hostile.van.port))
    assert answer.accepted

    # Even there, at an address to which the node has gone, nobody is believed without a proof.
    poll_all(lambda: right.heard(m.Hello), right.van, seconds=60.0)
    connection, hello = right.heard(m.Hello)[0]
    assert isinstance(hello, m.Hello)
    right.said = 0
    right.say(connection, m.Welcome(incarnation=5, session=hello.session, received=0))
    poll_all(lambda: right.heard(m.Resume), right.van, seconds=60.0)
    (_, asked), *_ = right.heard(m.Resume)
    assert isinstance(asked, m.Resume)
    lies = (
        m.Resumed(),
        BLAMED,
        m.Resumed(proof=proof_for_resume(others, asked.number)),
        m.Resumed(proof=proof_for_resume(key, asked.number + 1)),
    )
    for lie in lies:
        right.say(connection, lie)
    deadline = time.monotonic() + 60
    while dropped(waiting) < len(lies):
        assert time.monotonic() < deadline, dropped(waiting)
        right.van.van.poll(0.01)
    assert node.failure is None
    assert node.scheduler.is_away
    assert "does not prove that it is a scheduler of this job" in node.scheduler.waiting_text(0.0)

    right.say(connection, m.Resumed(proof=proof_for_resume(key, asked.number)))
    right.say(connection, BLAMED)
    poll_all(lambda: node.failure is not None, right.van, seconds=60.0)
    assert "rank 1 has failed" in str(node.failure)
