"""An owner hears which value each gradient was computed on: what its rank has pulled, however others push."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.lab.simulation.asynchronous import AsynchronousStore
from netstorm.lab.simulation.cluster import SimulatedCluster

STEPS = 6


class Program:
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
@settings(max_examples=30, deadline=None)
def test_a_gradient_comes_with_the_value_that_its_rank_has_got_last(seed, ranks):
    cluster = SimulatedCluster(ranks, seed=seed, jitter_s=0.01).join()
    stores = [
        AsynchronousStore(node, cluster.timeline, seed=seed, slowest_s=0.02, whole=True)
        for node in cluster.nodes
    ]
    cluster.run_until_ended([store.init("w", np.zeros(10, np.float32)) for store in stores])
    programs = [Program(store) for store in stores]
    cluster.run_until(lambda: all(program.ended for program in programs), what="the end")
    updates = [one for store in stores for one in store.blocks["w"].pushed_on]
    assert len(updates) == ranks * STEPS
    for rank, program in enumerate(programs):
        bases = [base for _, sender, base in updates if sender == rank]
        for base, got in zip(bases, program.got, strict=True):
            assert base is not None
            np.testing.assert_array_equal(base, got)
