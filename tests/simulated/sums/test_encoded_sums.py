"""Codecs over real trees: policies change, nodes die and join in mid-round, even between a codec's rounds."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from netstorm.compression.codec import AGREED
from netstorm.compression.registry import codec_of
from netstorm.kvstore.state_transfer import StateSnapshot
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.encoded_push import EncodedPushes
from netstorm.lab.simulation.node import Pending
from netstorm.lab.testing.codec_trees import CodecTrees
from netstorm.protocol.frames import checksum, ranks_in
from tests.simulated.jobs import random_policy


class Result(NamedTuple):
    """What one process has got of one step."""

    node: object
    values: npt.NDArray[np.float32]
    named: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """Bit sets of contributors, with the elements that are their sum."""


class Recording:
    """A codec that records what a rank gives of its gradients: what is in its last round."""

    def __init__(self, codec):
        self.codec, self.sent = codec, {}

    def __getattr__(self, name):
        return getattr(self.codec, name)

    def rounds(self, gradient, state, place):
        before = gradient + state.get("residual", np.zeros_like(gradient))
        rounds = self.codec.rounds(gradient, state, place)
        ranks = None
        while True:
            try:
                transfer = next(rounds) if ranks is None else rounds.send(ranks)
            except StopIteration:
                return
            self.sent[place.round] = before - state.get("residual", np.zeros_like(gradient))
            ranks = yield transfer


class EncodedJob:
    """What all programs of a job share."""

    def __init__(self, cluster, codec, shape, *, places, steps):
        self.cluster, self.description, self.shape = cluster, codec, shape
        self.places, self.steps = places, steps
        self.results: dict[int, list[Result]] = {step: [] for step in range(steps)}
        self.programs = []

    def begin(self, rank):
        program = EncodedProgram(self, rank)
        self.programs.append(program)
        return program

    def over(self):
        running = [program for program in self.programs if program.node.alive]
        return all(program.step >= self.steps for program in running)

    def returned(self, values):
        """Return which elements of a result are missing: ranks keep what they have sent of those."""
        return (values == 0) & (self.description["type"] in ("topk", "bsc"))

    def sent(self, rank, step):
        """Return what processes with this rank have given in a step: several, if it was started again."""
        return [
            one.codec.sent[step] for one in self.programs if one.node.rank == rank and step in one.codec.sent
        ]


class EncodedProgram:
    """The program of one process. Its gradients are random, and its own."""

    def __init__(self, job, rank):
        self.job, self.node, self.step, self.first = job, job.cluster.started(rank), 0, 0
        self.codec = Recording(codec_of(job.description))
        self.values = np.random.default_rng([rank, len(job.programs)])
        self.total = np.zeros(job.shape)
        """Sum of its gradients whose results it has."""
        self.began_with: list[float] = []
        """What the others' codecs had agreed on, at a newcomer."""
        self.pushes: Any = None
        """None until the node has joined."""
        self.node.joined.then(self._joined)

    def _joined(self):
        node, job = self.node, self.job
        self.pushes = EncodedPushes(node, "w", job.shape, self.codec, job.places)
        if not node.machine.needs_state:
            self._next()
            return
        pending = Pending(node.timeline, f"rank {node.rank}: the job's state")
        node.pending.append(pending)
        node.process.call(lambda now: node.machine.fetch_state(self._take, pending.done, now))
        pending.then(lambda: self._next() if pending.error is None else None)

    def _take(self, snapshot):
        self.step = self.first = snapshot.step
        self.began_with, occasional = msgspec.msgpack.decode(bytes(snapshot.content))
        self.pushes.go_on_at(snapshot.step, self.began_with, occasional)

    def _offer(self):
        if self.node.machine.live.has_newcomers:
            content = msgspec.msgpack.encode(self.pushes.agreed())
            snapshot = StateSnapshot(
                step=self.step,
                content=content,
                crc=checksum(content),
                rounds=self.pushes.next_rounds(),
                barriers=0,
                requests=self.node.machine.live.state_requests,
            )
            self.node.process.call(lambda now: self.node.machine.offer_state(snapshot, now))

    def _next(self):
        if not self.node.alive or self.node.failure is not None:
            return
        if self.step < self.job.steps:
            self.job.cluster.at(self.job.cluster.now + 0.05 * self.values.random(), self._push)
        else:
            self.job.cluster.at(self.job.cluster.now + 0.2, self._idle)

    def _idle(self):
        if self.node.alive and self.node.failure is None:
            self._offer()
            self._next()

    def _push(self):
        if not self.node.alive:
            return
        self._offer()
        gradient = self.values.standard_normal(self.job.shape).astype(np.float32)
        pending = self.pushes.push(gradient)
        pending.then(lambda: self._summed(pending, gradient))

    def _summed(self, pending, gradient):
        if pending.error is not None:
            return
        operation = self.node.operations[-1]
        bounds = operation.key.layout_of(operation.form).bounds
        named = tuple(
            (bits, tuple(bounds[chunk] for chunk in ranks_in(chunks)))
            for bits, chunks in sorted(operation.contributors.items())
        )
        self.job.results[self.step].append(Result(self.node, pending.result().reshape(-1), named))
        self.total += gradient
        self.step += 1
        self._next()


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


def elastic_job(codec, *, seed, steps, chunk=64):
    """Return a job of four ranks, and a place for a fifth one."""
    cluster = SimulatedCluster(
        4, seed=seed, elastic="1:5", chunk_size=chunk, delay_s=0.02, jitter_s=0.05, detect_s=1.0,
        heartbeat_interval_s=0.5, heartbeat_timeout_s=3.0, link_timeout_s=2.0,
    ).join()  # fmt: skip
    job = EncodedJob(cluster, codec, (12, 20), places=5, steps=steps)
    for rank in range(4):
        job.begin(rank)
    return job


def replace_rank(job, victim, newcomer):
    """Let a rank die, and another one come."""
    job.cluster.faults.crash(victim, silent=victim == 3)
    job.cluster.run_for(0.2)
    job.cluster.start(newcomer)
    job.begin(newcomer)


@pytest.mark.parametrize("codec", ELASTIC, ids=lambda codec: " ".join(map(str, codec.values())))
def test_members_that_die_and_join_between_the_rounds_of_a_gradient_leave_sums_right(codec):
    chunk = 10_000 if codec["type"] == "powersgd" else 64  # its factors' chunks are not the tensor's
    job = elastic_job(codec, seed=7, steps=14, chunk=chunk)
    for victim, newcomer in ((2, 4), (3, 2)):
        job.cluster.run_for(0.3)
        if codec["type"] in ("int8", "1bit", "powersgd"):  # of two rounds
            job.cluster.run_until(lambda: between_rounds(job), 5.0, "a gradient half done")
        replace_rank(job, victim, newcomer)
    job.cluster.run_until(job.over, 200.0, "all steps")
    assert check(job) > 0
    survivors = [program for program in job.programs if program.node.alive]
    assert len(survivors) == 4
    for program in survivors:
        check_mass(job, program)
    assert all(program.first > 0 for program in job.programs[4:])
    job.cluster.finish()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_newcomers_go_on_with_the_codec_that_auto_has_chosen_before_they_came(seed):
    job = elastic_job({"type": "auto", "every": 3}, seed=seed, steps=24)
    for victim, newcomer in ((2, 4), (3, 2)):
        job.cluster.run_until(lambda: has_chosen(job), 20.0, "a choice")
        replace_rank(job, victim, newcomer)
    job.cluster.run_until(job.over, 200.0, "all steps")
    assert check(job, within=0.02) > 0  # each hop of fp16 rounds
    joined = job.programs[4:]
    assert all(0 < program.first < job.steps for program in joined)
    assert any(program.began_with[0] > 0 for program in joined)
    agreed = {program.pushes.state[AGREED].tobytes() for program in job.programs if program.node.alive}
    assert len(agreed) == 1
    job.cluster.finish()


def has_chosen(job):
    """Return whether the codec that all living programs use is another one than the first."""
    states = [one.pushes.state for one in job.programs if one.node.alive and one.pushes is not None]
    return all(state.get(AGREED, [0])[0] > 0 for state in states)
