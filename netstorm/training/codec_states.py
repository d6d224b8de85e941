"""Which parameters of a tensor travel together under a codec, and what codecs keep of them.

A tensor is one of DDP's buckets, or an outer gradient: the values of several parameters in a row. A large
parameter is a unit by itself, so that its values, and what a codec keeps of them, do not depend on the
buckets that DDP makes, and so that units are encoded while others travel. Small ones would be mostly headers.
Those of a tensor that have the same codec are one unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from netstorm.compression.codec import AnyArray, Codec, State
from netstorm.compression.registry import CodecRules
from netstorm.compression.sparse import BySize
from netstorm.errors import UsageError

__all__ = ["CodecStates", "Parameter", "SavedStates", "SumUnit", "units_of"]

_COUNT: Final = "gradients"
"""Name of the number of a parameter's gradients so far."""

SavedStates: TypeAlias = dict[str, dict[str, dict[str, AnyArray]]]
"""What a checkpoint has: of "parameters" and of "units", by their names, arrays by what they are."""

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


class SumUnit(NamedTuple):
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


def units_of(parameters: Sequence[Parameter], rules: CodecRules) -> list[SumUnit]:
    """Return the units of a tensor, in the order of their first parameters.

    Args:
        parameters: those of the tensor, in the order of their values.
        rules: which of them has which codec.

    Raises:
        UsageError: a parameter has no codec.
    """
    groups: list[tuple[Codec | None, list[tuple[Parameter, slice]]]] = []
    shared: dict[str, list[tuple[Parameter, slice]]] = {}
    start = 0
    for parameter in parameters:
        place = slice(start, start + parameter.elements)
        start = place.stop
        codec = _codec(rules.of(parameter.name), parameter.shape)
        if codec is not None and (parameter.elements >= _LARGE or codec.form(parameter.shape) is None):
            groups.append((codec, [(parameter, place)]))
            continue
        kind = "" if codec is None else codec.fingerprint
        if kind not in shared:
            shared[kind] = []
            groups.append((codec, shared[kind]))
        shared[kind].append((parameter, place))
    return [_unit(codec, members) for codec, members in groups if any(part.elements for part, _ in members)]


def _codec(codec: Codec, shape: tuple[int, ...]) -> Codec | None:
    """Return the codec that a tensor of this shape has; None: it travels as it is."""
    if isinstance(codec, BySize):
        codec = codec.of(shape)
    return None if codec.form(shape) == 0 and not codec.parts(shape) else codec


def _unit(codec: Codec | None, members: list[tuple[Parameter, slice]]) -> SumUnit:
    if codec is not None:
        # DDP orders a bucket anew after its first step.
        members = sorted(members, key=lambda member: member[0].name)
    parameters, places = zip(*members, strict=True)
    if len(parameters) == 1:
        return SumUnit(parameters[0].name, parameters, places, parameters[0].shape, codec)
    elements = sum(parameter.elements for parameter in parameters)
    name = f"{parameters[0].name} and {len(parameters) - 1} more, {elements}"
    return SumUnit(name, parameters, places, (elements,), codec)


class CodecStates:
    """The states of all units.

    What has a value for each element, such as a residual, is a parameter's own: it goes along when DDP puts
    parameters into other buckets, and a checkpoint has it by parameter. Anything else, such as a factor, is
    the unit's.
    """

    def __init__(self) -> None:
        self._units: Final[dict[str, tuple[SumUnit, State]]] = {}
        """Those of the last gradients."""
        self._elements: Final[dict[str, dict[str, AnyArray]]] = {}
        """By parameter, of those that are in no unit."""
        self._others: Final[dict[str, dict[str, AnyArray]]] = {}
        """By name of a unit that is not there yet."""
        self._counts: Final[dict[str, int]] = {}

    def of(self, unit: SumUnit) -> State:
        """Return the state of a unit, of which no sum is under way."""
        present = self._units.get(unit.name)
        if present is not None and present[0].parameters == unit.parameters:
            return present[1]
        names = {parameter.name for parameter in unit.parameters}
        for other, (old, _) in list(self._units.items()):
            if names & {parameter.name for parameter in old.parameters}:
                self._dissolve(other)
        state: State = dict(self._others.pop(unit.name, {}))
        kept = [self._elements.pop(parameter.name, {}) for parameter in unit.parameters]
        for what in dict.fromkeys(what for each in kept for what in each):
            state[what] = np.concatenate(
                [
                    each[what] if what in each else np.zeros(parameter.elements, np.float32)
                    for each, parameter in zip(kept, unit.parameters, strict=True)
                ]
            )
        self._units[unit.name] = unit, state
        return state

    def next_number(self, unit: SumUnit) -> int:
        """Count a gradient of a unit, and return its number, from 0; the same at all ranks."""
        number = max(self._counts.get(parameter.name, 0) for parameter in unit.parameters)
        for parameter in unit.parameters:
            self._counts[parameter.name] = number + 1
        return number

    def saved(self) -> SavedStates:
        """Return copies of all that is kept. No sum may be under way."""
        elements = {name: dict(each) for name, each in self._elements.items()}
        others = {name: dict(each) for name, each in self._others.items()}
        for unit, state in self._units.values():
            _split(unit, state, elements, others)
        return {
            "parameters": {
                name: _copies(elements.get(name, {})) | {_COUNT: np.array(self._counts.get(name, 0))}
                for name in dict.fromkeys([*elements, *self._counts])
            },
            "units": {name: _copies(each) for name, each in others.items() if each},
        }

    def load(self, saved: Mapping[str, Mapping[str, Mapping[str, AnyArray]]]) -> None:
        """Go on from what `saved` has returned.

        Raises:
            UsageError: it is something else.
        """
        if not {"parameters", "units"} <= set(saved):
            raise UsageError(
                f"a state with {', '.join(map(repr, saved)) or 'nothing'} is none of codecs: expected what "
                "state_dict() of the same kind of object has returned, with 'parameters' and 'units'"
            )
        for place in (self._units, self._elements, self._others, self._counts):
            place.clear()
        for name, each in saved["parameters"].items():
            self._counts[name] = int(each[_COUNT])
            self._elements[name] = _copies({what: kept for what, kept in each.items() if what != _COUNT})
        for name, each in saved["units"].items():
            self._others[name] = _copies(each)

    def load_residual(self, parameters: Mapping[str, AnyArray]) -> None:
        """Begin with residuals, by parameter, and nothing else."""
        of_parameters = {name: {"residual": rest, _COUNT: np.array(0)} for name, rest in parameters.items()}
        self.load({"parameters": of_parameters, "units": {}})

    def forget_elements(self) -> None:
        """Forget what has a value for each element, such as residuals. No sum may be under way."""
        self._elements.clear()
        for unit, state in self._units.values():
            for what in [what for what, kept in state.items() if _is_of_elements(unit, kept)]:
                del state[what]

    def _dissolve(self, name: str) -> None:
        unit, state = self._units.pop(name)
        _split(unit, state, self._elements, self._others)


def _split(
    unit: SumUnit,
    state: State,
    elements: dict[str, dict[str, AnyArray]],
    others: dict[str, dict[str, AnyArray]],
) -> None:
    """Record what belongs to a unit's parameters, and the rest, which is the unit's."""
    others[unit.name] = {}
    for what, kept in state.items():
        if not _is_of_elements(unit, kept):
            others[unit.name][what] = kept
            continue
        start = 0
        for parameter in unit.parameters:
            end = start + parameter.elements
            elements.setdefault(parameter.name, {})[what] = kept[start:end].copy()
            start = end


def _is_of_elements(unit: SumUnit, kept: AnyArray) -> bool:
    return bool(kept.shape == (unit.elements,) and kept.dtype == np.float32)


def _copies(kept: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    return {what: np.array(array, order="C") for what, array in kept.items()}
