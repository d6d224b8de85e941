"""Keys: a tensor's name, shape and type; its rounds; its chunks. Pure."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from netstorm.errors import UsageError
from netstorm.kvstore.values.collective import Collective
from netstorm.kvstore.values.form import Array, Form
from netstorm.kvstore.values.forms import form_of, forms_of
from netstorm.kvstore.values.layout import Layout
from netstorm.protocol.chunks import COLLECTIVE, ITEM_BYTES
from netstorm.protocol.collectives import ELEMENT_BYTES, Signature, rounds_under_way
from netstorm.protocol.messages import KeyGrant, KeySpec
from netstorm.protocol.texts import printable

__all__ = ["Array", "Key"]

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
        self.forms: Final = forms_of(self.spec)
        """The forms that rounds of this key may have, by codec; the first is the key's own. See `form_of`."""
        self.rounds_under_way: Final = rounds_under_way(self.elements, form)
        """How far beyond its last complete round a node may contribute: it bounds what others must store."""
        self.identity = -1
        """The scheduler's number for this key; -1 until the scheduler has granted it."""
        self.layout: Layout | None = None
        """Where the chunks are, if they are the same in all rounds; see `layout_of`."""
        self.last_taken = -1
        """The last round number handed out."""
        self._rounds = itertools.count()
        self._grant: KeyGrant | None = None
        self._layouts: Final[dict[Signature, Layout]] = {}

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

    def layout_of(self, form: Form) -> Layout:
        """Return where the chunks of a round are. The key must have been granted."""
        if self.layout is not None:
            return self.layout
        assert isinstance(form, Collective)
        assert self._grant is not None
        found = self._layouts.get(form.signature)
        if found is None:
            if len(self._layouts) >= _LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            found = self._layouts[form.signature] = Layout.of_round(
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
            self.layout = Layout.of_key(self.elements, self.dtype.itemsize, grant, self.spec.form)
