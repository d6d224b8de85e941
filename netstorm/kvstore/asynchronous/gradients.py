"""The content of a push to owners: all values of a chunk, quantised ones, or some rows. Pure.

It has the forms of sums: a push is a sum over one rank.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import numpy as np

from netstorm.compression.rows import Rows, joined
from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.clocks import MOST_COUNTED
from netstorm.kvstore.asynchronous.owners import extent, has_whole_rows
from netstorm.kvstore.values.dense import Dense
from netstorm.kvstore.values.form import Array, Form, Values
from netstorm.kvstore.values.key import Key
from netstorm.kvstore.values.quantised import Quantised
from netstorm.kvstore.values.row_sparse import RowParts, RowSparse
from netstorm.protocol.chunks import row_length
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Push

__all__ = ["Gradient", "GradientAssembly", "as_dense", "check_push", "form_of", "payload_of"]

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
    values.reshape(-1, row_length(key.spec.shape))[rows.numbers] = rows.values
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
        return joined(self._parts, row_length(self._key.spec.shape), self._key.dtype)

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
