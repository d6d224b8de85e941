"""Codecs over real trees: policies change, nodes die and join in mid-round, even between a codec's rounds."""

import itertools
import random
from functools import partial

import numpy as np
import pytest

from netstorm.compression.codec import AGREED
from netstorm.compression.registry import codec_of
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.encoded_push import EncodedPushes
from netstorm.lab.testing.codec_trees import CodecTrees
from netstorm.protocol.frames import ranks_in
from tests.simulated.jobs import random_policy
from tests.simulated.sums.encoded_programs import EncodedJob

CODECS = (
    {"type": "fp16"},
    {"type": "int8"},
    {"type": "int8", "rounding": "stochastic"},
    {"type": "2bit"},
    {"type": "1bit"},
    {"type": "topk", "ratio": 0.1},
    {"type": "bsc", "ratio": 0.1, "momentum": 0, "size_lower_bound": 1},
    {"type": "mpq", "ratio": 0.1, "momentum": 0, "size_lower_bound": 10},
    {"type": "powersgd", "rank": 2},
)
SHAPE = (24, 30)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: " ".join(map(str, codec.values())))
def test_sums_are_the_same_and_lose_nothing_while_policies_change_and_take_over(codec):
    nodes, chance = 5, random.Random(f"{codec}")
    cluster = SimulatedCluster(
        nodes, seed=4, policy=random_policy(chance, nodes), chunk_size=64, delay_s=0.01, jitter_s=0.05
    ).join()
    pushes = [EncodedPushes(node, "w", SHAPE, codec_of(codec), nodes) for node in cluster.nodes]
    drawn = np.random.default_rng(5)
    given, applied = np.zeros(SHAPE), np.zeros(SHAPE)
    alone = CodecTrees(codec_of(codec), SHAPE, nodes)
    for step in range(3):
        gradients = drawn.standard_normal((nodes, *SHAPE)).astype(np.float32)
        pending = [push.push(values) for push, values in zip(pushes, gradients, strict=True)]
        times = sorted(0.1 * chance.random() for _ in range(2))
        for version, time in enumerate(times, 2 * step + 1):
            policy = random_policy(chance, nodes, version)
            cluster.at(cluster.now + time, partial(cluster.install_policy, policy))
        cluster.run_until_ended(pending)
        results = [one.result() for one in pending]
        assert all(one.tobytes() == results[0].tobytes() for one in results)
        given += gradients.sum(axis=0, dtype=np.float64)
        applied += results[0]
        expected = alone.sum(list(gradients))[0]
        if codec["type"] in ("int8", "2bit"):
            assert results[0].tobytes() == expected.tobytes()
        elif codec["type"] in ("1bit", "powersgd"):
            np.testing.assert_allclose(results[0].reshape(-1), expected, atol=1e-3)
    kept = sum(push.state.get("residual", np.zeros(SHAPE)).reshape(SHAPE) for push in pushes)
    np.testing.assert_allclose(applied + kept, given, atol=0.2 if codec["type"] == "fp16" else 1e-4)
    cluster.finish()


ELASTIC = tuple(codec for codec in CODECS if codec["type"] in ("int8", "1bit", "topk", "bsc", "powersgd"))


def between_rounds(job):
    """Return whether some rank is in the last round of a gradient, and another one in the first."""
    living = [one for one in job.programs if one.node.alive and one.node.operations]
    where = {(one.node.operations[-1].round, one.node.operations[-1].key.name) for one in living}
    return len({name for _, name in where}) > 1 and len({number for number, _ in where}) == 1


def check(job, within=2e-3):
    """Check that each result is the sum of what its contributors have given, the same at all members."""
    partial = 0
    for step, results in job.results.items():
        kept = [one for one in results if one.node.alive and one.node.failure is None]
        assert kept, f"step {step}"
        assert len({(one.values.tobytes(), one.named) for one in kept}) == 1, f"step {step}"
        for bits, spans in kept[0].named if len(kept[0].named) > 1 else [(kept[0].named[0][0], None)]:
            partial += bits.bit_count() < job.places
            candidates = [job.sent(rank, step) for rank in ranks_in(bits)]
            errors = []
            for chosen in itertools.product(*candidates):
                total = np.sum(chosen, axis=0, dtype=np.float64)
                error = np.where(job.returned(kept[0].values), 0, np.abs(total - kept[0].values))
                errors.append(max(error[start:end].max() for start, end in spans or [(0, len(error))]))
            assert min(errors) < within, f"step {step}: {kept[0].named}: {errors}"
    return partial


def check_mass(job, program):
    """Check that what a rank has given is its gradients but for its residual."""
    counted = np.zeros(program.total.size)
    for step, results in job.results.items():
        for one in results:
            if one.node is program.node:
                for bits, spans in one.named:
                    whole = len(one.named) == 1
                    for start, end in [(0, counted.size)] if whole else spans:
                        if bits >> program.node.rank & 1:
                            given = program.codec.sent[step][start:end]
                            counted[start:end] += np.where(job.returned(one.values[start:end]), 0, given)
    left = program.total.reshape(-1) - program.pushes.state["residual"].reshape(-1)
    np.testing.assert_allclose(counted, left, atol=1e-3)


@pytest.mark.parametrize("codec", ELASTIC, ids=lambda codec: " ".join(map(str, codec.values())))
def test_members_that_die_and_join_between_the_rounds_of_a_gradient_leave_sums_right(codec):
    nodes, places = 4, 5
    shape = (12, 20)
    chunk = 10_000 if codec["type"] == "powersgd" else 64  # its factors' chunks are not the tensor's
    cluster = SimulatedCluster(
        nodes, seed=7, elastic=f"1:{places}", chunk_size=chunk, delay_s=0.02, jitter_s=0.05, detect_s=1.0,
        heartbeat_interval_s=0.5, heartbeat_timeout_s=3.0, link_timeout_s=2.0,
    ).join()  # fmt: skip
    job = EncodedJob(cluster, codec, shape, places=places, steps=14)
    for rank in range(nodes):
        job.begin(rank)
    for victim, newcomer in ((2, 4), (3, 2)):
        cluster.run_for(0.3)
        if codec["type"] in ("int8", "1bit", "powersgd"):  # of two rounds
            cluster.run_until(lambda: between_rounds(job), 5.0, "a gradient half done")
        cluster.faults.crash(victim, silent=victim == 3)
        cluster.run_for(0.2)
        cluster.start(newcomer)
        job.begin(newcomer)
    cluster.run_until(job.over, 200.0, "all steps")
    assert check(job) > 0
    survivors = [program for program in job.programs if program.node.alive]
    assert len(survivors) == 4
    for program in survivors:
        check_mass(job, program)
    assert all(program.first > 0 for program in job.programs[nodes:])
    cluster.finish()


@pytest.mark.parametrize("seed", range(3))
def test_newcomers_go_on_with_the_codec_that_auto_has_chosen_before_they_came(seed):
    nodes, places = 4, 5
    cluster = SimulatedCluster(
        nodes, seed=seed, elastic=f"1:{places}", chunk_size=64, delay_s=0.02, jitter_s=0.05, detect_s=1.0,
        heartbeat_interval_s=0.5, heartbeat_timeout_s=3.0, link_timeout_s=2.0,
    ).join()  # fmt: skip
    job = EncodedJob(cluster, {"type": "auto", "every": 3}, (12, 20), places=places, steps=24)
    for rank in range(nodes):
        job.begin(rank)
    for victim, newcomer in ((2, 4), (3, 2)):
        cluster.run_until(lambda: has_chosen(job), 20.0, "a choice")
        cluster.faults.crash(victim, silent=victim == 3)
        cluster.run_for(0.2)
        cluster.start(newcomer)
        job.begin(newcomer)
    cluster.run_until(job.over, 200.0, "all steps")
    assert check(job, within=0.02) > 0  # each hop of fp16 rounds
    joined = job.programs[nodes:]
    assert all(0 < program.first < job.steps for program in joined)
    assert any(program.began_with[0] > 0 for program in joined)
    agreed = {program.pushes.state[AGREED].tobytes() for program in job.programs if program.node.alive}
    assert len(agreed) == 1
    cluster.finish()


def has_chosen(job):
    """Return whether the codec that all living programs use is another one than the first."""
    states = [one.pushes.state for one in job.programs if one.node.alive and one.pushes is not None]
    return all(state.get(AGREED, [0])[0] > 0 for state in states)
