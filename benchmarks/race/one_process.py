"""Trainings of many ranks in one process: what techniques do to accuracy, without a network.

Gradients go through the codecs of `netstorm.compression` and the sums of `netstorm.kvstore`, along random
trees (`netstorm.lab.testing.codec_trees`). Sums of whole numbers are those of a job on a WAN bit for bit,
others but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from netstorm.compression.registry import CodecRules, rules_of
from netstorm.lab.testing.codec_trees import CodecTrees
from netstorm.training.codec_states import Parameter, units_of

__all__ = ["Curve", "Floats", "KeySums", "UnitSums"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Curve:
    """How good a model was on its way."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """Accuracy of the test samples, or loss, after each of `steps`."""

    def add(self, step: int, value: float) -> None:
        """Note what was reached after a step."""
        self.steps.append(step)
        self.values.append(value)


class KeySums:
    """Sums of parameters' gradients, each by itself, as MXNet's stores make them."""

    def __init__(self, codec: Any, parameters: Sequence[Parameter], ranks: int) -> None:
        rules = rules_of(codec)
        self._sums: Final = [CodecTrees(rules.of(one.name), one.shape, ranks) for one in parameters]

    def sum(self, gradients: Sequence[Sequence[Floats]]) -> list[Floats]:
        """Return the sum of each parameter's gradients, flat.

        Args:
            gradients: of each parameter, by rank.
        """
        return [sums.sum(given)[0] for sums, given in zip(self._sums, gradients, strict=True)]


class UnitSums:
    """Sums of gradients as DDP's hook makes them: of small parameters with the same codec together."""

    def __init__(self, codec: Any, parameters: Sequence[Parameter], ranks: int) -> None:
        rules: CodecRules = rules_of(codec)
        self._units: Final = units_of(parameters, rules)
        self._sums: Final[Mapping[int, CodecTrees]] = {
            number: CodecTrees(unit.codec, unit.shape, ranks)
            for number, unit in enumerate(self._units)
            if unit.codec is not None
        }

    def sum(self, gradients: Sequence[Floats]) -> Floats:
        """Return the sum of gradients.

        Args:
            gradients: of each rank: the values of all parameters, one after the other.
        """
        total = np.empty_like(gradients[0])
        for number, unit in enumerate(self._units):
            parts = [np.concatenate([flat[place] for place in unit.places]) for flat in gradients]
            sums = self._sums.get(number)
            if sums is None:
                found = np.sum(parts, axis=0, dtype=np.float32)
            else:
                found = sums.sum([part.reshape(unit.shape) for part in parts])[0]
            start = 0
            for place in unit.places:
                end = start + place.stop - place.start
                total[place] = found[start:end]
                start = end
        return total
