"""Random elastic jobs that train asynchronously: what is confirmed stays, and nothing counts twice.

Everything follows from the seed:

    python -m tests.simulated.elastic.asynchronous_chaos SEED [LAST_SEED] [--long] [--verbose]
"""

from __future__ import annotations

import functools
import random
from typing import Any, Final

import numpy as np

from netstorm.kvstore.asynchronous.server import versions_of
from netstorm.kvstore.operations import UNBOUNDED
from netstorm.lab.simulation.asynchronous import AsynchronousStore
from tests.simulated.elastic import chaos

PROCESSES: Final = 24
"""Most processes of a job: each has an element of its own in each group of elements."""

KINDS: Final = tuple(kind for kind in chaos.KINDS if kind != "breaks")

LONG: Final = {"steps": 70, "faults": 16}


class AsynchronousProgram:
    """Pushes ones to its own elements, and pulls, step by step.

    Attributes:
        pushed: how many pushes it has made of each key.
        confirmed: how many of them were confirmed, at least, while the job knew of this process.
        final: what it has pulled in the end, by key.
    """

    def __init__(self, job, node, number):
        self.job: Final = job
        self.node: Final = node
        self.number: Final = number
        self.step = 0
        self.done = self.has_state = False
        self.error = None
        self.pushed: Final = dict.fromkeys(job.names, 0)
        self.confirmed: Final = dict.fromkeys(job.names, 0)
        self.final: Final = {}
        self._last: Final = {}
        self._store: Any = None
        node.joined.then(self._joined)

    @property
    def running(self):
        return self.node.alive and self.error is None

    def _goes_on(self, error):
        self.error = self.error or error or self.node.failure
        return self.running

    def _joined(self):
        if not self._goes_on(self.node.joined.error):
            return
        job = self.job
        self._store = AsynchronousStore(
            self.node,
            job.cluster.timeline,
            seed=job.seed + self.number,
            staleness=job.staleness,
            whole=job.whole,
            slowest_s=job.slowest_s,
        )
        start = np.zeros(job.elements, "int64")
        if self.node.machine.needs_state:
            for name in job.names:
                self._store.join(name, start)
            self._after_all([self._store.pull(name) for name in job.names], self._take_part)
        else:
            self._after_all([self._store.init(name, start) for name in job.names], self._begun)

    def _take_part(self):
        self.node.process.call(self.node.machine.begin_without_state)
        self._begun()

    def _begun(self):
        self.has_state = True
        self._next()

    def _after_all(self, pending, action):
        left = [len(pending)]

        def ended(one):
            left[0] -= 1
            if self._goes_on(one.error) and left[0] == 0:
                action()

        for one in pending:
            one.then(functools.partial(ended, one))

    def _next(self):
        if not self._goes_on(None):
            return
        self.done = self.step >= self.job.plan.steps
        if self.job.stopping:
            return
        pause = self.job.plan.pause_s(self.node.rank, self.step)
        self.job.cluster.at(self.job.cluster.now + pause, self._train)

    def _train(self):
        if not self._goes_on(None) or self.job.stopping:
            return
        self.step += 1
        for name in self.job.names:
            for _ in range(self.job.pushes):
                gradient = np.zeros(self.job.elements, "int64").reshape(-1, PROCESSES)
                gradient[:, self.number] = -1
                self.pushed[name] += 1
                pending = self._store.push(name, gradient.ravel())
                pending.then(functools.partial(self._confirm, name, pending))
        if self.job.counted:
            self._store.clock()
        pulled = {name: self._store.pull(name) for name in self.job.names}
        self._after_all(list(pulled.values()), lambda: self._check(pulled))

    def _confirm(self, name, pending):
        # Ranks that are cut off together may confirm pushes to each other, of which the job never hears.
        if self._goes_on(pending.error) and not self.job.at_risk[self.node.rank]:
            self.confirmed[name] += 1

    def _check(self, pulled):
        for name, pending in pulled.items():
            counts = pending.result().reshape(-1, PROCESSES)
            own = counts[:, self.number]
            assert (own == self.pushed[name]).all(), f"own pushes: {own} of {self.pushed[name]}"
            before = self._last.get(name, 0)
            assert (counts >= before).all(), f"what was pulled is lost: {counts - before}"
            self._last[name] = counts
        self._next()

    def end(self):
        """Pull once more, after all has been pushed; return what is pending."""
        pending = []
        self._store._staleness = UNBOUNDED  # others may have stopped before this rank's last push
        for name in self.job.names:
            one = self._store.pull(name)
            one.then(functools.partial(self._ended, name, one))
            pending.append(one)
            states, found = self._store.pull_states(name)
            states.then(functools.partial(self.final.__setitem__, (name, "states"), found))
            pending.append(states)
        return pending

    def _ended(self, name, pending):
        if pending.error is None:
            self.final[name] = pending.result().reshape(-1, PROCESSES)


class AsynchronousChaos(chaos.Chaos):
    """One random job."""

    def __init__(self, seed, *, kinds=KINDS, **more):
        super().__init__(seed, kinds=kinds, **more)
        draw = random.Random(f"asynchronous {seed}")
        self.names: Final = [f"key{number}" for number in range(draw.choice((1, 2)))]
        self.elements: Final = PROCESSES * draw.choice((1, 3, 7))
        self.whole: Final = draw.random() < 0.2
        self.counted: Final = draw.random() < 0.4
        self.pushes: Final = draw.choice((1, 2)) if self.counted else 1
        self.staleness: Final = draw.choice((UNBOUNDED, UNBOUNDED, 1, 3))
        self.slowest_s: Final = draw.choice((0.0, 0.001, 0.05))
        self.stopping = False
        self.heard: Final = {}
        """By block: the newest version that anybody has heard of."""
        self.ended: Final = []
        """The programs of all processes."""
        self.cluster = type(self.cluster)(
            self.nodes,
            seed=seed,
            elastic=f"1:{self.places}",
            delay_s=draw.choice((0.001, 0.01, 0.05)),
            jitter_s=draw.choice((0.0, 0.01, 0.1)),
            detect_s=chaos.DETECT_S,
            chunk_size=draw.choice((1, 2)) * PROCESSES,
            heartbeat_interval_s=0.5,
            heartbeat_timeout_s=chaos.HEARTBEAT_S,
            link_timeout_s=chaos.LINK_S,
        )

    def begin(self, rank):
        self.report.processes += 1
        node = self.cluster.started(rank)
        program = self.programs[rank] = AsynchronousProgram(self, node, len(self.ended))
        self.ended.append(program)
        node.joined.then(functools.partial(self.record_versions, node))
        self.watch(rank, program)

    def start(self, rank):
        if len(self.ended) < PROCESSES:
            super().start(rank)

    def holders(self):
        """See the base class. Values are with their owners, which newcomers are not yet."""
        return super().holders() - set(self.job.silent)

    # ----------------------------------------------------------------------------- what may be lost at once

    def record_versions(self, node):
        """Record each version that a replica of this node confirms."""
        joined = node.machine.joined
        if joined is None:
            return
        serving = joined.asynchronous._serving
        confirm = serving._kept

        def kept(served, block, version):
            self.heard[block.place] = max(version, self.heard.get(block.place, 0))
            confirm(served, block, version)

        serving._kept = kept

    def states_without(self, ranks):
        """Return whether each state that anybody has heard of is at a rank that is none of these."""
        shown: dict[Any, int] = self.heard
        left: dict[Any, int] = {}
        for rank, program in self.programs.items():
            joined = program.node.machine.joined
            if not program.node.alive or joined is None:
                continue
            serving = joined.asynchronous._serving
            safe = rank in self.holders() and rank not in ranks
            for served in serving._served.values():
                for block in served.blocks.values():
                    if block.serving:
                        alone = serving.replica(block) is None
                        version = block.version if alone else block.shown[0]
                        shown[block.place] = max(version, shown.get(block.place, 0))
                if safe:
                    for place, version in versions_of(served, serving._copies).items():
                        left[place] = max(version, left.get(place, 0))
        return all(left.get(place, 0) >= version for place, version in shown.items())

    def victims(self, most):
        chosen = super().victims(most)
        while chosen and not self.states_without(chosen):
            chosen.pop()
        return chosen

    def fault_cut(self):
        if self.states_without(list(self.programs)[:]) or not any(self.at_risk.values()):
            ends = sorted(self.programs)
            state = self.chance.getstate()
            if len(ends) >= 2:
                pair = self.chance.sample(ends, 2)
                self.chance.setstate(state)
                if self.states_without(pair) and self.holders() - set(pair):
                    super().fault_cut()

    # ------------------------------------------------------------------------------------------- the end

    def fill_report(self):
        self.report.views = self.job.view
        self.report.virtual_s = self.cluster.now
        self.stopping = True
        self.cluster.run_for(10.0)
        last = [program for program in self.programs.values() if program.running and program.done]
        pending = [one for program in last for one in program.end()]
        self.cluster.run_until(lambda: all(one.ended for one in pending), 200, "the last pulls")
        self.cluster.run_for(1.0)
        assert not any(one.error for one in pending)
        for program in last:
            for name in self.names:
                self.check_end(name, program.final[name], program.final[name, "states"])
                assert (program.final[name] == last[0].final[name]).all()

    def check_end(self, name, counts, states):
        for program in self.ended:
            found = counts[:, program.number]
            least, most = program.confirmed[name], program.pushed[name]
            self.report.checked += 1
            assert ((least <= found) & (found <= most)).all(), (
                f"{name}: {found} pushes of process {program.number} (rank {program.node.rank}) count, of "
                f"{least} confirmed and {most} made"
            )
        if self.whole:
            assert [int(text) for text in states.values()] == [counts[0].sum()]
        else:
            assert sum(int(text) for text in states.values()) >= counts[0].sum()

    def describe(self):
        lines = [f"seed {self.seed}: {self.nodes} nodes of {self.places}; {self.report.happened}"]
        for program in self.ended:
            node = program.node
            joined = node.machine.joined
            text = "" if joined is None else joined.asynchronous.waiting_text(1e18)
            lines.append(
                f"  process {program.number}, rank {node.rank}: step {program.step} done={program.done} "
                f"alive={node.alive} error={program.error!r} pushed={program.pushed} "
                f"confirmed={program.confirmed} {text}"
            )
        return "\n".join(lines)


def run(seed, **more):
    """Run the job of a seed; a failure says which it was, and where all programs were."""
    job = AsynchronousChaos(seed, **more)
    try:
        return job.run()
    except BaseException as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(job.describe())
        raise


if __name__ == "__main__":
    chaos.run = run
    chaos.main()
