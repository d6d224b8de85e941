"""The interface between trees, which move payloads, and the values in payloads. Pure.

A key has a form of its own, `Dense` or that of sparse rows. A round of it may have another form, as pushes
under gradient compression do. Aggregation and forwarding use values only through this interface: add a rank's
own contribution or a received payload to a sum, encode a sum as a payload, write a result, and check a
payload. The number of a form, `codec`, travels with each part.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.compression.quantised import (
    TWO_BIT_MOST,
    Planes,
    Signs,
    add_constant,
    add_planes,
    cut_planes,
    joined_planes,
    packed_planes_of,
    packed_problem,
    parted_planes,
    two_bit_problem,
    two_bit_values,
)
from netstorm.compression.sparse import (
    Entries,
    Rows,
    add_rows,
    decode_entries,
    decode_rows,
    encode_entries,
    encode_rows,
    entries_problem,
    largest_entries,
    rows_problem,
    total_of,
)
from netstorm.errors import UsageError
from netstorm.protocol.codecs import (
    COLLECTIVE,
    ELEMENT_BYTES,
    ITEM_BYTES,
    MAXIMA,
    NARROW,
    PACKED,
    QUANTISED,
    ROW_SPARSE,
    SPARSE,
    UNDETERMINED_FORM,
    Element,
    Reduction,
    Signature,
    argument_of,
    family_of,
    narrow,
    packed,
    pitch,
    rounds_under_way,
    row_length,
)
from netstorm.protocol.frames import Buffer, is_constant, printable, room_beside
from netstorm.protocol.messages import KeyGrant, KeySpec

__all__ = [
    "STORED",
    "Array",
    "ChunkLayout",
    "ChunkSum",
    "Collective",
    "Dense",
    "Form",
    "Key",
    "Maxima",
    "Narrow",
    "PackedForm",
    "Quantised",
    "RowParts",
    "RowSparse",
    "RowSum",
    "Segments",
    "Sparse",
    "SparseSum",
    "Sum",
    "UndeterminedForm",
    "Values",
    "ZeroSum",
    "narrowed",
    "widened",
]


Array = npt.NDArray[np.generic]

Values = Any
"""The user's values of a key or of one of its chunks, as the form takes them: a flat array if it is dense.

Each form has its own type (an array, `Signs`, `Rows`, `RowParts`), and none of them have anything in common.
"""


class Payload(NamedTuple):
    """The result of a chunk, as it came."""

    start: int
    """First element."""
    end: int
    content: Buffer | None
    """None: zeros."""
    contributors: int
    """Bit set of the ranks whose contributions are in it."""


Payloads = list[Payload]
"""The destination of an operation whose results another thread decodes, in order of arrival."""


class Sum(Protocol):
    """Contributions to one chunk. Starts empty; ends as what is sent to the parent or, at the root, to the
    children.
    """

    contributors: int
    """Bit set of the ranks whose contributions are in the sum."""

    def add_own(self, values: Values | None, bit: int) -> None:
        """Add this rank's contribution, which `Form.own` has returned (None: zeros)."""

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: zeros), which has no `Form.problem`. The sum may change its memory."""

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: zeros. It may be the user's own memory."""

    def to_keep(self) -> Buffer | None:
        """Return the root's result as a payload, in private memory: it outlives the user's source."""


class Form(Protocol):
    """One way to encode the values of a key's chunks."""

    @property
    def codec(self) -> int:
        """The number that parts carry (`Part.codec`): the same on all ranks."""

    def new_sum(self) -> Sum:
        """Return an empty sum of one chunk."""

    def own(self, source: Values, start: int, end: int) -> Values | None:
        """Return this rank's contribution to elements `start` to `end`, for `Sum.add_own`; None: zeros.

        Args:
            source: what the operation contributes.
        """

    def write(
        self, destination: Values, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Write the result of elements `start` to `end` (None: zeros) to the user's destination.

        Args:
            contributors: bit set of the ranks whose contributions are in it.
        """

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload for so many elements, such as "has 3 bytes, not 4"; None: it
        may be added, forwarded and written.

        Args:
            contributors: bit set of the ranks whose contributions are in it.
        """


# Keys: a tensor's name, shape and type; its rounds; its chunks.

_LAYOUTS: Final = 64
"""Layouts of collective rounds that are kept: a training loop makes the same few calls over and over."""


class Key:
    """One key of one store, as this process knows it."""

    __slots__ = (
        "_grant",
        "_layouts",
        "_rounds",
        "dtype",
        "elements",
        "forms",
        "identity",
        "last_taken",
        "layout",
        "rounds_under_way",
        "row_length",
        "spec",
    )

    def __init__(
        self,
        namespace: int,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        *,
        form: int = 0,
        members: tuple[int, ...] = (),
    ) -> None:
        """Describe a key; `shape` in elements, `form` its codec, `members` the ranks that push it (none:
        all).

        Raises:
            UsageError: a type that cannot be summed, or a negative dimension.
        """
        if dtype not in ITEM_BYTES:
            raise UsageError(f"key {name!r} has type {dtype}; NetStorm can sum {', '.join(ITEM_BYTES)}")
        name = printable(name)  # as the others see it
        if any(side < 0 for side in shape):
            raise UsageError(f"key {name!r} has shape {shape}; dimensions must be known and not negative")
        self.spec: Final = KeySpec(
            namespace=namespace, name=name, shape=shape, dtype=dtype, form=form, members=members
        )
        self.dtype: Final = np.dtype(dtype)
        self.elements: Final = int(np.prod(shape, dtype=np.int64))
        self.row_length: Final = row_length(shape)
        """Elements of a row."""
        self.forms: Final = forms_of(self.spec)
        """The forms that rounds of this key may have, by codec; the first is the key's own. See `form_of`."""
        self.rounds_under_way: Final = rounds_under_way(self.elements, form)
        """How far beyond its last complete round a node may contribute: it bounds what others must store."""
        self.identity = -1
        """The scheduler's number for this key; -1 until the scheduler has granted it."""
        self.layout: ChunkLayout | None = None
        """Where the chunks are, if they are the same in all rounds; see `layout_of`."""
        self.last_taken = -1
        """The last round number handed out."""
        self._rounds = itertools.count()
        self._grant: KeyGrant | None = None
        self._layouts: Final[dict[Signature, ChunkLayout]] = {}

    @classmethod
    def granted(cls, spec: KeySpec, grant: KeyGrant) -> Key:
        """Return a key as other ranks have registered it."""
        key = cls(spec.namespace, spec.name, spec.shape, spec.dtype, form=spec.form, members=spec.members)
        key.set_grant(grant)
        return key

    @property
    def grant(self) -> KeyGrant:
        """The scheduler's numbers, once it has granted the key."""
        assert self._grant is not None
        return self._grant

    @property
    def name(self) -> str:
        """The user's name of the key."""
        return self.spec.name

    @property
    def form(self) -> Form:
        """The form of a round, if the operation brings no other. Collective rounds always bring one."""
        return next(iter(self.forms.values()))

    @property
    def is_collective(self) -> bool:
        """Whether rounds may be of any type, shape and operation."""
        return self.spec.form == COLLECTIVE

    def form_of(self, codec: int) -> Form | None:
        """Return a form that checks and adds parts with a codec; None: the key never has it."""
        return form_of(self.spec, self.forms, codec)

    def layout_of(self, form: Form) -> ChunkLayout:
        """Return where the chunks of a round are. The key must have been granted."""
        if self.layout is not None:
            return self.layout
        assert isinstance(form, Collective)
        assert self._grant is not None
        found = self._layouts.get(form.signature)
        if found is None:
            if len(self._layouts) >= _LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            found = self._layouts[form.signature] = ChunkLayout.of_round(
                form.signature, self.elements, self._grant
            )
        return found

    def offset_of(self, chunk: int) -> int:
        """Return a chunk's offset among the job's bytes; 0 if it is not known, or there is no such chunk."""
        if self.is_collective and self._grant is not None:
            return self._grant.offset + max(0, chunk) * self._grant.chunk_size * ELEMENT_BYTES
        known = self.layout is not None and 0 <= chunk < self.layout.chunks
        return self.layout.offsets[chunk] if self.layout is not None and known else 0

    def take_round(self) -> int:
        """Return the number of the next round. Call it on the thread that pushes, when it pushes: later,
        rounds may swap.
        """
        self.last_taken = next(self._rounds)
        return self.last_taken

    def begin_at(self, round: int) -> None:
        """Hand out round numbers from `round` on: the job has done those before."""
        self._rounds = itertools.count(round)
        self.last_taken = round - 1

    def set_grant(self, grant: KeyGrant) -> None:
        """Record the scheduler's numbers."""
        self.identity = grant.key
        self._grant = grant
        if not self.is_collective:
            self.layout = ChunkLayout.of_key(self.elements, self.dtype.itemsize, grant, self.spec.form)


# Where the chunks of a round are, by the numbers that the scheduler fixed for its key.


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The chunks of a round, the first of which has number 0."""

    bounds: list[tuple[int, int]]
    """First element and end of each chunk; of a collective round: first byte and end."""
    offsets: list[int]
    """Byte offset of each chunk in the job: the global chunk order."""
    slots: range
    """One for each chunk; `Plan.tree_of` maps it to a tree."""
    chunks: int
    """Their number."""
    is_within_key: bool = True
    """The offsets are the key's own, and no other key's are between them."""

    @classmethod
    def of_key(cls, elements: int, itemsize: int, grant: KeyGrant, form: int = 0) -> ChunkLayout:
        """Cut a key's `elements` values into chunks: the same in all rounds."""
        size = grant.chunk_size
        bounds = [(start, min(start + size, elements)) for start in range(0, elements, size)]
        return cls._of(bounds, grant, pitch(size, itemsize, form))

    @classmethod
    def of_round(cls, signature: Signature, elements: int, grant: KeyGrant) -> ChunkLayout:
        """Cut the segments of a collective round into chunks; each begins with a new one.

        Args:
            signature: of the round.
            elements: of the key; rounds with many short segments may have more chunks than these are.
            grant: the key's.
        """
        size, segment = grant.chunk_size * ELEMENT_BYTES, signature.segment_bytes
        bounds = [
            (first + start, first + min(start + size, segment))
            for first in range(0, signature.segments * segment, segment or 1)
            for start in range(0, segment, size)
        ]
        within = len(bounds) <= -(-elements // grant.chunk_size)
        return cls._of(bounds, grant, size, within=within)

    @classmethod
    def _of(
        cls, bounds: list[tuple[int, int]], grant: KeyGrant, step: int, *, within: bool = True
    ) -> ChunkLayout:
        return cls(
            bounds=bounds,
            offsets=[grant.offset + chunk * step for chunk in range(len(bounds))],
            slots=range(grant.first_slot, grant.first_slot + len(bounds)),
            chunks=len(bounds),
            is_within_key=within,
        )


# Types of elements in memory. NumPy has no bfloat16, so its bits are handled here.
#
# Types of 16 bits are reduced in float32 within a node: one rounding a hop (design, section 5).

STORED: Final[dict[Element, np.dtype[np.generic]]] = {
    Element.BYTES: np.dtype(np.uint8),
    Element.FLOAT16: np.dtype(np.float16),
    Element.BFLOAT16: np.dtype(np.uint16),
    Element.FLOAT32: np.dtype(np.float32),
    Element.FLOAT64: np.dtype(np.float64),
    Element.INT8: np.dtype(np.int8),
    Element.INT16: np.dtype(np.int16),
    Element.INT32: np.dtype(np.int32),
    Element.INT64: np.dtype(np.int64),
    Element.UINT8: np.dtype(np.uint8),
    Element.UINT16: np.dtype(np.uint16),
    Element.UINT32: np.dtype(np.uint32),
    Element.UINT64: np.dtype(np.uint64),
    Element.BOOL: np.dtype(np.uint8),
}
"""The NumPy type that holds elements of each type."""

NARROW_ELEMENTS: Final = frozenset({Element.FLOAT16, Element.BFLOAT16})
"""Types that are reduced in float32."""

_QUIET_BIT: Final = np.uint32(0x00400000)
"""Set in a NaN before it is rounded, which might leave no bit of its payload."""


def widened(values: Array, element: Element) -> Array:
    """Return values as they are reduced: in float32 if they are of 16 bits."""
    if element is Element.FLOAT16:
        return values.astype(np.float32)
    if element is Element.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def narrowed(values: Array, element: Element) -> Array:
    """Return reduced values as they are stored, rounded to the nearest, ties to even."""
    with np.errstate(all="ignore"):
        if element is Element.FLOAT16:
            return values.astype(np.float16)
        if element is Element.BFLOAT16:
            bits = values.view(np.uint32)
            rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
            nan = np.isnan(values)
            if nan.any():
                rounded[nan] = (bits[nan] | _QUIET_BIT) >> 16
            return rounded.astype(np.uint16)
    return values


# The form of collective rounds: any reduction of any type, in segments that ranks may lack.
#
# No payload means no contribution: a rank that only receives sends headers alone.

Segments: TypeAlias = tuple[Array | None, ...]
"""A flat array for each segment, of the type in which elements are stored (`elements.STORED`); None: this
rank contributes nothing to that segment, or does not want its result.
"""


class Collective:
    """The form of one collective round. See `Form`.

    An operation's source and destination are `Segments`. Elements are counted in bytes.
    """

    __slots__ = ("_dtype", "codec", "signature")

    def __init__(self, signature: Signature) -> None:
        """Describe the values.

        Args:
            signature: on which ranks agree.
        """
        self.signature: Final = signature
        self.codec: Final = signature.codec()
        self._dtype: Final = STORED[signature.element]

    @property
    def copies(self) -> bool:
        """Whether one rank contributes to each segment, and the result is what it has."""
        return self.signature.reduction is Reduction.COPY

    def new_sum(self) -> ChunkSum:
        """Return an empty sum of one chunk."""
        return ChunkSum(self.signature.element, self.signature.reduction)

    def own(self, source: Segments, start: int, end: int) -> Array | None:
        """Return a view of this rank's values, if it has that segment."""
        return self._view(source, start, end)

    def write(
        self, destination: Segments, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Copy a result to the user's destination; an average is one over those who contributed.

        Where nobody has contributed, as in the place of a rank that has left the job, there are zeros.
        """
        target = self._view(destination, start, end)
        if target is None:
            return
        if payload is None:
            target[:] = 0
            return
        values = np.frombuffer(payload, self._dtype)
        if self.signature.reduction is Reduction.AVERAGE:
            _write_average(target, values, self.signature.element, contributors.bit_count())
        else:
            target[:] = values

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload for `elements` bytes; None: nothing."""
        size = memoryview(payload).nbytes
        return None if size == elements else f"has {size} bytes, not {elements}"

    def _view(self, segments: Segments, start: int, end: int) -> Array | None:
        """Return the values of bytes `start` to `end`, which are in one segment."""
        segment, first = divmod(start, self.signature.segment_bytes)
        values = segments[segment]
        if values is None:
            return None
        item = self._dtype.itemsize
        return values[first // item : (first + end - start) // item]


def _write_average(target: Array, values: Array, element: Element, ranks: int) -> None:
    """Write sums divided by the number of ranks; whole numbers are rounded towards zero, as PyTorch
    rounds.
    """
    if element in NARROW_ELEMENTS:
        target[:] = narrowed(np.true_divide(widened(values, element), np.float32(ranks)), element)
    elif np.issubdtype(values.dtype, np.floating):
        with np.errstate(all="ignore"):
            np.true_divide(values, values.dtype.type(ranks), out=target)
    else:
        quotients, rests = np.divmod(values, values.dtype.type(ranks))
        target[:] = quotients + np.logical_and(rests != 0, np.less(values, 0)).astype(values.dtype)


# What ranks contribute to one chunk of elements, reduced in place.
#
# A received payload belongs to the node, which reduces into it, and forwards it: so a hub holds one model,
# not one per child, and a chunk is forwarded without a copy. The user's source is only read.

_UFUNCS: Final[dict[Reduction, Callable[..., Array]]] = {
    Reduction.SUM: np.add,
    Reduction.AVERAGE: np.add,
    Reduction.PRODUCT: np.multiply,
    Reduction.MINIMUM: np.minimum,
    Reduction.MAXIMUM: np.maximum,
    Reduction.AND: np.bitwise_and,
    Reduction.OR: np.bitwise_or,
    Reduction.XOR: np.bitwise_xor,
}

_OF_TRUTH_VALUES: Final[dict[Reduction, Callable[..., Array]]] = {
    Reduction.SUM: np.bitwise_or,
    Reduction.MAXIMUM: np.bitwise_or,
    Reduction.PRODUCT: np.bitwise_and,
    Reduction.MINIMUM: np.bitwise_and,
}
"""What is the same for bytes that are 0 or 1, and stays 0 or 1."""


class ChunkSum:
    """Contributions to one chunk. See `Sum`.

    A missing payload contributes nothing, which for sums is zeros.
    """

    __slots__ = ("_dtype", "_element", "_own", "_received", "_reduce", "_values", "contributors")

    def __init__(self, element: Element, reduction: Reduction = Reduction.SUM) -> None:
        self.contributors: int = 0
        self._element = element
        self._dtype = STORED[element]
        truth = _OF_TRUTH_VALUES.get(reduction) if element is Element.BOOL else None
        self._reduce = truth or _UFUNCS.get(reduction)
        """None: one rank contributes."""
        self._own: Array | None = None
        """This rank's values while nothing has been received: a view of the user's memory."""
        self._received: Buffer | None = None
        """The payload that `_values` is a view of; it is forwarded."""
        self._values: Array | None = None
        """The running sum; float32 for types of 16 bits."""

    def add_own(self, values: Array | None, bit: int) -> None:
        """Add this rank's contribution (None: it has none)."""
        self.contributors |= bit
        if values is None:
            return
        if self._values is None:
            self._own = values
        else:
            self._add(widened(values, self._element))

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: no contribution), whose memory the sum may change from now on."""
        self.contributors |= contributors
        if payload is None:
            return
        values: Array = np.frombuffer(payload, self._dtype)
        if self._values is not None:
            self._add(widened(values, self._element))
            return
        if self._own is None:
            self._values, self._received = values, payload
            return
        if self._element in NARROW_ELEMENTS:
            self._values = widened(values, self._element)
        else:
            self._values, self._received = values, payload
        own, self._own = self._own, None
        self._add(widened(own, self._element))

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: nobody has contributed.

        It may be the user's memory: the result cannot come back before the parent has stored this payload.
        """
        if self._values is None:
            return self._own
        if self._received is not None:
            return self._received
        return narrowed(self._values, self._element)

    @property
    def alone(self) -> Array | None:
        """This rank's values, in the user's memory, if nobody else has contributed any."""
        return self._own if self._values is None else None

    def to_keep(self) -> Buffer | None:
        """Return the root's result in private memory: it outlives the user's source, and that of a child."""
        if self.alone is not None:
            return self.alone.copy()
        if self._received is None or not is_constant(self._received):
            return self.to_send()
        values, room = np.frombuffer(self._received, self._dtype), room_beside(self._received)
        kept = np.empty_like(values) if room is None else np.frombuffer(room, self._dtype)
        kept[:] = values
        return kept if room is None else room

    def _add(self, more: Array) -> None:
        assert self._values is not None
        if self._reduce is None:
            return
        if self._received is not None and self._element in NARROW_ELEMENTS:
            self._values, self._received = widened(self._values, self._element), None
        values = total = self._values
        room = None if self._received is None else room_beside(self._received)
        if room is not None:
            total, self._received = np.frombuffer(room, self._dtype), room
        elif not values.flags.writeable:
            total = self._received = np.empty_like(values)
        with np.errstate(all="ignore"):  # the user sees inf and nan in the values; no warnings
            self._reduce(values, more, out=total, casting="unsafe")
        self._values = total


# The form of dense values.


class Dense:
    """The form of values that all travel, as they are in memory. See `Form`."""

    __slots__ = ("_dtype", "_element", "_item_bytes")

    codec: Final = 0

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self._dtype: Final = dtype
        self._item_bytes: Final = dtype.itemsize
        self._element: Final = Element[dtype.name.upper()]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type of the values."""
        return self._dtype

    def new_sum(self) -> ChunkSum:
        """Return an empty sum of one chunk."""
        return ChunkSum(self._element)

    def own(self, source: Array, start: int, end: int) -> Array:
        """Return a view of the user's source."""
        return source[start:end]

    def write(
        self, destination: Array, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Copy a result to the user's destination."""
        destination[start:end] = 0 if payload is None else np.frombuffer(payload, self._dtype)

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload of `elements` values; None: nothing."""
        size = memoryview(payload).nbytes
        right = elements * self._item_bytes
        return None if size == right else f"has {size} bytes, not {right}"


# The form of rounds whose result is the largest value of any rank.


class Maxima(Dense):
    """The form of values of which the largest counts. See `Form`. NaN is larger than any number."""

    __slots__ = ()

    codec: int = MAXIMA  # type: ignore[misc] # another form's number

    def new_sum(self) -> ChunkSum:
        """Return an empty sum of one chunk."""
        return ChunkSum(self._element, Reduction.MAXIMUM)


# The form of float32 values that travel as float16 or bfloat16.
#
# Within a node they are summed in float32, so each hop rounds once.

Floats = npt.NDArray[np.float32]


class Narrow:
    """The form of a round whose values lose bits on the wire. See `Form`.

    An operation's source and destination are flat arrays of float32.
    """

    __slots__ = ("_dtype", "_element", "codec")

    def __init__(self, element: Element) -> None:
        """Describe the values.

        Args:
            element: the type of 16 bits that travels.
        """
        self._element: Final = element
        self._dtype: Final = STORED[element]
        self.codec: Final = narrow(element)

    def new_sum(self) -> ChunkSum:
        """Return an empty sum of one chunk."""
        return ChunkSum(self._element)

    def own(self, source: Floats, start: int, end: int) -> Array:
        """Return this rank's values, rounded to the nearest."""
        return narrowed(source[start:end], self._element)

    def write(
        self, destination: Floats, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Write a result as float32."""
        if payload is None:
            destination[start:end] = 0
        else:
            destination[start:end] = widened(np.frombuffer(payload, self._dtype), self._element)

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload of `elements` values; None: nothing."""
        size, right = memoryview(payload).nbytes, elements * self._dtype.itemsize
        return None if size == right else f"has {size} bytes, not {right}"


# The form of whole numbers in as few bits as their sum needs.
#
# One rank's numbers are 0 to `most`, and stand for -most/2 to most/2. A sum over n ranks is 0 to n times
# `most`, in bit planes (`compression.quantised`), which are added without being unpacked. So sums are exact,
# and all trees give the same ones.


class PackedForm:
    """The form of packed numbers. See `Form`.

    An operation's source is a `Planes` of all its numbers, its destination a list of `Payload`s.
    """

    __slots__ = ("_most", "codec")

    def __init__(self, most: int) -> None:
        """Describe the numbers.

        Args:
            most: the largest of one rank.
        """
        self._most: Final = most
        self.codec: Final = packed(most)

    def new_sum(self) -> PackedSum:
        """Return an empty sum of one chunk."""
        return PackedSum(self._most)

    def own(self, source: Planes, start: int, end: int) -> Planes:
        """Return this rank's numbers."""
        return cut_planes(source, start, end)

    def write(
        self, destination: Payloads, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Append the result."""
        destination.append(Payload(start, end, payload, contributors))

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload of `elements` sums over some ranks; None: nothing."""
        return packed_problem(payload, elements, contributors.bit_count(), self._most)


class PackedSum:
    """Contributions to one chunk. See `Sum`."""

    __slots__ = ("_counted", "_halves", "_most", "_planes", "contributors")

    def __init__(self, most: int) -> None:
        self.contributors = 0
        self._most = most
        self._planes: Planes | None = None
        """The sum, number by number. It is never changed: it may be a received payload."""
        self._counted = 0
        """How many ranks' numbers are in `_planes`. The other contributors have sent zeros."""
        self._halves = 0
        """What is to be added to each number of `_planes`, in halves."""

    def add_own(self, values: Planes | None, bit: int) -> None:
        """Add this rank's contribution."""
        self.contributors |= bit
        if values is not None:
            self._add(values, 1)

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload."""
        self.contributors |= contributors
        if payload is not None:
            ranks = contributors.bit_count()
            planes, half = parted_planes(payload, ranks, self._most)
            self._halves += half
            self._add(planes, ranks)

    def to_send(self) -> Buffer | None:
        """Return the sum over all contributors."""
        if self._planes is None:
            return None
        ranks = self.contributors.bit_count()
        self._halves += (ranks - self._counted) * self._most
        if ranks != self._counted or self._halves > 1:
            whole, self._halves = divmod(self._halves, 2)
            self._planes = add_constant(self._planes, whole, packed_planes_of(ranks, self._most))
            self._counted = ranks
        return joined_planes(self._planes, self._halves, self._most)

    to_keep = to_send

    def _add(self, planes: Planes, ranks: int) -> None:
        self._counted += ranks
        if self._planes is None:
            self._planes = planes
        else:
            self._planes = add_planes(self._planes, planes, packed_planes_of(self._counted, self._most))


# The form of a round under gradient compression: small packed integers, whose sums are exact.


class Quantised:
    """The form of quantised values. See `Form`.

    An operation's source is a `Signs`, its destination a flat array of float32.
    """

    __slots__ = ("_threshold",)

    codec: Final = QUANTISED

    def __init__(self, threshold: np.float32 | float = 1.0) -> None:
        """Describe the values.

        Args:
            threshold: the value of 1.
        """
        self._threshold: Final = np.float32(threshold)

    def new_sum(self) -> PackedSum:
        """Return an empty sum of one chunk."""
        return PackedSum(TWO_BIT_MOST)

    def own(self, source: Signs, start: int, end: int) -> Planes | None:
        """Return this rank's quantised values."""
        return source.planes(start, end)

    def write(
        self, destination: Floats, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Write the sums, as values of the gradient."""
        if payload is None:
            destination[start:end] = 0
        else:
            two_bit_values(payload, contributors.bit_count(), self._threshold, destination[start:end])

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload; None: nothing."""
        return two_bit_problem(payload, elements, contributors.bit_count())


# The form of some elements of many, of a float32 key.
#
# The sum of a chunk is the union of the elements that came in, each added up. The root may keep only the
# largest of them: then all ranks see which ones are missing, and each keeps for itself what it has
# contributed to those. Nodes between drop nothing: an element that one of them had dropped, and another had
# not, would look complete.

_PARTS: Final = 100
"""Of what a rank contributes on the average: the unit of the codec's argument."""


class Sparse:
    """The form of sparse values. See `Form`.

    An operation's source is `Entries`, its destination a list of `Payload`s.
    """

    __slots__ = ("_kept", "codec")

    def __init__(self, codec: int) -> None:
        """Describe the values.

        Args:
            codec: of `protocol.codecs.sparse`.
        """
        self.codec: Final = codec
        self._kept: Final = argument_of(codec) or 0

    def new_sum(self) -> SparseSum:
        """Return an empty sum of one chunk."""
        return SparseSum(self._kept)

    def own(self, source: Entries, start: int, end: int) -> Entries | None:
        """Return this rank's entries; None: it has none."""
        entries = source.between(start, end)
        return entries if len(entries.numbers) else None

    def write(
        self, destination: Payloads, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Append the result."""
        destination.append(Payload(start, end, payload, contributors))

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload for `elements` elements; None: nothing."""
        return entries_problem(payload, elements, contributors.bit_count())


class SparseSum:
    """Contributions to one chunk. See `Sum`."""

    __slots__ = ("_contributed", "_kept", "_total", "contributors")

    def __init__(self, kept: int) -> None:
        self.contributors = 0
        self._kept = kept
        self._total: Entries | None = None
        self._contributed = 0

    def add_own(self, values: Entries | None, bit: int) -> None:
        """Add this rank's entries (None: it has none in this chunk)."""
        self.contributors |= bit
        if values is not None:
            self._add(values, len(values.numbers))

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: no entries)."""
        self.contributors |= contributors
        if payload is not None:
            self._add(*decode_entries(payload))

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: no entries."""
        return None if self._total is None else encode_entries(self._total, self._contributed)

    def to_keep(self) -> Buffer | None:
        """Return the root's result: the largest entries, if the form keeps only some."""
        if self._total is None or not self._kept:
            return self.to_send()
        most = -(-self._contributed * self._kept // (_PARTS * self.contributors.bit_count()))
        return encode_entries(largest_entries(self._total, most), self._contributed)

    def _add(self, more: Entries, contributed: int) -> None:
        self._contributed += contributed
        self._total = more if self._total is None else total_of(self._total, more)


# The form of sparse rows, and their sums.
#
# A payload has the rows that some rank has values for; no payload means no rows. The sum of a chunk is the
# union of the rows that came in, each added up. As with dense values a received payload belongs to the node,
# which adds to its rows in place, and forwards it as it came if nothing was added.
#
# A row belongs to the chunk in which its first element is. Chunks of a row-sparse key are whole rows. Rows
# may be pushed to a dense key, too, and its chunks need not be whole rows.

RowParts = list[tuple[int, Rows]]
"""The destination of results: the rows of each chunk that has any, with the number of the chunk's first row,
in order of arrival.
"""


class RowSparse:
    """The form of rounds in which some rows travel. See `Form`.

    An operation's source is `Rows`, its destination `RowParts`.
    """

    __slots__ = ("_dtype", "_length", "_wide")

    codec: Final = ROW_SPARSE

    def __init__(self, dtype: np.dtype[np.generic], length: int) -> None:
        """Describe rows of so many values."""
        self._dtype: Final = dtype
        self._length: Final = max(1, length)
        self._wide: Final = dtype == np.float16
        """Sums are kept in float32: one rounding a hop (design, section 5)."""

    def new_sum(self) -> RowSum:
        """Return an empty sum of one chunk."""
        return RowSum(self._dtype, self._length, wide=self._wide)

    def own(self, source: Rows, start: int, end: int) -> Rows | None:
        """Return views of the source's rows that begin in these elements; None: there are none."""
        return source.between(-(-start // self._length), -(-end // self._length))

    def write(
        self, destination: RowParts, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Append the rows of a result; they are views of its payload."""
        if payload is not None:
            destination.append((-(-start // self._length), decode_rows(payload, self._length, self._dtype)))

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload of rows of a chunk of `elements` values; None: nothing."""
        return rows_problem(payload, self._length, self._dtype, -(-elements // self._length))


class RowSum:
    """Contributions to one chunk of rows. See `Sum`."""

    __slots__ = ("_dtype", "_length", "_own", "_received", "_total", "_wide", "contributors")

    def __init__(self, dtype: np.dtype[np.generic], length: int, *, wide: bool) -> None:
        self.contributors = 0
        self._dtype = dtype
        self._length = length
        self._wide = wide
        self._own: Rows | None = None
        """This rank's rows while nothing has been received: views of the user's memory."""
        self._received: Buffer | None = None
        """The payload that `_total` is views of; it is forwarded."""
        self._total: Rows | None = None
        """The running sum; float32 for float16 keys."""

    def add_own(self, values: Rows | None, bit: int) -> None:
        """Add this rank's rows (None: it has none in this chunk)."""
        self.contributors |= bit
        if values is None:
            return
        if self._total is None:
            self._own = values
        else:
            self._add(values)

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's payload (None: no rows), whose memory the sum may change from now on."""
        self.contributors |= contributors
        if payload is None:
            return
        rows = decode_rows(payload, self._length, self._dtype)
        if self._total is not None:
            self._add(rows)
            return
        self._total, self._received = rows, payload
        if self._own is not None:
            self._add(self._own)
            self._own = None

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent; None: no rows."""
        if self._received is not None:
            return self._received
        rows = self._total or self._own
        if rows is None:
            return None
        with np.errstate(all="ignore"):
            return encode_rows(Rows(rows.numbers, rows.values.astype(self._dtype, copy=False)))

    def to_keep(self) -> Buffer | None:
        """Return the root's result, in private memory as every payload."""
        return self.to_send()

    def _add(self, rows: Rows) -> None:
        assert self._total is not None
        if self._wide and self._received is not None:
            self._total = Rows(self._total.numbers, self._total.values.astype(np.float32))
            self._received = None
        total = add_rows(self._total, rows)
        if total is not self._total:
            self._total, self._received = total, None


# The form of zeros that fit a round of any form: those of a rank whose program has ended.
#
# A round that began in it takes the form of the first values that come, or of the operation of this rank's
# own program. Sums of zeros become sums of that form.


class UndeterminedForm:
    """The form of zeros in a round whose real form is not known yet. See `Form`."""

    __slots__ = ()

    codec: Final = UNDETERMINED_FORM

    def new_sum(self) -> ZeroSum:
        """Return an empty sum of one chunk."""
        return ZeroSum()

    def own(self, source: Values, start: int, end: int) -> None:
        """Return this rank's contribution."""

    def write(
        self, destination: Values, start: int, end: int, payload: Buffer | None, contributors: int
    ) -> None:
        """Do nothing: a round to which only ended ranks contribute has no user."""

    def problem(self, payload: Buffer, elements: int, contributors: int) -> str | None:
        """Return what is wrong with a payload: it has values, and zeros have none."""
        return "has values, and no form"


class ZeroSum:
    """Contributions to one chunk, all of them zeros. See `Sum`."""

    __slots__ = ("contributors",)

    def __init__(self) -> None:
        self.contributors = 0

    def add_own(self, values: Values | None, bit: int) -> None:
        """Add this rank to the contributors."""
        self.contributors |= bit

    def add_received(self, payload: Buffer | None, contributors: int) -> None:
        """Add a child's contributors."""
        self.contributors |= contributors

    def to_send(self) -> Buffer | None:
        """Return the sum as a payload for the parent."""
        return None

    to_keep = to_send


# The forms that the rounds of a key may have.

_ENCODED: Final = np.dtype(np.float32)
"""The type of keys whose rounds may travel in other forms than their own."""


def forms_of(spec: KeySpec) -> dict[int, Form]:
    """Return a form for each codec that parts of a key may have, the form of its initial value first.

    They serve to check and add parts. The form that writes the results comes with the operation. The codecs
    of collective keys are too many to list (`form_of`).
    """
    if spec.form == COLLECTIVE:
        return {}
    dtype = np.dtype(spec.dtype)
    if spec.form == RowSparse.codec:
        return {RowSparse.codec: RowSparse(dtype, row_length(spec.shape))}
    forms: dict[int, Form] = {Dense.codec: Dense(dtype)}
    if dtype == np.float32:  # what MXNet's gradient compression takes
        forms[Quantised.codec] = Quantised()
    if spec.shape:
        forms[RowSparse.codec] = RowSparse(dtype, row_length(spec.shape))
    return forms


def form_of(spec: KeySpec, forms: dict[int, Form], codec: int) -> Form | None:
    """Return the form of a part of a key; None: the key never has it.

    Args:
        spec: of the key.
        forms: those that the key always has.
        codec: the part's.
    """
    form = forms.get(codec)
    if form is not None:
        return form
    if spec.form == COLLECTIVE:
        signature = Signature.of_codec(codec)
        return None if signature is None else Collective(signature)
    return _encoded(codec) if Dense.codec in forms and spec.dtype == _ENCODED.name else None


@functools.lru_cache(maxsize=256)
def _encoded(codec: int) -> Form | None:
    """Return the form of float32 keys that a codec with an argument stands for; None: none."""
    family, argument = family_of(codec), argument_of(codec)
    if argument is None:
        return None
    if family == NARROW:
        return Narrow(Element(argument))
    if family == PACKED:
        return PackedForm(argument)
    if family == SPARSE:
        return Sparse(codec)
    return Maxima(_ENCODED) if family == MAXIMA else None
