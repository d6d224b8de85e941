"""What payloads and numbers in messages mean: values of all forms, codecs, keys and their chunks."""

from __future__ import annotations

import random
import warnings
from collections.abc import Hashable
from typing import Any, Final

import msgspec
import numpy as np

from decoders.wire import PACK_ERRORS, pack, unpack
from netstorm.compression.quantised import as_planes
from netstorm.compression.sparse import Entries
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.kvstore.forms import Key
from netstorm.kvstore.rounds.aggregation import check_part
from netstorm.lab.testing.decoders import POLICIES, FuzzTarget, mutate_bytes, mutate_value, structured
from netstorm.protocol.codecs import (
    BFLOAT16,
    COLLECTIVE,
    FLOAT16,
    ITEM_BYTES,
    MAXIMA,
    PACKED,
    QUANTISED,
    ROW_SPARSE,
    SPARSE,
    ChunkSizes,
    Element,
    Reduction,
    Signature,
    can_reduce,
    family_of,
    narrow,
    packed,
    sparse,
)
from netstorm.protocol.frames import Peer, bits_to_wire
from netstorm.protocol.messages import KeySpec, Part
from netstorm.scheduler.rounds import KeyConflict, KeyRegistry
from netstorm.topology.policy import Plan

__all__ = ["TARGETS"]

_PARTS: Final = msgspec.msgpack.Decoder(tuple[int, int, list[tuple[Part, bytes | None]]])
_SPECS: Final = msgspec.msgpack.Decoder(list[KeySpec])
_PLAN: Final = Plan(POLICIES[0], 0)
"""Rank 0 is the root of a chain: its only child is rank 1, whose parts carry ranks 1 to 3."""

_SIZES: Final = ChunkSizes(smallest=64, largest=256, enough=4)
_ENCODED: Final = (
    narrow(FLOAT16),
    narrow(BFLOAT16),
    packed(1),
    packed(56),
    packed(254),
    packed(255),
    sparse(0),
    sparse(1),
    sparse(2.5),
    MAXIMA,
)
"""Codecs with arguments, which rounds of float32 keys may have."""

_KEYS: Final = (
    *((dtype, (300,), 0) for dtype in ITEM_BYTES),
    ("float32", (100, 3), ROW_SPARSE),
    ("float16", (100, 3), ROW_SPARSE),
    ("float32", (300,), QUANTISED),
    ("float32", (2000,), COLLECTIVE),
)


def _granted() -> list[Key]:
    registry = KeyRegistry(_SIZES)
    keys = []
    for number, (dtype, shape, form) in enumerate(_KEYS):
        key = Key(0, str(number), shape, dtype, form=form)
        grant = registry.register(0, key.spec)
        if isinstance(grant, KeyConflict):
            raise TypeError(f"two keys of one name: {grant}")
        key.set_grant(grant)
        keys.append(key)
    return keys


_GRANTED: Final = _granted()


def _decode_parts(data: bytes) -> Hashable:
    """Check two parts of one chunk, then add them as a node does: [key, ?, [[part, payload], ...]]."""
    try:
        number, _, parts = _PARTS.decode(data)
    except PACK_ERRORS:
        return "no input of this target"
    key = _GRANTED[number % len(_GRANTED)]
    total: Any = None
    chunk = elements = 0
    for place, (part, payload) in enumerate(parts[:4]):
        frame = None if payload is None else bytearray(payload)
        form, contributors = check_part(
            Peer(1), part, frame, key=key, plan=_PLAN, complete=-1, bound=POLICIES[0].version
        )
        if total is None or form.codec != total[0].codec:
            total, chunk = (form, form.new_sum()), part.chunk
            start, end = key.layout_of(form).bounds[chunk]
            elements = end - start
        if part.chunk == chunk:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # As if of other ranks each time: nobody is in a sum twice.
                total[1].add_received(frame, contributors << place * _PLAN.policy.size)
    if total is None:
        return 0
    form, found = total
    for payload in (found.to_send(), found.to_keep()):
        if payload is not None:
            problem = form.problem(payload, elements, found.contributors)
            if problem is not None:
                raise AssertionError(f"the sum of right payloads is wrong: {problem}")
    return form.codec & 15, found.contributors, type(found), found.to_send() is None


def _part(codec: int, dtype: str, key: int, chunk: int = 0) -> list[Any]:
    part = Part(
        key=key,
        round=0,
        chunk=chunk,
        phase=0,  # type: ignore[arg-type] # as it travels
        version=1,
        tree=0,
        contributors=bits_to_wire(0b1110),
        dtype=dtype,
        codec=codec,
    )
    value: list[Any] = unpack(pack(part))
    return value


def _parts() -> list[bytes]:
    made = []
    for number, (dtype, _, form) in enumerate(_KEYS):
        key = _GRANTED[number]
        codecs = [key.form.codec] if not key.is_collective else _codecs()[::3]
        for codec in codecs:
            used = key.form_of(codec)
            if used is None:
                continue
            start, end = key.layout_of(used).bounds[0]
            if form == ROW_SPARSE:
                size = 2 * (3 * key.dtype.itemsize)
                payload = bytes(range(size)) + np.array([1, 5], "<u4").tobytes()
            elif form == QUANTISED:
                payload = bytes(3 * -(-(end - start) // 8))
            else:
                payload = bytes((end - start) * (1 if key.is_collective else key.dtype.itemsize))
            part = _part(codec, dtype, number)
            made.append(pack([number, 0, [[part, payload], [part, payload], [part, None]]]))
    return made + [pack(_encoded_part(codec)) for codec in _ENCODED]


def _encoded_part(codec: int) -> list[Any]:
    """Return an input whose payloads are the sum of what three ranks contribute under a codec."""
    number = next(place for place, key in enumerate(_KEYS) if key == ("float32", (300,), 0))
    key = _GRANTED[number]
    form = key.form_of(codec)
    if form is None:
        raise TypeError(f"float32 keys never have codec {codec}")
    start, end = key.layout_of(form).bounds[0]
    values = np.arange(end - start, dtype=np.float32)
    source: Any = values
    if family_of(codec) == PACKED:
        most = codec >> 4
        source = as_planes((values % (most + 1)).astype(np.uint8), most)
    elif family_of(codec) == SPARSE:
        source = Entries(np.arange(0, end - start, 7), values[::7])
    total = form.new_sum()
    for rank in (1, 2, 3):
        total.add_own(form.own(source, 0, end - start), 1 << rank)
    sent = total.to_send()
    part = _part(codec, "float32", number)
    payload = b"" if sent is None else bytes(sent)
    return [number, 0, [[part, payload], [part, payload], [part, None]]]


def _mutate_parts(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Mostly change payloads, and codecs bit by bit: what is wrong elsewhere is refused at once."""
    try:
        value = unpack(data)
        part, payload = chance.choice(value[2])
        kind = chance.random()
        if kind < 0.5 and payload:
            one = chance.choice([entry for entry in value[2] if entry[1]])
            one[1] = mutate_bytes(chance, one[1], payload)
            if chance.random() < 0.6:  # keeps its size
                one[1] = (one[1] + bytes(len(payload)))[: len(payload)]
        elif kind < 0.75:
            codec_at = Part.__struct_fields__.index("codec") + 1
            part[codec_at] = int(part[codec_at]) ^ 1 << chance.randrange(40)
            if chance.random() < 0.3:
                part[codec_at] = chance.choice([*_codecs(), *_ENCODED])
        else:
            value = mutate_value(chance, value, unpack(other))
        return pack(value)
    except (*PACK_ERRORS, IndexError, KeyError, AttributeError):
        return mutate_bytes(chance, data, other)


# ----------------------------------------------------------------------------------------- numbers of codecs


def _decode_codec(data: bytes) -> Hashable:
    """Find the form that any number stands for, and check a payload of it for a few elements."""
    codec = int.from_bytes(data[:9], "little", signed=True)
    key = _GRANTED[data[9] % len(_GRANTED)] if len(data) > 9 else _GRANTED[0]
    form = key.form_of(codec)
    if form is None:
        return None
    if form.codec != codec:
        raise AssertionError(f"codec {codec} makes the form of codec {form.codec}")
    payload, contributors = data[11:], (1 << data[10] % 64 + 1) - 1 if len(data) > 10 else 1
    problem = form.problem(payload, 8, contributors)
    if problem is None and not key.is_collective:
        total = form.new_sum()
        total.add_received(bytearray(payload), contributors)
        total.to_keep()
    return codec & 15, problem is None


def _numbers_of_codecs() -> list[bytes]:
    payloads = (bytes(16), bytes(8), bytes(9), b"\1\0\0\0\1\0\0\0\0\0\0\0\1")
    return [
        codec.to_bytes(9, "little", signed=True) + bytes([number, ranks]) + payload
        for codec in (-1, 0, 1, 2, 3, *_ENCODED, *_codecs()[::9])
        for number, ranks, payload in (
            (0, 0, payloads[0]),
            (1, 2, payloads[1]),
            *((1, 2, one) for one in payloads[2:]),
        )
    ]


# ------------------------------------------------------------------------------------------------- signatures


def _codecs() -> list[int]:
    return [
        Signature(reduction, element, segments, size).codec()
        for reduction in Reduction
        for element in Element
        if can_reduce(reduction, element)
        for segments, size in ((1, 64), (3, 16))
    ]


def _decode_signature(data: bytes) -> Hashable:
    codec = int.from_bytes(data[:9], "little", signed=True)
    found = Signature.of_codec(codec)
    if found is None:
        return None
    if found.codec() != codec:
        raise AssertionError(f"codec {codec} reads as {found}, which is codec {found.codec()}")
    found.chunks(64)
    return found.reduction, found.element


# ------------------------------------------------------------------------------------------------------- keys


def _decode_keys(data: bytes) -> Hashable:
    """Register keys as the scheduler does, and cut those that a node could have into chunks."""
    registry = KeyRegistry(_SIZES)
    granted = 0
    for spec in _SPECS.decode(data)[:32]:
        grant = registry.register(0, spec)
        if isinstance(grant, KeyConflict):
            str(grant)
            continue
        granted += 1
        if registry.sizes[-1] < 1 << 16:
            key = Key(spec.namespace, spec.name, spec.shape, spec.dtype, form=spec.form)
            key.set_grant(grant)
    return granted, registry.chunk_bytes.bit_length()


def _specs() -> list[bytes]:
    return [
        pack([msgspec.to_builtins(key.spec) for key in _GRANTED]),
        pack([msgspec.to_builtins(KeySpec(namespace=0, name="w", shape=(), dtype="float64"))]),
    ]


TARGETS: Final = (
    FuzzTarget(
        name="parts",
        decode=_decode_parts,
        allowed=(ProtocolViolation,),
        seeds=_parts,
        mutate=_mutate_parts,
    ),
    FuzzTarget(
        name="codecs",
        decode=_decode_codec,
        allowed=(),
        seeds=_numbers_of_codecs,
        mutate=mutate_bytes,
        largest=64,
    ),
    FuzzTarget(
        name="signatures",
        decode=_decode_signature,
        allowed=(),
        seeds=lambda: [codec.to_bytes(9, "little") for codec in _codecs()],
        mutate=mutate_bytes,
        largest=9,
    ),
    FuzzTarget(
        name="keys",
        decode=_decode_keys,
        allowed=(ProtocolViolation, UsageError, msgspec.MsgspecError, UnicodeDecodeError),
        seeds=_specs,
        mutate=structured(unpack, pack, PACK_ERRORS),
    ),
)
