"""The blocks of one key that this rank owns, and what it does to them. See `BlockStore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import numpy as np

from netstorm.errors import UsageError
from netstorm.frontends.torch.asynchronous.saved_state import (
    Begun,
    decoded_states,
    encoded_states,
    problem_of_states,
)
from netstorm.frontends.torch.asynchronous.update_rule import Floats, UpdateRule
from netstorm.kvstore.asynchronous.blocks import Gradient, extent
from netstorm.kvstore.forms import Key
from netstorm.kvstore.process.runtime import Runtime
from netstorm.protocol.frames import Buffer

__all__ = ["OwnedBlocks"]


class OwnedBlocks:
    """Values on the host. Updates run one after the other on the process's thread for computing."""

    whole: Final = False
    """The rule treats each element alone."""

    def __init__(
        self, runtime: Runtime, key: Key, initial: Floats, rule: UpdateRule, begun: Begun | None = None
    ) -> None:
        """Copy this rank's blocks of a key's initial value, or in an elastic job all blocks, which may become
        this rank's. The key has been granted. A checkpoint may have `begun` its states.
        """
        self._runtime: Final = runtime
        self._rule: Final = rule
        self._dtype: Final = key.dtype
        self._values: Final[dict[int, Floats]] = {}
        self._velocities: Final[dict[int, Floats]] = {}
        self._updates: Final[dict[int, int]] = {}
        self._key: Final = key
        self._begun: Final = begun
        self._initial: Final[dict[int, Floats]] = {}
        """What all ranks began with: for corrections, and for blocks that are installed later."""
        self._from_initial: Final[set[int]] = set()
        """Blocks that this rank has had from their initial value on."""
        self._pulled: Final[dict[tuple[int, int], Buffer]] = {}
        """What each rank has got last, by block and rank; kept for corrections alone."""
        owners, elastic = runtime.node.requests.asynchronous.owners, runtime.node.requests.live.is_elastic
        for block in owners.blocks(key, whole=self.whole):
            start, end = extent(key, block)
            if elastic:
                self._initial[block] = initial[start:end].copy()
            elif owners.owner(key, block) == runtime.rank:
                self._begin(block, initial[start:end])
                if rule.lamda:
                    self._initial[block] = initial[start:end].copy()

    @property
    def rule(self) -> str:
        """Fingerprint of the update rule."""
        return self._rule.fingerprint

    @property
    def begins_with_states(self) -> bool:
        """Whether a checkpoint has been loaded."""
        return self._begun is not None

    def apply(
        self,
        block: int,
        rank: int,
        gradient: Gradient,
        live: tuple[float, ...],
        done: Callable[[], None],
    ) -> None:
        """Have a block updated with a gradient of a rank."""
        pulled = self._pulled.get((block, rank))

        def update() -> None:
            if not isinstance(gradient, np.ndarray) or len(live) != 1:
                raise UsageError(f"a push of rank {rank} with {live}: expected an array and a learning rate")
            weight = self._values[block]
            base = weight
            if self._rule.lamda:
                if pulled is not None:
                    base = _floats(pulled, self._dtype)
                elif block in self._from_initial:
                    base = self._initial[block]
            velocity, values = self._velocities.get(block), cast("Floats", gradient)
            self._rule.update(weight, velocity, values, base=base, rate=live[0])
            self._updates[block] += 1

        self._compute(update, done)

    def read(self, block: int, done: Callable[[Buffer], None]) -> None:
        """Give `done` a copy of a block's value, behind the updates that are queued."""
        found: list[Floats] = []
        self._compute(lambda: found.append(self._values[block].copy()), lambda: done(found[0]))

    def pulled(self, block: int, rank: int, value: Buffer) -> None:
        """Keep what a rank gets, if gradients are corrected. Ranks that get the same value share it."""
        if self._rule.lamda:
            self._pulled[block, rank] = value

    def states(self, block: int, done: Callable[[bytes], None]) -> None:
        """Give `done` the count of updates and the momentum, if there is one, as bytes."""
        found: list[bytes] = []
        self._compute(
            lambda: found.append(encoded_states(self._updates[block], self._velocities.get(block))),
            lambda: done(found[0]),
        )

    def check(self, block: int, states: bytes, done: Callable[[str], None]) -> None:
        """Tell `done` whether states are a count of updates and a momentum of this size."""
        problem = problem_of_states(states, self._initial[block].nbytes if self._rule.momentum else 0)
        self._compute(lambda: None, lambda: done(f"{problem}, for {self.rule}" if problem else ""))

    def install(self, block: int, values: Buffer | None, states: bytes) -> None:
        """Begin to hold a block, with the initial value or another owner's state.

        What ranks have pulled of it is not known then: their next gradients are not corrected.
        """
        self._forget_pulled(block)

        def begin() -> None:
            if values is None:
                self._begin(block, self._initial[block])
            else:
                self._begin(block, _floats(values, self._dtype))
                self._from_initial.discard(block)
            if states:
                self._updates[block], velocity = decoded_states(states, self._dtype)
                if velocity is not None:
                    self._velocities[block] = velocity.copy()

        self._compute(begin, lambda: None)

    def discard(self, block: int) -> None:
        """Hold a block no longer."""
        self._forget_pulled(block)

        def drop() -> None:
            self._values.pop(block, None)
            self._velocities.pop(block, None)
            self._updates.pop(block, None)

        self._compute(drop, lambda: None)

    def _begin(self, block: int, value: Floats) -> None:
        self._values[block] = value.copy()
        self._from_initial.add(block)
        begun = self._begun
        self._updates[block] = 0 if begun is None else begun.updates
        if not self._rule.momentum:
            return
        if begun is None or begun.momentum is None:
            self._velocities[block] = np.zeros(value.size, self._dtype)
        else:
            begin, end = extent(self._key, block)
            self._velocities[block] = begun.momentum[begin:end].copy()

    def _forget_pulled(self, block: int) -> None:
        for place in [place for place in self._pulled if place[0] == block]:
            del self._pulled[place]

    def _compute(self, work: Callable[[], None], done: Callable[[], None]) -> None:
        """Run `work` on the thread for computing, and then `done` on the I/O thread."""
        runtime = self._runtime

        def run() -> None:
            try:
                work()
            except Exception as error:
                runtime.fail(f"its update of a block has failed: {type(error).__name__}: {error}")
                raise
            runtime.post(lambda _node, _now: done())

        runtime.computing.run(run)


def _floats(value: Buffer, dtype: np.dtype[np.generic]) -> Floats:
    return cast("Floats", np.frombuffer(value, dtype))
