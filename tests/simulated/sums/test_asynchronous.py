"""Asynchronous training on the simulated cluster: nothing lost or doubled, pulls monotone, bounds kept."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from netstorm.compression.sparse import Rows
from netstorm.kvstore.operations import UNBOUNDED
from netstorm.lab.simulation.asynchronous import AsynchronousStore
from netstorm.lab.simulation.cluster import SimulatedCluster
from tests.simulated.failures.workload import FAST_TIMEOUTS, failing_links
from tests.simulated.jobs import examples, random_policy


@dataclass(frozen=True)
class Training:
    """Everything that a run depends on."""

    nodes: int
    seed: int
    keys: int
    elements: int
    steps: int
    chunk_size: int
    staleness: int
    whole: bool
    counted: bool
    """The scripts call `clock()`."""
    pushes: int = 1
    """Of a key in a step; more than one only where scripts count clocks."""
    slowest_s: float = 0.01
    jitter_s: float = 0.003
    breaks: float = 0.0
    uneven: bool = False
    """Some ranks take more steps than others."""
    dying: bool = False
    """Links die, for good or for a while."""

    def unit(self, rank):
        """Return what a rank's gradient is made of."""
        return self.base**rank

    def steps_of(self, rank):
        """Return how many steps a rank takes."""
        return self.steps + (self.seed >> (2 * rank) & 3 if self.uneven else 0)

    @property
    def base(self):
        """Return of which digits a value is made: one for each rank."""
        return (self.steps + 3) * self.pushes + 1

    def counts(self, value):
        """Return how many gradients of each rank are in a value of all equal elements."""
        left, found = int(-value.flat[0]), []
        for _ in range(self.nodes):
            left, count = divmod(left, self.base)
            found.append(count)
        assert left == 0
        return found


class Program:
    """What one rank does: steps of pull, think and push, each when the one before has ended."""

    def __init__(self, training, cluster, node, tracks):
        self.training = training
        self.cluster = cluster
        self.tracks = tracks
        self.chance = random.Random(f"program {training.seed} {node.rank}")
        self.store = AsynchronousStore(
            node,
            cluster.timeline,
            seed=training.seed,
            staleness=training.staleness,
            whole=training.whole,
            slowest_s=training.slowest_s,
        )
        self.node = node
        self.names = [f"k{number}" for number in range(training.keys)]
        self.pending = []
        self.last = {}
        self.step = 0
        self.over = None

    def begin(self):
        training = self.training
        start = np.zeros(training.elements, "int64")
        for name in self.names:
            self.wait(self.store.init(name, start))
        self.after_all(self.train)

    def wait(self, pending):
        self.pending.append(pending)
        return pending

    def after_all(self, action):
        """Go on when all that is pending has ended; an error is the test's to see."""
        waiting, self.pending = self.pending, []
        left = [len(waiting)]

        def ended():
            left[0] -= 1
            for one in waiting:
                if one.error is not None:
                    raise one.error
            if left[0] == 0:
                action()

        for one in waiting:
            one.then(ended)

    def train(self):
        if self.step == self.training.steps_of(self.node.rank):
            self.over = self.node.finish()
            return
        gradient = np.full(self.training.elements, self.training.unit(self.node.rank), "int64")
        self.chance.shuffle(self.names)
        for name in self.names:
            for _ in range(self.training.pushes):
                self.store.push(name, gradient, priority=self.chance.randint(0, 2))
        self.step += 1
        if self.training.counted:
            self.store.clock()
        for name in self.names:
            self.wait(self.store.pull(name))
        self.tracks[self.node.rank] = self.step
        pulled = list(zip(self.names, self.pending, strict=True))
        think_s = self.chance.random() * self.chance.choice((0.0, 0.01, 0.2))
        self.after_all(lambda: self.cluster.at(self.cluster.now + think_s, lambda: self.check(pulled)))

    def check(self, pulled):
        training, rank = self.training, self.node.rank
        for name, pending in pulled:
            value = pending.result()
            for start in range(0, training.elements, 1 if training.whole else training.chunk_size):
                assert (value[start : start + 1] == value[start]).all()
            per_chunk = [training.counts(value[start:]) for start in range(0, training.elements, 7)]
            for number, counts in enumerate(per_chunk):
                assert counts[rank] == self.step * training.pushes, "not all of this rank's own are in it"
                before = self.last.get((name, number), [0] * training.nodes)
                assert all(now >= then for now, then in zip(counts, before, strict=True)), "it went back"
                self.last[name, number] = counts
                if training.staleness != UNBOUNDED:
                    least = (self.step - training.staleness) * training.pushes
                    slowest = [
                        min(least, training.steps_of(one) * training.pushes) for one in range(len(counts))
                    ]
                    enough = all(count >= one for count, one in zip(counts, slowest, strict=True))
                    assert enough, f"staleness {training.staleness}: {counts} at {self.step}"
        self.train()


def run(training, **more):
    """Train; return the programs of all ranks."""
    cluster = SimulatedCluster(
        training.nodes,
        seed=training.seed,
        policy=random_policy(random.Random(f"policy {training.seed}"), training.nodes),
        chunk_size=training.chunk_size,
        jitter_s=training.jitter_s,
        **more,
    ).join()
    tracks: dict[int, int] = {}
    programs = [Program(training, cluster, node, tracks) for node in cluster.nodes]
    if training.breaks:
        cluster.faults.set_breaks(training.breaks)
    if training.dying:
        for cut in failing_links(training.seed, training.nodes, 0.3):
            heal_at = None if cut.heal_at is None else cluster.now + cut.heal_at
            replace(cut, at=cluster.now + cut.at, heal_at=heal_at).schedule(cluster.faults)
    for program in programs:
        program.begin()
    cluster.run_until(
        lambda: all(program.over is not None and program.over.ended for program in programs), 600.0
    )
    cluster.run_until(lambda: cluster.scheduler.machine.outcome is not None, 60.0)
    outcome = cluster.scheduler.machine.outcome
    assert outcome is not None
    assert outcome.exit_code == 0
    return programs


def check_total(training, programs):
    """Each gradient of each rank has been applied to each block exactly once."""
    values = {}
    for program in programs:
        for name, kept in program.store.blocks.items():
            for block, value in kept.values.items():
                assert (name, block) not in values
                values[name, block] = value
                steps = [training.steps_of(rank) for rank in range(training.nodes)]
                assert training.counts(value) == [step * training.pushes for step in steps]
    size = sum(len(value) for value in values.values())
    assert size == training.keys * training.elements


trainings = st.builds(
    Training,
    nodes=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    keys=st.integers(1, 3),
    elements=st.integers(1, 40),
    steps=st.integers(1, 5),
    chunk_size=st.sampled_from([1, 7, 16, 100]),
    staleness=st.sampled_from([UNBOUNDED, 1, 1, 2, 0]),
    whole=st.booleans(),
    counted=st.booleans(),
    uneven=st.booleans(),
    slowest_s=st.sampled_from([0.0, 0.001, 0.05]),
    jitter_s=st.sampled_from([0.0, 0.003, 0.1]),
).map(lambda drawn: replace(drawn, pushes=1 + drawn.seed % 2 if drawn.counted else 1))


@examples(8)
@given(trainings)
def test_every_push_is_applied_once_pulls_never_go_back_and_nobody_is_too_far_ahead(training):
    check_total(training, run(training))


@examples(5)
@given(trainings)
def test_broken_connections_change_nothing_of_that(training):
    training = replace(training, breaks=0.02)
    check_total(training, run(training))


@examples(4)
@given(trainings)
def test_links_that_die_change_nothing_of_that(training):
    training = replace(training, nodes=training.nodes + 2, dying=True, slowest_s=0.05)
    check_total(training, run(training, **FAST_TIMEOUTS))


@examples(7)
@given(
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.sampled_from([1, 7, 16, 100]),
    st.sampled_from([(1, 3), (6,), (5, 4), (9, 2, 3), (2, 30)]),
    st.booleans(),
)
def test_rows_are_added_once_by_their_owners_and_pulled_alone(nodes, seed, chunk_size, shape, whole):
    """Rows may be longer than a chunk, and cut by its end."""
    cluster = SimulatedCluster(
        nodes,
        seed=seed,
        policy=random_policy(random.Random(seed), nodes),
        chunk_size=chunk_size,
        jitter_s=0.01,
    ).join()
    chance = np.random.default_rng(seed)
    stores = [
        AsynchronousStore(node, cluster.timeline, seed=seed, whole=whole, slowest_s=0.01)
        for node in cluster.nodes
    ]
    cluster.run_until_ended([store.init("k", np.zeros(shape, "int64")) for store in stores])
    cluster.faults.set_breaks(seed % 3 / 100)
    expected, pending = np.zeros(shape, "int64"), []
    for _ in range(3):
        for store in stores:
            numbers = np.flatnonzero(chance.random(shape[0]) < 0.5)
            rows = Rows(numbers, chance.integers(-9, 9, (len(numbers), int(np.prod(shape[1:])))))
            expected[numbers] -= rows.values.reshape(expected[numbers].shape)
            pending.append(store.push_rows("k", rows))
        dense = chance.integers(-9, 9, shape)
        expected -= dense
        pending.append(stores[0].push("k", dense))
    cluster.run_until_ended(pending, 600.0)
    wanted = np.flatnonzero(chance.random(shape[0]) < 0.6)
    for store in stores:
        everything = store.pull("k")
        states, found = store.pull_states("k")
        cluster.run_until_ended([everything, states], 600.0)
        assert (everything.result() == expected).all()
        assert set(found.values()) == {str(3 * (nodes + 1)).encode()}
        if int(np.prod(shape[1:])) <= chunk_size:
            some = store.pull("k", rows=wanted)
            cluster.run_until_ended([some], 600.0)
            assert (some.result() == expected[wanted]).all()
    cluster.faults.set_breaks(0.0)


# ------------------------------------------------------------------ the value that a gradient was computed on

STEPS = 6


class PullingProgram:
    """One rank: pull, push, pull, push, each when the one before has ended."""

    def __init__(self, store: AsynchronousStore) -> None:
        self.store = store
        self.got: list[Any] = []
        self.pending = [self._pull()]

    def _pull(self) -> Any:
        pending = self.store.pull("w")
        pending.then(lambda: self._push(pending.result()))
        return pending

    def _push(self, value: Any) -> None:
        self.got.append(value.copy())
        pending = self.store.push("w", np.full(10, 1.0, np.float32))
        self.pending.append(pending)
        if len(self.got) < STEPS:
            pending.then(lambda: self.pending.append(self._pull()))

    @property
    def ended(self) -> bool:
        return len(self.got) == STEPS and all(one.ended for one in self.pending)


@given(st.integers(0, 9999), st.integers(2, 5))
@examples(10)
def test_a_gradient_comes_with_the_value_that_its_rank_has_got_last(seed, ranks):
    cluster = SimulatedCluster(ranks, seed=seed, jitter_s=0.01).join()
    stores = [
        AsynchronousStore(node, cluster.timeline, seed=seed, slowest_s=0.02, whole=True)
        for node in cluster.nodes
    ]
    cluster.run_until_ended([store.init("w", np.zeros(10, np.float32)) for store in stores])
    programs = [PullingProgram(store) for store in stores]
    cluster.run_until(lambda: all(program.ended for program in programs), what="the end")
    updates = [one for store in stores for one in store.blocks["w"].pushed_on]
    assert len(updates) == ranks * STEPS
    for rank, program in enumerate(programs):
        bases = [base for _, sender, base in updates if sender == rank]
        for base, got in zip(bases, program.got, strict=True):
            assert base is not None
            np.testing.assert_array_equal(base, got)
