"""Keys: a tensor's name, shape and type; its rounds; its chunks. Pure."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from netstorm.errors import UsageError
from netstorm.kvstore.values.form import Array, Form
from netstorm.kvstore.values.forms import forms_of
from netstorm.protocol.chunks import ITEM_BYTES, pitch
from netstorm.protocol.messages import KeyGrant, KeySpec

__all__ = ["Array", "Key", "Layout"]


class Layout:
    """Where the chunks of a key are, by the numbers that the scheduler fixed."""

    __slots__ = ("bounds", "chunks", "offsets", "slots")

    def __init__(self, elements: int, itemsize: int, grant: KeyGrant, form: int = 0) -> None:
        """Cut `elements` values into chunks, as the grant fixes."""
        starts, chunk_size = range(0, elements, grant.chunk_size), grant.chunk_size
        step = pitch(chunk_size, itemsize, form)
        self.chunks: Final = len(starts)
        self.bounds: Final = [(start, min(start + chunk_size, elements)) for start in starts]
        """First element and end of each chunk."""
        self.offsets: Final = [grant.offset + chunk * step for chunk in range(self.chunks)]
        """Byte offset of each chunk in the job: the global chunk order."""
        self.slots: Final = range(grant.first_slot, grant.first_slot + self.chunks)
        """One for each chunk; `Plan.tree_of` maps it to a tree."""


class Key:
    """One key of one store, as this process knows it."""

    __slots__ = ("_rounds", "dtype", "elements", "forms", "identity", "last_taken", "layout", "spec")

    def __init__(
        self, namespace: int, name: str, shape: tuple[int, ...], dtype: str, *, form: int = 0
    ) -> None:
        """Describe a key; `shape` in elements, `form` its codec.

        Raises:
            UsageError: a type that cannot be summed, or a negative dimension.
        """
        if dtype not in ITEM_BYTES:
            raise UsageError(f"key {name!r} has type {dtype}; NetStorm can sum {', '.join(ITEM_BYTES)}")
        if any(side < 0 for side in shape):
            raise UsageError(f"key {name!r} has shape {shape}; dimensions must be known and not negative")
        self.spec: Final = KeySpec(namespace=namespace, name=name, shape=shape, dtype=dtype, form=form)
        self.dtype: Final = np.dtype(dtype)
        self.elements: Final = int(np.prod(shape, dtype=np.int64))
        self.forms: Final = forms_of(self.spec)
        """The forms that rounds of this key may have, by codec; the first is the key's own."""
        self.identity = -1
        """The scheduler's number for this key; -1 until the scheduler has granted it."""
        self.layout: Layout | None = None
        self.last_taken = -1
        """The last round number handed out."""
        self._rounds = itertools.count()

    @property
    def name(self) -> str:
        """The user's name of the key."""
        return self.spec.name

    @property
    def form(self) -> Form:
        """The form of a round, if the operation brings no other."""
        return next(iter(self.forms.values()))

    def offset_of(self, chunk: int) -> int:
        """Return a chunk's offset among the job's bytes; 0 if it is not known, or there is no such chunk."""
        known = self.layout is not None and 0 <= chunk < self.layout.chunks
        return self.layout.offsets[chunk] if self.layout is not None and known else 0

    def take_round(self) -> int:
        """Return the number of the next round. Call it on the thread that pushes, when it pushes: later,
        rounds may swap.
        """
        self.last_taken = next(self._rounds)
        return self.last_taken

    def set_grant(self, grant: KeyGrant) -> None:
        """Record the scheduler's numbers."""
        self.identity = grant.key
        self.layout = Layout(self.elements, self.dtype.itemsize, grant, self.spec.form)
