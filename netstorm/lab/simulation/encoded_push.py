"""Pushes of simulated programs under a codec. Each keeps its state from one push to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from netstorm.compression.codec import AGREED, Codec, GradientPlace, State
from netstorm.kvstore.calls import Agreed, EncodedSum, encoded_keys
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.lab.simulation.node import Pending

if TYPE_CHECKING:
    from netstorm.lab.simulation.node import SimulatedNode

__all__ = ["EncodedPushes"]


class EncodedPushes:
    """The pushes of one tensor at one node."""

    def __init__(
        self, node: SimulatedNode, name: str, shape: tuple[int, ...], codec: Codec, ranks: int
    ) -> None:
        """Register the tensor's keys.

        Args:
            node: whose program pushes.
            name: of the tensor.
            shape: of the tensor.
            codec: how it travels.
            ranks: the most that the job may have.
        """
        self.state: Final[State] = {}
        """What the codec keeps at this node."""
        self._node: Final = node
        self._codec: Final = codec
        self._shape: Final = shape
        self._ranks: Final = ranks
        self._pushes = 0
        own = node.register(name, shape, "float32", form=codec.form(shape) or 0)
        self._name: Final = name
        self._keys: Final = encoded_keys(codec, own, self._register)

    def next_rounds(self) -> dict[int, int]:
        """Return the next round of each key by its number, for the snapshot of a program."""
        keys = [*self._of_each_push(), *self._keys.occasional]
        return {key.identity: key.last_taken + 1 for key in keys if key.identity >= 0}

    def go_on_at(self, push: int, agreed: Sequence[float] = (), occasional: Sequence[int] = ()) -> None:
        """Go on with the push of this number, as a newcomer whose job has made those before.

        Args:
            push: its number.
            agreed: what another node's `agreed` has returned.
            occasional: likewise.
        """
        self._pushes = push
        for key in self._of_each_push():
            key.begin_at(push)
        if agreed:
            self.state[AGREED] = np.array(agreed)
        for key, round in zip(self._keys.occasional, occasional, strict=False):
            key.begin_at(round)

    def agreed(self) -> tuple[list[float], list[int]]:
        """Return what the codec has agreed on, and the next round of each key that not all pushes have. No
        push may be under way.
        """
        state, rounds = Agreed.of(self._keys, self.state)
        return [] if state is None else state.tolist(), list(rounds.values())

    def _of_each_push(self) -> list[Key]:
        keys = zip(self._keys.keys, self._keys.in_each, strict=True)
        return [key for key, in_each in keys if in_each and key is not None]

    def push(self, values: npt.NDArray[np.float32]) -> Pending:
        """Begin to sum `values` over all ranks."""
        node = self._node
        place = GradientPlace(self._shape, self._ranks, node.rank, self._pushes, lambda: node.timeline.now)
        self._pushes += 1
        pending = Pending(node.timeline, f"rank {node.rank}: push {place.round} of {self._name!r}")
        gradient = np.array(values, np.float32, order="C").reshape(-1)
        pending.collect_with(lambda: gradient.reshape(self._shape))
        node.pending.append(pending)
        run = EncodedSum(
            self._keys,
            submit=self._submit,
            later=lambda function: function(),
            fail=node.fail,
            rule=self._codec.fingerprint,
        )
        run.begin(self._codec.rounds(gradient, self.state, place), pending.done)
        return pending

    def _submit(self, operation: Operation) -> None:
        node = self._node
        node.operations.append(operation)
        node.process.call(lambda now: node.machine.submit(operation, now))

    def _register(self, name: str, shape: tuple[int, ...], form: int) -> Key:
        return self._node.register(name, shape, "float32", form=form)
