"""What codecs keep of the parameters from one gradient to the next, and its form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from netstorm.compression.codec import AnyArray, State
from netstorm.errors import UsageError
from netstorm.frontends.torch.gradient_codecs.units import Unit

__all__ = ["Kept"]

_COUNT: Final = "gradients"
"""Name of the number of a parameter's gradients so far."""


class Kept:
    """The states of all units.

    What has a value for each element, such as a residual, is a parameter's own: it goes along when DDP puts
    parameters into other buckets, and a checkpoint has it by parameter. Anything else, such as a factor, is
    the unit's.
    """

    def __init__(self) -> None:
        self._units: Final[dict[str, tuple[Unit, State]]] = {}
        """Those of the last gradients."""
        self._elements: Final[dict[str, dict[str, AnyArray]]] = {}
        """By parameter, of those that are in no unit."""
        self._others: Final[dict[str, dict[str, AnyArray]]] = {}
        """By name of a unit that is not there yet."""
        self._counts: Final[dict[str, int]] = {}

    def of(self, unit: Unit) -> State:
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

    def next_number(self, unit: Unit) -> int:
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
    unit: Unit, state: State, elements: dict[str, dict[str, AnyArray]], others: dict[str, dict[str, AnyArray]]
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


def _is_of_elements(unit: Unit, kept: AnyArray) -> bool:
    return bool(kept.shape == (unit.elements,) and kept.dtype == np.float32)


def _tensors(kept: Mapping[str, AnyArray]) -> dict[str, torch.Tensor]:
    return {what: torch.from_numpy(np.array(array, order="C")) for what, array in kept.items()}


def _array(kept: torch.Tensor) -> AnyArray:
    array: AnyArray = kept.detach().cpu().numpy().copy()
    return array
