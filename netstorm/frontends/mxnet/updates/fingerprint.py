"""The fingerprint of an optimizer: a short text that is the same on all ranks if they update alike."""

from __future__ import annotations

import hashlib
import logging
from typing import Final

from netstorm.frontends.mxnet.compat import mx

__all__ = ["fingerprint_of"]

_log = logging.getLogger(__name__)

_NOT_COMPARED: Final = frozenset(
    {"param_dict", "idx2name", "sym_info", "num_update", "begin_num_update", "lr", "rescale_grad"}
)
"""Attributes that may differ (names of parameters), change with every update, or are compared by
`UpdateRule.fingerprint`."""


def fingerprint_of(optimizer: mx.optimizer.Optimizer) -> str:
    """Return the class and a digest of the hyper-parameters, without what scripts change between steps."""
    name = type(optimizer).__name__
    details = ", ".join(
        f"{attribute}={_plain(value)}"
        for attribute, value in sorted(vars(optimizer).items())
        if not attribute.startswith("_") and attribute not in _NOT_COMPARED
    )
    _log.info("update rule: %s(%s)", name, details)
    return f"{name}#{hashlib.sha256(details.encode()).hexdigest()[:8]}"


def _plain(value: object) -> str:
    """Return a value as text that is the same on all ranks for the same settings."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_plain(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_plain, value)) + "]"
    settings = (
        {name: inner for name, inner in vars(value).items() if not name.startswith("_")}
        if hasattr(value, "__dict__")
        else {}
    )
    return type(value).__name__ + (_plain(settings) if settings else "")
