"""One block at its owner: pushes that wait to be applied, in order, and pulls that wait for them. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from netstorm.compression.sparse import Numbers, Rows, joined_rows
from netstorm.errors import Disagreement, ProtocolViolation
from netstorm.kvstore.forms import Array, Dense, Form, Key, Quantised, RowParts, RowSparse, Values
from netstorm.kvstore.operations import Outbox
from netstorm.kvstore.paths.routes import RoutedOutbox, queue_order
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import (
    Applied,
    BlockCopy,
    CopyKept,
    CopyMessage,
    CopyReleased,
    CopyWanted,
    HeldClocks,
    Pull,
    PullRows,
    PullStates,
    Push,
    States,
    Tick,
    Value,
)
from netstorm.protocol.messages import AsynchronousMessage as Routed
from netstorm.pslite.machine import Call, Charge, Order
from netstorm.topology.policy import Policy, interleave

__all__ = [
    "MOST_COUNTED",
    "Answer",
    "AsynchronousOutbox",
    "Block",
    "BlockCopies",
    "BlockState",
    "BlockStore",
    "Clocks",
    "EarlyMessage",
    "Gradient",
    "Owners",
    "Place",
    "Served",
    "Staleness",
    "ToOwner",
    "WaitingPull",
    "about",
    "as_dense",
    "block_extent",
    "check_counts",
    "check_push",
    "chunks_of",
    "extent",
    "form_of",
    "has_whole_rows",
    "payload_of",
    "pieces_of",
    "requested_rows",
    "states_for",
    "values_for",
    "wants_states",
]


_LEFT: Final = -2
"""Stands for a rank whose process has left while its push was being applied."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitingPull:
    """A pull that has not been answered for a block."""

    rank: int
    pull: Pull | PullRows | PullStates
    rows: Numbers | None = None
    """The rows of `chunk` to send; None: all of the block."""
    chunk: int = 0
    charge: Charge | None = None
    """What it counts, if it has to wait for updates."""


class Block:
    """The queues of one block; its value is in the block store.

    Pushes of one rank are applied in the order in which the rank made them, in whatever order parts come.
    In an elastic job a push is confirmed, and a value sent, once the block's replica has the state.
    """

    __slots__ = (
        "_arrived",
        "_assembling",
        "ahead",
        "applied",
        "begins",
        "being_applied",
        "busy",
        "chunks",
        "early",
        "installed",
        "key",
        "number",
        "pulls",
        "queue",
        "serving",
        "shipped",
        "shown",
        "snapshot",
        "unconfirmed",
        "version",
        "wanted_by",
    )

    def __init__(self, key: Key, number: int, chunks: range, ranks: int) -> None:
        self.key: Final = key
        self.number: Final = number
        """That of its first chunk."""
        self.chunks: Final = chunks
        self.version = 0
        """How many pushes are in the value."""
        self.applied: Final = [0] * ranks
        """The same by rank, of its present process."""
        self.begins: Final = [0] * ranks
        """By rank: what its pushes are counted from where staleness is bounded; -1: it has not pushed yet."""
        self.queue: Final[deque[tuple[int, GradientAssembly]]] = deque()
        """Complete pushes to be applied, with their ranks."""
        self.pulls: list[WaitingPull] = []
        self.busy = False
        """The store has been asked for something."""
        self.being_applied = -1
        """The rank whose push the store has been asked to apply."""
        self.snapshot: Buffer | None = None
        """A copy of the value that pulls may have."""
        self.serving = True
        """This rank answers for the block; otherwise it only keeps its state, or waits for it."""
        self.installed = True
        """The store holds it."""
        self.early: dict[tuple[int, int, int], EarlyMessage] = {}
        """Parts that have come before the state was here, by rank, push and chunk."""
        self.ahead: Final[dict[tuple[int, int], list[Charge]]] = {}
        """What pushes after the next one count, by rank and push."""
        self.shown: tuple[int, tuple[int, ...]] = (0, (0,) * ranks)
        """`version` and `applied` of the state that the replica has."""
        self.shipped: BlockState | None = None
        """What is on its way to the replica."""
        self.unconfirmed: Final[list[tuple[int, int, Applied]]] = []
        """Pushes that the replica does not have: the version that they are in, the rank, and the message."""
        self.wanted_by: Final[set[int]] = set()
        """Ranks that wait for the state: the block is theirs now."""
        self._arrived = [0] * ranks
        self._assembling: dict[tuple[int, int], GradientAssembly] = {}

    @property
    def place(self) -> tuple[int, int]:
        """The key's number, and the block's."""
        return self.key.identity, self.number

    @property
    def version_soon(self) -> int:
        """How many pushes are in the value once the store has done what it has been asked for.

        So much of it is announced at a change of owners. Another rank may have the same version without the
        push that is being applied; if it went on from that one, two values would have one version.
        """
        return self.version + (self.being_applied != -1)

    def add_part(self, rank: int, push: Push, payload: Buffer | None) -> bool:
        """Add a part of a push; return False if it was here before."""
        if push.number < self._arrived[rank]:
            return False
        owner = (rank, push.number)
        assembly = self._assembling.get(owner)
        if assembly is None:
            assembly = self._assembling[owner] = GradientAssembly(push, self.key, self.chunks)
        if not assembly.add(push, payload):
            return False
        while (following := self._assembling.get((rank, self._arrived[rank]))) and following.complete:
            del self._assembling[rank, self._arrived[rank]]
            self._arrived[rank] += 1
            self.queue.append((rank, following))
        return True

    def arrived(self, rank: int) -> int:
        """Return how many pushes of a rank have come, without gaps."""
        return self._arrived[rank]

    def next_to_apply(self, rank: int) -> int:
        """Return the number of a rank's next push that the store has not been asked to apply."""
        return self.applied[rank] + (self.being_applied == rank)

    def others(self, rank: int) -> int:
        """Return how many updates by other ranks are in the value."""
        return self.version - self.applied[rank]

    def others_shown(self, rank: int) -> int:
        """Return the same of the value that pulls get."""
        version, applied = self.shown
        return version - applied[rank] if version else self.others(rank)

    def pushes_of(self, rank: int, applied: Sequence[int]) -> int | None:
        """Return how many pushes of a rank count where staleness is bounded, of those that are `applied`;
        None: its process has joined later, and has not pushed yet.
        """
        return None if self.begins[rank] < 0 else self.begins[rank] + applied[rank]

    def interrupt(self) -> None:
        """Drop what waits: those who have sent it send it again. What the store is doing goes on."""
        self.queue.clear()
        self.pulls.clear()
        self.early.clear()
        self.unconfirmed.clear()
        self.wanted_by.clear()
        self._assembling.clear()
        self.shipped = None
        self.snapshot = None
        self.shown = (0, (0,) * len(self.applied))
        for rank, applied in enumerate(self.applied):
            self._arrived[rank] = applied + (rank == self.being_applied)

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left: another one counts from 0."""
        self.applied[rank] = self._arrived[rank] = 0
        self.begins[rank] = -1
        if self.being_applied == rank:
            self.being_applied = _LEFT

    def take(self, state: BlockState) -> None:
        """Go on from a state of another process."""
        self.version = state.version
        self.applied[:] = self._arrived[:] = state.applied
        self.begins[:] = state.begins

    def state(self, values: Buffer, states: bytes) -> BlockState:
        """Return the present state."""
        return BlockState(
            version=self.version,
            applied=list(self.applied),
            begins=list(self.begins),
            values=values,
            states=states,
        )


# Which rank owns which block of a key, in asynchronous training. Pure; the same on every node.
#
# A block is the unit of an update: a chunk, or a whole key if the update rule needs whole tensors (a norm).
# Chunks are spread, so that all owners receive and update a large key at once. If keys were spread, every
# rank would wait for the owner of the largest key.
#
# A push may carry single rows of a key, so no row is divided among owners: a row belongs to the chunk in
# which it begins.
#
# In an elastic job a block also has a *replica*: the rank that keeps a copy, and owns the block if the owner
# is lost. Both follow from who is in the job, so every node finds the same ones.


class Owners:
    """Maps blocks to ranks, in proportion to the weights that the scheduler fixed for the job.

    Attributes:
        ranks: that own blocks now.
    """

    def __init__(self, weights: Sequence[int], eligible: Iterable[int] | None = None) -> None:
        """Begin with these ranks; None: all."""
        self._replicated: Final = eligible is not None
        ranks = [rank for rank, weight in enumerate(weights) if weight > 0]
        self._all: Final = tuple(ranks[index] for index in interleave([weights[rank] for rank in ranks]))
        """An owner for each slot, if all ranks are here."""
        self.ranks: tuple[int, ...] = ()
        self._two: tuple[tuple[int, int | None], ...] = ()
        """Owner and replica, by slot."""
        self.change(ranks if eligible is None else eligible)

    def change(self, eligible: Iterable[int]) -> None:
        """Record which ranks are in the job, and may own blocks.

        Those of a rank that is not are its successor's: the next one in the order of slots. A rank that comes
        back has the same blocks again.
        """
        here = set(eligible)
        order = self._all if here & set(self._all) else tuple(sorted(here))  # else those without a weight
        self.ranks = tuple(sorted(here & set(order)))
        self._two = tuple(_next_two([rank if rank in here else None for rank in order]))

    def of_slot(self, slot: int) -> int:
        """Return the owner of the block whose first chunk has this slot."""
        return self._two[slot % len(self._two)][0]

    def replica(self, key: Key, block: int) -> int | None:
        """Return the rank that keeps a copy of a block; None: there is no second rank."""
        return self._two[_owner_slot(key, block) % len(self._two)][1]

    def waited_for(self, key: Key, blocks: Collection[int]) -> str:
        """Return for whom an operation on some blocks waits, for a person. In an elastic job owners wait for
        replicas themselves.
        """
        text = f"their owners, ranks {sorted({self.owner(key, block) for block in blocks})}"
        replicas = {self.replica(key, block) for block in blocks} if self._replicated else set()
        found = sorted(rank for rank in replicas if rank is not None)
        return f"{text}, which may wait for ranks {found} to confirm copies" if found else text

    def blocks(self, key: Key, *, whole: bool) -> list[int]:
        """Return the first chunks of a key's blocks."""
        chunks = _chunks(key)
        return list(range(min(1, chunks) if whole else chunks))

    def blocks_of(self, rank: int, key: Key, *, whole: bool) -> list[int]:
        """Return the blocks of a key that a rank owns."""
        return [block for block in self.blocks(key, whole=whole) if self.owner(key, block) == rank]

    def owner(self, key: Key, block: int) -> int:
        """Return the owner of a block, which is given by its first chunk."""
        return self.of_slot(_owner_slot(key, block))

    def count(self, key: Key, *, whole: bool) -> Counter[int]:
        """Return how many blocks of a key each owner has."""
        return Counter(self.owner(key, block) for block in self.blocks(key, whole=whole))


def _next_two(order: Sequence[int | None]) -> list[tuple[int, int | None]]:
    """Return for each place of a circle the next two ranks from there on; None: there is no second one.

    Args:
        order: the ranks around the circle; None: nobody, at this place.
    """
    first, second = None, None
    two = []
    for rank in (*reversed(order), *reversed(order)):  # the second time around, both are known
        if rank is not None and rank != first:
            first, second = rank, first
        two.append((first, second))
    return [(first, second) for first, second in reversed(two[len(order) :]) if first is not None]


def _owner_slot(key: Key, block: int) -> int:
    """Return the slot of a block among owners.

    It is its chunk's slot among trees, but keys in the first chunk of the job's bytes have one each, by their
    number, as GeoMX's MultiGPS spreads small tensors: one owner would have all of a small model (ADR 4).
    """
    assert key.layout is not None
    slot = key.layout.slots[block]
    return key.identity if slot == 0 and key.layout.chunks == 1 else slot


def chunks_of(key: Key, block: int, *, whole: bool) -> range:
    """Return the chunks of a block."""
    return range(_chunks(key)) if whole else range(block, block + 1)


def extent(key: Key, chunk: int) -> tuple[int, int]:
    """Return the first element, and the end, of a chunk at its owner."""
    assert key.layout is not None
    start, end = key.layout.bounds[chunk]
    if not has_whole_rows(key):
        return start, end
    length = key.row_length
    return -(-start // length) * length, -(-end // length) * length


def block_extent(key: Key, block: int, *, whole: bool) -> slice:
    """Return where a block's values are in its key's."""
    chunks = chunks_of(key, block, whole=whole)
    return slice(extent(key, chunks[0])[0], extent(key, chunks[-1])[1])


def has_whole_rows(key: Key) -> bool:
    """Return whether each row has one owner. Rows longer than a chunk are divided like any values."""
    layout = key.layout
    assert layout is not None
    return layout.chunks > 0 and key.row_length <= layout.bounds[0][1]


def _chunks(key: Key) -> int:
    """Return how many chunks of a key have owners: not the last one, if no row begins in it."""
    assert key.layout is not None
    chunks = key.layout.chunks
    if chunks:
        start, end = extent(key, chunks - 1)
        return chunks - (start == end)
    return 0


# The content of a push to owners: all values of a chunk, quantised ones, or some rows.
#
# It has the forms of sums: a push is a sum over one rank.

Gradient: TypeAlias = Array | Rows
"""The gradient of a block: a value for each element, flat, or some of its rows."""

_ONE: Final = 1
"""Bit set of a single contributor."""


def form_of(key: Key, codec: int, threshold: float = 0.0) -> Form | None:
    """Return the form of a push; None: this key has no such codec.

    Args:
        key: what is pushed to.
        codec: the form's number.
        threshold: the value of a quantised 1.
    """
    if codec == Quantised.codec and codec in key.forms:
        return Quantised(threshold) if threshold > 0 and math.isfinite(threshold) else None
    if codec == RowSparse.codec and not has_whole_rows(key):
        return None
    return key.forms.get(codec)


def payload_of(form: Form, source: Values, start: int, end: int) -> Buffer | None:
    """Return the payload for these elements; None: zeros. It may be the user's memory."""
    total = form.new_sum()
    total.add_own(form.own(source, start, end), _ONE)
    return total.to_send()


def as_dense(rows: Rows, key: Key) -> Array:
    """Return rows as a dense array of all elements of a key."""
    values: Array = np.zeros(key.elements, key.dtype)
    values.reshape(-1, key.row_length)[rows.numbers] = rows.values
    return values


def check_push(push: Push, payload: Buffer | None, key: Key) -> None:
    """Check a part of a push of a chunk that has an owner.

    Raises:
        ProtocolViolation: no correct node sends it.
    """
    start, end = extent(key, push.chunk)
    form = form_of(key, push.codec, push.threshold)
    if push.number < 0 or push.dtype != key.spec.dtype or form is None:
        problem: str | None = f"is of {push.dtype} in codec {push.codec}; the key is {key.spec.dtype}"
    elif not 0 <= push.begin <= MOST_COUNTED:
        problem = f"counts pushes from {push.begin} on: expected 0 to {MOST_COUNTED}"
    elif not 0 <= push.confirmed <= push.number:
        problem = f"comes after {push.confirmed} that were confirmed: expected 0 to {push.number}"
    elif payload is None:
        problem = "has no values" if push.codec == Dense.codec else None
    else:
        problem = form.problem(payload, end - start, _ONE)
    if problem is not None:
        raise ProtocolViolation(f"push {push.number} of chunk {push.chunk} of key {key.name!r} {problem}")


class GradientAssembly:
    """The gradient of one block, as the parts of a push come in."""

    __slots__ = ("_chunks", "_key", "_missing", "_parts", "_values", "push")

    def __init__(self, push: Push, key: Key, chunks: range) -> None:
        self.push: Final = push
        """One of its parts."""
        self._key: Final = key
        self._chunks: Final = chunks
        self._missing = set(chunks)
        self._values: Array | None = None
        self._parts: RowParts = []

    @property
    def complete(self) -> bool:
        """Whether all parts are here."""
        return not self._missing

    @property
    def gradient(self) -> Gradient:
        """The gradient, once it is complete."""
        if self._values is not None:
            return self._values
        return joined_rows(self._parts, self._key.row_length, self._key.dtype)

    def add(self, push: Push, payload: Buffer | None) -> bool:
        """Add a part that has passed `check_push`; return False if it was here before.

        Raises:
            ProtocolViolation: it has another codec than the other parts.
        """
        key, chunk = self._key, push.chunk
        if chunk not in self._missing:
            return False
        form = form_of(key, push.codec, push.threshold)
        if form is None or push.codec != self.push.codec:
            raise ProtocolViolation(f"push {push.number} of key {key.name!r} has parts of several codecs")
        self._missing.remove(chunk)
        if push.codec == Dense.codec and len(self._chunks) == 1:
            assert payload is not None
            self._values = np.frombuffer(payload, key.dtype)  # not copied: it is ours
            return True
        first = extent(key, self._chunks[0])[0]
        start, end = extent(key, chunk)
        if push.codec == RowSparse.codec:
            form.write(self._parts, start - first, end - first, payload, _ONE)
            return True
        if self._values is None:
            self._values = np.empty(extent(key, self._chunks[-1])[1] - first, key.dtype)
        form.write(self._values, start - first, end - first, payload, _ONE)
        return True


# The clock of each rank, as an owner knows it (stale synchronous parallel; MLNET, HotCloud'15).
#
# A clock of a rank has ended at an owner once all that the rank pushed in it has been applied there. A tick
# carries the number of those pushes, since it may overtake them on the network. In an elastic job, where
# blocks change owners, a rank sends it once its pushes have been confirmed, and none need to be counted.
#
# A process that joins later counts its clocks from the slowest one of the others, which owners tell it. Until
# its first clock has ended, nobody waits for it.

MOST_COUNTED: Final = 2**53
"""Clocks, or pushes: more than any job makes. Messages carry sums of such numbers, of at most 64 bits."""


class Clocks:
    """The clocks of one store, by rank."""

    def __init__(self, ranks: int) -> None:
        self._ended: Final = [0] * ranks
        """-1: a process that has joined later, and has not ended a clock."""
        self._applied: Final[list[dict[int, int]]] = [{} for _ in range(ranks)]
        self._expected: Final[list[dict[int, int]]] = [{} for _ in range(ranks)]

    @property
    def ended_by_rank(self) -> tuple[int, ...]:
        """How many clocks of each rank have ended; -1: see `forget`."""
        return tuple(self._ended)

    def applied(self, rank: int, clock: int) -> bool:
        """Count an applied push of a rank's clock; return whether that ends a clock."""
        counts = self._applied[rank]
        counts[clock] = counts.get(clock, 0) + 1
        return self._advance(rank)

    def ended(self, rank: int, clock: int, pushed: int) -> bool:
        """Record that a rank's clock is `clock` now, after `pushed` pushes in the one before. Return whether
        that ends a clock.
        """
        if clock <= self._ended[rank]:  # known already
            return False
        self._expected[rank][clock - 1] = pushed
        return self._advance(rank)

    def reached(self, rank: int, clock: int) -> bool:
        """Record that `clock` clocks of a rank have ended, with all their pushes; return whether that is
        news.
        """
        if clock <= self._ended[rank]:
            return False
        self._ended[rank] = clock
        return True

    def merge(self, ended: Sequence[int]) -> None:
        """Take over what another rank has heard, where that is more."""
        for rank, clocks in enumerate(ended):
            self._ended[rank] = max(clocks, self._ended[rank])

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left, or that it has joined later: nobody waits for it."""
        self._ended[rank] = -1
        self._applied[rank].clear()
        self._expected[rank].clear()

    def slowest(self, ranks: Iterable[int]) -> int | None:
        """Return the least number of ended clocks of some ranks, without those that have just joined; None of
        none.
        """
        return min((self._ended[rank] for rank in ranks if self._ended[rank] >= 0), default=None)

    def of(self, rank: int) -> int:
        """Return how many clocks of a rank have ended."""
        return self._ended[rank]

    def _advance(self, rank: int) -> bool:
        began, expected, applied = self._ended[rank], self._expected[rank], self._applied[rank]
        while True:
            clock = self._ended[rank]
            if clock not in expected or applied.get(clock, 0) < expected[clock]:
                return clock > began
            del expected[clock]
            applied.pop(clock, None)
            self._ended[rank] += 1


def check_counts(*counts: int) -> None:
    """Check counts of pushes or clocks that another rank has sent; -1 stands for none.

    Raises:
        ProtocolViolation: one is out of range.
    """
    for count in counts:
        if not -1 <= count <= MOST_COUNTED:
            raise ProtocolViolation(f"a count of {count} pushes or clocks: expected at most {MOST_COUNTED}")


# What an owner needs of a frontend: the values of its blocks, and their update rule.


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
        done: Callable[[Buffer | None], None],
        *,
        reads: bool = False,
    ) -> None:
        """Update a block with a gradient of a rank, which is the store's until it calls `done`: with what
        `read` gives, if it `reads`, else with None.
        """

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


# A key of which this rank owns some blocks, or keeps them until their new owner has them.


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


# States of blocks as bytes: what a rank keeps for owners, and how a state travels.
#
# An owner ships a block's state, not the pushes that led to it. Rules may give other results when a push is
# replayed (random draws, counts of all updates, a user's function), and of N ranks N gradients would travel.

_AboutCopy = TypeVar("_AboutCopy", CopyKept, CopyReleased, CopyWanted)

_PIECE_BYTES: Final = 2**20
"""Size of a piece: far less than the largest message."""

_MOST_STATES: Final = 16
"""Bytes of a rule's states for a byte of values, at most: five arrays of float32 for float16..."""
_STATES_BESIDE: Final = 2**20
"""... and what does not grow with the values."""

Place = tuple[int, int]
"""A key's number, and the block's."""


@dataclass(slots=True, kw_only=True)
class BlockState:
    """A block's values, the state of its update rule, and which pushes are in both."""

    version: int
    """Number of pushes."""
    applied: list[int]
    """Those of each rank's present process."""
    begins: list[int]
    """See `BlockCopy.begins`."""
    values: Buffer
    states: bytes
    sender: int = -1
    """The rank that it has come from; -1: it is this rank's own."""

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left: another one counts from 0."""
        self.applied[rank] = 0
        self.begins[rank] = -1


def pieces_of(state: BlockState, key: int, block: int, *, view: int) -> Iterator[tuple[BlockCopy, Buffer]]:
    """Yield the messages, with an empty path, and payloads that carry a state."""
    whole = b"".join((memoryview(state.values).cast("B"), state.states))
    pieces = max(1, -(-len(whole) // _PIECE_BYTES))
    for piece in range(pieces):
        message = BlockCopy(
            path=(),
            hop=0,
            key=key,
            block=block,
            version=state.version,
            view=view,
            piece=piece,
            pieces=pieces,
            values=memoryview(state.values).nbytes,
            applied=tuple(state.applied),
            begins=tuple(state.begins),
        )
        yield message, memoryview(whole)[piece * _PIECE_BYTES : (piece + 1) * _PIECE_BYTES]


def about(kind: type[_AboutCopy], place: Place, version: int, view: int) -> _AboutCopy:
    """Return a message, with an empty path, about a version of a block."""
    return kind(path=(), hop=0, key=place[0], block=place[1], version=version, view=view)


@dataclass(slots=True)
class _Arriving:
    first: BlockCopy
    pieces: dict[int, bytes] = field(default_factory=dict)


class BlockCopies:
    """The states that this rank keeps of blocks which others own, and those that are on their way here.

    Attributes:
        ranks: of the job.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks: Final = ranks
        self._kept: Final[dict[Place, BlockState]] = {}
        self._arriving: Final[dict[Place, _Arriving]] = {}

    def kept(self) -> Iterator[tuple[Place, BlockState]]:
        """Yield what is kept."""
        yield from self._kept.items()

    def get(self, place: Place) -> BlockState | None:
        """Return what is kept of a block."""
        return self._kept.get(place)

    def keep(self, place: Place, state: BlockState) -> None:
        """Keep a state in place of an earlier one."""
        self._kept[place] = state

    def drop(self, place: Place) -> None:
        """Keep a block's state no longer."""
        self._kept.pop(place, None)

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left."""
        for state in self._kept.values():
            state.forget(rank)

    def interrupt(self, place: Place | None = None) -> None:
        """Drop what has arrived in part, of one block or all: it will be sent again, or something later."""
        if place is None:
            self._arriving.clear()
        else:
            self._arriving.pop(place, None)

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._arriving.clear()

    def add(self, rank: int, message: BlockCopy, payload: Buffer | None, nbytes: int) -> BlockState | None:
        """Add a piece, from a rank, of the state of a block whose values have `nbytes`; return the state once
        it is whole.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        self._check(message, nbytes)
        data = b"" if payload is None else bytes(payload)
        if len(data) > _PIECE_BYTES:
            raise ProtocolViolation(
                f"piece {message.piece} of {_name(message)} has {len(data)} bytes: expected at most "
                f"{_PIECE_BYTES}"
            )
        place = message.key, message.block
        found = self._arriving.get(place)
        if found is None or found.first.version < message.version:
            found = self._arriving[place] = _Arriving(message)
        first = found.first
        if message.version < first.version:
            return None  # a later one has overtaken it
        if (message.pieces, message.applied, message.begins) != (first.pieces, first.applied, first.begins):
            raise ProtocolViolation(
                f"piece {message.piece} of {_name(message)} is one of {message.pieces} with pushes "
                f"{message.applied} from {message.begins} on: expected {first.pieces}, {first.applied} and "
                f"{first.begins}, as with the first that came"
            )
        found.pieces[message.piece] = data
        if len(found.pieces) < message.pieces:
            return None
        del self._arriving[place]
        whole = b"".join(found.pieces[piece] for piece in range(message.pieces))
        if len(whole) < nbytes:
            raise ProtocolViolation(
                f"{_name(message)} has {len(whole)} bytes: its values alone have {nbytes}"
            )
        return BlockState(
            version=message.version,
            applied=list(message.applied),
            begins=list(message.begins),
            values=memoryview(whole)[:nbytes],
            states=whole[nbytes:],
            sender=rank,
        )

    def _check(self, message: BlockCopy, nbytes: int) -> None:
        """Check the numbers in a message.

        Raises:
            ProtocolViolation: one of them is not what a correct node sends.
        """
        most = max(1, -(-(nbytes + _MOST_STATES * nbytes + _STATES_BESIDE) // _PIECE_BYTES))
        problem = ""
        if message.values != nbytes:
            problem = f"{message.values} bytes of values: the block has {nbytes}"
        elif not 0 < message.version <= MOST_COUNTED:
            problem = f"that version: expected one from 1 to {MOST_COUNTED}"
        elif not 0 <= message.piece < message.pieces <= most:
            problem = f"piece {message.piece} of {message.pieces}: expected at most {most}, counted from 0"
        elif len(message.applied) != self.ranks or len(message.begins) != self.ranks:
            problem = (
                f"counts of {len(message.applied)} and {len(message.begins)} ranks: the job has {self.ranks}"
            )
        elif min(message.applied) < 0 or sum(message.applied) > message.version:
            problem = f"pushes {message.applied} of each rank: expected counts, and no more than the version"
        elif not -1 <= min(message.begins) <= max(message.begins) <= MOST_COUNTED:
            problem = f"pushes counted from {message.begins}: expected numbers from -1 to {MOST_COUNTED}"
        if problem:
            raise ProtocolViolation(f"{_name(message)} comes with {problem}")


def _name(message: BlockCopy) -> str:
    return f"version {message.version} of block {message.block} of key {message.key}"


# An owner's answers to pulls: values, rows, or the states of its update rule.

Answer = tuple[int, Value | States, Buffer]
"""The receiver's rank, a message with an empty path, and its payload."""


def wants_states(waiting: WaitingPull) -> bool:
    """Return whether a pull asks for states, not for values."""
    return isinstance(waiting.pull, PullStates)


def requested_rows(pull: PullRows, payload: Buffer | None, key: Key) -> np.typing.NDArray[np.int64]:
    """Return which rows of a chunk a pull asks for.

    Raises:
        ProtocolViolation: no correct node asks for these.
    """
    size = 0 if payload is None else memoryview(payload).nbytes
    assert key.layout is not None
    if (
        payload is not None
        and size
        and size % 4 == 0
        and 0 <= pull.chunk < key.layout.chunks
        and has_whole_rows(key)
    ):
        numbers = np.frombuffer(payload, "<u4").astype(np.int64)
        start, end = extent(key, pull.chunk)
        if (numbers[1:] > numbers[:-1]).all() and numbers[-1] < (end - start) // key.row_length:
            return numbers
    raise ProtocolViolation(
        f"a pull of rows of chunk {pull.chunk} of key {key.name!r} that the chunk does not have"
    )


def values_for(block: Block, ready: Iterable[WaitingPull], staleness: Staleness) -> Iterator[Answer]:
    """Yield the answers to the pulls that wait for the value in `block.snapshot`."""
    key = block.key
    assert block.snapshot is not None
    value = np.frombuffer(block.snapshot, key.dtype)
    first = extent(key, block.chunks[0])[0]
    for waiting in ready:
        slowest, clock = staleness.slowest(block, waiting.rank)
        for chunk in block.chunks if waiting.rows is None else (waiting.chunk,):
            start, end = extent(key, chunk)
            part = value[start - first : end - first]
            if waiting.rows is not None:
                part = part.reshape(-1, key.row_length)[waiting.rows].reshape(-1)
            message = Value(
                path=(),
                hop=0,
                key=key.identity,
                chunk=chunk,
                number=waiting.pull.number,
                others=block.others_shown(waiting.rank),
                dtype=key.spec.dtype,
                priority=waiting.pull.priority,
                slowest=slowest,
                clock=clock,
            )
            yield waiting.rank, message, part


def states_for(block: Block, ready: Iterable[WaitingPull], values: Buffer, states: bytes) -> Iterator[Answer]:
    """Yield the answers to the pulls that wait for the states of a block; `values` belong to them."""
    both = b"".join((memoryview(values).cast("B"), states))
    for waiting in ready:
        whole = both if isinstance(waiting.pull, PullStates) and waiting.pull.with_values else states
        pieces = max(1, -(-len(whole) // _PIECE_BYTES))
        for piece in range(pieces):
            message = States(
                path=(),
                hop=0,
                key=block.key.identity,
                block=block.number,
                number=waiting.pull.number,
                piece=piece,
                pieces=pieces,
                priority=waiting.pull.priority,
            )
            yield waiting.rank, message, whole[piece * _PIECE_BYTES : (piece + 1) * _PIECE_BYTES]


# How far ranks are, as an owner knows it, and whether a pull must wait for the slowest of them.
#
# Bounded staleness is that of stale synchronous parallel training (MLNET, HotCloud'15). Clocks are those that
# scripts count, or else each push of a key is one.

_MOST_STORES: Final = 4096
_MOST_AHEAD: Final = 65_536
"""Clocks of one rank that may be under way to an owner: more wait in queues and fill them."""


class Staleness:
    """The ranks that push, and their clocks.

    Attributes:
        newcomers: ranks whose processes have joined later.
    """

    def __init__(self, ranks: int, present: Iterable[int] | None = None) -> None:
        """Begin, in a job of `ranks` ranks. If it is elastic, those that are in it at first are `present`;
        otherwise (None) all are, always.
        """
        self._ranks: Final = ranks
        self._elastic: Final = present is not None
        self._clocks: Final[dict[int, Clocks]] = {}
        """By namespace."""
        self._running: Final = set(range(ranks))
        """Ranks that have not finished."""
        self._present = set(range(ranks) if present is None else present)
        self.newcomers: Final[set[int]] = set()

    @property
    def clocks(self) -> Mapping[int, Clocks]:
        """The clocks of each store, by namespace."""
        return self._clocks

    # ------------------------------------------------------------------------------- ranks that come and go

    def finished(self, rank: int) -> None:
        """Record that a rank pushes no more: it holds up no pull any longer."""
        self._running.discard(rank)

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left the job. Another one with this rank counts from 0."""
        self._running.add(rank)
        self.newcomers.add(rank)
        for clocks in self._clocks.values():
            clocks.forget(rank)

    def change_view(self, members: Iterable[int]) -> None:
        """Record who is in the job."""
        self._present = set(members)

    def merge(self, heard: Iterable[HeldClocks]) -> None:
        """Take over what another rank has heard of clocks.

        Raises:
            ProtocolViolation: it speaks of other ranks than the job has, of no store, or of too many clocks.
        """
        for one in heard:
            if not 0 <= one.namespace < _MOST_STORES or len(one.ended) != self._ranks:
                raise ProtocolViolation(
                    f"clocks of {len(one.ended)} ranks in store {one.namespace}: expected {self._ranks} ranks"
                )
            check_counts(*one.ended)
            self._of(one.namespace).merge(one.ended)

    # -------------------------------------------------------------------------------------------- clocks end

    def tick(self, rank: int, tick: Tick) -> bool:
        """Record that a clock of a rank has ended; return whether all its pushes have been applied.

        Raises:
            ProtocolViolation: it is far from the rank's last one, or of no store.
        """
        clocks = self._clocks.get(tick.namespace)
        ended = 0 if clocks is None else clocks.of(rank)
        far = tick.clock > (MOST_COUNTED if self._elastic else ended + _MOST_AHEAD)
        if not 0 <= tick.namespace < _MOST_STORES or tick.pushed < 0 or tick.clock < 0 or far:
            raise ProtocolViolation(
                f"rank {rank} ends clock {tick.clock} of store {tick.namespace} after {tick.pushed} pushes: "
                f"expected one of {_MOST_STORES} stores, and at most {_MOST_AHEAD} clocks after {ended} "
                f"({MOST_COUNTED} in an elastic job)"
            )
        clocks = self._of(tick.namespace)
        if self._elastic:
            return clocks.reached(rank, tick.clock)
        return clocks.ended(rank, tick.clock, tick.pushed)

    def applied(self, block: Block, rank: int, clock: int) -> bool:
        """Count a push that has been applied; return whether that ends a clock of its rank."""
        return not self._elastic and self._of(block.key.spec.namespace).applied(rank, clock)

    def slowest(self, block: Block, rank: int) -> tuple[int, int]:
        """Return the least number of pushes of a block, and of clocks, of the ranks other than this one."""
        if not self._elastic:
            return 0, 0
        others = self._others(rank)
        counts = (block.pushes_of(other, block.applied) for other in others)
        pushes = min((count for count in counts if count is not None), default=0)
        return pushes, self._of(block.key.spec.namespace).slowest(others) or 0

    def is_fresh_enough(self, block: Block, waiting: WaitingPull, applied: Sequence[int]) -> bool:
        """Return whether a value, in which so many pushes of each rank are, has those of the slowest rank
        that a pull demands.
        """
        rank, pull = waiting.rank, waiting.pull
        if isinstance(pull, PullStates) or pull.least <= 0:
            return True
        others = self._others(rank)
        if pull.counted:
            slowest = self._of(block.key.spec.namespace).slowest(others)
        else:
            counts = (block.pushes_of(other, applied) for other in others)
            slowest = min((count for count in counts if count is not None), default=None)
        return slowest is None or slowest >= pull.least

    def _others(self, rank: int) -> list[int]:
        """Return the other ranks that are in the job and go on pushing."""
        return [other for other in self._running & self._present if other != rank]

    def _of(self, namespace: int) -> Clocks:
        found = self._clocks.get(namespace)
        if found is None:
            found = self._clocks[namespace] = Clocks(self._ranks)
            for rank in self.newcomers:
                found.forget(rank)
        return found


# Messages: those that wait, and those that this rank sends.

ToOwner: TypeAlias = Push | Pull | PullRows | PullStates | CopyMessage


@dataclass(frozen=True, slots=True)
class EarlyMessage:
    """A message that waits until its key, or its block, is served."""

    rank: int
    """Its sender."""
    message: ToOwner
    payload: Buffer | None
    charge: Charge


class AsynchronousOutbox(RoutedOutbox[Routed]):
    """Takes what one rank sends in asynchronous training, and its calls to stores.

    Attributes:
        view: version of the policy with which the present owners came; 0: the job is not elastic.
        keys: those that have been granted, by number.
    """

    def __init__(self, rank: int, policy: Policy, outbox: Outbox, *, view: int = 0) -> None:
        """Begin with the links of this policy; `outbox` takes instructions."""
        super().__init__(rank, policy, outbox)
        self.view = view
        self.keys: Final[dict[int, Key]] = {}

    def order(self, message: Routed) -> Order:
        """See the base class. Chunks are sent in the order in which the job's bytes are, as far as that is
        known here.
        """
        offset = 0
        if isinstance(message, (Push, Value)) and message.key in self.keys:
            offset = self.keys[message.key].offset_of(message.chunk)
        return queue_order(message, offset)

    def send(self, target: int, message: Routed, payload: Buffer | None = None) -> None:
        """See the base class. The message is of the present view."""
        if message.view != self.view:
            message = msgspec.structs.replace(message, view=self.view)
        super().send(target, message, payload)

    def call(self, function: Callable[[], None]) -> None:
        """Have a store called, soon."""
        self._outbox.add(Call(function=function))
