"""Tests of exactly-once delivery: subclass `DeliveryConformance`, and give it a `VanWorld` (see
`van_conformance`).
"""

from __future__ import annotations

import random

import pytest

from netstorm.pslite.session import Limits
from netstorm.testing.faulty_van import FaultyVan
from netstorm.testing.recorder import RecordingProcess, part
from netstorm.testing.van_conformance import VanWorld

__all__ = ["DeliveryConformance"]


class DeliveryConformance:
    """Tests that sessions over a van deliver exactly once, whatever happens to connections and bytes."""

    limits = Limits(link_timeout_s=30.0, query_after_s=0.2, first_retry_s=0.01, longest_retry_s=0.1)
    timeout_s = 60.0
    messages = 150

    def processes(
        self, world: VanWorld, rng: random.Random, *, ordered: bool
    ) -> tuple[list[RecordingProcess], list[FaultyVan]]:
        """Return two processes on faulty vans; the first one knows the address of the second."""
        processes, vans = [], []
        for rank in range(2):
            van, host, port = world.make()
            faulty = FaultyVan(van, random.Random(rng.random()))
            vans.append(faulty)
            processes.append(
                RecordingProcess(
                    faulty, rank, now=world.now, host=host, port=port, ordered=ordered, limits=self.limits
                )
            )
        processes[0].connect(processes[1])
        return processes, vans

    def finish(self, world: VanWorld, processes: list[RecordingProcess], expected: list[int]) -> None:
        """Let time pass until each process has received its number of messages, and all are acknowledged."""
        deadline = world.now() + self.timeout_s
        while any(
            len(process.machine.got) < number or not process.endpoint.idle()
            for process, number in zip(processes, expected, strict=True)
        ):
            assert world.now() < deadline, [
                (len(process.machine.got), process.machine.lost, process.endpoint.links())
                for process in processes
            ]
            world.pass_time(0.002)
            for process in processes:
                process.turn()
        for _ in range(20):  # a duplicate would come late
            world.pass_time(0.005)
            for process in processes:
                process.turn()

    @pytest.mark.parametrize("ordered", [False, True])
    @pytest.mark.parametrize("seed", range(3))
    def test_everything_is_delivered_once_whatever_breaks(
        self,
        world: VanWorld,
        seed: int,
        *,
        ordered: bool,
    ) -> None:
        """Connections break at random on either side's hand-over, bits flip in headers and payloads."""
        rng = random.Random(seed)
        processes, vans = self.processes(world, rng, ordered=ordered)
        for van in vans:
            van.broken_probability = 0.02
            van.header_probability = 0.01
            van.payload_probability = 0.03
        here, there = processes
        payloads = [rng.randbytes(rng.choice([0, 10, 3000, 100_000])) for _ in range(self.messages)]
        there.connect(here)  # both ways, over connections of their own
        for number, payload in enumerate(payloads):
            for process, other in ((here, there), (there, here)):
                process.send(other, part(number), payload, (0, 0, number))
                process.turn()
            if number % 10 == 0:
                world.pass_time(0.005)
            if number == self.messages // 2:
                world.break_connections()
        self.finish(world, processes, [self.messages] * 2)
        for process in processes:
            assert process.machine.lost == []
            assert sorted(process.machine.numbers()) == list(range(self.messages))
            if ordered:
                assert process.machine.numbers() == list(range(self.messages))
            assert process.machine.payloads() == dict(enumerate(payloads))

    def test_without_faults_nothing_is_sent_twice(self, world: VanWorld) -> None:
        """And queued messages are sent in their order, in both directions of a session."""
        processes, _ = self.processes(world, random.Random(0), ordered=False)
        here, there = processes
        for number in reversed(range(self.messages)):
            here.send(there, part(number), bytes(1000), (0, 0, number))
        self.finish(world, processes, [0, self.messages])
        for number in reversed(range(self.messages)):
            there.send(here, part(number), bytes(1000), (0, 0, number))
        self.finish(world, processes, [self.messages] * 2)
        for process in processes:
            assert process.machine.numbers() == list(range(self.messages))
            [link] = process.endpoint.links().values()
            assert link["messages_resent"] == link["duplicates"] == 0
            assert link["connections"] == 1
