"""Averages of tensors over the members of a group, under codecs."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch

from netstorm import clock
from netstorm.compression.auto import Auto
from netstorm.compression.codec import AnyArray, Codec, GradientPlace, Rounds, State
from netstorm.compression.registry import CodecRules, Description, rules_of
from netstorm.compression.sparse import MixedPrecision
from netstorm.errors import UsageError
from netstorm.frontends.torch.collectives import Exchanges
from netstorm.frontends.torch.member import CallWork, ProcessGroupMember, after_all, copy_back
from netstorm.frontends.torch.tensors import Staged, staged
from netstorm.kvstore.calls import EncodedSum
from netstorm.kvstore.operations import Done
from netstorm.kvstore.process.runtime import describe_compression
from netstorm.protocol.codecs import Reduction
from netstorm.training.averages import divide_parts

__all__ = [
    "ENCODED",
    "Description",
    "Descriptions",
    "EncodedAverages",
    "Kept",
    "Parameter",
    "PartOf",
    "described_codec",
    "units_of",
]


ENCODED: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Types that codecs take; those of 16 bits become float32 for it."""

Descriptions = Description | Mapping[str, Description]
"""A codec, or one for each pattern of parameters' names."""

_GROUPS_TIMEOUT: Final = timedelta(0)


class EncodedAverages:
    """Averages tensors that are made of the same parameters again and again; keeps what codecs keep of them.

    All members make the same averages in the same order, and one of a parameter has ended before its next one
    begins.
    """

    def __init__(self, member: ProcessGroupMember, codec: Descriptions, what: str) -> None:
        """Begin.

        Args:
            member: this process in the group.
            codec: of all parameters, or for each pattern of their names.
            what: is averaged, for messages.

        Raises:
            UsageError: no such codec, or a bad parameter of it.
        """
        self.rules: Final[CodecRules] = rules_of(codec)
        if any(isinstance(one, Auto) for one in self.rules.codecs):
            member.runtime.refuse_if_reproducible("the codec 'auto'")
        self.kept: Final = Kept()
        self._what: Final = what
        self._member: Final = member
        self._calls: Final = member.tensor_calls()
        self._exchanges: Final = Exchanges(member.rank, member.size)
        self._units: Final[dict[tuple[Parameter, ...], list[SumUnit]]] = {}
        self._has_agreed = bool(member.runtime.settings.elastic)
        """Ranks have compared their codecs. Those that join later could not."""

    def check(self, parameter: Parameter, dtype: torch.dtype) -> None:
        """Check that a parameter can be averaged.

        Raises:
            UsageError: no codec is for its name, or its codec cannot take its type.
        """
        is_encoded = any(unit.codec is not None for unit in units_of([parameter], self.rules))
        if is_encoded and dtype not in ENCODED:
            raise UsageError(
                f"codec {self.rules.of(parameter.name).name!r} for parameter {parameter.name!r}, which is "
                f"{dtype}: codecs take float32, float16 and bfloat16; exempt it by a rule such as "
                f"{{{parameter.name!r}: 'none', '*': …}}"
            )

    def begin(self, tensor: torch.Tensor, parameters: Sequence[Parameter], priority: int = 0) -> CallWork:
        """Begin to average a tensor over the members that contribute, in place, and return the work.

        Args:
            tensor: dense; the values of the parameters, one after the other.
            parameters: the same at all members.
            priority: larger goes first on every link.

        Raises:
            UsageError: see `check`.
        """
        units = self._units_of(tuple(parameters), tensor)
        self._member.positions.check(self._calls)
        memory = staged(tensor)
        work = self._member.work(
            f"average of {self._what}, {tensor.numel()} values", [tensor], _GROUPS_TIMEOUT
        )
        work.on_device(memory.device)
        thread = self._member.thread.for_caller()

        def ended(error: Exception | None) -> None:
            if error is None and memory.is_copy:
                thread.run(lambda: copy_back([memory], work.finish, work))
            else:
                work.finish(error)

        done = after_all(len(units) + 1, ended)
        self._compare_codecs(done)
        for unit in units:
            if unit.codec is None:
                self._begin_plain(unit, memory, priority, done)
            else:
                self._begin_encoded(unit, unit.codec, memory, priority, done)
        return work

    def _units_of(self, parameters: tuple[Parameter, ...], tensor: torch.Tensor) -> list[SumUnit]:
        units = self._units.get(parameters)
        if units is None:
            for parameter in parameters:
                self.check(parameter, tensor.dtype)
            units = self._units[parameters] = units_of(parameters, self.rules)
        return units

    def _compare_codecs(self, done: Done) -> None:
        """Have ranks compare their codecs before the first average: with others they would wait for each
        other.
        """
        if self._has_agreed:
            done(None)
            return
        self._has_agreed = True
        exchange = self._exchanges.all_reduce(torch.zeros(1), Reduction.SUM)
        text = f"average of {self._what} with codec {self.rules.fingerprint}"
        self._member.begin(msgspec.structs.replace(exchange, text=text), done)

    def _begin_plain(self, unit: SumUnit, memory: Staged, priority: int, done: Done) -> None:
        part = PartOf(memory, unit.places, memory.host.dtype)
        exchange = self._exchanges.all_reduce(part.host, Reduction.AVERAGE, priority)
        self._member.begin(exchange, done, (part,))

    def _begin_encoded(self, unit: SumUnit, codec: Codec, memory: Staged, priority: int, done: Done) -> None:
        runtime = self._member.runtime
        part = PartOf(memory, unit.places, torch.float32)
        state = self.kept.of(unit)
        total = EncodedSum(
            self._calls.keys_of(f"{unit.name} as {codec.name}", unit.shape, codec, state),
            submit=runtime.submit,
            later=runtime.computing.run,
            fail=runtime.fail,
            priority=priority,
            rule=codec.fingerprint,
        )
        place = GradientPlace(
            unit.shape, self._member.size, runtime.rank, self.kept.next_number(unit), clock.monotonic
        )

        def rounds() -> Rounds:
            part.wait_until_read()
            gradient = part.host.numpy()
            yield from codec.rounds(gradient, state, place)
            divide_parts(gradient, total)
            part.copy_back()
            self._member.record_reduced(total.contributors)
            if isinstance(codec, Auto) and (news := codec.take_news()):
                describe_compression(runtime, f"auto: {news}")

        runtime.computing.run(lambda: total.begin(rounds(), done))


def described_codec(text: str, where: str) -> Descriptions:
    """Return the codec that a text describes: its name, or JSON.

    Args:
        text: such as `int8`, `{"type": "topk", "ratio": 0.01}` or `{"*.bias": "none", "*": "int8"}`.
        where: the text is from, for messages.

    Raises:
        UsageError: it is neither, there is no such codec, or a parameter of it is wrong.
    """
    found: Any = text.strip()
    if found.startswith("{"):
        try:
            found = json.loads(found, object_pairs_hook=functools.partial(_unique, where))
        except json.JSONDecodeError as error:
            raise UsageError(f"{where}={text!r} is not JSON: {error}") from None
    try:
        _check_descriptions(found)
        rules_of(found)
    except UsageError as error:
        raise UsageError(f"{where}={text!r}: {error}") from None
    descriptions: Descriptions = found
    return descriptions


def _check_descriptions(found: Any) -> None:
    for each in [found] if isinstance(found, str) or "type" in found else found.values():
        if not isinstance(each, (str, Mapping)):
            raise UsageError(f"{each!r} is no codec: expected a name, or its type and parameters")


def _unique(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{where}: {name!r} is there twice; one codec for each pattern")
    return dict(pairs)


# What codecs keep of the parameters from one gradient to the next, and its form in a checkpoint.

_COUNT: Final = "gradients"
"""Name of the number of a parameter's gradients so far."""


class Kept:
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
        known = self._units.get(unit.name)
        if known is not None and known[0].parameters == unit.parameters:
            return known[1]
        names = {parameter.name for parameter in unit.parameters}
        for other, (old, _) in list(self._units.items()):
            if names & {parameter.name for parameter in old.parameters}:
                self._dissolve(other)
        state: State = dict(self._others.pop(unit.name, {}))
        found = [self._elements.pop(parameter.name, {}) for parameter in unit.parameters]
        for what in dict.fromkeys(what for each in found for what in each):
            state[what] = np.concatenate(
                [
                    each[what] if what in each else np.zeros(parameter.elements, np.float32)
                    for each, parameter in zip(found, unit.parameters, strict=True)
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

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that is kept, as tensors. No sum may be under way."""
        elements = {name: dict(each) for name, each in self._elements.items()}
        others = {name: dict(each) for name, each in self._others.items()}
        for unit, state in self._units.values():
            _split(unit, state, elements, others)
        return {
            "parameters": {
                name: _tensors(elements.get(name, {})) | {_COUNT: torch.tensor(self._counts.get(name, 0))}
                for name in dict.fromkeys([*elements, *self._counts])
            },
            "units": {name: _tensors(each) for name, each in others.items() if each},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned.

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
            self._elements[name] = {what: _array(kept) for what, kept in each.items() if what != _COUNT}
        for name, each in saved["units"].items():
            self._others[name] = {what: _array(kept) for what, kept in each.items()}

    def load_residual(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Begin with residuals, by parameter, and nothing else."""
        self.load_state_dict(
            {
                "parameters": {
                    name: {"residual": rest, _COUNT: torch.tensor(0)} for name, rest in parameters
                },
                "units": {},
            }
        )

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


def _tensors(kept: Mapping[str, AnyArray]) -> dict[str, torch.Tensor]:
    return {what: torch.from_numpy(np.array(array, order="C")) for what, array in kept.items()}


def _array(kept: torch.Tensor) -> AnyArray:
    array: AnyArray = kept.detach().cpu().numpy().copy()
    return array


# Some values of a tensor in memory of their own, as a call or a codec takes them.


class PartOf(Staged):
    """Values of several places of a tensor in a row, perhaps of another type; all of them in place if
    possible.
    """

    must_wait = True

    def __init__(self, whole: Staged, places: Sequence[slice], dtype: torch.dtype) -> None:
        """Describe the values; `wait_until_read` reads them.

        Args:
            whole: the tensor.
            places: where the values are, in the order in which they are wanted.
            dtype: in which they are wanted.
        """
        self._whole = whole
        self._values = whole.host.reshape(-1)  # a view: it is contiguous
        self._places = places
        self._write = True
        self.tensor = self._values
        self.device = None
        in_place = dtype == self._values.dtype and _all_of(self._values.numel(), places)
        elements = sum(place.stop - place.start for place in places)
        self.host = self._values if in_place else torch.empty(elements, dtype=dtype)

    def wait_until_read(self) -> None:
        """Read the values."""
        self._whole.wait_until_read()
        if self.is_copy:
            for mine, theirs in self._pairs():
                mine.copy_(theirs)

    def copy_back(self) -> None:
        """Give the values to the tensor."""
        if self.is_copy:
            for mine, theirs in self._pairs():
                theirs.copy_(mine)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        mine = torch.split(self.host, [place.stop - place.start for place in self._places])
        return [(part, self._values[place]) for part, place in zip(mine, self._places, strict=True)]


def _all_of(elements: int, places: Sequence[slice]) -> bool:
    end = 0
    for place in places:
        if place.start != end:
            return False
        end = place.stop
    return end == elements


# Which parameters of a tensor travel together. Pure.
#
# A tensor is one of DDP's buckets, or an outer gradient: the values of several parameters in a row. A large
# parameter is a unit by itself, so that its values, and what a codec keeps of them, do not depend on the
# buckets that DDP makes, and so that units are encoded while others travel. Small ones would be mostly
# headers. Those of a tensor that have the same codec are one unit.

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
