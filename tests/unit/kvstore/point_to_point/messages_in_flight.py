"""Two or more nodes' sends and receives, and the messages between them, which a test delivers as it likes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from netstorm.kvstore.messages import PointToPoint
from netstorm.kvstore.operations import Outbox, ReceiveOperation, SendOperation
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Call, Send
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree


def policy_of(parents, version=0):
    """Return a policy of one tree."""
    root = parents.index(-1)
    tree = Tree(root=root, reduce_parent=tuple(parents), broadcast_parent=tuple(parents))
    return Policy(version=version, trees=(tree,), weights=(1,))


class Flight:
    """The nodes of a job, in a chain unless `parents` says otherwise."""

    def __init__(self, size=2, parents=None):
        policy = policy_of(parents or [-1, *range(size - 1)])
        self.outboxes = [Outbox() for _ in range(size)]
        self.counters = [Counters() for _ in range(size)]
        self.nodes = [
            PointToPoint(rank, policy, outbox=outbox, counters=counters)
            for rank, (outbox, counters) in enumerate(zip(self.outboxes, self.counters, strict=True))
        ]
        self.sent = []
        """(sender, instruction) of what is under way."""
        self.ended = {}
        """Errors, or None, by operation, and how often it has ended."""

    def send(self, source, target, values, *, tag=0, channel="world", refused=None):
        operation = SendOperation(
            peer=target,
            channel=channel,
            tag=tag,
            source=np.asarray(values, np.uint8),
            what=f"uint8 ({len(values)},)",
            done=lambda error: self._end(operation, error),
            refused=refused,
        )
        self.nodes[source].submit(operation, 0.0)
        self.collect()
        return operation

    def receive(self, target, source, size, *, tag=0, channel="world", peers=(), now=0.0):
        operation = ReceiveOperation(
            peer=source,
            channel=channel,
            tag=tag,
            destination=np.zeros(size, np.uint8),
            what=f"uint8 ({size},)",
            done=lambda error: self._end(operation, error),
            peers=peers,
        )
        self.nodes[target].submit(operation, now)
        self.collect()
        return operation

    def collect(self):
        """Take all instructions of all nodes, and carry out the calls among them."""
        for rank, outbox in enumerate(self.outboxes):
            for instruction in outbox.take():
                if isinstance(instruction, Call):
                    instruction.function()
                else:
                    assert isinstance(instruction, Send)
                    self.sent.append((rank, instruction))

    def deliver(self, place=0, *, again=False):
        """Deliver one message of those under way; `again`: and keep it, so that it comes once more."""
        source, send = self.sent[place] if again else self.sent.pop(place)
        self.put(source, int(send.peer), send.message, send.payload)

    def put(self, source, target, message, payload=None):
        """Have a node receive a message."""
        copy = None if payload is None else bytes(payload)
        self.nodes[target].receive(Peer(source), message, copy, 0)
        self.collect()

    def deliver_all(self):
        while self.sent:
            self.deliver()

    def names(self):
        """Return what is under way."""
        return [type(send.message).__name__ for _, send in self.sent]

    def error(self, operation):
        """Return the error of an operation that has ended."""
        [error] = self.ended[operation]
        return error

    def ended_well(self, *operations):
        return all(self.ended.get(operation) == [None] for operation in operations)

    def _end(self, operation, error):
        self.ended.setdefault(operation, []).append(error)


def steps_of(path):
    """Return the pairs of neighbours of a path."""
    return list(pairwise(path))
