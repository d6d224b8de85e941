#!/usr/bin/env python3
"""Bounded staleness with trees (MLNET, §3.2) against owners, simulated: bytes and time a clock.

python benchmarks/studies/tree_staleness.py --staleness 1,3 --nodes --json stale.json

A model of messages over a network's links, to decide what to build. Each worker computes, pushes a gradient,
counts a clock and pulls; it goes on with weights that have all clocks of the others up to its own less the
staleness bound. Each block of the model has a tree of all ranks:

    owners          what NetStorm has: the owner is everybody's parent, pushes and pulls go to it at once
    owners, sent    owners send new weights to all, unasked; pulls take those that are there, within the bound
    owners, cached  MLNET's rules without its trees: workers hold pushes and keep weights within the bound
    trees, sent     NetStorm's trees: inner nodes add pushes up, and pass new weights on to all, unasked
    trees, cached   MLNET: inner nodes also hold pushes back, and answer pulls from what they have
    rounds          trees with a bound of 0: NetStorm's synchronous rounds

`--nodes` also runs what NetStorm has, real nodes on virtual time with an eighth of all bytes and rates: its
owners, and its rounds, of which each rank awaits the result as many clocks later as the bound allows.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import amount, number, numbers, seconds
from netstorm.kvstore.asynchronous.blocks import Owners
from netstorm.lab.simulation.asynchronous import AsynchronousStore
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.node import Pending
from netstorm.topology.form import form_policy
from netstorm.topology.network import Link, Network, generate
from netstorm.topology.policy import owner_weights
from netstorm.topology.tree import Tree

Array = npt.NDArray[np.float64]
Clocks = npt.NDArray[np.int64]
"""By rank: how many of its gradients are in something."""

NETWORKS: Final = (("internet2", 9, 41), ("asymmetric", 9, 42), ("cloud", 9, 43))
"""Family, nodes and seed. Nothing was tuned on them."""
_SMALLER: Final = 8
"""By this factor real nodes send less, over slower links: that takes the same time, and less memory."""
_LIMIT_S: Final = 36_000.0
"""Virtual time in which real nodes end, or the study fails."""
_REQUEST: Final = 100
"""Bytes of a message without values."""
_PER_BLOCK: Final = 4
"""Weights of a linear model that stand for a block's, to see how it learns."""
_SAMPLES: Final = 400
"""Of each worker, for the linear model."""
_STEP: Final = 0.1
"""Its learning rate for the mean of all workers' gradients."""
_LEARNED: Final = 0.02
"""The linear model has learned once this part is left of its loss at the start above the least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What nodes do."""

    name: str
    trees: bool
    """A block has a tree of the network; else its owner is everybody's parent."""
    cached: bool = False
    """Pushes are held back, and pulls answered from the weights that are there, within the bound."""
    newest: bool = False
    """A pull goes to the root whatever is there."""
    sent: bool = False
    """The root sends new weights to all once they have one more clock of all ranks; nobody asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What workers do."""

    bound: int
    """Staleness, clocks; 0: synchronous."""
    model: int
    """Bytes."""
    block: int
    """Bytes, at most."""
    clocks: int
    """Of each worker."""
    compute: float
    """Seconds of the fastest worker's step; the slowest takes up to twice as long, as MLNET's do."""


ENTRANTS: Final = (
    Rules(name="owners", trees=False, newest=True),
    Rules(name="owners, sent", trees=False, sent=True),
    Rules(name="owners, cached", trees=False, cached=True),
    Rules(name="trees, sent", trees=True, sent=True),
    Rules(name="trees, cached", trees=True, cached=True),
)
ROUNDS: Final = Rules(name="rounds", trees=True, sent=True)


# ------------------------------------------------------------------------------------------------ the network


class Wires:
    """Virtual time, and messages over links: each link and access line sends one after the other."""

    def __init__(self, network: Network) -> None:
        self.now = 0.0
        self.bytes_sent = 0
        """Over all links."""
        self._network: Final = network
        self._free: Final[dict[object, float]] = {}
        self._events: Final[list[tuple[float, int, Callable[[], None]]]] = []
        self._numbers: Final = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def run(self) -> None:
        """Go on until nothing is left to do."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def send(self, source: int, target: int, size: int, arrives: Callable[[], None]) -> None:
        """Send a message over the links of its route; it is forwarded when it is complete."""
        network = self._network
        hops: list[tuple[object, float, float]] = []
        for link in network.route(network.ranks[source], network.ranks[target]):
            self.bytes_sent += size
            hops += self._through(link)
        self._forward(hops, size, arrives)

    def _through(self, link: Link) -> list[tuple[object, float, float]]:
        out, into = self._network.nodes[link.source].egress, self._network.nodes[link.target].ingress
        ends = [(("out", link.source), out)] if out else []
        lines: list[tuple[object, float | None]] = [*ends, ((link.source, link.target), link.rate)]
        if into:
            lines.append((("in", link.target), into))
        return [
            (line, rate, link.latency if rate is link.rate else 0.0)
            for line, rate in lines
            if rate is not None
        ]

    def _forward(
        self, hops: Sequence[tuple[object, float, float]], size: int, then: Callable[[], None]
    ) -> None:
        if not hops:
            then()
            return
        (line, rate, latency), *rest = hops
        self._free[line] = max(self.now, self._free.get(line, 0.0)) + 8 * size / rate
        self.at(self._free[line] + latency, lambda: self._forward(rest, size, then))


# ---------------------------------------------------------------------------------------------------- a block


@dataclass(slots=True)
class _Sum:
    """A sum of gradients, or weights, and what is in it."""

    values: Array
    clocks: Clocks

    def add(self, other: _Sum) -> _Sum:
        return _Sum(self.values + other.values, np.maximum(self.clocks, other.clocks))


class _Place:
    """A block at one rank."""

    def __init__(self, size: int, subtree: Sequence[int]) -> None:
        self.subtree: Final = list(subtree)
        self.told = 0
        """The clock of its subtree that its parent has been told."""
        self.merged: _Sum | None = None
        """Gradients that have not been sent to the parent."""
        self.pushed = np.zeros(size, np.int64)
        """What has been in `merged` up to now."""
        self.unseen: list[_Sum] = []
        """What has been sent and is not in the weights that have come."""
        self.base = _Sum(np.zeros(_PER_BLOCK), np.zeros(size, np.int64))
        """The weights that came from the parent; the root's weights."""
        self.asked = 0
        """The highest clock that the parent has been asked for."""
        self.waiting: list[tuple[int, int]] = []
        """(clock, child or the rank itself): pulls that need this clock."""


class Block:
    """One block's trees, and the rules of its nodes."""

    def __init__(self, wires: Wires, tree: Tree, size: int, rules: Rules, load: Load) -> None:
        """Begin with weights of 0.

        Args:
            wires: carry messages.
            tree: gradients go up one half of it, and weights down the other.
            size: bytes.
            rules: of nodes.
            load: at its last clock nothing is held back.
        """
        self._wires, self._tree, self._size, self._rules = wires, tree, size, rules
        self._held, self._last = load.bound if rules.cached else 0, load.clocks
        masks = tree.subtree_mask
        ranks = range(tree.size)
        self._places = [_Place(tree.size, [one for one in ranks if masks[rank] >> one & 1]) for rank in ranks]
        self.answered: Callable[[int], None] = lambda _rank: None
        """Called when a rank may go on with the weights that it has."""

    def weights(self, rank: int) -> _Sum:
        """Return those that a rank has, its own gradients included, and what is in them."""
        place = self._places[rank]
        own = [place.merged] if place.merged is not None else []
        found = place.base
        for part in (*place.unseen, *own):
            found = found.add(part)
        return found

    def push(self, rank: int, part: _Sum) -> None:
        """Take a gradient of the rank itself, or a sum of a child."""
        place = self._places[rank]
        if rank == self._tree.root:
            before = place.base.clocks.min()
            place.base = place.base.add(part)
            if place.base.clocks.min() > before:
                self._answer(rank)
            return
        place.merged = part if place.merged is None else place.merged.add(part)
        place.pushed = np.maximum(place.pushed, part.clocks)
        clock = int(place.pushed[place.subtree].min())
        if clock - place.told > self._held or (clock == self._last and clock > place.told):
            place.told = clock
            parent, merged, place.merged = self._tree.reduce_parent[rank], place.merged, None
            place.unseen.append(merged)
            self._wires.send(rank, parent, self._size, lambda: self.push(parent, merged))

    def pull(self, rank: int, child: int, clock: int) -> None:
        """Ask for weights that have a clock of all ranks, for a child or for the rank itself."""
        place = self._places[rank]
        is_root = rank == self._tree.root
        newest = self._rules.newest and not is_root
        if self.weights(rank).clocks.min() >= clock and not newest:
            self._reply(rank, child)
            return
        place.waiting.append((clock, child))
        if not is_root and not self._rules.sent:
            self._ask(rank, clock)

    def _ask(self, rank: int, clock: int) -> None:
        place, parent = self._places[rank], self._tree.broadcast_parent[rank]
        if clock > place.asked or self._rules.newest:
            place.asked = clock
            self._wires.send(rank, parent, _REQUEST, lambda: self.pull(parent, rank, clock))

    def _reply(self, rank: int, child: int) -> None:
        if child == rank:
            self.answered(rank)
            return
        weights = self.weights(rank)
        self._wires.send(rank, child, self._size, lambda: self._take(child, weights))

    def _take(self, rank: int, weights: _Sum) -> None:
        place = self._places[rank]
        if (weights.clocks >= place.base.clocks).all():
            place.base = weights
            place.unseen = [part for part in place.unseen if (part.clocks > weights.clocks).any()]
        self._answer(rank)

    def _answer(self, rank: int) -> None:
        """Answer those who have waited, and pass new weights on if that is the rule."""
        place = self._places[rank]
        if self._rules.sent:
            for child in self._tree.broadcast_children[rank]:
                self._reply(rank, child)
        waiting, place.waiting = place.waiting, []
        clock = self.weights(rank).clocks.min()
        for needed, child in waiting:
            if needed > clock:
                place.waiting.append((needed, child))
            elif child == rank or not self._rules.sent:
                self._reply(rank, child)
        if place.waiting and rank != self._tree.root and not self._rules.sent:
            self._ask(rank, max(needed for needed, _ in place.waiting))


# ------------------------------------------------------------------------------------------------ the workers


class Workers:
    """All workers: each computes, pushes, counts a clock and pulls.

    Attributes:
        ended: how many have made all their clocks.
        missing: by gradient: how many clocks of the slowest rank its weights lack.
        learned_s: when the linear model had learned; None: it has not.
    """

    def __init__(self, wires: Wires, blocks: Sequence[Block], size: int, load: Load, seed: int) -> None:
        """Have all of them begin to compute."""
        self._wires, self._blocks, self._load = wires, blocks, load
        self._draw = random.Random(f"computing {seed}")
        self._mean = [load.compute * self._draw.uniform(1, 2) for _ in range(size)]
        self._clock, self._open = [0] * size, [0] * size
        self.ended = 0
        self.missing: list[int] = []
        self.learned_s: float | None = None
        data = np.random.default_rng(seed)
        dimensions = len(blocks) * _PER_BLOCK
        self._inputs = data.normal(size=(size, _SAMPLES, dimensions))
        self._wanted = self._inputs @ data.normal(size=dimensions) + data.normal(size=(size, _SAMPLES))
        best = np.linalg.lstsq(self._inputs.reshape(-1, dimensions), self._wanted.ravel(), rcond=None)[0]
        self._least, start = self._loss(best), self._loss(np.zeros(dimensions))
        self._enough = self._least + _LEARNED * (start - self._least)
        for block in blocks:
            block.answered = self._pulled
        for rank in range(size):
            self._compute(rank)

    def _loss(self, weights: Array) -> float:
        return float(np.mean((self._inputs @ weights - self._wanted) ** 2))

    def _compute(self, rank: int) -> None:
        found = [block.weights(rank) for block in self._blocks]
        weights, clock = np.concatenate([part.values for part in found]), self._clock[rank]
        self.missing.append(max(clock - min(int(part.clocks.min()) for part in found), 0))
        if self.learned_s is None and self._loss(weights) < self._enough:
            self.learned_s = self._wires.now
        gradient = self._inputs[rank].T @ (self._inputs[rank] @ weights - self._wanted[rank]) / _SAMPLES
        seconds = self._mean[rank] * self._draw.lognormvariate(0, 0.2)
        self._wires.at(self._wires.now + seconds, lambda: self._computed(rank, gradient))

    def _computed(self, rank: int, gradient: Array) -> None:
        clock = self._clock[rank] = self._clock[rank] + 1
        clocks = np.zeros(len(self._clock), np.int64)
        clocks[rank] = clock
        steps = np.split(-_STEP / len(self._clock) * gradient, len(self._blocks))
        self._open[rank] = len(self._blocks)
        for block, step in zip(self._blocks, steps, strict=True):
            block.push(rank, _Sum(step, clocks))
        if clock == self._load.clocks:
            self.ended += 1
            return
        for block in self._blocks:
            block.pull(rank, rank, clock - self._load.bound)

    def _pulled(self, rank: int) -> None:
        self._open[rank] -= 1
        if not self._open[rank]:
            self._compute(rank)


def run(network: Network, rules: Rules, load: Load, seed: int) -> dict[str, Any]:
    """Simulate workers until all have made their clocks.

    Args:
        network: of the workers.
        rules: of nodes.
        load: on them.
        seed: of speeds and data.

    Returns:
        Seconds and MB (over all links) a clock, the clocks that a gradient's weights lack (mean and most),
        and the seconds until the linear model had learned.
    """
    wires, count = Wires(network), -(-load.model // load.block)
    policy = form_policy(network, "auto", chunk_bytes=load.block, tensors=[load.model])
    owners = Owners(owner_weights(policy))
    blocks = []
    for place in range(count):
        tree = policy.trees[policy.tree_of(place)]
        if not rules.trees:
            owner = network.ranks[owners.of_slot(place)]
            tree = Tree.undirected(owner, tuple(-1 if rank == owner else owner for rank in network.ranks))
        blocks.append(Block(wires, tree, load.model // count, rules, load))
    workers = Workers(wires, blocks, network.size, load, seed)
    wires.run()
    if workers.ended < network.size:
        raise RuntimeError(f"{rules.name}, staleness {load.bound}: the workers wait for each other for ever")
    return {
        "seconds": wires.now / load.clocks,
        "megabytes": wires.bytes_sent / load.clocks / 1e6,
        "missing": statistics.fmean(workers.missing),
        "most_missing": max(workers.missing),
        "learned_s": workers.learned_s,
    }


def seconds_of_nodes(network: Network, bound: int, load: Load, seed: int, *, owners: bool) -> float:
    """Return the seconds a clock of real nodes on virtual time: with owners, or with rounds awaited late."""
    network, block = network.scaled(1 / _SMALLER), load.block // _SMALLER
    size, elements = network.size, load.model // _SMALLER // 4
    policy = form_policy(network, "auto", chunk_bytes=block, tensors=[4 * elements])
    cluster = SimulatedCluster(
        size, network=network, policy=policy, seed=seed, chunk_size=block // 4, largest_chunk=block // 4
    ).join()
    stores = [
        AsynchronousStore(node, cluster.timeline, seed=seed, staleness=bound)
        for node in cluster.nodes
        if owners
    ]
    cluster.run_until_ended([store.init("w", np.zeros(elements, np.float32)) for store in stores], _LIMIT_S)
    draw = random.Random(f"computing {seed}")
    mean = [load.compute * draw.uniform(1, 2) for _ in range(size)]
    began, ended = cluster.now, [False] * size
    sums: list[list[Pending]] = [[] for _ in range(size)]

    def compute(rank: int, clock: int) -> None:
        seconds = mean[rank] * draw.lognormvariate(0, 0.2)
        cluster.timeline.after(seconds, lambda: computed(rank, clock + 1))

    def computed(rank: int, clock: int) -> None:
        gradient = np.ones(elements, np.float32)
        if owners:
            stores[rank].push("w", gradient)
        else:
            sums[rank].append(cluster.nodes[rank].push("w", gradient, in_place=True))
        if clock == load.clocks:
            ended[rank] = True
        elif owners:
            stores[rank].pull("w").then(lambda: compute(rank, clock))
        elif clock <= bound:
            compute(rank, clock)
        else:
            sums[rank][clock - bound - 1].then(lambda: compute(rank, clock))

    for rank in range(size):
        compute(rank, 0)
    cluster.run_until(lambda: all(ended), _LIMIT_S, "the end of all workers")
    return (cluster.now - began) / load.clocks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, print a table, and return the exit code."""
    options = _options(arguments)
    rows: list[dict[str, Any]] = []
    print("network       s  rules            s a clock  MB a clock  clocks missing  learned after")
    for family, nodes, seed in NETWORKS:
        network = generate(family, nodes, seed)
        for bound, rules in [(0, ROUNDS), *itertools.product(options.staleness, ENTRANTS)]:
            load = Load(
                bound=bound,
                model=options.size,
                block=options.block,
                clocks=options.clocks,
                compute=options.compute,
            )
            found = run(network, rules, load, seed)
            rows.append({"network": f"{family} {seed}", "staleness": bound, "rules": rules.name, **found})
            learned = "never" if found["learned_s"] is None else f"{found['learned_s']:6.1f} s"
            missing = f"{found['missing']:.2f} (most {found['most_missing']})"
            times = f"{found['seconds']:9.2f}  {found['megabytes']:10.0f}"
            print(
                f"{family:10} {seed} {bound:2}  {rules.name:15} {times}  {missing:14}  {learned}", flush=True
            )
        for bound, owners in itertools.product(
            [0, *options.staleness], (True, False) if options.nodes else ()
        ):
            load = Load(
                bound=bound, model=options.size, block=options.block, clocks=15, compute=options.compute
            )
            name = "nodes: owners" if owners else "nodes: rounds"
            took = seconds_of_nodes(network, bound, load, seed, owners=owners)
            rows.append({"network": f"{family} {seed}", "staleness": bound, "rules": name, "seconds": took})
            print(f"{family:10} {seed} {bound:2}  {name:15} {took:9.2f}", flush=True)
    if options.json:
        content = {"options": {**vars(options), "json": None}, "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--staleness", type=numbers, default=[1, 3], metavar="S,…", help="bounds, clocks")
    parser.add_argument("--size", type=amount, default=16_000_000, metavar="SIZE", help="of the model")
    parser.add_argument("--block", type=amount, default=1_000_000, metavar="SIZE", help="of a block at most")
    parser.add_argument("--clocks", type=number, default=60, metavar="N", help="of each worker")
    parser.add_argument("--compute", type=seconds, default=1.0, metavar="S", help="the fastest worker's step")
    parser.add_argument("--nodes", action="store_true", help="also run real nodes, on virtual time")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
