"""Averages of tensors over the members of a group, under codecs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import numpy as np
import torch

from netstorm import clock
from netstorm.compression.auto import Auto
from netstorm.compression.codec import Codec, Place, Rounds
from netstorm.compression.registry import CodecRules, Description, rules_of
from netstorm.errors import UsageError
from netstorm.frontends.torch.gradient_codecs.kept import Kept
from netstorm.frontends.torch.gradient_codecs.parts import PartOf
from netstorm.frontends.torch.gradient_codecs.units import Parameter, Unit, units_of
from netstorm.frontends.torch.process_group.exchanges import Exchanges
from netstorm.frontends.torch.process_group.member import Member, after_all, copy_back
from netstorm.frontends.torch.process_group.memory import Staged
from netstorm.frontends.torch.process_group.staging import staged
from netstorm.frontends.torch.process_group.work import CallWork
from netstorm.kvstore.calls import EncodedSum
from netstorm.kvstore.operations import Done
from netstorm.kvstore.process.runtime import describe_compression
from netstorm.protocol.codecs import Reduction

__all__ = ["ENCODED", "Description", "Descriptions", "EncodedAverages", "described_codec"]

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

    def __init__(self, member: Member, codec: Descriptions, what: str) -> None:
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
        self._units: Final[dict[tuple[Parameter, ...], list[Unit]]] = {}
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

    def _units_of(self, parameters: tuple[Parameter, ...], tensor: torch.Tensor) -> list[Unit]:
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

    def _begin_plain(self, unit: Unit, memory: Staged, priority: int, done: Done) -> None:
        part = PartOf(memory, unit.places, memory.host.dtype)
        exchange = self._exchanges.all_reduce(part.host, Reduction.AVERAGE, priority)
        self._member.begin(exchange, done, (part,))

    def _begin_encoded(self, unit: Unit, codec: Codec, memory: Staged, priority: int, done: Done) -> None:
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
        place = Place(
            unit.shape, self._member.size, runtime.rank, self.kept.next_number(unit), clock.monotonic
        )

        def rounds() -> Rounds:
            part.wait_until_read()
            gradient = part.host.numpy()
            yield from codec.rounds(gradient, state, place)
            for elements, contributors in total.counted(len(gradient)):
                gradient[elements] /= np.float32(max(1, contributors.bit_count()))
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
