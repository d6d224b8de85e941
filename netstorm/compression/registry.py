"""Codecs by name, and which tensor has which. Pure.

A new codec is a class with the members of `Codec` and a line in `CODECS`.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from netstorm.compression.auto import Auto
from netstorm.compression.codec import BFloat16, Codec, Float16, Uncompressed
from netstorm.compression.power_sgd import PowerSGD
from netstorm.compression.quantised import Int8, OneBit, TwoBit
from netstorm.compression.sparse import TopK, bi_sparse, mixed_precision
from netstorm.errors import UsageError

__all__ = ["CODECS", "CodecRules", "codec_of", "rules_of"]

CODECS: Final[dict[str, Callable[..., Codec]]] = {
    "auto": Auto,
    "none": Uncompressed,
    "fp16": Float16,
    "bf16": BFloat16,
    "int8": Int8,
    "2bit": TwoBit,
    "1bit": OneBit,
    "topk": TopK,
    "bsc": bi_sparse,
    "mpq": mixed_precision,
    "powersgd": PowerSGD,
}
"""What makes a codec from its parameters."""

_OF_GEOMX: Final = {
    "bsc": {"threshold": "ratio"},
    "mpq": {"threshold": "ratio"},
    "topk": {"threshold": "ratio"},
}
"""Parameters under the names that GeoMX gives them."""

Description = str | Mapping[str, Any]
"""A codec's name, or a mapping with `type` and its parameters."""


class CodecRules:
    """Which tensor has which codec: the first pattern that its name matches decides."""

    def __init__(self, rules: Mapping[str, Codec]) -> None:
        self._rules: Final = dict(rules)
        self.fingerprint: Final = "; ".join(
            f"{pattern}: {codec.fingerprint}" for pattern, codec in rules.items()
        )

    @property
    def codecs(self) -> list[Codec]:
        """All codecs."""
        return list(self._rules.values())

    def of(self, name: str) -> Codec:
        """Return the codec of a tensor.

        Raises:
            UsageError: no pattern matches its name.
        """
        for pattern, codec in self._rules.items():
            if fnmatch.fnmatchcase(name, pattern):
                return codec
        raise UsageError(
            f"no codec for {name!r}: its name matches none of {', '.join(map(repr, self._rules))}; "
            "let '*' be the last one"
        )


def codec_of(description: Description) -> Codec:
    """Return the codec that a name, or a mapping with `type` and parameters, describes.

    Args:
        description: of the codec.

    Raises:
        UsageError: another type, or a bad parameter.
    """
    if not isinstance(description, (str, Mapping)):
        raise UsageError(f"codec {description!r}: expected a name, or a mapping with 'type' and parameters")
    if not isinstance(description, str) and "type" not in description:
        raise UsageError(
            f"codec {dict(description)!r}: expected a 'type', which is one of {', '.join(CODECS)}"
        )
    parameters: dict[str, Any] = {"type": description} if isinstance(description, str) else dict(description)
    name = str(parameters.pop("type"))
    make = CODECS.get(name)
    if make is None:
        raise UsageError(f"codec {name!r}: expected one of {', '.join(CODECS)}")
    for given, own in _OF_GEOMX.get(name, {}).items():
        if given in parameters:
            parameters[own] = parameters.pop(given)
    taken = {known: of for known, of in inspect.signature(make).parameters.items() if known != "name"}
    unknown = sorted(set(parameters) - set(taken))
    if unknown:
        raise UsageError(
            f"codec {name!r} with {unknown[0]}={parameters[unknown[0]]!r}: it takes "
            f"{', '.join(taken) or 'no parameters'}"
        )
    return make(**{known: _typed(name, given, taken[known]) for known, given in parameters.items()})


def _typed(codec: str, given: object, parameter: inspect.Parameter) -> object:
    """Return what was given for a parameter, as the type of its default; text of a number will do, as with
    MXNet.
    """
    default = parameter.default
    if parameter.annotation == "float | str":  # the codec reads text itself
        return given
    what = {str: "text", int: "a whole number"}.get(type(default), "a number")
    expected = f"codec {codec!r} with {{{parameter.name!r}: {given!r}}}: expected {what} such as {default!r}"
    if isinstance(default, str):
        if isinstance(given, str):
            return given
        raise UsageError(expected)
    try:
        number = float(given) if isinstance(given, str) else given
    except ValueError:
        raise UsageError(expected) from None
    if isinstance(number, bool) or not isinstance(number, (int, float, np.number)):
        raise UsageError(expected)
    if isinstance(default, int):
        if not float(number).is_integer():
            raise UsageError(expected)
        return int(number)
    return number


def rules_of(description: Description | Mapping[str, Description]) -> CodecRules:
    """Return which tensor has which codec.

    Args:
        description: a codec for all; or one for each pattern of names, of which the first that matches
            counts, as in `{"*.bias": "none", "*": "int8"}`.

    Raises:
        UsageError: another codec, or a bad parameter.
    """
    if not isinstance(description, Mapping) or "type" in description:
        return CodecRules({"*": codec_of(description)})
    if not description:
        raise UsageError("no codec: expected a name, or a pattern of tensors' names for each codec")
    return CodecRules({pattern: codec_of(found) for pattern, found in description.items()})
