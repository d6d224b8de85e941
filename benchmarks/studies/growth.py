"""How a job grows: what a packing costs with many nodes, and how soon the scheduler answers meanwhile.

    python benchmarks/studies/growth.py --nodes 128,512 --families mesh,cloud --json growth.json

Forming: processor time of one packing (100 MB), its peak memory, and its fluid rate as a part of what simple
cuts allow: what leaves and enters each node, and 2(N - 1) transfers over all links. Linear programs of so
many nodes take hours, so the optimum is unknown.

Answers: the scheduler's own machine, driven by the messages of that many nodes: each joins, registers a key,
and begins rounds once a second; it reports `--links` of its links a second and beats. A message
counts its processor time, and that of all that the machine does before it takes the next one: polls,
estimates, the request to form a policy, encoding what nodes are told. Forming itself is another process's
work; its result comes at the time that it took, and counts like a message.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import number, numbers, writable
from netstorm.protocol import messages as m
from netstorm.protocol.frames import SCHEDULER, BodyEncoder, Peer
from netstorm.pslite.machine import Admit, Call, Send
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.scheduler.options import SchedulerOptions
from netstorm.scheduler.policies import (
    FormationRequest,
    FormationResult,
    InitialAssumptions,
    PolicySettings,
    Workload,
)
from netstorm.scheduler.policy_former import form
from netstorm.settings import Settings
from netstorm.topology.form import form_policy
from netstorm.topology.lower_bound import latency_bound
from netstorm.topology.network import Network, generate
from netstorm.topology.packing import packing
from netstorm.topology.resources import Resources, fluid_time

_TENSOR: Final = 100_000_000
_HUGE: Final = 1e15
"""Bytes of which latencies are no part."""


def forming(family: str, nodes: int) -> dict[str, Any]:
    """Return what one packing costs, and how good it is."""
    network = generate(family, nodes, 1)
    resources = Resources.of(network)
    began, on_clock = time.process_time(), time.perf_counter()
    policy = packing(network, tensor_bytes=_TENSOR).policy(0)
    took = time.process_time() - began
    together = [resources.pair_capacities.sum()]
    if all(node.egress for node in network.nodes):
        together.append(sum(node.egress or 0.0 for node in network.nodes))
    least = max(latency_bound(network, _HUGE), 2 * (nodes - 1) * 8 * _HUGE / min(together))
    return {
        "family": family,
        "nodes": nodes,
        "cpu_s": took,
        "seconds": time.perf_counter() - on_clock,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "trees": len(policy.trees),
        "of_simple_bound": least / fluid_time(resources, policy, _HUGE),
    }


class Scheduler:
    """A scheduler's machine, and the processor time that it took for each message, in ms."""

    def __init__(self, nodes: int) -> None:
        """Begin with a policy for equal links."""
        network = Network.uniform(nodes)
        settings = Settings.from_environment({}, num_workers=nodes)
        workload = Workload((_TENSOR,), 131_072)
        self.asked: list[FormationRequest] = []
        self.took_ms: dict[str, list[float]] = {}
        self.answered_ms: list[float] = []
        """From the arrival of each message: it waits for those before it."""
        self.now = 100.0
        self._free_at = 0.0
        self._bodies = BodyEncoder()
        self._peers: list[Peer] = []
        self._machine = SchedulerMachine(
            SchedulerOptions.from_settings(settings, release="study"),
            form_policy(network, "mst", version=1),
            now=self.now,
            assumed=InitialAssumptions(
                network=network, known=False, settings=PolicySettings(topology="packing"), workload=workload
            ),
        )
        self._machine.on_form = self.asked.append

    def join(self, rank: int) -> None:
        """Have a node join."""
        options = self._machine.options
        hello = m.Hello(
            job=options.job, sender=-1, incarnation=rank + 1, receiver=SCHEDULER, session=1, received=0
        )
        verdict = self._machine.admit(hello)
        assert isinstance(verdict, Admit), verdict
        self._peers.append(verdict.peer)
        join = m.Join(
            asked_rank=rank,
            num_workers=options.num_workers,
            host=f"n{rank}",
            port=4000,
            site="",
            release="study",
            pid=1,
        )
        self.say(rank, join)

    def say(self, rank: int, message: m.Message) -> None:
        """Take a message of a node, and all that is due then."""
        began = time.process_time()
        self._machine.receive(self._peers[rank], message, None, 0, self.now)
        self._end(began, type(message).__name__)

    def hear(self, result: FormationResult) -> None:
        """Take the result of a formation."""
        began = time.process_time()
        self._machine.policy_formed(result, self.now)
        self._end(began, "FormationResult")

    def _end(self, began: float, name: str) -> None:
        if self._machine.next_tick() <= self.now:
            self._machine.tick(self.now)
        for instruction in self._machine.take_instructions():
            if isinstance(instruction, Call):
                instruction.function()
            elif isinstance(instruction, Send):
                if isinstance(instruction.message, m.Joined):
                    self._bodies.encode_joined(instruction.message)
                else:
                    self._bodies.encode(instruction.message)
        took = time.process_time() - began
        self._free_at = max(self._free_at, self.now) + took
        self.answered_ms.append(1e3 * (self._free_at - self.now))
        self.took_ms.setdefault(name, []).append(1e3 * took)


def answers(nodes: int, seconds: int, links: int) -> dict[str, Any]:
    """Return how long a scheduler takes for a message, with so many nodes, by what was said."""
    network, draw = generate("mesh", nodes, 1), random.Random(1)
    scheduler = Scheduler(nodes)
    for rank in range(nodes):
        scheduler.join(rank)
    key = m.KeySpec(namespace=0, name="w", shape=(_TENSOR // 4,), dtype="float32")
    for rank in range(nodes):
        scheduler.say(rank, m.RegisterKeys(keys=(key,)))
    joined, scheduler.took_ms, scheduler.answered_ms = scheduler.took_ms, {}, []
    scheduler.now += 1000.0  # joining is over
    results: list[tuple[float, FormationResult]] = []
    """With the time at which they come."""
    for second in range(seconds):
        for rank, message in _said(network, second, links, draw):
            scheduler.now += 1 / (4 * nodes)
            scheduler.say(rank, message)
            if len(scheduler.asked) > len(results):
                began = time.process_time()
                result = form(scheduler.asked[-1])
                results.append((scheduler.now + time.process_time() - began, result))
            if results and results[-1][0] <= scheduler.now < results[-1][0] + 1 / (4 * nodes):
                scheduler.hear(results[-1][1])
    answered = sorted(scheduler.answered_ms)
    times = sorted(took for each in scheduler.took_ms.values() for took in each)
    return {
        "nodes": nodes,
        "links_reported_a_second": links * nodes,
        "p50_ms": _percentile(times, 0.5),
        "p99_ms": _percentile(times, 0.99),
        "most_ms": times[-1],
        "answered_p50_ms": _percentile(answered, 0.5),
        "answered_p99_ms": _percentile(answered, 0.99),
        "busy": sum(times) / 1e3 / seconds,
        "asked_to_form": len(scheduler.asked),
        "formed_after_s": [at for at, _ in results],
        "joining_most_ms": max(took for each in joined.values() for took in each),
        "p99_ms_by_message": {
            name: _percentile(sorted(each), 0.99) for name, each in scheduler.took_ms.items()
        },
    }


def _said(network: Network, second: int, links: int, draw: random.Random) -> Iterator[tuple[int, m.Message]]:
    for rank in network.ranks:
        others = draw.sample(
            [other for other in network.ranks if other != rank], min(links, network.size - 1)
        )
        measured = tuple(
            m.LinkMeasure(
                source=other,
                rate=network.link(other, rank).rate * draw.uniform(0.97, 1.03),
                error=0.03,
                latency=network.link(other, rank).latency,
                chunks=10,
            )
            for other in others
        )
        yield rank, m.Measured(links=measured)
        yield rank, m.Heartbeat()
        yield rank, m.TopologyRequest(begun=(m.RoundBegun(key=0, round=second, rule=""),))
        yield rank, m.Heartbeat()


def _percentile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def main() -> None:
    """Run what was asked for, print it, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--nodes", type=numbers, default=[128, 512], metavar="N,...")
    parser.add_argument("--families", type=lambda text: text.split(","), default=["mesh", "cloud"])
    parser.add_argument("--seconds", type=number, default=60, help="of the job that the scheduler serves")
    parser.add_argument("--links", type=number, default=16, help="reported by each node a second")
    parser.add_argument("--json", type=writable, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"answers": [], "forming": []}
    for nodes in options.nodes:
        one = answers(nodes, options.seconds, options.links)
        found["answers"].append(one)
        print(
            f"{nodes} nodes, {one['links_reported_a_second']} links reported a second: a message takes "
            f"{one['p50_ms']:.2f} ms (median), {one['p99_ms']:.1f} (p99), {one['most_ms']:.0f} (most); "
            f"it is answered within {one['answered_p99_ms']:.1f} ms (p99, with waiting); "
            f"{one['busy']:.0%} of a core; {one['asked_to_form']} policies asked for",
            flush=True,
        )
    for family in options.families:
        for nodes in options.nodes:
            one = forming(family, nodes)
            found["forming"].append(one)
            print(
                f"{family}, {nodes} nodes: {one['trees']} trees in {one['cpu_s']:.1f} s of a processor "
                f"({one['seconds']:.1f} s), {one['of_simple_bound']:.3f} of what cuts allow, "
                f"peak {one['peak_rss'] / 1e6:.0f} MB",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
