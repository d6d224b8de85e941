"""What can be added to a system's name: `netstorm-packing+int8`, `netstorm-packing+local:steps=8`. Pure.

A technique is a codec of `netstorm.compression` or an entry of `TECHNIQUES`. Its parameters follow colons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from netstorm.compression.registry import CODECS, codec_of
from netstorm.compression.sparse import MOMENTUM
from netstorm.errors import UsageError

__all__ = ["TECHNIQUES", "Technique", "codec_from", "split_name"]

Value = float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """What a worker and its job do differently."""

    compression: Mapping[str, Value] | None = None
    """For `set_gradient_compression`: of gradients, or of changes between averages."""
    local_steps: int = 0
    """Steps that each rank takes alone between two averages; 0: gradients are summed in each step."""
    outer: bool = False
    """Averages of what ranks have learnt go to an outer optimizer, as DiLoCo has it; PyTorch's alone."""
    momentum: bool = True
    """The optimizer has momentum; a codec with momentum correction has it instead."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Settings of the job."""

    def and_(self, other: Technique) -> Technique:
        """Return both together.

        Raises:
            UsageError: they exclude each other.
        """
        if self.compression and other.compression:
            raise UsageError("two codecs: a system has one")
        if self.local_steps and other.local_steps:
            raise UsageError("two kinds of local steps: a system has one")
        return Technique(
            compression=self.compression or other.compression,
            local_steps=self.local_steps or other.local_steps,
            outer=self.outer or other.outer,
            momentum=self.momentum and other.momentum,
            variables={**self.variables, **other.variables},
        )

    def for_worker(self) -> dict[str, Any]:
        """Return what a worker must know, as JSON takes it."""
        compression = None if self.compression is None else dict(self.compression)
        return {"compression": compression, "local_steps": self.local_steps, "momentum": self.momentum}


def _local(steps: Value = 8) -> Technique:
    return Technique(local_steps=_whole("local", steps))


def _diloco(steps: Value = 20) -> Technique:
    return Technique(local_steps=_whole("diloco", steps), outer=True)


def _whole(name: str, steps: Value) -> int:
    if not isinstance(steps, int) or steps < 1:
        raise UsageError(f"{name} with steps={steps!r}: expected a whole number from 1")
    return steps


def _late(bound: Value = 0.2, deadline: Value = "500ms") -> Technique:
    return Technique(variables={"NETSTORM_LOSS_BOUND": str(bound), "NETSTORM_DEADLINE": str(deadline)})


def _dgt(share: Value = 0.8, deadline: Value = "500ms") -> Technique:
    return Technique(variables={"ENABLE_DGT": "1", "DMLC_K": str(share), "NETSTORM_DEADLINE": str(deadline)})


TECHNIQUES: Final[Mapping[str, Callable[..., Technique]]] = {
    "local": _local,
    "diloco": _diloco,
    "late": _late,
    "dgt": _dgt,
}
"""Techniques that are no codec, by name. A further one is a function of its parameters, and a line here."""


def split_name(name: str) -> tuple[str, Technique]:
    """Return the system of a name such as `netstorm-packing+topk:ratio=0.001`, and its techniques together.

    Raises:
        UsageError: there is no such technique, it takes other parameters, or the system is not NetStorm.
    """
    system, *added = name.split("+")
    if added and not system.startswith("netstorm-"):
        raise UsageError(f"{name!r}: techniques are for NetStorm, such as netstorm-packing+int8")
    together = Technique()
    for text in added:
        try:
            together = together.and_(_technique(text))
        except UsageError as error:
            raise UsageError(f"{name!r}: {error}") from None
    return system, together


def codec_from(text: str) -> dict[str, Value] | None:
    """Return the description of a codec such as `topk:ratio=0.001`; None: `none`.

    Raises:
        UsageError: there is no such codec, or it takes other parameters.
    """
    name, parameters = _parameters(text)
    described = {"type": name, **parameters}
    codec_of(described)
    return None if name == "none" else described


def _technique(text: str) -> Technique:
    name, parameters = _parameters(text)
    make = TECHNIQUES.get(name)
    if make is None and name not in CODECS:
        raise UsageError(f"no technique {name!r}; there are {', '.join((*CODECS, *TECHNIQUES))}")
    if make is None:
        corrected = parameters.get("momentum", MOMENTUM if name in {"bsc", "mpq"} else 0)
        return Technique(compression=codec_from(text), momentum=not corrected)
    try:
        return make(**parameters)
    except TypeError:
        raise UsageError(f"technique {name!r} with {', '.join(parameters)}: unknown parameter") from None


def _parameters(text: str) -> tuple[str, dict[str, Value]]:
    name, *given = text.split(":")
    parameters: dict[str, Value] = {}
    for parameter in given:
        what, equals, value = parameter.partition("=")
        if not equals:
            raise UsageError(f"{text!r}: expected NAME or NAME:PARAMETER=VALUE, such as topk:ratio=0.001")
        parameters[what] = _value(value)
    return name, parameters


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
