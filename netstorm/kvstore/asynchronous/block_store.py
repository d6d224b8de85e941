"""What an owner needs of a frontend: the values of its blocks, and their update rule. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from netstorm.kvstore.asynchronous.gradients import Gradient
from netstorm.protocol.frames import Buffer

__all__ = ["BlockStore", "read_both"]


class BlockStore(Protocol):
    """Stores the values of the blocks of one key that this rank owns. Its methods must not block.

    Each `done` is called later, on the machine's thread.
    """

    @property
    def rule(self) -> str:
        """Fingerprint of the update rule."""

    @property
    def whole(self) -> bool:
        """Whether the rule needs whole tensors."""

    @property
    def begins_with_states(self) -> bool:
        """Whether a checkpoint was loaded: a rank that joins later must get its states of all blocks from
        others, also of those that nobody has pushed.
        """

    def apply(
        self,
        block: int,
        rank: int,
        gradient: Gradient,
        live: tuple[float, ...],
        done: Callable[[], None],
    ) -> None:
        """Update a block with a gradient of a rank, which is the store's until it calls `done`."""

    def read(self, block: int, done: Callable[[Buffer], None]) -> None:
        """Give `done` a copy of a block's value, which does not change later."""

    def pulled(self, block: int, rank: int, value: Buffer) -> None:
        """Hear that a rank gets a value that was read: what it pushes next belongs to that one."""

    def states(self, block: int, done: Callable[[bytes], None]) -> None:
        """Give `done` the update rule's states of a block, after the updates that have been requested."""

    def check(self, block: int, states: bytes, done: Callable[[str], None]) -> None:
        """Tell `done` why `install` could not take these states of a block, which another rank has sent, and
        what it expects; empty: it can.
        """

    def install(self, block: int, values: Buffer | None, states: bytes) -> None:
        """Begin to hold a block with these values, or the initial ones (None), and what `states` gave of it.

        In an elastic job any block may come, at any time; what the store held of it before is gone.
        """

    def discard(self, block: int) -> None:
        """Hold a block no longer: it is another rank's now."""


def read_both(
    store: BlockStore,
    block: int,
    done: Callable[[Buffer, bytes], None],
    call: Callable[[Callable[[], None]], None],
) -> None:
    """Give `done` a copy of a block's value, and its states. Nothing may be applied to it meanwhile; `call`
    calls the store.
    """

    def read(values: Buffer) -> None:
        call(lambda: store.states(block, lambda states: done(values, states)))

    call(lambda: store.read(block, read))
