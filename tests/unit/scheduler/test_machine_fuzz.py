"""Whatever processes send, in whatever order: the scheduler refuses nonsense, and never breaks or spins."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import PeerError
from netstorm.protocol import messages as m
from netstorm.protocol.frames import encode_body
from netstorm.pslite.machine import Admit
from netstorm.scheduler.snapshot import JobPhase
from tests.unit.scheduler.driving import RELEASE, Driven, running, star

numbers = st.one_of(st.integers(-2, 4), st.sampled_from([2**31, 2**63 - 1, -(2**63), 1500]))
texts = st.one_of(st.sampled_from(["", "a", "b", "float32", "int8"]), st.text(max_size=5))
rounds = st.tuples(numbers, numbers, texts).map(lambda args: m.RoundBegun(*args))
shapes = st.lists(numbers, max_size=3).map(tuple)
keys = st.builds(m.KeySpec, numbers, texts, shapes, st.sampled_from(["float32", "int8", "float16", "x", ""]))

messages = st.one_of(
    st.builds(
        m.Join,
        asked_rank=numbers,
        num_workers=st.sampled_from([3, 3, 3, 0, 2**40]),
        host=st.sampled_from(["h0", "h1", "h2", "", "h\n"]),
        port=st.sampled_from([1, 4000, 0, -1, 2**40]),
        site=texts,
        release=st.sampled_from([RELEASE, RELEASE, ""]),
        pid=numbers,
        must_agree=st.dictionaries(st.sampled_from(["CHUNK_SIZE", "?"]), texts, max_size=2),
    ),
    st.builds(m.Heartbeat, busy=texts),
    st.builds(m.RegisterKeys, keys=st.lists(keys, max_size=4).map(tuple)),
    st.builds(m.TopologyRequest, begun=st.lists(rounds, max_size=4).map(tuple)),
    st.builds(m.Barrier, number=numbers),
    st.builds(m.Suspect, rank=numbers, reason=texts),
    st.builds(m.Finished, last_rounds=st.dictionaries(numbers, numbers, max_size=2)),
    st.builds(m.Failed, reason=texts),
    st.just(m.Leave()),
    st.just(m.AllFinished()),
    st.just(m.Waiting(text="")),
    st.just(m.BarrierReached(number=0)),
    st.builds(m.PeerGone, rank=numbers, kind=texts, reason=texts),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["h0", "h1", "h2", "h3"]), messages),
        st.tuples(st.just("time"), st.sampled_from([0.0, 0.5, 3.0, 11.0, 310.0])),
        st.tuples(st.just("lose"), st.sampled_from(["h0", "h1", "h2", "h3"])),
    ),
    max_size=30,
)


def take(driven: Driven, steps: list[Any]) -> None:
    for who, what in steps:
        if who == "time":
            driven.run(what)
        elif who == "lose":
            if what in driven.peers:
                driven.lose(what)
        else:
            if who not in driven.peers:
                assert isinstance(driven.hello(who, incarnation=hash(who) & 0xFFFF), Admit)
            try:
                driven.say(who, what)
            except PeerError as error:
                assert str(error)
        for told in driven.sent.values():
            for message in told:
                assert msgspec.msgpack.decode(encode_body(message)), "what it says can be sent"


@settings(max_examples=100)
@given(steps)
def test_strangers_can_do_nothing_but_join(steps):
    driven = Driven(3)
    take(driven, steps)
    driven.stop()
    driven.run(6.0)
    assert driven.machine.phase is JobPhase.OVER


@settings(max_examples=100)
@given(steps, st.integers(0, 99))
def test_members_can_end_the_job_but_not_the_scheduler(steps, seed):
    driven = running(3)
    driven.peers |= {f"h{rank}": driven.peer_of(rank) for rank in range(3)}
    chance = random.Random(seed)
    for version, step in enumerate(steps, start=2):
        take(driven, [step])
        if chance.random() < 0.2 and driven.machine.phase is JobPhase.RUNNING:
            driven.install(star(3, version=version))
    driven.run(30.0)
    assert driven.machine.phase is JobPhase.OVER, "silence ends every job"
    assert driven.machine.outcome is not None
