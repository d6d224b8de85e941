"""Clocks that are off and drift, over unequal and noisy paths: what is learnt is right within its bound."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netstorm.errors import FrameError
from netstorm.pslite import sntp
from netstorm.pslite.sntp import ClockSync


class Pair:
    """A node and the scheduler in true time: the node's clock is off and drifts, the path has two delays."""

    def __init__(self, *, offset=1e9, drift=0.0, there=0.02, back=0.02, jitter=0.0, loss=0.0, seed=0):
        self.offset, self.drift, self.there, self.back = offset, drift, there, back
        self.jitter, self.loss = jitter, loss
        self.random = random.Random(seed)
        self.sync = ClockSync(seed=seed)
        self.now = 1000.0
        """True time, which is the scheduler's."""

    def local(self, time):
        """What the node's clock shows: the cluster clock goes `drift` faster than it."""
        return (time - self.offset) / (1 + self.drift)

    def delay(self, base):
        return base + (self.random.expovariate(1 / self.jitter) if self.jitter else 0.0)

    def exchange(self):
        request = self.sync.poll(self.local(self.now))
        if self.random.random() < self.loss:
            return
        arrived = self.now + self.delay(self.there)
        left = arrived + self.random.random() * 0.001
        data = sntp.answer(request, received=arrived, transmitted=left)
        self.now = left + self.delay(self.back)
        self.sync.receive(data, self.local(self.now))

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            if self.sync.next_poll() <= self.local(self.now):
                self.exchange()
            self.now += 0.05

    def error(self):
        return self.sync.cluster_time(self.local(self.now)) - self.now


def test_before_any_exchange_nothing_is_known():
    sync = ClockSync(seed=0)
    assert not sync.synchronised
    assert sync.offset(5.0) == 0.0
    assert sync.error_bound(5.0) == math.inf


def test_one_exchange_over_an_even_path_finds_the_offset():
    pair = Pair(offset=1e9, there=0.05, back=0.05)
    pair.exchange()
    assert pair.error() == pytest.approx(0.0, abs=2e-6)


@pytest.mark.parametrize(("there", "back"), [(0.01, 0.09), (0.2, 0.001)])
def test_the_error_is_half_of_what_the_two_directions_differ_by(there, back):
    pair = Pair(there=there, back=back)
    pair.run(60)
    assert pair.error() == pytest.approx((there - back) / 2, abs=2e-6)


pairs = st.builds(
    Pair,
    offset=st.floats(0.7e9, 2.7e9),
    drift=st.floats(-1e-4, 1e-4),
    there=st.floats(1e-4, 0.3),
    back=st.floats(1e-4, 0.3),
    jitter=st.floats(0.0, 0.05),
    seed=st.integers(0, 99),
)


@given(pairs)
@example(Pair(offset=7e8, there=0.0078125, back=0.0001, jitter=0.03125, seed=1))
def test_the_error_stays_within_half_the_asymmetry_plus_what_jitter_and_drift_allow(pair):
    pair.run(40)
    fastest = min(one.delay for one in pair.sync._recent)
    drifted = 2e-4 * 20
    slack = (fastest - pair.there - pair.back) / 2 + drifted + 1e-5
    assert abs(pair.error()) <= abs(pair.there - pair.back) / 2 + slack
    assert abs(pair.error()) <= pair.sync.error_bound(pair.local(pair.now)) + drifted


def test_of_noisy_exchanges_the_fastest_counts():
    pair = Pair(jitter=0.05, seed=3)
    errors = []
    for _ in range(40):
        pair.run(5)
        errors.append(abs(pair.error()))
    assert sum(errors) / len(errors) < 0.01  # a fifth of the jitter


@pytest.mark.parametrize("drift", [80e-6, -40e-6])
def test_a_drift_is_found_and_the_clock_runs_on_with_it(drift):
    pair = Pair(drift=drift, jitter=0.0005, seed=1)
    pair.run(400)
    assert pair.sync.drift == pytest.approx(drift, rel=0.1)
    pair.now += 100  # nobody answers for a while
    assert abs(pair.error()) < 100 * abs(drift) / 5


def test_noise_is_not_taken_for_drift():
    pair = Pair(drift=0.0, jitter=0.02, seed=5)
    for _ in range(50):
        pair.run(10)
        assert abs(pair.sync.drift) < 50e-6
        assert abs(pair.error()) < 0.02


@given(st.integers(0, 30))
def test_lost_packets_only_take_longer(seed):
    pair = Pair(loss=0.5, seed=seed)
    pair.run(30)
    assert pair.error() == pytest.approx(0.0, abs=1e-5)


def test_a_clock_that_is_set_is_followed_at_once():
    pair = Pair()
    pair.run(100)
    pair.offset -= 3600.0
    pair.run(20)
    assert pair.error() == pytest.approx(0.0, abs=1e-4)
    assert len(pair.sync._history) < 20


def test_polls_come_fast_until_the_filter_is_full_and_then_rarely():
    pair = Pair()
    times: list[float] = []
    for _ in range(20):
        pair.now = max(pair.now, pair.offset + pair.sync.next_poll() if times else pair.now)
        times.append(pair.now)
        pair.exchange()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps[:7]) < 0.7
    assert 14 < gaps[-1] < 18


def test_nodes_that_start_together_do_not_ask_together():
    due = set()
    for seed in range(20):
        sync = ClockSync(seed=seed)
        sync.poll(0.0)
        due.add(sync.next_poll())
    assert len(due) == 20


def test_an_answer_is_taken_once_and_only_to_a_question_of_ours():
    pair = Pair()
    data = sntp.answer(pair.sync.poll(1.0), received=5.0, transmitted=5.0)
    pair.sync.receive(data, 1.1)
    with pytest.raises(FrameError, match="was not made"):
        pair.sync.receive(data, 1.1)
    with pytest.raises(FrameError, match="was not made"):
        pair.sync.receive(sntp.answer(sntp.request(7.0), received=5.0, transmitted=5.0), 1.1)


@pytest.mark.parametrize(("received", "transmitted"), [(5.0, 4.0), (5.0, 9.0)])
def test_a_server_whose_own_times_make_no_sense_is_not_believed(received, transmitted):
    sync = ClockSync(seed=0)
    data = sntp.answer(sync.poll(1.0), received=received, transmitted=transmitted)
    with pytest.raises(FrameError, match="a round trip of"):
        sync.receive(data, 1.1)
    assert not sync.synchronised


def test_requests_without_an_answer_do_not_pile_up():
    sync = ClockSync(seed=0)
    for second in range(1000):
        sync.poll(float(second))
    assert len(sync._outstanding) <= 8
