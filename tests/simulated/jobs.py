"""Random jobs: what each rank pushes and when, under which trees, and what must come out."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from netstorm.errors import FrameError
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.codecs import ITEM_BYTES
from netstorm.protocol.frames import open_frames
from netstorm.topology.detours import hops_of
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.tree import Tree

LARGEST = 7
"""Largest integer that is summed: sums of nine are exact in every type."""


def random_parents(chance, size, root):
    """Return the parents of a random spanning tree of any shape: chains, stars and between."""
    parents = [-1] * size
    reached = [root]
    others = [rank for rank in range(size) if rank != root]
    chance.shuffle(others)
    depth = chance.choice((1, 2, size))
    for rank in others:
        parents[rank] = chance.choice(reached[-depth:])
        reached.append(rank)
    return tuple(parents)


def random_policy(chance, size, version=0, look_aheads=(0, 0, 1, 30, 1000)):
    """Return trees of any shape, whose directions differ half of the time, and one of these look-aheads; a
    policy that takes over what is under way, half of the time.
    """
    trees = []
    for _ in range(chance.randint(1, 4)):
        root = chance.randrange(size)
        reduce_parent = random_parents(chance, size, root)
        broadcast_parent = random_parents(chance, size, root) if chance.random() < 0.5 else reduce_parent
        trees.append(Tree(root=root, reduce_parent=reduce_parent, broadcast_parent=broadcast_parent))
    weights = tuple(chance.randint(1, 5) for _ in trees)
    return Policy(
        version=version,
        trees=tuple(trees),
        weights=weights,
        reason="drawn at random",
        look_ahead=chance.choice(look_aheads),
        look_ahead_s=chance.choice((0.0, 0.02, 1.0, 30.0)),
        takes_over=chance.random() < 0.5,
        slow=tuple(chance.sample(hops_of(trees), chance.randint(0, min(2, size - 1)))),
    )


def random_detours(chance, policy):
    """Return a policy with up to two detours of either kind around most of its hops, over any ranks."""
    detours = []
    for source, target in hops_of(policy.trees):
        others = [rank for rank in range(policy.size) if rank not in (source, target)]
        for explore in (False, True):
            for _ in range(chance.randint(0, 2) if others else 0):
                between = chance.sample(others, chance.randint(1, min(3, len(others))))
                detours.append(
                    Detour(
                        path=(source, *between, target),
                        links=tuple(
                            (chance.choice((1e12, 1e6)), chance.choice((0.0, 0.001, 1.0)))
                            for _ in (*between, target)
                        ),
                        explore=explore,
                    )
                )
    return msgspec.structs.replace(policy, detours=tuple(detours))


@dataclass(frozen=True)
class KeyUse:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Job:
    """Everything that a run depends on."""

    nodes: int
    seed: int
    keys: tuple[KeyUse, ...]
    rounds: int
    chunk_size: int
    jitter_s: float = 0.0
    spread_s: float = 0.0
    """Pushes come at random times within it."""
    policies: int = 1
    look_aheads: tuple[int, ...] = (0, 0, 1, 30, 1000)
    """Of the policies, in bytes."""
    detours: bool = False
    """Policies have auxiliary paths, and nodes use them by either rule."""

    def policy(self, chance, version=0):
        """Return one of the policies that the job runs under."""
        policy = random_policy(chance, self.nodes, version, self.look_aheads)
        return random_detours(chance, policy) if self.detours else policy

    def cluster(self, **more):
        if self.detours:
            chance = random.Random(f"rules {self.seed}")
            more |= {
                "aux_rule": chance.choice(("arrival", "queue")),
                "primary_busy_bound": chance.randint(1, 3),
                "auxiliary_queue_length": chance.randint(0, 5),
                "explore_share": chance.choice((0.0, 0.02, 1.0)),
                "window_bytes": chance.choice((0, 1, 300, 5000)),
            }
        return SimulatedCluster(
            self.nodes,
            seed=self.seed,
            policy=self.policy(random.Random(f"policy {self.seed}")),
            chunk_size=self.chunk_size,
            jitter_s=self.jitter_s,
            **more,
        )

    def values(self, rank, key, number):
        """Return what a rank pushes: small integers, whatever the type."""
        return drawn_values(self.seed, rank, key, number)

    def sums(self, key, number):
        """Return the right answer."""
        total = sum(self.values(rank, key, number).astype(np.int64) for rank in range(self.nodes))
        return np.asarray(total).astype(key.dtype)

    def pushes(self, rank):
        """Return (time, key, round) in the order in which a rank pushes: its own, but rounds in order."""
        chance = random.Random(f"order {self.seed} {rank}")
        todo = [key for key in self.keys for _ in range(self.rounds)]
        chance.shuffle(todo)
        times = sorted(chance.random() * self.spread_s for _ in todo)
        count: dict[str, int] = {}
        for time, key in zip(times, todo, strict=True):
            number = count[key.name] = count.get(key.name, -1) + 1
            yield time, key, number

    def push_all(self, cluster, *, policies=True):
        """Let every rank push everything at its times; return what they wait for, by rank, key and round."""
        pending = {}
        begin = cluster.now
        for node in cluster.nodes:
            for time, key, number in self.pushes(node.rank):

                def push(node=node, key=key, number=number):
                    if node.alive:
                        values = self.values(node.rank, key, number)
                        in_place = (node.rank + number) % 2 == 0
                        pending[node.rank, key, number] = node.push(
                            key.name, values, priority=len(key.name) - number, in_place=in_place
                        )

                cluster.at(begin + time, push)
        if policies:
            self.change_policies(cluster)
        expected = self.nodes * len(self.keys) * self.rounds
        cluster.run_until(lambda: len(pending) == expected, self.spread_s + 1, "all pushes")
        return pending

    def change_policies(self, cluster):
        chance = random.Random(f"policies {self.seed}")
        times = sorted(chance.random() * self.spread_s for _ in range(1, self.policies))
        for version, time in enumerate(times, 1):
            policy = self.policy(chance, version)
            cluster.at(cluster.now + time, lambda policy=policy: cluster.install_policy(policy))

    def check(self, pending):
        """Every rank has the same bytes, and they are the right sum."""
        for (rank, key, number), one in pending.items():
            got, right = one.result(), self.sums(key, number)
            assert got.dtype == right.dtype
            assert got.shape == right.shape
            assert got.tobytes() == right.tobytes(), f"rank {rank}, {key.name}, round {number}"


@functools.cache
def drawn_values(seed, rank, key, number):
    """Return small integers of the key's type, drawn at random."""
    drawn = np.random.default_rng([seed, rank, number, *key.name.encode()])
    low = 0 if key.dtype.startswith("u") else -LARGEST
    return drawn.integers(low, LARGEST + 1, key.shape).astype(key.dtype)


def jobs(*, nodes=(1, 9), policies=(1, 1), detours=False):
    """Generate jobs, with numbers of nodes and policies in these ranges."""
    shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    kinds = st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES)))
    drawn = st.builds(
        Job,
        nodes=st.integers(*nodes),
        seed=st.integers(0, 2**32),
        keys=st.lists(kinds, min_size=1, max_size=4).map(
            lambda drawn: tuple(KeyUse(f"key{n}", shape, dtype) for n, (shape, dtype) in enumerate(drawn))
        ),
        rounds=st.integers(1, 4),
        chunk_size=st.sampled_from([1, 7, 16, 100, 65_536]),
        jitter_s=st.sampled_from([0.0, 0.003, 0.1]),
        spread_s=st.sampled_from([0.0, 0.01, 0.5]),
        policies=st.integers(*policies),
        detours=st.just(detours),
    )
    return drawn.map(few_chunks)


MOST_CHUNKS = 100
"""Most chunks of a key. Under a look-ahead of one chunk they go one by one, and a delay may be 0.1 s."""


def few_chunks(job):
    """Return the job with chunks so large that no key has too many."""
    largest = max(math.prod(key.shape) for key in job.keys)
    return replace(job, chunk_size=max(job.chunk_size, -(-largest // MOST_CHUNKS)))


def usable(network, least=1e6):
    """Return a network without lines so slow that a handshake would take longer than the time-outs."""

    def lifted(rate):
        return None if rate is None else max(rate, least)

    return replace(
        network,
        nodes=tuple(
            replace(node, egress=lifted(node.egress), ingress=lifted(node.ingress)) for node in network.nodes
        ),
        links=tuple(replace(link, rate=lifted(link.rate)) for link in network.links),
        changes=tuple(replace(change, rate=lifted(change.rate)) for change in network.changes),
    )


def counted(cluster, name):
    return sum(node.machine.counters.snapshot().get(name, 0) for node in cluster.nodes)


def nothing_was_amiss(cluster):
    """No part was refused or came twice, and every credit was due; parts of chunks that have moved may come
    late.
    """
    late = () if counted(cluster, "chunks_moved") else ("parts_of_complete_rounds",)
    for name in (
        "protocol_violations",
        "contributions_counted_before",
        "results_known_before",
        "credits_unasked",
        "dropped_refused",
        *late,
    ):
        assert counted(cluster, name) == 0, name


def examples(count):
    """Return the settings of a test of so many examples; the profile `nightly` runs 80 times as many."""
    return settings(max_examples=count * settings().max_examples // 25)


def on_messages(cluster, kind, action):
    """Call `action` with source, target and message of each message of this kind that the network carries."""
    before = cluster.network.watch

    def watch(source, target, header, payload):
        before(source, target, header, payload)
        try:
            message = open_frames(header, 1 if payload is None else 2).message
        except FrameError:
            return
        if isinstance(message, kind):
            action(source, target, message)

    cluster.network.watch = watch
