"""MXNet's frontend. Importing it registers the KVStore types `dist_sync_netstorm` and, short, `netstorm`."""

from __future__ import annotations

from netstorm.frontends.mxnet import forking as forking  # what it does, it does when it is imported
from netstorm.frontends.mxnet.names import register_types, take_over_dist_types
from netstorm.frontends.mxnet.store import NetStormKVStore

__all__ = ["NetStormKVStore", "take_over_dist_types"]

register_types()
