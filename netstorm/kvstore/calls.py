"""The collective calls of one process group at one rank, as operations on a few keys. Pure.

The n-th call of a group is the n-th at every member. A call's bytes choose its key, and the key's next round
carries it out. So calls of about the same size follow each other, and others overtake them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol
from zlib import crc32

import msgspec
import numpy as np

from netstorm.compression.codec import AGREED, AnyArray, Codec, Rounds, State
from netstorm.errors import UsageError
from netstorm.kvstore.forms import STORED, Array, Collective, Key, Segments
from netstorm.kvstore.operations import CollectiveCall, Done, Operation
from netstorm.protocol.codecs import (
    COLLECTIVE,
    MOST_BYTES,
    MOST_SEGMENTS,
    Element,
    Reduction,
    Signature,
    can_reduce,
    capacity_of,
)
from netstorm.protocol.frames import bits_of, ranks_in
from netstorm.protocol.messages import LossTerms, Member

__all__ = [
    "Agreed",
    "CallPositions",
    "EncodedSum",
    "GroupCalls",
    "NumberedCalls",
    "Position",
    "RegisterKey",
    "SiteSums",
    "Sites",
    "TensorCalls",
    "TensorExchange",
    "TensorKeys",
    "encoded_keys",
    "run_in_turn",
    "set_memory",
]


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Where the calls of one group are."""

    called: int
    """How many have been made."""
    rounds: dict[int, int]
    """By capacity of a key, or another number that tells it from the others: its next round."""
    agreed: dict[int, list[float]] = {}
    """By key, of the sums that are made by a codec: what that has agreed on (`compression.codec`)."""


class TensorExchange(msgspec.Struct, frozen=True, kw_only=True):
    """What a call does: all members give the same `text`, `reduction`, `element` and `segment_bytes`."""

    text: str
    """Name, types and shapes of the call, as error messages show it."""
    reduction: Reduction
    element: Element
    segment_bytes: int
    source: Segments
    """What this rank contributes to each segment. Must stay unchanged until the call is done."""
    destination: Segments
    """Where each segment's result goes; may be the source's memory."""
    receivers: tuple[int, ...] = ()
    """For each segment: bit set of the members, counted within the group, that want its result. What a member
    has copied for itself needs none. Empty: all want all."""
    priority: int = 0
    loss: LossTerms | None = None
    """The result may be without late contributions; see `Operation.loss`."""


class RegisterKey(Protocol):
    """Makes a key known to the job."""

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: str, /, *, form: int, members: tuple[int, ...]
    ) -> Key:
        """Return the key; `form` is its codec, and `members` are the ranks that have it (none: all)."""


class NumberedCalls:
    """Calls of one group, numbered in the order of the program, and the keys whose rounds carry them out.

    Attributes:
        name: of the group and of what tells these calls from its others; the same at every member.
        members: the group's ranks in the job, by rank within the group.
        called: how many calls have been made.
    """

    def __init__(self, name: str, members: tuple[int, ...], *, size: int, register: RegisterKey) -> None:
        """Begin without calls.

        Args:
            name: begins the names of all keys; the same at every member, and no other group's.
            members: the group's ranks in the job, by rank within the group.
            size: ranks of the job.
            register: registers a key.
        """
        self.name: Final = name
        self._register: Final = register
        self.members: Final = members
        self.called = 0
        self._key_members: Final = () if len(members) == size else tuple(sorted(members))
        self._keys: Final[dict[int, Key]] = {}
        """By what tells a key from the others: see `Position.rounds`."""
        self._first: dict[int, int] = {}
        """Of a key that is not registered yet: its first round here."""

    @property
    def of_all_ranks(self) -> bool:
        """Whether all ranks of the job are members."""
        return not self._key_members

    def position(self) -> Position:
        """Return where the calls are. None may be under way."""
        rounds = self._first | {number: key.last_taken + 1 for number, key in self._keys.items()}
        return Position(self.called, dict(sorted(rounds.items())))

    def go_on_at(self, position: Position) -> None:
        """Go on where another member is: this rank has joined later."""
        self.called = position.called
        self._first = dict(position.rounds)
        for number, key in self._keys.items():
            key.begin_at(position.rounds.get(number, 0))

    def next_rounds(self) -> dict[int, int]:
        """Return the next round of each key that has been granted, by the key's number."""
        return {key.identity: key.last_taken + 1 for key in self._keys.values() if key.identity >= 0}

    def _add_key(self, number: int, key: Key) -> Key:
        key.begin_at(self._first.get(number, 0))
        self._keys[number] = key
        return key


class GroupCalls(NumberedCalls):
    """The collective calls of one group: by capacity, a key for all calls of about the same size."""

    def operation(self, exchange: TensorExchange, done: Done, timeout_s: float = math.inf) -> Operation:
        """Return the next call as an operation. Call it on the thread that runs the program.

        Args:
            exchange: what to do.
            done: see `Operation`.
            timeout_s: the longest wait for its end; reaching it ends the job.

        Raises:
            UsageError: values that cannot be reduced so, or more than a call can have.
        """
        self.check(exchange)
        if not exchange.segment_bytes:
            exchange = _of_one_element(exchange)
        segments = len(exchange.source)
        form = Collective(Signature(exchange.reduction, exchange.element, segments, exchange.segment_bytes))
        call = CollectiveCall(self.name, self.called, exchange.text, self.members, timeout_s)
        self.called += 1
        key = self._key(segments * exchange.segment_bytes)
        return Operation(
            key=key,
            round=key.take_round(),
            source=exchange.source,
            destination=exchange.destination,
            done=done,
            priority=exchange.priority,
            loss=exchange.loss,
            form=form,
            receivers=_in_job(exchange.receivers, self.members),
            call=call,
        )

    def check(self, exchange: TensorExchange) -> None:
        """Check that a call can be made; `operation` does, too.

        Raises:
            UsageError: values that cannot be reduced so, or more than a call can have.
        """
        if not can_reduce(exchange.reduction, exchange.element):
            raise UsageError(
                f"{exchange.text}: {exchange.element.name.lower()} has no {exchange.reduction.name.lower()}"
            )
        segments = len(exchange.source)
        if segments > MOST_SEGMENTS or exchange.segment_bytes > MOST_BYTES:
            raise UsageError(
                f"{exchange.text}: {segments} parts of {exchange.segment_bytes} bytes are more than one call "
                f"can have: {MOST_SEGMENTS} of {MOST_BYTES}"
            )

    def prepare(self, size: int) -> None:
        """Make known what carries out calls of so many bytes: else others wait for the first of this rank."""
        self._key(size)

    def _key(self, size: int) -> Key:
        capacity = capacity_of(size)
        key = self._keys.get(capacity)
        if key is None:
            name, members = f"{self.name}/{capacity}", self._key_members
            registered = self._register(name, (capacity,), "float32", form=COLLECTIVE, members=members)
            key = self._add_key(capacity, registered)
        return key


@functools.lru_cache(maxsize=256)
def _in_job(receivers: tuple[int, ...], members: tuple[int, ...]) -> tuple[int, ...]:
    """Return bit sets of ranks of the job for those of members of a group."""
    return tuple(bits_of(members[place] for place in ranks_in(bits)) for bits in receivers)


def _of_one_element(exchange: TensorExchange) -> TensorExchange:
    """Return what carries out a call of empty tensors: one element each, which nobody sees.

    A call of nothing would be over at once, also where the others' tensors are not empty. So it meets theirs.
    """
    dtype = STORED[exchange.element]

    def stand_ins(segments: Segments) -> Segments:
        return tuple(None if values is None else np.zeros(1, dtype) for values in segments)

    return msgspec.structs.replace(
        exchange,
        segment_bytes=dtype.itemsize,
        source=stand_ins(exchange.source),
        destination=stand_ins(exchange.destination),
    )


# The sums of named tensors by codecs that one process group makes at one rank, as rounds of keys.
#
# Each tensor has keys of its own (`encoded_keys`), and its n-th sum is the n-th of every member. A rank that
# joins later goes on where the others are.


class TensorCalls(NumberedCalls):
    """The sums of each tensor of one group: keys by checksum of the name."""

    def __init__(self, name: str, members: tuple[int, ...], *, size: int, register: RegisterKey) -> None:
        """Begin without tensors; see `NumberedCalls`."""
        super().__init__(name, members, size=size, register=register)
        self._tensors: Final[dict[str, TensorKeys]] = {}
        self._states: Final[dict[int, State]] = {}
        """By checksum of the name of a tensor's own key: what its codec keeps."""
        self._agreed: dict[int, list[float]] = {}
        """Of tensors that have not been summed here yet: what the others' codecs have agreed on."""

    def keys_of(
        self, tensor: str, shape: tuple[int, ...], codec: Codec, state: State | None = None
    ) -> TensorKeys:
        """Return the keys for a tensor's next sum.

        Args:
            tensor: its name, the same at every member.
            shape: of the tensor.
            codec: how it travels; always the same one.
            state: what the codec keeps of the tensor; gets what ranks agreed on before this one joined. None:
                nobody who joins later will be told.
        """
        self.called += 1
        name = f"{self.name}/{tensor}"
        if state is not None:
            number = crc32(name.encode())
            self._states[number] = state
            if number in self._agreed:
                state[AGREED] = np.array(self._agreed.pop(number))
        keys = self._tensors.get(tensor)
        if keys is None:
            form = codec.form(shape)
            own = Key(0, name, shape, "float32") if form is None else self._new(name, shape, form)
            keys = self._tensors[tensor] = encoded_keys(codec, own, self._new)
        return keys

    def position(self) -> Position:
        """Return where the sums are. None may be under way."""
        agreed = self._agreed | {
            number: state[AGREED].tolist() for number, state in self._states.items() if AGREED in state
        }
        return msgspec.structs.replace(super().position(), agreed=dict(sorted(agreed.items())))

    def go_on_at(self, position: Position) -> None:
        """Go on where another member is: this rank has joined later."""
        super().go_on_at(position)
        self._agreed = dict(position.agreed)

    def _new(self, name: str, shape: tuple[int, ...], form: int) -> Key:
        key = self._register(name, shape, "float32", form=form, members=self._key_members)
        return self._add_key(crc32(name.encode()), key)


# Where the calls of a program's groups are: a rank that joins later goes on from there.


class CallPositions:
    """The groups of a program, and where their calls are.

    Only those groups that have all ranks of the job are alike at all ranks, so a newcomer gets no others.
    """

    def __init__(self, *, later: bool) -> None:
        """Begin without groups.

        Args:
            later: this rank has joined a job that had begun, so its calls do not begin with the first.
        """
        self._later: Final = later
        self._groups: Final[dict[str, NumberedCalls]] = {}
        self._given: Mapping[str, Position] | None = None

    def add(self, group: NumberedCalls) -> None:
        """Add a group. It goes on where the others are, if that is known already."""
        self._groups[group.name] = group
        if self._given is not None and group.name in self._given:
            group.go_on_at(self._given[group.name])

    def check(self, group: NumberedCalls) -> None:
        """Check that a group's next call is known.

        Raises:
            UsageError: this rank has joined later, and does not know it.
        """
        if not self._later:
            return
        if self._given is None:
            raise UsageError(
                "this rank has joined a job that had begun, and does not have its state yet: call "
                "ElasticState.step(), or share_state() of NumPy's Group, before any collective call"
            )
        if not group.of_all_ranks:
            raise UsageError(
                "this rank has joined a job that had begun, and does not know how many calls the group of "
                f"ranks {list(group.members)} has made: in elastic jobs, ranks that join later can only use "
                "groups of all ranks"
            )

    def now(self) -> dict[str, Position]:
        """Return where each group of all ranks is, by name. No call may be under way."""
        return {name: group.position() for name, group in sorted(self._groups.items()) if group.of_all_ranks}

    def rounds(self) -> dict[int, int]:
        """Return the next round of each key of these groups."""
        rounds: dict[int, int] = {}
        for group in self._groups.values():
            if group.of_all_ranks:
                rounds |= group.next_rounds()
        return rounds

    def go_on_at(self, positions: Mapping[str, Position]) -> None:
        """Go on where the other ranks are. Groups that are added later do so, too."""
        self._given = dict(positions)
        for name, group in self._groups.items():
            if name in positions:
                group.go_on_at(positions[name])


# The sum of one tensor by a codec: its rounds, one after the other.

RegisterEncoded = Callable[[str, tuple[int, ...], int], Key]
"""Makes a key known to the job, by name, shape and codec."""


class TensorKeys(NamedTuple):
    """The keys of a tensor: its own (None: it has no rounds), and its further ones."""

    keys: tuple[Key | None, ...]
    in_each: tuple[bool, ...]
    """Whether each gradient has a round of it."""

    @property
    def occasional(self) -> list[Key]:
        """Those that only some gradients have a round of. Which ones have, codecs decide alike at all
        ranks.
        """
        return [
            key
            for key, in_each in zip(self.keys, self.in_each, strict=True)
            if not in_each and key is not None
        ]

    @property
    def counting(self) -> Key:
        """The first key that each gradient has a round of."""
        return next(
            key for key, in_each in zip(self.keys, self.in_each, strict=True) if in_each and key is not None
        )


class Agreed(NamedTuple):
    """What a rank needs to make the next sum of a tensor as the others do, if it has joined later. No sum may
    be under way.
    """

    state: AnyArray | None
    """See `compression.codec.AGREED`."""
    rounds: dict[Key, int]
    """The next rounds of the keys that only some gradients have a round of."""

    @classmethod
    def of(cls, keys: TensorKeys, state: State) -> Agreed:
        """Return that of a tensor of which the codec keeps `state`."""
        agreed = state.get(AGREED)
        return cls(
            None if agreed is None else agreed.copy(), {key: key.last_taken + 1 for key in keys.occasional}
        )


def encoded_keys(codec: Codec, own: Key, register: RegisterEncoded) -> TensorKeys:
    """Return the keys of a tensor, for `EncodedSum`.

    Its further ones (`Codec.parts`) are registered, in the same order at all ranks.

    Args:
        codec: of the tensor.
        own: its own key.
        register: registers another one.
    """
    shape = own.spec.shape
    parts = codec.parts(shape)
    further = [register(f"{own.name}/{part.suffix}", (part.elements,), part.codec) for part in parts]
    return TensorKeys(
        (None if codec.form(shape) is None else own, *further), (True, *(part.in_each for part in parts))
    )


class EncodedSum:
    """A gradient on its way through the rounds of its codec.

    The numbers of rounds that each gradient has are taken at once, on the thread that pushes. One sum of a
    tensor must have ended before the next one begins, since a codec keeps a state.
    """

    __slots__ = (
        "_done",
        "_fail",
        "_keys",
        "_last",
        "_later",
        "_numbers",
        "_priority",
        "_rule",
        "_submit",
        "contributors",
    )

    def __init__(
        self,
        keys: TensorKeys,
        *,
        submit: Callable[[Operation], None],
        later: Callable[[Callable[[], None]], None],
        fail: Callable[[str], None],
        priority: int = 0,
        rule: str = "",
    ) -> None:
        """Take the numbers of the rounds.

        Args:
            keys: the tensor's.
            submit: begins an operation.
            later: calls a function soon, on a thread that may compute.
            fail: ends the job, whose other ranks would wait for this one.
            priority: larger goes first on every link.
            rule: fingerprint of what this rank does with the sum, and of the codec.
        """
        self._keys: Final = keys.keys
        self._numbers: Final = [
            key.take_round() if in_each and key is not None else -1
            for key, in_each in zip(keys.keys, keys.in_each, strict=True)
        ]
        self._submit: Final = submit
        self._later: Final = later
        self._fail: Final = fail
        self._done: Done = _nobody
        self._priority: Final = priority
        self._rule: Final = rule
        self._last: Operation | None = None
        self.contributors = 0
        """Bit set of the ranks whose values are in all of the last round."""

    @property
    def number(self) -> int:
        """The number of the first round."""
        return next(number for number in self._numbers if number >= 0)

    def counted(self, elements: int) -> list[tuple[slice, int]]:
        """Return the bit set of the ranks whose values are in each part of the tensor's sum, so many
        elements.

        There are several parts only if a rank left or joined the job meanwhile, and if the last round was one
        of the tensor's own key.
        """
        last = self._last
        if last is None or len(last.contributors) == 1 or last.key is not self._keys[0]:
            return [(slice(0, elements), self.contributors)]
        return [(slice(start, end), ranks) for start, end, ranks in _parts(last)]

    def begin(self, rounds: Rounds, done: Done) -> None:
        """Begin the first round, on a thread that may compute.

        Args:
            rounds: of the codec.
            done: called once, from any thread: None, or why there is no sum.
        """
        self._done = done
        self._go_on(rounds, None)

    def _go_on(self, rounds: Rounds, ranks: int | None) -> None:
        try:
            transfer = next(rounds) if ranks is None else rounds.send(ranks)
        except StopIteration:
            self._done(None)
            return
        except Exception as error:  # noqa: BLE001 -- whatever it is, the others must hear of it
            names = " and ".join(repr(key.name) for key in self._keys if key is not None)
            self._fail(f"what key {names} sums cannot be encoded: {error}")
            self._done(error)
            return
        key = self._keys[transfer.part]
        assert key is not None, f"part {transfer.part} has no rounds"
        form, number = key.form_of(transfer.codec), self._numbers[transfer.part]
        assert form is not None, f"key {key.name!r} has no codec {transfer.codec}"

        def ended(error: Exception | None) -> None:
            if error is not None:
                rounds.close()
                self._done(error)
                return
            self._last = operation
            if transfer.counted is not None:
                transfer.counted.extend(_parts(operation))
            self.contributors = -1
            for bits in operation.contributors:
                self.contributors &= bits
            fewest = min((bits.bit_count() for bits in operation.contributors), default=0)
            self._later(lambda: self._go_on(rounds, fewest))

        operation = Operation(
            key=key,
            round=key.take_round() if number < 0 else number,
            source=transfer.source,
            destination=transfer.destination,
            done=ended,
            priority=self._priority,
            rule=self._rule,
            form=form,
        )
        self._submit(operation)


def _parts(operation: Operation) -> list[tuple[int, int, int]]:
    """Return first element, end and contributors of each chunk of a result."""
    assert operation.key.layout is not None, "its round is done"
    return [
        (*bounds, ranks)
        for ranks, chunks in operation.contributors.items()
        for chunk, bounds in enumerate(operation.key.layout.bounds)
        if chunks >> chunk & 1
    ]


def _nobody(error: Exception | None) -> None:
    """Hear of the end of a sum that has not begun."""


# Sums of one tensor within a site and across sites, as operations that follow each other.
#
# A sum over all ranks has three steps: within the site; across sites, among one rank of each, the leaders;
# and from each leader to its site. So every site sends and receives each value once over the WAN. All three
# are collective rounds of keys that only those ranks have (`GroupCalls`), so no other rank adds or forwards.

_ELEMENTS: Final = {
    np.dtype("float16"): Element.FLOAT16,
    np.dtype("float32"): Element.FLOAT32,
    np.dtype("float64"): Element.FLOAT64,
}


class SiteSums:
    """The sums of one tensor. All ranks of a site must ask for the same ones in the same order."""

    def __init__(
        self,
        name: str,
        elements: int,
        dtype: np.dtype[np.generic],
        sites: Sites,
        *,
        register: RegisterKey,
        of_all: bool = True,
    ) -> None:
        """Begin without sums.

        Args:
            name: of the tensor, the same at all ranks.
            elements: of the tensor, at least one.
            dtype: of the tensor.
            sites: of the job.
            register: as of `GroupCalls`.
            of_all: a site that has all ranks uses keys of all ranks. If not, its keys name their members:
                in an elastic job these are not joined by ranks that come later.

        Raises:
            UsageError: a type that is not float16, float32 or float64.
        """
        if dtype not in _ELEMENTS:
            raise UsageError(f"{name!r} has type {dtype}; sites sum {', '.join(map(str, _ELEMENTS))}")
        self._element: Final = _ELEMENTS[dtype]
        self._nothing: Final[Array] = np.empty(0, dtype)
        """Takes the place of the memory until `set_memory`."""
        self._bytes: Final = elements * dtype.itemsize
        self._sites: Final = sites

        def group(kind: str, members: tuple[int, ...]) -> GroupCalls:
            size = sites.size if of_all else -1
            return GroupCalls(f"{name}/{kind}", members, size=size, register=register)

        self._site: Final = group(f"site {sites.name}", sites.local)
        self._leaders: Final = group("sites", sites.leaders)

    def within(self, what: str, priority: int = 0) -> list[Operation]:
        """Return the operations of a sum over the own site; none if this rank is alone there.

        Call it on the thread that runs the program; `set_memory` gives the operations their memory.

        Args:
            what: for what it is, the same at all ranks: a difference is an error that names both.
            priority: larger goes first on every link.
        """
        if len(self._sites.local) == 1:
            return []
        return [self._operation(self._site, f"sum of {what}", Reduction.SUM, priority)]

    def average_within(self, what: str, priority: int = 0) -> list[Operation]:
        """Return the operations of an average over those of the own site that contribute; see `within`."""
        if len(self._sites.local) == 1:
            return []
        return [self._operation(self._site, f"average of {what}", Reduction.AVERAGE, priority)]

    def from_leader(self, what: str, priority: int = 0, *, leader: int | None = None) -> list[Operation]:
        """Return the operations that give the leader's values to its site; see `within`.

        Args:
            what: as in `within`.
            priority: as in `within`.
            leader: another rank of the site that leads it now, as all of them know.
        """
        if len(self._sites.local) == 1:
            return []
        leads = self._sites.is_leader if leader is None else self._sites.rank == leader
        return [self._operation(self._site, f"values of {what}", Reduction.COPY, priority, leads=leads)]

    def across(self, what: str, priority: int = 0) -> list[Operation]:
        """Return the operations of a sum over all ranks; see `within`."""
        found = self.within(what, priority)
        if self._sites.is_leader and len(self._sites.leaders) > 1:
            found.append(self._operation(self._leaders, f"sum of {what}", Reduction.SUM, priority))
        return found + self.from_leader(what, priority)

    def _operation(
        self, calls: GroupCalls, text: str, reduction: Reduction, priority: int, *, leads: bool = False
    ) -> Operation:
        copies = reduction is Reduction.COPY
        gives, gets = leads or not copies, not (leads and copies)
        exchange = TensorExchange(
            text=f"{text}, {self._bytes} bytes",
            reduction=reduction,
            element=self._element,
            segment_bytes=self._bytes,
            source=(self._nothing if gives else None,),
            destination=(self._nothing if gets else None,),
            priority=priority,
        )
        return calls.operation(exchange, _ignore)


def set_memory(operations: Sequence[Operation], values: Array) -> None:
    """Let operations of `SiteSums` take and leave their values in `values`: flat, of the tensor's type."""
    for operation in operations:
        gives, gets = operation.source, operation.destination
        assert isinstance(gives, tuple)
        assert isinstance(gets, tuple)
        operation.source = (None if gives[0] is None else values,)
        operation.destination = (None if gets[0] is None else values,)


def run_in_turn(operations: Sequence[Operation], submit: Callable[[Operation], None], done: Done) -> None:
    """Submit operations one after the other; call `done` after the last one, or with the first error."""
    if not operations:
        done(None)
        return
    first, *others = operations

    def ended(error: Exception | None) -> None:
        if error is not None:
            done(error)
        else:
            run_in_turn(others, submit, done)

    first.done = ended
    submit(first)


def _ignore(_: Exception | None) -> None:
    """Stand in for what `run_in_turn` sets."""


# The sites of a job: which ranks share a local network, and who speaks for each across the WAN.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """The sites as one rank sees them, in the order of their lowest ranks.

    Attributes:
        names: of the sites.
        ranks: of each site, ascending.
        mine: index of the own site.
        rank: the own rank.
    """

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    mine: int
    rank: int

    @classmethod
    def of(cls, members: Sequence[Member], rank: int) -> Sites:
        """Group the members of a job. Where NETSTORM_SITE is not set, the host's address stands for it.

        Raises:
            UsageError: `rank` is not among the members.
        """
        found: dict[str, list[int]] = {}
        for member in members:
            found.setdefault(member.site or member.host, []).append(member.rank)
        names = tuple(found)
        ranks = tuple(tuple(sorted(found[name])) for name in names)
        mine = next((index for index, site in enumerate(ranks) if rank in site), None)
        if mine is None:
            raise UsageError(f"rank {rank} is at none of the sites {', '.join(names)}")
        return cls(names=names, ranks=ranks, mine=mine, rank=rank)

    def without_others(self) -> Sites:
        """Return the own rank as a site of its own, the only one: of a rank that has joined later."""
        return Sites(names=(self.name,), ranks=((self.rank,),), mine=0, rank=self.rank)

    @property
    def name(self) -> str:
        """The own site's name."""
        return self.names[self.mine]

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of the own site."""
        return self.ranks[self.mine]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The rank of each site that sends over the WAN for it, ascending: its lowest."""
        return tuple(sorted(site[0] for site in self.ranks))

    @property
    def is_leader(self) -> bool:
        """Whether the own rank sends over the WAN."""
        return self.rank == self.local[0]

    @property
    def size(self) -> int:
        """How many ranks all sites have."""
        return sum(map(len, self.ranks))
