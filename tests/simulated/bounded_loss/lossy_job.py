"""Random jobs whose rounds may end without late contributions, and exact checks of all that comes out.
Everything follows from the seed:

    python -m tests.simulated.bounded_loss.lossy_job SEED [LAST_SEED]
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.packets import PacketFaults
from netstorm.protocol.frames import ranks_in
from netstorm.protocol.messages import LossTerms
from tests.simulated.jobs import random_detours, random_policy

Array = npt.NDArray[Any]

LARGEST = 50
"""Largest value of a gradient. Values are whole numbers, so that all sums are exact."""


@dataclass
class Report:
    """What a job has done."""

    results: int = 0
    partial: int = 0
    """Chunks of results without all ranks."""
    ended: int = 0
    passed_on: int = 0
    moved: int = 0
    over_lanes: int = 0
    """Sums that went as packets."""
    resent: int = 0
    """Packets that were sent again."""
    most_lost: float = 0.0
    """Largest share of a step that was missing, as the roots take it to be."""
    virtual_s: float = 0.0


@dataclass
class Seen:
    """One round of one key: what every rank contributed, and what came out."""

    given: dict[int, Array] = field(default_factory=dict)
    result: bytes = b""
    contributors: tuple[tuple[int, int], ...] = ()
    at: int = -1
    """Rank that this was first seen at."""


class LossyJob:
    """One random job, whose ranks compute for random times, over a network with random delays."""

    def __init__(
        self,
        seed: int,
        *,
        policies: int = 0,
        crashes: int = 0,
        steps: int = 12,
        packets: PacketFaults | None = None,
    ) -> None:
        self.seed = seed
        chance = self.chance = random.Random(f"lossy {seed}")
        self.nodes = chance.randint(2 + crashes, 7)
        self.steps = steps
        self.terms = LossTerms(
            bound=chance.choice((0.05, 0.15, 0.3, 0.6)),
            deadline_s=chance.choice((0.02, 0.1, 0.4)),
            important=chance.choice((0.0, 0.0, 0.3, 0.8)),
        )
        self.shapes = {
            f"key{number}": chance.choice((1, 5, 23, 60)) for number in range(chance.randint(1, 3))
        }
        self.dtype = chance.choice(("float32", "float64"))
        self.slow = chance.randrange(self.nodes)
        self.crashes, self.policies = crashes, policies
        more: dict[str, Any] = {"elastic": f"1:{self.nodes}"} if crashes else {}
        if packets is not None:
            more |= {"datagrams": True, "packet_faults": packets, "loss_bound": self.terms.bound}
            self.shapes = {name: 200 * size for name, size in self.shapes.items()}
        self.look_aheads = (0, 0, 30, 1000)
        self.detours = chance.random() < 0.3
        self.cluster = SimulatedCluster(
            self.nodes,
            seed=seed,
            policy=self._policy(0),
            delay_s=chance.choice((0.001, 0.02)),
            jitter_s=chance.choice((0.0, 0.05, 0.2)),
            detect_s=1.0,
            chunk_size=chance.choice((3, 5, 20)) * (1 if packets is None else 200),
            heartbeat_interval_s=0.5,
            heartbeat_timeout_s=3.0,
            link_timeout_s=2.0,
            **more,
        )
        self.version = itertools.count(1000, 1000)
        self.kept = {
            (rank, name): np.zeros(size, self.dtype)
            for rank in range(self.nodes)
            for name, size in self.shapes.items()
        }
        self.gradients = {name: np.zeros(size, np.float64) for name, size in self.shapes.items()}
        self.applied = {name: np.zeros(size, np.float64) for name, size in self.shapes.items()}
        self.seen: dict[tuple[str, int], Seen] = {}
        self.done: dict[int, int] = Counter()
        self.report = Report()
        self.dead: set[int] = set()

    def _policy(self, version: int):
        policy = random_policy(self.chance, self.nodes, version, self.look_aheads)
        return random_detours(self.chance, policy) if self.detours else policy

    # ------------------------------------------------------------------------------------------- the programs

    def run(self) -> Report:
        cluster = self.cluster.join()
        for node in cluster.nodes:
            for name, size in self.shapes.items():
                node.register(name, (size,), self.dtype)
            self._compute(node.rank)
        begun, chance = cluster.now, self.chance
        for _ in range(self.policies):
            cluster.at(begun + chance.random() * self.steps * 0.15, self._install)
        for one, other in itertools.permutations(range(self.nodes), 2):
            if chance.random() < 0.3:
                at = begun + chance.random() * self.steps * 0.1
                cluster.at(
                    at, functools.partial(cluster.faults.delay, one, other, chance.choice((0.05, 0.3, 1.0)))
                )
                cluster.at(at + 0.5, functools.partial(cluster.faults.delay, one, other, 0.0))
        for rank in chance.sample(range(self.nodes), self.crashes):
            cluster.at(begun + chance.random() * self.steps * 0.15, functools.partial(self._crash, rank))
        cluster.run_until(self._over, 600, "the end of all programs")
        self._check_end()
        return self.report

    def _over(self) -> bool:
        return all(self.done[rank] == self.steps for rank in range(self.nodes) if rank not in self.dead)

    def _install(self) -> None:
        job = self.cluster.scheduler.machine.job
        assert job is not None
        self.cluster.install_policy(self._policy(job.policy.version + 1))

    def _crash(self, rank: int) -> None:
        self.dead.add(rank)
        self.cluster.faults.crash(rank)

    def _compute(self, rank: int) -> None:
        """Compute the gradients of the next step, for a time that is longer at one of the ranks."""
        step = self.done[rank]
        if step == self.steps or rank in self.dead:
            return
        chance = random.Random(f"{self.seed} {rank} {step}")
        pause = chance.random() * (0.05 if rank != self.slow or chance.random() < 0.7 else 0.6)
        self.cluster.at(self.cluster.now + pause, functools.partial(self._push, rank, step))

    def _push(self, rank: int, step: int) -> None:
        if rank in self.dead:
            return
        left = len(self.shapes)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left and rank not in self.dead:
                self.done[rank] += 1
                self._compute(rank)

        for place, name in enumerate(self.shapes):
            gradient = self.gradient(rank, name, step)
            kept = self.kept[rank, name]
            kept += gradient
            seen = self.seen.setdefault((name, step), Seen())
            seen.given[rank] = kept.copy()
            node = self.cluster.nodes[rank]
            pending = node.push(name, kept, priority=-place, loss=self.terms)
            pending.then(
                functools.partial(self._summed, (rank, name, step), pending, node.operations[-1], ended)
            )

    def gradient(self, rank: int, name: str, step: int) -> Array:
        drawn = np.random.default_rng([self.seed, rank, step, *name.encode()])
        values = drawn.integers(1, LARGEST + 1, self.shapes[name]) * drawn.choice((-1, 1), self.shapes[name])
        typed: Array = values.astype(self.dtype)
        return typed

    # --------------------------------------------------------------------------------------------- the checks

    def _summed(self, what, pending, operation, ended) -> None:
        rank, name, step = what
        if rank in self.dead or pending.error is not None:
            assert self.crashes, pending.error
            return
        seen = self.seen[name, step]
        value, contributors = pending.result(), tuple(sorted(operation.contributors.items()))
        self.report.results += 1
        bounds = operation.key.layout_of(operation.form).bounds
        named = [(bits, *bounds[chunk]) for bits, chunks in contributors for chunk in ranks_in(chunks)]
        where = f"{name}, step {step}, rank {rank}: {contributors}"
        assert sum(end - start for _, start, end in named) == value.size, where
        for bits, start, end in named:
            right = np.sum([seen.given[one][start:end] for one in ranks_in(bits)], axis=0, dtype=self.dtype)
            assert value[start:end].tobytes() == right.tobytes(), where
            # What was counted is gone from what this rank keeps, and nothing else is.
            left = np.zeros_like(right) if bits >> rank & 1 else seen.given[rank][start:end]
            assert self.kept[rank, name][start:end].tobytes() == left.tobytes(), where
            if bits != (1 << self.nodes) - 1:
                self.report.partial += 1
        if seen.at < 0 or seen.at in self.dead:  # what a dead rank had, nobody else needs to have
            seen.contributors, seen.result, seen.at = contributors, value.tobytes(), rank
        assert (seen.contributors, seen.result) == (contributors, value.tobytes()), where
        ended()

    def _check_end(self) -> None:
        """Nothing is lost: what all have applied, and what each keeps, are all gradients together."""
        for (name, _), seen in self.seen.items():
            if seen.at >= 0:
                self.applied[name] += np.frombuffer(seen.result, self.dtype)
        self.report.virtual_s = self.cluster.now
        for node in self.cluster.nodes:
            counters = node.machine.counters.snapshot()
            self.report.ended += int(counters.get("chunks_ended_early", 0))
            self.report.passed_on += int(counters.get("sums_passed_on", 0))
            self.report.moved += int(counters.get("chunks_moved", 0))
            self.report.over_lanes += int(counters.get("lane_messages", 0))
            self.report.resent += int(counters.get("lane_packets_resent", 0))
            assert not counters.get("protocol_violations", 0), counters
        if not self.crashes:
            for name in self.shapes:
                total = sum(
                    self.gradient(rank, name, step)
                    for rank in range(self.nodes)
                    for step in range(self.steps)
                )
                kept = sum(self.kept[rank, name] for rank in range(self.nodes))
                assert (self.applied[name] + kept == total).all(), name
            self._check_bound()

    def _check_bound(self) -> None:
        """The share that is missing from a step is within the bound, at each root while trees do not change,
        and of all chunks in any case. A missing gradient counts as the mean of those that are there; what
        ranks keep of earlier steps counted then.
        """
        missed: Counter[tuple[str, int, int]] = Counter()
        for step in range(self.steps):
            mass: dict[int, float] = defaultdict(float)
            lost: dict[int, float] = defaultdict(float)
            for name in self.shapes:
                seen = self.seen[name, step]
                key = self.cluster.nodes[0].keys[name]
                layout = key.layout
                assert layout is not None
                for bits, chunks in seen.contributors:
                    for chunk in ranks_in(chunks):
                        start, end = layout.bounds[chunk]
                        there = sum(float(np.abs(seen.given[r][start:end]).sum()) for r in ranks_in(bits))
                        gradients = sum(1 + missed[name, chunk, rank] for rank in ranks_in(bits))
                        for rank in range(self.nodes):
                            late = not bits >> rank & 1
                            missed[name, chunk, rank] = missed[name, chunk, rank] + 1 if late else 0
                        missing = there / gradients * (self.nodes - bits.bit_count())
                        trees = self.cluster.policy.trees
                        tree = trees[self.cluster.policy.tree_of(layout.slots[chunk])]
                        root = int(tree.root) if not self.policies else 0
                        mass[root] += there / gradients * self.nodes
                        lost[root] += missing
            for root, all_of_it in mass.items():
                if all_of_it:
                    share = lost[root] / all_of_it
                    self.report.most_lost = max(self.report.most_lost, share)
                    assert share <= self.terms.bound * (1 + 1e-9), (step, root, share, self.terms)


def run(seed: int, **more) -> Report:
    """Run the job of a seed; a failure says which it was."""
    job = LossyJob(seed, **more)
    try:
        return job.run()
    except BaseException as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"seed {seed}: {job.nodes} nodes, {job.terms}, {more}\n{job.cluster.describe()}")
        raise


def main() -> None:
    numbers = [int(one) for one in sys.argv[1:] if one.isdigit()]
    for seed in range(numbers[0], numbers[-1] + 1):
        print(seed, run(seed, policies=seed % 3, crashes=(seed % 5 == 4) * 1), flush=True)


if __name__ == "__main__":
    main()
