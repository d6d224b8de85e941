"""An example of each message, made from its declaration: a new message is fuzzed without a word here."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import inspect

from netstorm.protocol.messages import Message
from netstorm.topology.network import Rank
from netstorm.topology.policy import Detour, Policy
from netstorm.topology.tree import Tree

__all__ = ["POLICIES", "example", "message_classes"]

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
