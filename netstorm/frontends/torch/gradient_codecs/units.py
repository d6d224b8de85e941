"""Which parameters of a tensor travel together. Pure.

A tensor is one of DDP's buckets, or an outer gradient: the values of several parameters in a row. A large
parameter is a unit by itself, so that its values, and what a codec keeps of them, do not depend on the
buckets that DDP makes, and so that units are encoded while others travel. Small ones would be mostly headers.
Those of a tensor that have the same codec are one unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from netstorm.compression.codec import Codec
from netstorm.compression.registry import CodecRules
from netstorm.compression.sparse import MixedPrecision

__all__ = ["Parameter", "Unit", "units_of"]

_LARGE: Final = 1 << 15
"""Elements of a parameter that is a unit by itself: 128 KiB, beside which headers do not count."""


class Parameter(NamedTuple):
    """One of those whose values are in a tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


class Unit(NamedTuple):
    """What is summed as one."""

    name: str
    """The same at all ranks."""
    parameters: tuple[Parameter, ...]
    places: tuple[slice, ...]
    """Where each parameter's values are in the tensor."""
    shape: tuple[int, ...]
    codec: Codec | None
    """None: the values travel as they are, of their own type."""

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


def units_of(parameters: Sequence[Parameter], rules: CodecRules) -> list[Unit]:
    """Return the units of a tensor, in the order of their first parameters.

    Args:
        parameters: those of the tensor, in the order of their values.
        rules: which of them has which codec.

    Raises:
        UsageError: a parameter has no codec.
    """
    found: list[tuple[Codec | None, list[tuple[Parameter, slice]]]] = []
    shared: dict[str, list[tuple[Parameter, slice]]] = {}
    start = 0
    for parameter in parameters:
        place = slice(start, start + parameter.elements)
        start = place.stop
        codec = _codec(rules.of(parameter.name), parameter.shape)
        if codec is not None and (parameter.elements >= _LARGE or codec.form(parameter.shape) is None):
            found.append((codec, [(parameter, place)]))
            continue
        kind = "" if codec is None else codec.fingerprint
        if kind not in shared:
            shared[kind] = []
            found.append((codec, shared[kind]))
        shared[kind].append((parameter, place))
    return [_unit(codec, members) for codec, members in found if any(part.elements for part, _ in members)]


def _codec(codec: Codec, shape: tuple[int, ...]) -> Codec | None:
    """Return the codec that a tensor of this shape has; None: it travels as it is."""
    if isinstance(codec, MixedPrecision):
        codec = codec.of(shape)
    return None if codec.form(shape) == 0 and not codec.parts(shape) else codec


def _unit(codec: Codec | None, members: list[tuple[Parameter, slice]]) -> Unit:
    if codec is not None:
        # DDP orders a bucket anew after its first step.
        members = sorted(members, key=lambda member: member[0].name)
    parameters, places = zip(*members, strict=True)
    if len(parameters) == 1:
        return Unit(parameters[0].name, parameters, places, parameters[0].shape, codec)
    elements = sum(parameter.elements for parameter in parameters)
    name = f"{parameters[0].name} and {len(parameters) - 1} more, {elements}"
    return Unit(name, parameters, places, (elements,), codec)
