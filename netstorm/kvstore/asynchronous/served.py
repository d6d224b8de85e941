"""A key of which this rank owns some blocks, or keeps them until their new owner has them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from netstorm.errors import Disagreement, NetStormError
from netstorm.kvstore.asynchronous.block import Block
from netstorm.kvstore.asynchronous.block_store import BlockStore
from netstorm.kvstore.asynchronous.owners import chunks_of, extent
from netstorm.kvstore.values.key import Key
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import AsynchronousMessage as Routed
from netstorm.protocol.messages import Push

__all__ = ["Actions", "Served"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What the parts of an owner may have done."""

    send: Callable[[int, Routed, Buffer | None], None]
    """Sends a message (with an empty path) and a payload to a rank, which may be this one."""
    end_job: Callable[[NetStormError], None]
    """Fails the whole job."""
    call: Callable[[Callable[[], None]], None]
    """Calls a store."""
    advance: Callable[[Served, Block], None]
    """Goes on with a block."""
    start: Callable[[Served, Block], None]
    """Serves a block whose state is here."""
    on_progress: Callable[[], None]
    """Called after each answer of a store has been handled."""


class Served:
    """The blocks of one key that a store holds.

    Attributes:
        blocks: those that the store holds, or will hold, by number.
        owned: those among them that this rank owns.
        by_chunk: the same by chunk.
    """

    __slots__ = ("blocks", "by_chunk", "key", "owned", "store")

    def __init__(self, key: Key, store: BlockStore) -> None:
        """Begin without blocks."""
        self.key: Final = key
        self.store: Final = store
        self.blocks: Final[dict[int, Block]] = {}
        self.owned: list[Block] = []
        self.by_chunk: dict[int, Block] = {}

    def own(self, numbers: Iterable[int], ranks: int, *, installed: bool, later: Iterable[int] = ()) -> None:
        """Own these blocks from now on. New ones are `installed` in the store already, or will be; ranks that
        have joined `later` count their pushes from those of the others.
        """
        for number in [number for number, block in self.blocks.items() if not block.installed]:
            del self.blocks[number]  # its state has not come
        self.owned = []
        for number in numbers:
            if number not in self.blocks:
                chunks = chunks_of(self.key, number, whole=self.store.whole)
                block = self.blocks[number] = Block(self.key, number, chunks, ranks)
                block.installed = block.serving = installed
                for rank in later:
                    block.forget(rank)
            self.owned.append(self.blocks[number])
        self._find_chunks()

    def renew(self, block: Block) -> Block:
        """Return a new block in place of one whose store is still busy with an earlier state of it."""
        new = Block(self.key, block.number, block.chunks, len(block.applied))
        new.serving = False
        new.early.update(block.early)
        new.pulls.extend(block.pulls)
        self.blocks[block.number] = new
        self.owned = [new if one is block else one for one in self.owned]
        self._find_chunks()
        return new

    def nbytes(self, number: int) -> int:
        """Return how many bytes the values of a block have."""
        chunks = chunks_of(self.key, number, whole=self.store.whole)
        start, end = extent(self.key, chunks[0])[0], extent(self.key, chunks[-1])[1]
        return (end - start) * self.key.dtype.itemsize

    def disagreement(self, push: Push, rank: int, owner: int) -> Disagreement | None:
        """Return the error if a rank pushes for another update rule than this one, an owner, has."""
        if push.rule == self.store.rule:
            return None
        return Disagreement(
            f"key {self.key.name!r}: rank {rank} pushes for {push.rule!r}, and rank {owner}, an owner of it, "
            f"updates with {self.store.rule!r}: every rank must use the same optimizer and hyper-parameters"
        )

    def _find_chunks(self) -> None:
        self.by_chunk = {chunk: block for block in self.owned for chunk in block.chunks}
