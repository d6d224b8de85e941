"""A member, or a stranger, that speaks in another one's name: over real, encrypted sockets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from netstorm.kvstore.node import GeneralNode
from netstorm.kvstore.options import NodeOptions
from netstorm.observe.log import Counters
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, Peer, encode_body, open_frames, seal
from netstorm.pslite.admission import Credentials, ProcessProof
from netstorm.pslite.guard import LETTER
from netstorm.pslite.io_thread import Driver, start_driver
from netstorm.pslite.keys import CurveKeys, JobKey, NodeKey, key_text
from netstorm.pslite.van import Broken, Connection, Received
from netstorm.settings import Settings
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.integration.failures.scripts import PLAIN_JOIN, PLAIN_PROLOGUE
from tests.integration.jobs import Job
from tests.integration.security.vans import KeyedVan, events_of, poll_all
from tests.unit.scheduler.driving import Driven

KEY = JobKey.fresh()
CHAIN = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 1)),), weights=(1,))

Started = tuple[Driver[Any], Counters]


def hello(sender: int, incarnation: int, receiver: int) -> bytes:
    said = m.Hello(
        job="default",
        sender=sender,
        incarnation=incarnation,
        receiver=receiver,
        session=time.monotonic_ns(),
        received=0,
    )
    return seal(encode_body(said), sequence=0, sent_at=1, payload_crc=None)


def answer(here: KeyedVan, port: int, said: bytes) -> m.Message:
    """Say one thing over a new connection, and return what comes back."""
    connection = Connection(time.monotonic_ns())
    here.van.open(connection, "127.0.0.1", port)
    here.van.transmit(connection, said, None)

    def answers() -> list[Received]:
        return [event for event in events_of(here, Received) if event.connection == connection]

    poll_all(answers, here)
    frames = answers()[0].frames
    return open_frames(frames[0], len(frames)).message


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[Any, int], Started]]:
    """Run machines on sockets of their own, with the job's key; end them."""
    KEY.write(tmp_path / "job.key")
    drivers = []

    def start(machine: Any, rank: int, ordered: Callable[[Peer], bool] = lambda _: True) -> Started:
        counters = Counters()
        driver = start_driver(
            lambda _: machine,
            settings=Settings(key_file=str(tmp_path / "job.key")),
            counters=counters,
            bind_host="127.0.0.1",
            port=0,
            rank=rank,
            ordered=ordered,
            stamp=time.time_ns,
            name="victim",
        )
        drivers.append(driver)
        return driver, counters

    yield start
    for driver in drivers:
        driver.thread.close(linger_s=0.0)


def node_of(*members: KeyedVan) -> GeneralNode:
    """Return rank 0 of a job, whose other ranks these are."""
    node = GeneralNode(NodeOptions(scheduler_host="127.0.0.1", scheduler_port=9, host="h", port=1), now=0.0)
    ranks = [m.Member(0, "h", 1, "", 100, "own")]
    ranks += [
        m.Member(rank, "127.0.0.1", van.port, "", 100 + rank, van.user)
        for rank, van in enumerate(members, start=1)
    ]
    joined = m.Joined(
        rank=0, members=tuple(ranks), policy=CHAIN, heartbeat_interval_s=60.0, heartbeat_timeout_s=600.0
    )
    node.receive(SCHEDULER, joined, None, None, 0.0)
    node.take_instructions()
    return node


# ------------------------------------------------------------------------------------------------- members


def test_each_process_has_a_key_of_its_own_and_its_receiver_knows_it(keyed):
    one, other, there = keyed(KEY), keyed(KEY), keyed(KEY)
    for van in (one, other):
        for connection in (Connection(1), Connection(2)):
            van.van.open(connection, "127.0.0.1", there.port)
            van.van.transmit(connection, b"x", None)
    poll_all(lambda: len(events_of(there, Received)) == 4, one, other, there)
    users = [event.user for event in events_of(there, Received)]
    assert sorted(users) == sorted([one.user, other.user] * 2)
    assert one.user != other.user
    assert len({event.connection for event in events_of(there, Received)}) == 4


def test_a_member_that_speaks_as_another_rank_is_refused_named_and_counted(keyed, started, caplog):
    honest, hostile = keyed(KEY), keyed(KEY)
    driver, counters = started(node_of(honest, hostile), 0)
    refused = answer(hostile, driver.port, hello(1, 101, 0))
    assert isinstance(refused, m.Refused)
    assert (
        "rank 1 of this job has another key than this process, which has the key of rank 2" in refused.reason
    )
    assert counters.get("refused_hellos") == 1
    assert "which has the key of rank 2" in caplog.text
    assert isinstance(answer(honest, driver.port, hello(1, 101, 0)), m.Welcome)
    assert isinstance(answer(hostile, driver.port, hello(2, 102, 0)), m.Welcome), "in its own name"


def test_a_member_with_yet_another_key_is_refused_too(keyed, started):
    honest, hostile, made_up = keyed(KEY), keyed(KEY), keyed(KEY)
    driver, counters = started(node_of(honest, hostile), 0)
    for rank in (1, 2):
        assert isinstance(answer(made_up, driver.port, hello(rank, 100 + rank, 0)), m.Refused)
    assert counters.get("refused_hellos") == 2


def test_nobody_goes_on_with_the_session_of_another_process_with_the_scheduler(keyed, started):
    honest, hostile = keyed(KEY), keyed(KEY)
    driver, counters = started(Driven(2).machine, -1)
    assert isinstance(answer(honest, driver.port, hello(-1, 7, SCHEDULER)), m.Welcome)
    refused = answer(hostile, driver.port, hello(-1, 7, SCHEDULER))
    assert isinstance(refused, m.Refused)
    assert "has another key than this process" in refused.reason
    assert counters.get("refused_hellos") == 1
    assert isinstance(answer(honest, driver.port, hello(-1, 7, SCHEDULER)), m.Welcome)


def test_an_applicant_cannot_write_lines_of_its_own_into_the_log_nor_to_a_terminal(keyed, started, caplog):
    forged = "x\n11:00:01 netstorm INFO job 'alexnet' has ended well: 2 nodes\x1b[2J\x1b]0;mine\x07"
    hostile = keyed(KEY)
    driver, _ = started(Driven(2, job="default", join_timeout_s=1e12).machine, -1)
    connection = Connection(1)
    hostile.van.open(connection, "127.0.0.1", driver.port)
    hostile.van.transmit(connection, hello(-1, 7, SCHEDULER), None)
    poll_all(lambda: events_of(hostile, Received), hostile)
    join = m.Join(asked_rank=0, num_workers=2, host="h", port=5, site="", release=forged, pid=1)
    hostile.van.transmit(connection, seal(encode_body(join), sequence=1, sent_at=1, payload_crc=None), None)
    poll_all(lambda: "runs NetStorm" in caplog.text, hostile)
    (line,) = (record.getMessage() for record in caplog.records if "runs NetStorm" in record.getMessage())
    assert line.isprintable()
    assert "x\\n11:00:01 netstorm INFO" in line


def test_a_node_with_a_key_of_its_own_joins_those_that_have_the_jobs_alone(keyed, started):
    tokyo, paris = NodeKey("tokyo", CurveKeys.fresh()), NodeKey("paris", CurveKeys.fresh())
    honest, other = keyed(Credentials.of_process(KEY, tokyo)), keyed(Credentials.of_process(KEY, paris))
    driver, _ = started(node_of(honest, keyed(KEY)), 0)
    assert isinstance(answer(honest, driver.port, hello(1, 101, 0)), m.Welcome)
    again = keyed(Credentials.of_process(KEY, tokyo))
    assert isinstance(answer(again, driver.port, hello(1, 101, 0)), m.Welcome), "it is the same node"
    assert isinstance(answer(other, driver.port, hello(1, 101, 0)), m.Refused)


# ------------------------------------------------------------------------------------- without the job's key


@pytest.fixture
def stranger() -> Iterator[Callable[[int, bytes, CurveKeys], zmq.Socket[bytes]]]:
    """Connect as somebody that knows the public key of the job's pair, which no process ever sends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = []

    def connect(port: int, identity: bytes, own: CurveKeys) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        if identity:
            dealer.setsockopt(zmq.ROUTING_ID, identity)
        dealer.curve_publickey, dealer.curve_secretkey = z85.encode(own.public), z85.encode(own.secret)
        dealer.curve_serverkey = z85.encode(KEY.curve_keys().public)
        made.append((dealer, dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)))
        dealer.connect(f"tcp://127.0.0.1:{port}")
        return dealer

    yield connect
    for dealer, monitor in made:
        dealer.disable_monitor()
        monitor.close(0)
        dealer.close(0)
    context.term()


OWN = CurveKeys.fresh()


@pytest.mark.parametrize(
    "identity",
    [
        pytest.param(b"", id="none"),
        pytest.param(LETTER + bytes(8), id="as without keys"),
        pytest.param(LETTER + os.urandom(24), id="guessed"),
        pytest.param(LETTER + ProcessProof(KEY).fresh(CurveKeys.fresh().public), id="another process's"),
        pytest.param(LETTER + ProcessProof(JobKey.fresh()).fresh(OWN.public), id="another job's"),
        pytest.param(b"X" + ProcessProof(KEY).fresh(OWN.public), id="with another letter"),
    ],
)
@pytest.mark.parametrize("frames", [1, 2])
def test_who_does_not_prove_the_jobs_key_is_cut_off_before_anything_is_read(
    keyed, stranger, identity, frames
):
    there = keyed(KEY)
    dealer = stranger(there.port, identity, OWN)
    dealer.send_multipart([hello(1, 101, 0)] * frames)
    poll_all(lambda: there.counters.get("refused_proof"), there)
    poll_all(lambda: dealer.get_monitor_socket().poll(0), there)
    assert not events_of(there, Received)
    friend = keyed(KEY)
    friend.van.open(Connection(1), "127.0.0.1", there.port)
    friend.van.transmit(Connection(1), b"x", None)
    poll_all(lambda: events_of(there, Received), friend, there)


def test_the_holder_of_the_jobs_key_is_heard_by_the_same_means(keyed, stranger):
    there = keyed(KEY)
    dealer = stranger(there.port, LETTER + ProcessProof(KEY).fresh(OWN.public), OWN)
    dealer.send(b"x")
    poll_all(lambda: events_of(there, Received), there)
    assert events_of(there, Received)[0].user == key_text(OWN.public)
    assert not there.counters.get("refused_proof")


def test_who_does_not_hold_the_jobs_key_cannot_pose_as_a_process_that_accepts(keyed):
    here, posing = keyed(KEY), keyed(JobKey.fresh())
    here.van.open(Connection(1), "127.0.0.1", posing.port)
    here.van.transmit(Connection(1), b"gradients", None)
    poll_all(lambda: events_of(here, Broken), here, posing)
    assert not events_of(posing, Received)


# -------------------------------------------------------------------------------------------- a whole job

MEMBER = """
import time
from netstorm.protocol import messages as m
from netstorm.protocol.frames import encode_body, open_frames, seal
from netstorm.pslite.admission import Credentials, load_credentials
from netstorm.pslite.van import Connection, Received
from netstorm.pslite.zeromq import ZmqVan

def say_as_rank_0(own, receiver, host, port):
    credentials = load_credentials(runtime.settings, "127.0.0.1")
    if own:
        pair = runtime.process.driver.van._guard.authenticator._own
        credentials = Credentials(job=credentials.job, own=pair, proof=credentials.proof)
    van = ZmqVan(credentials=credentials)
    said = m.Hello(job=runtime.settings.job, sender=0, incarnation=runtime.node.members[0].incarnation,
                   receiver=receiver, session=7, received=0)
    van.open(Connection(1), host, port)
    van.transmit(Connection(1), seal(encode_body(said), sequence=0, sent_at=1, payload_crc=None), None)
    deadline, events = time.monotonic() + 30, []
    while not events:
        assert time.monotonic() < deadline
        events = van.poll(0.1)
    van.shut(0.0)
    message = open_frames(events[0].frames[0], 1).message
    show("to", receiver, type(message).__name__, message.reason)

for own in (True, False):
    say_as_rank_0(own, 2, runtime.node.members[2].host, runtime.node.members[2].port)
    say_as_rank_0(own, -1, runtime.settings.scheduler_host, runtime.settings.scheduler_port)
"""

ROUNDS = """
for number in range(20):
    step()
    assert (out == runtime.size).all(), out
runtime.barrier()
runtime.finish()
show("all sums were right", {name: n for name, n in runtime.counters.snapshot().items() if "refused" in name})
"""


@pytest.mark.slow
def test_a_member_cannot_speak_for_another_one_to_any_process_of_its_job(tmp_path: Path) -> None:
    KEY.write(tmp_path / "job.key")
    with Job(tmp_path, 3, NETSTORM_KEY_FILE=tmp_path / "job.key") as job:
        for rank in range(3):
            job.start(rank, PLAIN_PROLOGUE + PLAIN_JOIN + (MEMBER if rank == 1 else "") + ROUNDS)
        ended = job.end_all()
        scheduler = job.said(-1)
    assert [end.code for end in ended] == [0, 0, 0], [end.text for end in ended]
    assert all("all sums were right" in end.out for end in ended)
    said = [line for line in ended[1].out.splitlines() if line.startswith("to ")]
    assert len(said) == 4
    assert all("Refused" in line and "has another key than this process" in line for line in said), said
    assert all("which has the key of rank 1" in line for line in said[:2]), said
    assert "'refused_hellos': 2" in ended[2].out
    assert "refused a session from rank 0 of job" in ended[2].err
    assert "refused a session from rank 0 of job" in scheduler
