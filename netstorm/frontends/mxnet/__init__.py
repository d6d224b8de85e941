"""MXNet's frontend. Importing it registers the KVStore types `dist_sync_netstorm` and, short, `netstorm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

from netstorm.errors import UsageError
from netstorm.frontends.mxnet import forking as forking  # before a fork
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.store import NetStormKVStore

__all__ = ["NetStormKVStore", "take_over_dist_types"]

_SYNCHRONOUS: Final = ("dist", "dist_sync", "dist_device_sync", "dist_sync_device")
_ASYNCHRONOUS: Final = ("dist_async", "dist_device_async", "dist_async_device")

_registry: Final = mx.kvstore.KVStoreBase.kv_registry


def take_over_dist_types() -> None:
    """Let MXNet's own distributed types mean NetStorm, for scripts that nobody wants to edit."""
    for name in _SYNCHRONOUS:
        _registry[name] = NetStormKVStore
    for name in _ASYNCHRONOUS:
        _registry[name] = _refusal(name)


def _refusal(name: str) -> Callable[[], NoReturn]:
    def refuse() -> NoReturn:
        raise UsageError(
            f"kvstore {name!r}: this version trains synchronously only; use 'dist_sync_netstorm' "
            "('dist_sync' under python -m netstorm.run)"
        )

    return refuse


_registry["dist_sync_netstorm"] = NetStormKVStore
_registry["netstorm"] = NetStormKVStore
_registry["dist_async_netstorm"] = _refusal("dist_async_netstorm")
