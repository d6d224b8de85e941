"""A simulated elastic job whose programs check all their results."""

from __future__ import annotations

import random
from typing import Any

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.elastic import (
    ElasticProgram,
    ExactValues,
    KeyKind,
    KeyUse,
    ProgramPlan,
    ResultChecks,
)

KEYS = (
    KeyUse(name="a", shape=(33,), dtype="float32", kind=KeyKind.DENSE),
    KeyUse(name="b", shape=(7,), dtype="int32", kind=KeyKind.DENSE, rounds=2),
)

STEPS = 40

SHORT: dict[str, Any] = {"heartbeat_interval_s": 0.5, "heartbeat_timeout_s": 3.0, "link_timeout_s": 2.0}


class ElasticRun:
    """The programs of one elastic job; all their results are checked."""

    def __init__(
        self,
        seed: int,
        nodes: int,
        *,
        steps: int = STEPS,
        pause_s: float = 0.2,
        states_differ: bool = False,
        group: tuple[int, ...] = (),
        keyed: bool = False,
        **more,
    ) -> None:
        chance = random.Random(f"elastic {seed}")
        self.nodes = nodes
        self.cluster = SimulatedCluster(
            nodes,
            seed=seed,
            elastic=f"1:{nodes}",
            delay_s=chance.choice((0.001, 0.01, 0.05)),
            jitter_s=chance.choice((0.0, 0.01)),
            chunk_size=10,
            scheduler_timeout_s=60.0,
            **SHORT,
            **more,
        )
        self.cluster.network.keyed = keyed
        self.cluster.join()
        self.plan = ProgramPlan(
            keys=KEYS,
            steps=steps,
            places=nodes,
            barrier_every=chance.choice((0, 5)),
            pause_s=lambda rank, step: pause_s * random.Random(f"{seed} {rank} {step}").random(),
            states_differ=states_differ,
            group=group,
        )
        self.checks = ResultChecks(
            ExactValues(seed, nodes), nodes, lambda node: node.alive and node.failure is None
        )
        self.programs: dict[int, ElasticProgram] = {}
        for rank in range(nodes):
            self.begin(rank)

    def begin(self, rank: int) -> None:
        cluster = self.cluster
        self.programs[rank] = ElasticProgram(
            cluster.started(rank),
            self.plan,
            self.checks,
            after=lambda seconds, action: cluster.at(cluster.now + seconds, action),
        )

    def start_again(self, rank: int) -> None:
        self.cluster.start(rank)
        self.begin(rank)

    def run_to_the_end(self) -> None:
        running = [program for program in self.programs.values() if program.running]
        self.cluster.run_until(lambda: all(one.done for one in running), 300.0, "the end of all programs")
