"""Averages of tensors over the members of a group, under codecs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch

from netstorm import clock
from netstorm.compression.auto import Auto
from netstorm.compression.codec import Codec, GradientPlace, Rounds
from netstorm.compression.registry import CodecRules, Description, rules_of
from netstorm.errors import UsageError
from netstorm.frontends.torch.collectives import Exchanges
from netstorm.frontends.torch.member import CallWork, ProcessGroupMember, after_all, copy_back
from netstorm.frontends.torch.tensors import Staged, staged
from netstorm.kvstore.calls import EncodedSum
from netstorm.kvstore.operations import Done
from netstorm.kvstore.process.runtime import describe_compression
from netstorm.protocol.codecs import Reduction
from netstorm.training.averages import divide_parts
from netstorm.training.codec_states import CodecStates, Parameter, SumUnit, units_of

__all__ = [
    "ENCODED",
    "Description",
    "Descriptions",
    "EncodedAverages",
    "PartOf",
    "described_codec",
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
        self._kept: Final = CodecStates()
        self._what: Final = what
        self._member: Final = member
        self._calls: Final = member.tensor_calls()
        self._exchanges: Final = Exchanges(member.rank, member.size)
        self._units: Final[dict[tuple[Parameter, ...], list[SumUnit]]] = {}
        self._has_agreed = bool(member.runtime.settings.elastic)
        """Ranks have compared their codecs. Those that join later could not."""

    def kept(self) -> dict[str, Any]:
        """Return copies of what codecs keep of each parameter, as tensors. No sum may be under way."""
        return {
            kind: {
                name: {what: torch.from_numpy(array) for what, array in arrays.items()}
                for name, arrays in named.items()
            }
            for kind, named in self._kept.saved().items()
        }

    def keep(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `kept` has returned.

        Raises:
            UsageError: it is something else.
        """
        self._kept.load(
            {
                kind: {
                    name: {what: tensor.detach().cpu().numpy() for what, tensor in tensors.items()}
                    for name, tensors in (named.items() if isinstance(named, Mapping) else ())
                }
                for kind, named in saved.items()
            }
        )

    def keep_residual(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Begin with residuals, by parameter, and nothing else."""
        self._kept.load_residual({name: rest.detach().cpu().numpy() for name, rest in residuals.items()})

    def forget_elements(self) -> None:
        """Forget what has a value for each element, such as residuals. No sum may be under way."""
        self._kept.forget_elements()

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
        state = self._kept.of(unit)
        total = EncodedSum(
            self._calls.keys_of(f"{unit.name} as {codec.name}", unit.shape, codec, state),
            submit=runtime.submit,
            later=runtime.computing.run,
            fail=runtime.fail,
            priority=priority,
            rule=codec.fingerprint,
        )
        place = GradientPlace(
            unit.shape, self._member.size, runtime.rank, self._kept.next_number(unit), clock.monotonic
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
