"""The choice of a codec by the times of network and program."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from netstorm.compression.auto import NAMES, Auto, Candidates, NetworkUse, choose
from netstorm.compression.codec import AGREED
from netstorm.compression.power_sgd import PowerSGD
from netstorm.errors import UsageError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.encoded_push import EncodedPushes
from netstorm.lab.testing.codec_trees import CodecTrees
from netstorm.topology.network import Network

FRACTIONS = (1, 0.5, 0.25, 0.0625)


def test_the_first_candidate_that_keeps_up_is_chosen_by_its_bytes_or_by_its_own_time():
    assert choose({0: 1.0}, FRACTIONS, compute_s=1.0).place == 0
    assert choose({0: 1.0}, FRACTIONS, compute_s=0.6).place == 1
    assert choose({0: 1.0}, FRACTIONS, compute_s=0.3).place == 2
    assert choose({0: 1.0}, FRACTIONS, compute_s=0.01).place == 3
    assert choose({0: 1.0, 1: 0.8}, FRACTIONS, compute_s=0.71).place == 2  # latency has a part of 0.6


def test_latency_that_does_not_shrink_is_told_from_bytes():
    found = choose({0: 1.0, 2: 0.4}, FRACTIONS, compute_s=0.5)
    assert found.place == 2
    assert found.times[3] == pytest.approx(0.25)
    assert found.times[1] == pytest.approx(0.6)


def test_what_is_no_better_than_measurements_differ_changes_nothing():
    fractions = (1, 0.5)
    assert choose({0: 0.95, 1: 0.5}, fractions, compute_s=1.0, current=1).place == 1
    assert choose({0: 0.89, 1: 0.5}, fractions, compute_s=1.0, current=1).place == 0
    assert choose({0: 1.01, 1: 0.5}, fractions, compute_s=1.0, current=0).place == 1
    assert choose({0: 1.05, 1: 1.0}, fractions, compute_s=0.1, current=0).place == 0
    assert choose({0: 1.2, 1: 1.0}, fractions, compute_s=0.1, current=0).place == 1


def test_times_that_make_no_line_are_taken_in_proportion_to_bytes():
    assert choose({2: 0.5}, FRACTIONS, compute_s=3.0).times[0] == pytest.approx(2.0)
    assert choose({0: 1.0, 2: 1.5}, FRACTIONS, compute_s=0.2).times[3] == pytest.approx(0.0625)


def test_sums_that_overlap_occupy_the_network_once():
    use = NetworkUse()
    assert use.typical() == (-1, -1)
    for step in range(5):
        use.begin(step)
        use.begin(step + 0.1)
        use.end(step + 0.2)
        use.end(step + 0.3)
    busy, idle = use.typical()
    assert busy == pytest.approx(0.3)
    assert idle == pytest.approx(0.7)
    use.begin(5)
    use.forget()
    assert use.typical()[0] == pytest.approx(0.3)  # sums that begin now decide by the same times
    use.end(6)
    assert use.typical()[0] == -1


def test_it_chooses_every_so_many_gradients():
    with pytest.raises(UsageError, match=r"every=0: expected 1 or more"):
        Auto(0)


@pytest.mark.parametrize(("rate", "name"), [(1e9, ""), (4e6, "powersgd rank=16")])
def test_all_ranks_of_a_job_choose_alike_and_no_gradient_is_lost(rate: float, name: str):
    ranks, shape = 3, (200, 500)
    cluster = SimulatedCluster(nodes=ranks, seed=1, network=Network.uniform(ranks, rate=rate)).join()
    codecs = [Auto(every=3) for _ in range(ranks)]
    tensors = [
        EncodedPushes(node, "w", shape, codec, ranks)
        for node, codec in zip(cluster.nodes, codecs, strict=True)
    ]
    random = np.random.default_rng(3)
    total, applied = np.zeros(shape), np.zeros(shape)
    for _ in range(8):
        gradients = [random.normal(size=shape).astype(np.float32) for _ in range(ranks)]
        pending = [tensor.push(gradient) for tensor, gradient in zip(tensors, gradients, strict=True)]
        cluster.run_until_ended(pending)
        sums = [one.result() for one in pending]
        assert len({one.tobytes() for one in sums}) == 1
        total += sum(gradients)
        applied += sums[0]
        computed: list[bool] = []
        cluster.timeline.after(0.05, partial(computed.append, True))
        cluster.run_until(partial(any, computed), 10.0, "the computation")
    kept = [tensor.state.get("residual", np.zeros(shape)).reshape(shape) for tensor in tensors]
    np.testing.assert_allclose(applied + sum(kept), total, atol=1e-4)
    chosen = {NAMES[int(tensor.state[AGREED][0])] for tensor in tensors}
    assert chosen == {name or "none"}
    said = {codec.take_news() for codec in codecs}
    assert all(one.startswith(f"{name or 'none'} (") for one in said), said
    assert all("A step computes for 0.05 s; its sums take: none " in one for one in said), said


def trees_of(codec, shape, ranks=3):
    return CodecTrees(codec, shape, ranks, chunk=1000, seed=5)


def forced(trees, place):
    for state in trees.states:
        state[AGREED][0] = place


@pytest.mark.parametrize("shape", [(200, 500), (64, 20, 25), (12, 20), (7,), ()])
def test_no_gradient_is_lost_when_the_codec_changes_for_tensors_of_any_shape(shape: tuple[int, ...]):
    trees, random = trees_of(Auto(), shape), np.random.default_rng(1)
    size = int(np.prod(shape, dtype=int))
    given, got = np.zeros(size), np.zeros(size)
    for place in (None, 0, 3, 3, 2, 3, 1, 0, 3, 0):
        if place is not None:
            forced(trees, place)
        gradients = [random.normal(size=size).astype(np.float32) for _ in range(3)]
        sums = trees.sum(gradients)
        assert len({one.tobytes() for one in sums}) == 1
        given += sum(gradients)
        got += sums[0]
    kept = sum(state.get("residual", np.zeros(size)) for state in trees.states)
    np.testing.assert_allclose(got + kept, given, atol=0.02)  # fp16 has no residual


def test_what_is_no_large_matrix_has_whole_numbers_instead_of_factors():
    candidates = Candidates()
    for shape, last in (((512, 1024), 0.0508), ((128, 1152), 0.142), ((10, 512), 0.3125), ((512,), 0.3125)):
        codecs, fractions = candidates.of(shape), candidates.fractions(shape)
        assert fractions[:2] == [1, 0.5]
        assert fractions[3] == pytest.approx(last, rel=0.01)
        assert (codecs[3] is codecs[2]) is (fractions[3] == fractions[2])


def test_the_last_candidate_sums_what_powersgd_does():
    trees = trees_of(Auto(), (200, 500))
    gradients = [np.random.default_rng(rank).normal(size=100_000).astype(np.float32) for rank in range(3)]
    trees.sum(gradients)
    forced(trees, 3)
    exact = PowerSGD(16)
    other = trees_of(exact, (200, 500))
    np.testing.assert_allclose(trees.sum(gradients)[0], other.sum(gradients)[0], atol=1e-3)


def test_a_checkpoint_of_other_candidates_begins_with_the_first_of_them():
    trees = trees_of(Auto(), (200, 500))
    for state in trees.states:
        state[AGREED] = np.array([3.0, 40, *[0.5] * 4, *[1] * 4])  # the last one was topk
    gradients = [np.ones(100_000, np.float32)] * 3
    np.testing.assert_array_equal(trees.sum(gradients)[0], np.full(100_000, 3))
    assert {state[AGREED][0] for state in trees.states} == {0}
