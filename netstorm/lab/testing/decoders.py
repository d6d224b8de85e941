"""Decoders as fuzzing sees them: valid inputs, mutations of bytes, texts and structured values, and what one
input may cost. Hypothesis and atheris choose the inputs.
"""

from __future__ import annotations

import copy
import random
import re
import resource
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import inspect

from netstorm.protocol.messages import Message
from netstorm.topology.network import Rank
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.tree import Tree

__all__ = [
    "POLICIES",
    "FuzzTarget",
    "Mutator",
    "example",
    "message_classes",
    "mutate_bytes",
    "mutate_value",
    "of_words",
    "structured",
    "withstand",
]


# Mutations of structured values: what decodes stays decodable, but says something else.
#
# A value is what MessagePack and JSON have: nested lists and mappings of numbers, texts, bytes and null.

_WHOLE: Final = (
    0, 1, -1, 2, 3, 7, 8, 15, 16, 63, 64, 255, 256, 2**15, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**40,
    2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1,
)  # fmt: skip
_REAL: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS: Final = (
    "", "0", "float32", "float16", "int64", "complex128", "object", "*", "job", "x" * 300, "\0", "\n", "é",
    "🦊", "__class__", "{0}", "%s", "../..", "nan", "[red]",
)  # fmt: skip
_OTHERS: Final[tuple[Callable[[], Any], ...]] = (
    lambda: None,
    lambda: True,
    list,
    dict,
    lambda: [0],
    lambda: b"",
    lambda: {0: 0},
    lambda: b"\xff" * 9,
)
_LONG: Final = 400
"""Elements that a list grows to."""

_DEEP: Final = 250


def mutate_value(chance: random.Random, value: Any, other: Any) -> Any:
    """Return `value`, changed in one to four places; it may be changed itself. `other` lends parts."""
    for _ in range(1 + int(chance.random() ** 2 * 4)):
        value = _mutate_once(chance, value, other)
    return value


def structured(
    unpack: Callable[[bytes], Any], pack: Callable[[Any], bytes], errors: tuple[type[Exception], ...]
) -> Mutator:
    """Return a mutator of inputs that are encoded values.

    Args:
        unpack: decodes an input.
        pack: encodes a value, also one that no correct program would.
        errors: what both raise.
    """

    def mutate(chance: random.Random, data: bytes, other: bytes) -> bytes:
        if chance.random() < 0.15:
            return mutate_bytes(chance, data, other)
        try:
            return pack(mutate_value(chance, unpack(data), unpack(other)))
        except errors:
            return mutate_bytes(chance, data, other)

    return mutate


def _mutate_once(chance: random.Random, value: Any, other: Any) -> Any:
    parent: Any = None
    place: Any = None
    at = value
    while isinstance(at, (list, dict)) and at and chance.random() < 0.85:
        parent = at
        place = (
            int(chance.random() * len(at))
            if isinstance(at, list)
            else list(at)[int(chance.random() * len(at))]
        )
        at = at[place]
    new = _changed(chance, at, other)
    if parent is None:
        return new
    parent[place] = new
    return value


def _changed(chance: random.Random, at: Any, other: Any) -> Any:
    kind = chance.random()
    if kind < 0.1:
        return _part_of(chance, other)
    if kind < 0.14:
        return chance.choice(_OTHERS)()
    if isinstance(at, bool):
        return not at
    if isinstance(at, int):
        return chance.choice(_WHOLE) if chance.random() < 0.6 else at + chance.randint(-3, 3)
    if isinstance(at, float):
        return chance.choice(_REAL) if chance.random() < 0.7 else at * chance.uniform(-2, 2)
    if isinstance(at, str):
        return _changed_text(chance, at)
    if isinstance(at, bytes):
        return mutate_bytes(chance, at, b"\0\1\2\3\xff")
    if isinstance(at, list):
        return _changed_list(chance, at, other)
    if isinstance(at, dict):
        return _changed_mapping(chance, at, other)
    return chance.choice(_WHOLE)


def _changed_text(chance: random.Random, text: str) -> str:
    if chance.random() < 0.6 or not text:
        return chance.choice(_TEXTS)
    at = int(chance.random() * len(text))
    return text[:at] + chance.choice(_TEXTS) + text[at + int(chance.random() * 3) :]


def _changed_list(chance: random.Random, values: list[Any], other: Any) -> list[Any]:
    kind = int(chance.random() * 8)
    at = int(chance.random() * (len(values) + 1))
    if kind == 0 and values:
        del values[at - 1]
    elif kind == 1:
        values.insert(at, _part_of(chance, other))
    elif kind == 2 and values:
        values.insert(at, copy.deepcopy(values[int(chance.random() * len(values))]))
    elif kind == 3:
        chance.shuffle(values)
    elif kind == 4:
        del values[at:]
    elif kind == 5 and values:
        first = int(chance.random() * len(values))
        values[first], values[at - 1] = values[at - 1], values[first]
    elif kind == 6 and values and chance.random() < 0.2:
        values += [values[-1]] * int(chance.random() ** 3 * _LONG)
    elif kind == 7 and chance.random() < 0.02:
        nested: list[Any] = []
        for _ in range(int(chance.random() * _DEEP)):
            nested = [nested]
        values.insert(at, nested)
    return values


def _changed_mapping(chance: random.Random, values: dict[Any, Any], other: Any) -> dict[Any, Any]:
    kind = chance.random()
    keys = list(values)
    new = chance.choice(_WHOLE) if chance.random() < 0.5 else chance.choice(_TEXTS)
    if keys and kind < 0.3:
        del values[chance.choice(keys)]
    elif keys and kind < 0.6:
        values[new] = values.pop(chance.choice(keys))
    else:
        values[new] = _part_of(chance, other)
    return values


def _part_of(chance: random.Random, value: Any) -> Any:
    while isinstance(value, (list, dict)) and value and chance.random() < 0.7:
        children = value if isinstance(value, list) else list(value.values())
        value = children[int(chance.random() * len(children))]
    return copy.deepcopy(value)


# Mutations that know nothing of a format: bits, bytes, numbers, pieces.

_BYTES: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x90, 0xDF, 0xC0, 0xCA, 0x20, 0x0A, 0x22, 0x5B, 0x7B)
_NUMBERS: Final = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_PIECE: Final = 32
_MOST_AT_ONCE: Final = 4


def mutate_bytes(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Return `data` with one to four changes; `other` lends pieces."""
    changed = bytearray(data)
    for _ in range(1 + int(chance.random() ** 2 * _MOST_AT_ONCE)):
        _CHANGES[int(chance.random() * len(_CHANGES))](chance, changed, other)
    return bytes(changed)


def _flip(chance: random.Random, data: bytearray, _other: bytes) -> None:
    if data:
        data[int(chance.random() * len(data))] ^= 1 << int(chance.random() * 8)


def _set(chance: random.Random, data: bytearray, _other: bytes) -> None:
    if data:
        data[int(chance.random() * len(data))] = (
            chance.choice(_BYTES) if chance.random() < 0.5 else chance.getrandbits(8)
        )


def _insert(chance: random.Random, data: bytearray, _other: bytes) -> None:
    at = int(chance.random() * (len(data) + 1))
    data[at:at] = chance.randbytes(1 + int(chance.random() * 8))


def _delete(chance: random.Random, data: bytearray, _other: bytes) -> None:
    first, end = _range(chance, len(data))
    del data[first:end]


def _truncate(chance: random.Random, data: bytearray, _other: bytes) -> None:
    del data[int(chance.random() * (len(data) + 1)) :]


def _repeat(chance: random.Random, data: bytearray, _other: bytes) -> None:
    first, end = _range(chance, len(data))
    data[first:first] = data[first:end] * (1 + int(chance.random() ** 4 * 64))


def _splice(chance: random.Random, data: bytearray, other: bytes) -> None:
    first, end = _range(chance, len(other))
    at, until = _range(chance, len(data))
    data[at:until] = other[first:end]


def _cross(chance: random.Random, data: bytearray, other: bytes) -> None:
    data[int(chance.random() * (len(data) + 1)) :] = other[int(chance.random() * (len(other) + 1)) :]


def _number(chance: random.Random, data: bytearray, _other: bytes) -> None:
    size = chance.choice((1, 2, 4, 8))
    if len(data) < size:
        return
    at = int(chance.random() * (len(data) - size + 1))
    value = chance.choice(_NUMBERS) & (1 << 8 * size) - 1
    if chance.random() < 0.3:
        value = int.from_bytes(data[at : at + size], "little") + chance.randint(-4, 4) & (1 << 8 * size) - 1
    data[at : at + size] = value.to_bytes(size, "little" if chance.random() < 0.5 else "big")


def _range(chance: random.Random, size: int) -> tuple[int, int]:
    first = int(chance.random() * size)
    return first, min(size, first + 1 + int(chance.random() * _PIECE))


_CHANGES: Final[tuple[Callable[[random.Random, bytearray, bytes], None], ...]] = (
    _flip,
    _set,
    _insert,
    _delete,
    _truncate,
    _repeat,
    _splice,
    _cross,
    _number,
)


# Mutations of text formats: words and lines are moved, and replaced by others of the format.

_WORDS: Final = re.compile(rb"[A-Za-z_]+|[0-9]+|\s+|.", re.DOTALL)
_TEXT_NUMBERS: Final = (
    b"0",
    b"-1",
    b"1",
    b"4095",
    b"4096",
    b"65536",
    b"1e999",
    b"99999999999999999999",
    b"0x10",
    b".5",
)
_MOST_WORDS_AT_ONCE: Final = 5


def of_words(vocabulary: Sequence[bytes]) -> Mutator:
    """Return a mutator of texts in which these words mean something."""
    words = (*vocabulary, *_TEXT_NUMBERS, "é".encode(), b"\0", b"\t", b"\r\n")

    def mutate(chance: random.Random, data: bytes, other: bytes) -> bytes:
        if chance.random() < 0.2:
            return mutate_bytes(chance, data, other)
        parts = _WORDS.findall(data)
        for _ in range(1 + int(chance.random() ** 2 * _MOST_WORDS_AT_ONCE)):
            kind = int(chance.random() * 7)
            at = int(chance.random() * (len(parts) + 1))
            if kind == 0 and parts:
                parts[at - 1] = chance.choice(words)
            elif kind == 1:
                parts.insert(at, chance.choice(words))
            elif kind == 2 and parts:
                del parts[at - 1 : at + int(chance.random() * 6)]
            elif kind == 3 and parts:
                first = int(chance.random() * len(parts))
                piece = parts[first : first + int(chance.random() * 20)]
                parts[at:at] = piece * (1 + int(chance.random() ** 6 * 100))
            elif kind == 4 and parts:
                first = int(chance.random() * len(parts))
                parts[first], parts[at - 1] = parts[at - 1], parts[first]
            elif kind == 5:
                lent = _WORDS.findall(other)
                first = int(chance.random() * len(lent))
                parts[at : at + int(chance.random() * 5)] = lent[first : first + int(chance.random() * 30)]
            elif kind == 6:
                opened = chance.choice((b"[", b"{", b"- ", b"? ", b"*a ", b"&a ", b"!t ", b'"', b"'", b"|\n"))
                parts.insert(at, opened * (1 + int(chance.random() ** 8 * 2000)))
        return b"".join(parts)

    return mutate


# An example of each message, made from its declaration: a new message is fuzzed without a word here.

_CHAIN: Final = Tree.undirected(Rank(0), (-1, 0, 1, 2))
_STAR: Final = Tree.undirected(Rank(0), (-1, 0, 0, 0))

POLICIES: Final = (
    Policy(version=1, trees=(_CHAIN,), weights=(1,)),
    Policy(
        version=2,
        trees=(_CHAIN, _STAR),
        weights=(3, 5),
        reason="an example",
        look_ahead=1 << 20,
        look_ahead_s=0.5,
        detours=(Detour(path=(1, 2, 0), links=((1e6, 0.01), (2e6, 0.02)), explore=True, load=0.5),),
        leads=(0, 2),
        takes_over=True,
        slow=((0, 1), (2, 3)),
        keeps_begun=True,
    ),
)


def message_classes() -> list[type[Message]]:
    """Return the classes of all messages that travel, in the order of their tags."""
    found: list[type[Message]] = []
    ahead: list[type[Message]] = [Message]
    while ahead:
        one = ahead.pop()
        ahead += one.__subclasses__()
        if isinstance(one.__struct_config__.tag, int):
            found.append(one)
    return sorted(found, key=lambda one: str(one.__struct_config__.tag).zfill(9))


def example(kind: type[msgspec.Struct], variant: int = 0) -> Any:
    """Return what an instance of `kind` is in MessagePack; variants differ in numbers and lengths."""
    return _value(inspect.type_info(kind), variant)


def _value(kind: inspect.Type, variant: int) -> Any:
    match kind:
        case inspect.StructType():
            return _struct(kind, variant)
        case inspect.VarTupleType() | inspect.ListType():
            return [_value(kind.item_type, variant + place) for place in range(1 + variant)]
        case inspect.TupleType():
            return [_value(item, variant) for item in kind.item_types]
        case inspect.DictType():
            return {_value(kind.key_type, variant): _value(kind.value_type, variant)}
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.UnionType():
            return _value(kind.types[variant % len(kind.types)], variant)
    simple: dict[type[inspect.Type], Any] = {
        inspect.BoolType: bool(variant % 2),
        inspect.IntType: variant,
        inspect.FloatType: variant + 0.5,
        inspect.StrType: "float32" if variant % 2 else "text",
        inspect.BytesType: bytes([1 << variant % 8]),
        inspect.NoneType: None,
    }
    return simple[type(kind)]


def _struct(kind: inspect.StructType, variant: int) -> Any:
    if kind.cls is Policy:
        return msgspec.to_builtins(POLICIES[variant % len(POLICIES)])
    values = [_value(field.type, variant) for field in kind.fields]
    if kind.array_like:
        return values if kind.tag is None else [kind.tag, *values]
    return {field.encode_name: value for field, value in zip(kind.fields, values, strict=True)}


# A decoder as fuzzing sees it: what it takes, which exceptions it may raise, and what one input may cost.

Mutator: TypeAlias = Callable[[random.Random, bytes, bytes], bytes]
"""Makes an input of another one, and perhaps of parts of a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzTarget:
    """One decoder."""

    name: str
    """One word, which names the folder of its corpus, too."""
    decode: Callable[[bytes], Hashable]
    """Decodes one input, and uses what it has decoded as the program would."""
    allowed: tuple[type[Exception], ...]
    """What it may raise; anything else is a finding."""
    seeds: Callable[[], list[bytes]]
    """Valid inputs to begin with."""
    mutate: Mutator
    largest: int = 4096
    """Bytes of an input; mutation cuts what is longer."""


_MOST_CPU_S: Final = 1.0
"""Processor time of one input of a few kilobytes."""

_MOST_NEW_BYTES: Final = 96 * 2**20
"""By which one input may make the process larger than it ever was."""


def withstand(target: FuzzTarget, data: bytes) -> bool:
    """Decode one input; return whether it was valid.

    Raises:
        AssertionError: it took more processor time or memory than an input may.
        Exception: any that the target does not allow.
    """
    before = resource.getrusage(resource.RUSAGE_SELF)
    try:
        target.decode(data)
        valid = True
    except target.allowed:
        valid = False
    after = resource.getrusage(resource.RUSAGE_SELF)
    grown = (after.ru_maxrss - before.ru_maxrss) * 1024
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if grown > _MOST_NEW_BYTES:  # first: taking it costs time, too
        raise AssertionError(
            f"{target.name} took {grown / 2**20:.0f} MiB of memory for {len(data)} bytes: "
            f"expected at most {_MOST_NEW_BYTES / 2**20:.0f} MiB"
        )
    if took_s > _MOST_CPU_S:
        raise AssertionError(
            f"{target.name} took {took_s:.1f} s of processor time for {len(data)} bytes: "
            f"expected at most {_MOST_CPU_S:g} s"
        )
    return valid
