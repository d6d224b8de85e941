"""Programs that push one tensor under a codec, in jobs that nodes leave and join."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from netstorm.compression.registry import codec_of
from netstorm.kvstore.state_transfer import StateSnapshot
from netstorm.lab.simulation.encoded_push import EncodedPushes
from netstorm.lab.simulation.node import Pending
from netstorm.protocol.frames import checksum, ranks_in


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
