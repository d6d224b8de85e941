"""MXNet's frontend. Importing it registers the KVStore types `dist_sync_netstorm` and, short, `netstorm`."""

from __future__ import annotations

from typing import Final

from netstorm.frontends.mxnet import forking as forking  # before a fork
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.store import NetStormKVStore

__all__ = ["NetStormKVStore", "take_over_dist_types"]

_TAKEN_OVER: Final = ("dist", "dist_sync", "dist_device_sync", "dist_sync_device")


def take_over_dist_types() -> None:
    """Let MXNet's own synchronous distributed types mean NetStorm, for scripts that nobody wants to edit."""
    for name in _TAKEN_OVER:
        mx.kvstore.KVStoreBase.kv_registry[name] = NetStormKVStore


mx.kvstore.KVStoreBase.kv_registry["dist_sync_netstorm"] = NetStormKVStore
mx.kvstore.KVStoreBase.kv_registry["netstorm"] = NetStormKVStore
