"""Whatever happens to connections and bytes, every message is delivered once: random faults, found by
Hypothesis.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from netstorm.lab.testing.conformance import FaultyVan
from netstorm.lab.testing.recorder import part
from netstorm.pslite.sending import SendingHalf, SendQueueItem, Window
from netstorm.pslite.session import Limits, ReceivingHalf
from tests.unit.pslite.world import World

WINDOW = 40


class TwoHalves(RuleBasedStateMachine):
    """A sending and a receiving half with a connection between them that loses what it likes, but keeps its
    order.
    """

    def __init__(self):
        super().__init__()
        self.sender = SendingHalf(Window(WINDOW))
        self.receiver = ReceivingHalf(ordered=False)
        self.submitted = 0
        self.delivered = []
        self.on_the_way = []
        self.acknowledgements = []
        self.transmitted_since_connect = set()
        self.query = 0

    @rule(size=st.integers(4, 30), urgent=st.booleans())
    def submit(self, size, urgent):
        self.sender.submit(
            SendQueueItem(
                b"%04d" % self.submitted + bytes(size - 4), order=() if urgent else (0, 0, self.submitted)
            )
        )
        self.submitted += 1

    @rule(most=st.integers(1, 10))
    def transmit(self, most):
        for _ in range(most):
            message = self.sender.next(0.0)
            if message is None:
                return
            self.on_the_way.append(message)

    @precondition(lambda self: self.on_the_way)
    @rule(fate=st.sampled_from(["arrives", "arrives", "arrives", "payload corrupted", "header corrupted"]))
    def deliver(self, fate):
        message = self.on_the_way.pop(0)
        if message == "query":
            if fate == "arrives":
                self.acknowledge()
        elif fate == "payload corrupted":
            self.acknowledgements.append(("nack", message.sequence))
        elif fate == "arrives" and not self.receiver.has(message.sequence):
            number = int(message.body[:4])
            taken = self.receiver.receive(message.sequence, (part(number), None, 0))
            assert [arrived for arrived, _, _ in taken] == [part(number)]
            self.delivered.append(number)

    @rule()
    def acknowledge(self):
        self.acknowledgements.append(("ack", *self.receiver.received_numbers(), 0))

    @precondition(lambda self: self.acknowledgements)
    @rule(lost=st.booleans())
    def hear(self, lost):
        kind, *what = self.acknowledgements.pop(0)
        if lost:
            return
        if kind == "nack":
            self.sender.resend(*what)
        else:
            received, beyond, mark = what
            self.sender.acknowledge(received, beyond, 0.0, mark=mark)

    @rule()
    def reconnect(self):
        self.on_the_way.clear()
        self.acknowledgements.clear()
        self.sender.disconnected()
        self.sender.acknowledge(*self.receiver.received_numbers(), 0.0)

    @invariant()
    def nothing_twice(self):
        assert len(set(self.delivered)) == len(self.delivered)

    @invariant()
    def the_window_holds(self):
        window = self.sender.window
        assert window.in_flight >= 0
        assert window.messages_in_flight >= 0
        waiting = sum(message.size for message in self.sender.unacknowledged.values() if not message.resend)
        assert window.in_flight == waiting
        bulk = [one.size for one in self.sender.unacknowledged.values() if not one.resend and one.order]
        assert sum(bulk) <= WINDOW or len(bulk) <= 1

    def teardown(self):
        """However it was treated before: on a sound connection everything that is left arrives."""
        for _ in range(10 * self.submitted + 10):
            while (message := self.sender.next(0.0)) is not None:
                self.on_the_way.append(message)
            while self.on_the_way:
                self.deliver("arrives")
            # a query and its answer: whatever was transmitted before is here or lost
            mark = self.sender.mark()
            self.acknowledgements.clear()
            self.sender.acknowledge(*self.receiver.received_numbers(), 0.0, mark=mark)
        assert sorted(self.delivered) == list(range(self.submitted))
        assert not self.sender.has_work()
        assert self.sender.window.in_flight == 0


TestTwoHalves = TwoHalves.TestCase


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    ordered=st.booleans(),
    breaks=st.sampled_from([0.0, 0.01, 0.1]),
    headers=st.sampled_from([0.0, 0.01, 0.1]),
    payloads=st.sampled_from([0.0, 0.1, 0.5]),
    window=st.sampled_from([0, 1, 3000, 100_000]),
    both_connect=st.booleans(),
)
def test_two_processes_exchange_everything_once_over_connections_that_fail(
    *, seed, ordered, breaks, headers, payloads, window, both_connect
):
    limits = Limits(
        link_timeout_s=1000,
        query_after_s=1.0,
        handshake_s=1.0,
        first_retry_s=0.01,
        longest_retry_s=0.2,
        window_bytes=window,
    )
    world = World(ordered=ordered, limits=limits, delay_s=0.02, seed=seed, break_probability=breaks / 4)
    rng = random.Random(seed)
    here, there = world.pair()
    for process in (here, there):
        faulty = FaultyVan(process.van, rng)
        faulty.broken_probability = breaks
        faulty.header_probability = headers
        faulty.payload_probability = payloads
        process.van = faulty
    if both_connect:
        there.connect(here)
    sent = {here: 0, there: 0}
    here.send(there, part(0), b"first")
    sent[here] = 1
    assert world.run_until(lambda: there.machine.got)
    for _ in range(rng.randrange(1, 40)):
        process, other = rng.choice([(here, there), (there, here)])
        order = rng.choice([(), (0, 0, sent[process]), (-1, 0, 0)])
        process.send(other, part(sent[process]), rng.randbytes(rng.choice([0, 1, 2000])), order)
        sent[process] += 1
        world.run(rng.random() * 0.05)
    done = world.run_until(
        lambda: (
            len(there.machine.got) >= sent[here]
            and len(here.machine.got) >= sent[there]
            and here.endpoint.idle()
            and there.endpoint.idle()
        ),
        5000,
    )
    assert here.machine.lost == there.machine.lost == []
    assert sorted(there.machine.numbers()) == list(range(sent[here]))
    assert sorted(here.machine.numbers()) == list(range(sent[there]))
    assert done


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), kill_at=st.floats(0, 3), silent=st.booleans())
def test_when_a_process_dies_the_other_has_delivered_a_part_or_is_told(seed, kill_at, silent):
    world = World(limits=Limits(link_timeout_s=10, query_after_s=2), delay_s=0.05, seed=seed)
    here, there = world.pair()
    for number in range(200):
        here.send(there, part(number), bytes(50_000), (0, 0, number))
    world.run(kill_at)
    world.kill(there, silent=silent)
    finished = here.endpoint.idle()
    world.run(60)
    assert finished != bool(here.machine.lost) or here.endpoint.idle()
    if not finished:
        [(peer, reason)] = here.machine.lost
        assert peer == 1
        assert "host1" in reason
    assert there.machine.numbers() == list(range(len(there.machine.got)))
