"""The blocks of one key that this rank owns: when its update rule is asked for what.

A frontend, or the simulated cluster, gives the rule and the thread that it runs on. Only that thread touches
blocks, so calls about a block take effect in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, Protocol, TypeVar

import numpy as np

from netstorm.kvstore.asynchronous.blocks import Gradient, Owners, block_extent
from netstorm.kvstore.forms import Array, Key
from netstorm.kvstore.node import GeneralNode
from netstorm.protocol.frames import Buffer

__all__ = ["BlockRule", "OwnedBlocks", "UpdateThread", "initial_blocks", "serving"]

Values = TypeVar("Values")
"""What a rule keeps a block's values in."""


class BlockRule(Protocol[Values]):
    """The update rule of one key's blocks. The thread for updates calls its methods."""

    @property
    def fingerprint(self) -> str:
        """Names the rule: all ranks must have the same."""

    @property
    def whole(self) -> bool:
        """Whether it needs whole tensors."""

    @property
    def begins_with_states(self) -> bool:
        """Whether a checkpoint was loaded."""

    @property
    def compensates(self) -> bool:
        """Whether it asks on which value a gradient was computed."""

    def begin(self, block: int, values: Array, states: bytes) -> Values:
        """Begin to update a block; return a copy of its values.

        Args:
            block: its number.
            values: flat.
            states: what `encoded_state` has returned at another rank; empty: the rule's own begin.
        """

    def update(
        self, block: int, values: Values, gradient: Gradient, live: tuple[float, ...], base: Array | None
    ) -> None:
        """Update a block in place.

        Args:
            block: its number.
            values: of it.
            gradient: of one rank.
            live: what that rank's script had set: learning rate and such.
            base: the value that the gradient was computed on, for a rule that compensates; None: unknown, so
                there is nothing to correct.
        """

    def read(self, values: Values, then: Callable[[Buffer], None]) -> None:
        """Call `then`, now or later, from any thread, with a copy that has all updates until now."""

    def encoded_state(self, block: int, values: Values) -> bytes:
        """Return what the rule has of a block besides its values."""

    def problem_of(self, block: int, initial: Array, states: bytes) -> str:
        """Return why `begin` could not take these states, and what it expects; empty: it can. `initial` has
        the block's size and type.
        """

    def drop(self, block: int) -> None:
        """Forget a block."""


class UpdateThread(Protocol):
    """Runs updates."""

    def call(self, function: Callable[[], None]) -> None:
        """Call a function after those before. From any thread; does not wait."""

    def post(self, function: Callable[[], None]) -> None:
        """Have the machine's thread call a function. From any thread; does not wait."""


class OwnedBlocks(Generic[Values]):
    """See `netstorm.kvstore.asynchronous.blocks.BlockStore`."""

    def __init__(
        self,
        key: Key,
        rule: BlockRule[Values],
        thread: UpdateThread,
        initial: Mapping[int, Array],
        *,
        elastic: bool,
    ) -> None:
        """Begin, on the thread for updates or before it has been given anything.

        Args:
            key: the blocks are those of its value.
            rule: updates them.
            thread: calls the rule.
            initial: `initial_blocks`; in an elastic job this rank holds none of them yet, they are installed
                later.
            elastic: blocks may come and go.
        """
        self._rule: Final = rule
        self._thread: Final = thread
        self._dtype: Final = key.dtype
        self._initial: Final[Mapping[int, Array]] = initial if elastic or rule.compensates else {}
        """What all ranks began with: for corrections, and for blocks that are installed later."""
        self._blocks: Final[dict[int, Values]] = (
            {} if elastic else {block: rule.begin(block, values, b"") for block, values in initial.items()}
        )
        self._from_initial: Final = set(self._blocks)
        """Blocks that this rank has had from their initial value on."""
        self._pulled: Final[dict[tuple[int, int], Buffer]] = {}
        """What each rank has got last, by block and rank. Ranks that get the same value share it."""

    @property
    def rule(self) -> str:
        """Fingerprint of the update rule."""
        return self._rule.fingerprint

    @property
    def whole(self) -> bool:
        """Whether the rule needs whole tensors."""
        return self._rule.whole

    @property
    def begins_with_states(self) -> bool:
        """Whether a checkpoint was loaded."""
        return self._rule.begins_with_states

    def apply(
        self,
        block: int,
        rank: int,
        gradient: Gradient,
        live: tuple[float, ...],
        done: Callable[[Buffer | None], None],
        *,
        reads: bool = False,
    ) -> None:
        """Have a block updated with a gradient of a rank, and read if its new value is wanted."""
        pulled = self._pulled.get((block, rank))

        def update() -> None:
            base = self._base(block, pulled) if self._rule.compensates else None
            self._rule.update(block, self._blocks[block], gradient, live, base)
            if reads:
                self._read(block, done)
            else:
                self._thread.post(lambda: done(None))

        self._thread.call(update)

    def read(self, block: int, done: Callable[[Buffer], None]) -> None:
        """Give `done` a copy of a block's value, behind the updates that are queued."""
        self._thread.call(lambda: self._read(block, done))

    def pulled(self, block: int, rank: int, value: Buffer) -> None:
        """Keep what a rank gets, if the rule asks for it."""
        if self._rule.compensates:
            self._pulled[block, rank] = value

    def states(self, block: int, done: Callable[[bytes], None]) -> None:
        """Give `done` the rule's state of a block."""

        def encode() -> None:
            states = self._rule.encoded_state(block, self._blocks[block])
            self._thread.post(lambda: done(states))

        self._thread.call(encode)

    def check(self, block: int, states: bytes, done: Callable[[str], None]) -> None:
        """Tell `done` why `install` could not take these states; empty: it can."""

        def compare() -> None:
            problem = self._rule.problem_of(block, self._initial[block], states)
            self._thread.post(lambda: done(problem))

        self._thread.call(compare)

    def install(self, block: int, values: Buffer | None, states: bytes) -> None:
        """Begin to hold a block, with the initial value or another owner's state.

        What ranks have pulled of it is not known then: their next gradients are not corrected.
        """
        self._forget_pulled(block)

        def begin() -> None:
            if values is None:
                value = self._initial[block]
                self._from_initial.add(block)
            else:
                value = np.frombuffer(values, self._dtype)
                self._from_initial.discard(block)
            self._blocks[block] = self._rule.begin(block, value, states)

        self._thread.call(begin)

    def discard(self, block: int) -> None:
        """Hold a block no longer."""
        self._forget_pulled(block)

        def drop() -> None:
            self._rule.drop(block)
            self._blocks.pop(block, None)

        self._thread.call(drop)

    def _read(self, block: int, done: Callable[[Buffer], None]) -> None:
        self._rule.read(self._blocks[block], lambda copy: self._thread.post(lambda: done(copy)))

    def _base(self, block: int, pulled: Buffer | None) -> Array | None:
        """Return the value that a gradient was computed on: as its rank has pulled it, else the initial one.
        Neither is known if another rule, or another owner, was here before.
        """
        if pulled is not None:
            return np.frombuffer(pulled, self._dtype)
        return self._initial.get(block) if block in self._from_initial else None

    def _forget_pulled(self, block: int) -> None:
        for place in [place for place in self._pulled if place[0] == block]:
            del self._pulled[place]


def initial_blocks(
    key: Key, value: Array, owners: Owners, *, rank: int, whole: bool, elastic: bool
) -> dict[int, Array]:
    """Return copies of the blocks of a key's initial value that a rank may hold: its own, or in an elastic
    job all of them.

    Args:
        key: has been granted.
        value: flat.
        owners: of the job.
        rank: this one.
        whole: blocks are whole keys.
        elastic: blocks may come and go.
    """
    blocks: Iterable[int] = owners.blocks(key, whole=whole)
    return {
        block: value[block_extent(key, block, whole=whole)].copy()
        for block in blocks
        if elastic or owners.owner(key, block) == rank
    }


def serving(
    node: GeneralNode, key: Key, value: Array, rule: BlockRule[Values], thread: UpdateThread
) -> Callable[[], None]:
    """Copy the blocks of a key's initial value that this rank may hold, and return what begins to serve them:
    to be called on the thread for updates, or before it has been given anything.

    Args:
        node: this rank's; it has joined the job.
        key: is known to the job.
        value: flat; it must not change before this returns.
        rule: updates the blocks.
        thread: calls the rule.
    """
    elastic, owners = node.live.is_elastic, node.asynchronous.owners
    initial = initial_blocks(key, value, owners, rank=node.rank, whole=rule.whole, elastic=elastic)

    def serve() -> None:
        blocks = OwnedBlocks(key, rule, thread, initial, elastic=elastic)
        thread.post(lambda: node.asynchronous.serve(key, blocks))

    return serve
