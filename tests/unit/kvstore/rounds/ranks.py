"""Aggregations of several ranks, whose messages a test carries."""

from __future__ import annotations

import random

import numpy as np

from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation, Outbox
from netstorm.kvstore.rounds.bindings import Bindings
from netstorm.kvstore.rounds.node_rounds import NodeRounds
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Peer, bits_to_wire, checksum
from netstorm.protocol.messages import Binding, KeyGrant, Part, Phase
from netstorm.pslite.machine import Call, Send
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

CHAIN = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 1)),), weights=(1,))
"""2 -> 1 -> 0: rank 1 aggregates and forwards, rank 0 is the root."""


THREE_STARS = Policy(
    version=1,
    trees=(
        Tree.undirected(Rank(0), (-1, 0, 0)),
        Tree(root=Rank(1), reduce_parent=(1, -1, 1), broadcast_parent=(2, -1, 1)),
        Tree.undirected(Rank(2), (2, 0, -1)),
    ),
    weights=(1, 1, 1),
)


class Ranks:
    """Carries instructions between ranks, in an order that a seed decides."""

    def __init__(self, policy, *, chunk_size=4, seed=0):
        self.random = random.Random(seed)
        self.chunk_size = chunk_size
        self.size = policy.size
        self.bindings = [Bindings(rank) for rank in range(self.size)]
        for bindings in self.bindings:
            bindings.install(policy)
        self.counters = [Counters() for _ in range(self.size)]
        self.outboxes = [Outbox() for _ in range(self.size)]
        self.nodes = [
            NodeRounds(r, self.bindings[r], self.outboxes[r], self.counters[r]) for r in range(self.size)
        ]
        self.in_flight = []

    def add_keys(self, elements, **more):
        """Make a key known at all ranks."""
        return [self.add_key(rank, elements, **more) for rank in range(self.size)]

    def push_all(self, keys, values, **more):
        """Push the same at all ranks; return (result, outcome) of each."""
        return [self.push(rank, key, values, **more) for rank, key in enumerate(keys)]

    def add_key(self, rank, elements, identity=0, dtype="float32", granted=9):
        key = Key(0, f"k{identity}", (elements,), dtype)
        key.set_grant(KeyGrant(0, key.name, identity, first_slot=0, offset=0, chunk_size=self.chunk_size))
        self.bindings[rank].bind(Binding(key=identity, from_round=0, version=1, granted=granted))
        self.nodes[rank].add_key(key)
        self.collect(rank)
        return key

    def push(self, rank, key, values, *, in_place=False, loss=None):
        source = None if values is None else np.array(values, key.dtype)
        result = source if in_place else np.full(key.elements, -1, key.dtype)
        outcome: list[Exception | None] = []
        operation = Operation(
            key=key, round=key.take_round(), source=source, destination=result, done=outcome.append, loss=loss
        )
        self.nodes[rank].submit(operation, now=0.0)
        self.collect(rank)
        return result, outcome

    def collect(self, rank):
        for instruction in self.outboxes[rank].take():
            if isinstance(instruction, Call):
                instruction.function()
            else:
                assert isinstance(instruction, Send)
                data = None if instruction.payload is None else bytearray(bytes(instruction.payload))
                self.in_flight.append((rank, int(instruction.peer), instruction.message, data))

    def deliver_all(self):
        while self.in_flight:
            self.deliver(self.in_flight.pop(self.random.randrange(len(self.in_flight))))

    def deliver(self, parcel):
        sender, receiver, part, data = parcel
        self.nodes[receiver].receive(Peer(sender), part, data, 0 if data is None else checksum(data))
        self.collect(receiver)


def legal_part(**changed):
    values = {
        "key": 0, "round": 0, "chunk": 0, "phase": Phase.REDUCE, "version": 1, "tree": 0,
        "contributors": bits_to_wire(0b100), "dtype": "float32",
    }  # fmt: skip
    return Part(**{**values, **changed})
