"""The keys of a job: their shapes, numbers, chunk sizes, and offsets among the job's bytes."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol.codecs import (
    COLLECTIVE,
    FACTORS,
    ITEM_BYTES,
    LEAST_FACTORS,
    QUANTISED,
    ROW_SPARSE,
    ChunkSizes,
    aligned,
    counted_bytes,
    encoded_fraction,
    pitch,
    row_length,
    slot_of,
)
from netstorm.protocol.messages import KeyGrant, KeySpec

__all__ = ["KeyConflict", "KeyRegistry"]

_MOST_DIMENSIONS: Final = 64
"""NumPy 2's own limit. The product of a million dimensions would keep the scheduler busy."""

MOST_KEYS: Final = 2**17
_MOST_CHARACTERS: Final = 4096
"""Of a key's name. Together they bound what a member can make the scheduler, and all nodes, store."""

_FORMS: Final = {
    0: "",
    FACTORS: " of factors",
    QUANTISED: " under gradient compression",
    COLLECTIVE: " of a process group",
    ROW_SPARSE: " row_sparse",
}

_NAMED_SLOTS: Final = 2**20
"""More than policies have trees, and far from any bound of slots."""

_MOST_BYTES: Final = 2**62
"""Offsets travel as 64-bit integers."""


@dataclass(frozen=True, slots=True)
class KeyConflict:
    """Two ranks register one key with different shapes or types."""

    first_rank: int
    first: KeySpec
    rank: int
    spec: KeySpec

    def __str__(self) -> str:
        store = f" (of store {self.spec.namespace})" if self.spec.namespace else ""
        return (
            f"rank {self.rank} has {self.spec.name}{store} as {_kind(self.spec)}, rank {self.first_rank} as "
            f"{_kind(self.first)}: every rank must give a key the same shape and type"
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    spec: KeySpec
    grant: KeyGrant
    first_rank: int


class KeyRegistry:
    """Keys by namespace and name. The first registration defines a key; all others must agree with it."""

    def __init__(self, sizes: ChunkSizes, *, by_name: bool = False) -> None:
        """Begin without keys.

        Args:
            sizes: of chunks.
            by_name: a key's trees follow from its name, not from its place among the job's bytes: groups of
                other ranks register theirs now earlier, now later.
        """
        self._sizes: Final = sizes
        self._by_name: Final = by_name
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._specs: list[KeySpec] = []
        self._end = 0
        self._factor_bytes = 0
        """Of all keys of factors."""
        self._key_bytes: list[int] = []
        self._chunk_bytes: dict[int, int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        """By name of a process group, whose keys are named after it: its ranks; empty: all."""

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, key: int) -> bool:
        return 0 <= key < len(self._specs)

    @property
    def total_bytes(self) -> int:
        """Bytes of all keys together, with the gaps that alignment makes."""
        return self._end

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each key, in order of registration, which is that of first use."""
        return tuple(self._key_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Size of a full chunk, of the kind that holds most of the job's bytes; 0 while there is no key."""
        return max(self._chunk_bytes, key=self._chunk_bytes.__getitem__, default=0)

    def spec(self, key: int) -> KeySpec:
        """Return what a key was registered as."""
        return self._specs[key]

    def grant(self, key: int) -> KeyGrant:
        """Return a key's number and layout."""
        spec = self._specs[key]
        return self._entries[spec.namespace, spec.name].grant

    def name(self, key: int) -> str:
        """Return the user's name of a key."""
        return self._specs[key].name

    def members_of_group(self, group: str) -> tuple[int, ...]:
        """Return the ranks of a process group; empty: all, or the group has no key."""
        return self._groups.get(group, ())

    def register(self, rank: int, spec: KeySpec) -> KeyGrant | KeyConflict:
        """Register a key. Returns its number and layout, or a conflict with what another rank registered.

        Raises:
            ProtocolViolation: no correct node sends such a key.
        """
        item_bytes = ITEM_BYTES.get(spec.dtype)
        if item_bytes is None:
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} as {spec.dtype!r}; what can be summed: "
                + ", ".join(ITEM_BYTES)
            )
        found = self._entries.get((spec.namespace, spec.name))
        if found is not None:
            return (
                found.grant if found.spec == spec else KeyConflict(found.first_rank, found.spec, rank, spec)
            )
        if len(self._specs) >= MOST_KEYS or len(spec.name) > _MOST_CHARACTERS:
            raise ProtocolViolation(
                f"rank {rank} registers key number {len(self._specs)}, with a name of {len(spec.name)} "
                f"characters: expected at most {MOST_KEYS} keys, and {_MOST_CHARACTERS} characters"
            )
        if len(spec.shape) > _MOST_DIMENSIONS:
            raise ProtocolViolation(f"rank {rank} registers {spec.name!r} with {len(spec.shape)} dimensions")
        offset = aligned(self._end, item_bytes)
        size = item_bytes
        for side in spec.shape:
            if side < 0:
                raise ProtocolViolation(f"rank {rank} registers {spec.name!r} with the shape {spec.shape}")
            size *= side
        if offset + size > _MOST_BYTES:
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} with {size} bytes: too large for any job"
            )
        chunk_size = self._chunk_size(rank, spec, size // item_bytes)
        step = pitch(chunk_size, item_bytes, spec.form)
        size = counted_bytes(size, chunk_size, item_bytes, spec.form)
        grant = KeyGrant(
            namespace=spec.namespace,
            name=spec.name,
            key=len(self._specs),
            first_slot=self._slot(spec, offset),
            offset=offset,
            chunk_size=chunk_size,
        )
        self._end = offset + size
        self._add(spec)
        self._count_factors(spec)
        self._key_bytes.append(size)
        self._chunk_bytes[step] = self._chunk_bytes.get(step, 0) + size
        self._entries[spec.namespace, spec.name] = _Entry(spec, grant, rank)
        return grant

    def restore(self, rank: int, spec: KeySpec, grant: KeyGrant) -> None:
        """Add a key as another scheduler has numbered it. Call it in the order of their numbers."""
        item_bytes = ITEM_BYTES[spec.dtype]
        size = item_bytes * math.prod(spec.shape)
        step = pitch(grant.chunk_size, item_bytes, spec.form)
        size = counted_bytes(size, grant.chunk_size, item_bytes, spec.form)
        self._end = max(self._end, grant.offset + size)
        self._add(spec)
        self._count_factors(spec)
        self._key_bytes.append(size)
        self._chunk_bytes[step] = self._chunk_bytes.get(step, 0) + size
        self._entries[spec.namespace, spec.name] = _Entry(spec, grant, rank)

    def _add(self, spec: KeySpec) -> None:
        self._specs.append(spec)
        if spec.form == COLLECTIVE:
            self._groups.setdefault(spec.name.rpartition("/")[0], spec.members)

    def _slot(self, spec: KeySpec, offset: int) -> int:
        """Return the slot of the first chunk. Factors are under way alone, so they are shared among the trees
        by their own bytes.
        """
        if self._by_name:
            return zlib.crc32(f"{spec.namespace} {spec.name}".encode()) % _NAMED_SLOTS
        if spec.form == FACTORS:
            return slot_of(self._factor_bytes, LEAST_FACTORS)
        return slot_of(offset, self._sizes.smallest)

    def _count_factors(self, spec: KeySpec) -> None:
        if spec.form == FACTORS:
            self._factor_bytes += ITEM_BYTES[spec.dtype] * math.prod(spec.shape)

    def _chunk_size(self, rank: int, spec: KeySpec, elements: int) -> int:
        """Return the elements of a chunk."""
        if encoded_fraction(spec.form) < 1:
            return self._sizes.of_encoded(elements, spec.form)
        if spec.form == FACTORS:
            return self._sizes.of_factors(elements)
        if spec.form == COLLECTIVE:
            return self._sizes.of_collective(elements)
        if spec.form != ROW_SPARSE:
            return self._sizes.of(elements)
        chunk_size = self._sizes.of_rows(spec.shape)
        if chunk_size == 0:
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} with rows of {row_length(spec.shape)} elements, too "
                "long for a message"
            )
        return chunk_size


def _kind(spec: KeySpec) -> str:
    members = f" of ranks {list(spec.members)}" if spec.members else ""
    return f"{tuple(spec.shape)} {spec.dtype}{_FORMS.get(spec.form, f' in form {spec.form}')}{members}"
