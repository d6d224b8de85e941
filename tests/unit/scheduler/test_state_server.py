"""The state server of ESync: who is answered when, and with what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import ProtocolViolation
from netstorm.protocol.messages import StepTimes
from netstorm.scheduler.rounds import NodeTimes, StateServer, balanced_steps, ready_at


def times(round: int, step_s: float, exchange_s: float = 0.0, **more: int) -> StepTimes:
    fields = {"training": 0, "least": 1, "most": 100, **more}
    return StepTimes(round=round, step_s=step_s, exchange_s=exchange_s, **fields)


def test_all_are_answered_when_the_last_has_reported_and_one_that_reports_again_is_answered_again():
    server = StateServer()
    assert server.report(1, times(0, 1.0), (0, 1, 2), 1.0) == []
    for now in (4.0, 4.2):
        assert server.report(0, times(0, 4.0), (0, 1, 2), now) == []
    assert server.report(2, times(0, 2.0), (0, 1, 2), 4.5) == [(0, 0, 1), (1, 0, 4), (2, 0, 2)]
    assert server.report(1, times(0, 1.0), (0, 1, 2), 5.0) == [(1, 0, 4)]


def test_steps_follow_what_nodes_measure_later():
    server = StateServer()
    server.report(0, times(0, 1.0), (0, 1), 1.0)
    answers = [server.report(1, times(0, 1.0), (0, 1), 1.0)]
    for round in range(1, 12):
        server.report(0, times(round, 1.0), (0, 1), 10.0 * round)
        answers.append(server.report(1, times(round, 4.0), (0, 1), 10.0 * round))
    assert answers[0] == [(0, 0, 1), (1, 0, 1)]
    assert answers[-1] == [(0, 11, 4), (1, 11, 1)]


def test_the_wait_for_others_does_not_count_as_communication():
    """Both exchanges ended at 4.5: rank 0 had waited 3 s of its 3.5 s, and needs half a second, as rank 1."""
    server = StateServer()
    server.report(0, times(0, 1.0), (0, 1), 1.0)
    server.report(1, times(0, 4.0), (0, 1), 4.0)
    server.report(0, times(1, 1.0, 3.5), (0, 1), 5.5)
    assert server.report(1, times(1, 4.0, 0.5), (0, 1), 8.5) == [(0, 1, 4), (1, 1, 1)]


def test_a_node_that_hears_late_of_the_result_takes_fewer_steps():
    server = StateServer()
    server.report(0, times(0, 1.0), (0, 1), 4.0)
    server.report(1, times(0, 4.0), (0, 1), 4.0)
    server.report(0, times(1, 1.0, 2.0), (0, 1), 10.0)
    assert server.report(1, times(1, 4.0, 0.0), (0, 1), 10.0) == [(0, 1, 2), (1, 1, 1)]


def test_after_a_restart_who_is_a_round_behind_is_answered_at_once():
    """Rank 1 has an answer of the process before, and has gone on; rank 0's was lost."""
    server = StateServer()
    assert server.report(1, times(7, 1.0), (0, 1), 0.0) == []
    assert server.report(0, times(6, 2.0), (0, 1), 0.1) == [(0, 6, 1)]
    assert server.report(0, times(7, 2.0), (0, 1), 2.0) == [(0, 7, 1), (1, 7, 2)]


def test_nobody_waits_for_a_rank_that_has_left():
    server = StateServer()
    server.report(0, times(0, 1.0), (0, 1, 2), 0.0)
    server.report(1, times(0, 2.0), (0, 1, 2), 0.0)
    assert server.members_changed((0, 1), (0, 1)) == [(0, (0, 0, 2)), (0, (1, 0, 1))]
    assert server.members_changed((0, 1), (0, 1)) == []


def test_who_has_joined_later_is_answered_at_once_and_nobody_waits_for_it():
    server = StateServer()
    assert server.report(0, times(7, 1.0), (0, 1), 0.0) == []
    assert server.report(2, times(5, 1.0, least=2), (0, 1), 0.1) == [(2, 5, 2)]
    assert server.report(1, times(7, 2.0), (0, 1), 2.0) == [(0, 7, 2), (1, 7, 1)]


def test_what_is_known_of_a_rank_that_does_not_count_yet_is_kept_until_it_leaves():
    server = StateServer()
    server.report(2, times(7, 4.0), (0, 1), 0.0)
    assert server.members_changed((0, 1), (0, 1, 2)) == []
    server.report(0, times(7, 1.0), (0, 1, 2), 0.0)
    assert server.report(1, times(7, 2.0), (0, 1, 2), 0.0) == [(0, 7, 4), (1, 7, 2), (2, 7, 1)]


def test_trainings_are_apart():
    server = StateServer()
    server.report(0, times(0, 1.0, training=0), (0, 1), 0.0)
    assert server.report(1, times(0, 1.0, training=1), (0, 1), 0.0) == []
    assert server.report(1, times(0, 1.0, training=0), (0, 1), 0.0) == [(0, 0, 1), (1, 0, 1)]


@pytest.mark.parametrize(
    "report",
    [
        times(0, 0.0),
        times(0, float("nan")),
        times(0, float("inf")),
        times(0, 1.0, -1.0),
        times(-1, 1.0),
        times(0, 1.0, training=-1),
        times(0, 1.0, training=10**6),
        times(0, 1.0, least=0),
        times(0, 1.0, least=5, most=4),
        times(0, 1.0, most=10**9),
    ],
)
def test_what_no_node_can_have_measured_is_refused(report):
    with pytest.raises(ProtocolViolation, match="rank 0 reports"):
        StateServer().report(0, report, (0, 1), 0.0)


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=6), st.data())
def test_every_round_is_answered_once_whatever_the_order(orders, data):
    server = StateServer()
    for round, order in enumerate(orders):
        answers = []
        for rank in order:
            step_s = data.draw(st.floats(0.01, 10))
            answers.append(server.report(rank, times(round, step_s), range(4), float(round)))
        assert [bool(found) for found in answers] == [False, False, False, True]
        assert [(rank, number) for rank, number, _ in answers[-1]] == [(rank, round) for rank in range(4)]
        assert all(1 <= steps <= 100 for _, _, steps in answers[-1])


# ---------------------------------------------------------- local steps that let all nodes be ready at once


SECONDS = st.floats(1e-3, 1e3)
NODES = st.dictionaries(
    st.integers(0, 20),
    st.builds(
        NodeTimes,
        step_s=SECONDS,
        exchange_s=st.floats(0, 1e3),
        least=st.integers(1, 5),
        most=st.integers(5, 100),
    ),
    min_size=1,
)


def of(*step_s: float, most: int = 100, **more: int) -> dict[int, NodeTimes]:
    return {rank: NodeTimes(step_s=time, most=most, **more) for rank, time in enumerate(step_s)}


def far(exchange_s):
    return {2: NodeTimes(step_s=1.0, exchange_s=exchange_s, most=100)}


@pytest.mark.parametrize(
    ("nodes", "steps"),
    [
        pytest.param(of(1.0, 1.0, 1.0, 4.0), [4, 4, 4, 1], id="one is four times slower"),
        pytest.param(of(2.0, 2.0, least=3), [3, 3], id="equal nodes take the fewest"),
        pytest.param(of(1.02, 0.99, 4.0), [4, 4, 1], id="times that scatter a little cost no step"),
        pytest.param(of(1.0, 1.05), [1, 1], id="nor do these"),
        pytest.param(of(1.0, 4.0) | far(2.0), [4, 1, 2], id="one needs longer to communicate"),
        pytest.param(of(1.0, 5.0) | far(9.0), [10, 2, 1], id="and the others wait for it"),
        pytest.param(of(0.001, 10.0, most=50), [50, 1], id="nobody takes more than its most"),
    ],
)
def test_steps_let_all_nodes_be_ready_at_once(nodes, steps):
    assert balanced_steps(nodes) == dict(enumerate(steps))


@given(NODES)
def test_all_are_ready_together_and_nobody_could_have_taken_another_step(nodes):
    steps = balanced_steps(nodes)
    end = ready_at(nodes)
    assert steps.keys() == nodes.keys()
    for rank, node in nodes.items():
        count = steps[rank]
        assert node.least <= count <= node.most
        ready = count * node.step_s + node.exchange_s
        assert ready <= end + 0.1 * node.step_s * (1 + 1e-9) + 1e-9 * end
        another = (count + 1) * node.step_s + node.exchange_s
        assert count == node.most or another > end + 0.1 * node.step_s * (1 - 1e-9) - 1e-9 * end


@given(NODES, st.floats(0.1, 10))
def test_the_unit_of_time_does_not_matter_much(nodes, unit):
    scaled = {
        rank: NodeTimes(
            step_s=node.step_s * unit, exchange_s=node.exchange_s * unit, least=node.least, most=node.most
        )
        for rank, node in nodes.items()
    }
    one, other = balanced_steps(nodes), balanced_steps(scaled)
    assert all(abs(one[rank] - other[rank]) <= 1 for rank in nodes)
