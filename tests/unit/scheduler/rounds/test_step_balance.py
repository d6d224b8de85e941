"""Local steps that let all nodes be ready at once: fixed cases, and what holds for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from netstorm.scheduler.rounds import NodeTimes, balanced_steps, ready_at

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


def test_a_node_four_times_slower_takes_one_step_while_the_others_take_four():
    assert balanced_steps(of(1.0, 1.0, 1.0, 4.0)) == {0: 4, 1: 4, 2: 4, 3: 1}


def test_equal_nodes_take_the_fewest_steps():
    assert balanced_steps(of(2.0, 2.0, least=3)) == {0: 3, 1: 3}


def test_measured_times_that_scatter_a_little_cost_no_step():
    assert balanced_steps(of(1.02, 0.99, 4.0)) == {0: 4, 1: 4, 2: 1}
    assert balanced_steps(of(1.0, 1.05)) == {0: 1, 1: 1}


def test_a_node_that_needs_longer_to_communicate_takes_fewer_steps():
    far = NodeTimes(step_s=1.0, exchange_s=2.0, most=100)
    assert balanced_steps(of(1.0, 4.0) | {2: far}) == {0: 4, 1: 1, 2: 2}


def test_the_slowest_to_communicate_may_be_whom_the_others_wait_for():
    far = NodeTimes(step_s=1.0, exchange_s=9.0, most=100)
    assert balanced_steps(of(1.0, 5.0) | {2: far}) == {0: 10, 1: 2, 2: 1}


def test_nobody_takes_more_than_its_most():
    assert balanced_steps(of(0.001, 10.0, most=50)) == {0: 50, 1: 1}


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
