"""The names of the KVStore types, as MXNet's users write them.

`Trainer(…, kvstore="netstorm")` alone would train without a store, and without a warning: with one device
MXNet makes no store at all unless the name has "dist" in it. So where MXNet makes a store by name, the short
name is replaced by the long one. A name that is misspelt would mean no store there, either, or one of MXNet's
parameter server: it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from difflib import get_close_matches
from typing import Final

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.asynchronous import create_asynchronous
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.errors import raises_mxnet_errors
from netstorm.frontends.mxnet.local_updates import HFA, MixedSync
from netstorm.frontends.mxnet.store import NetStormKVStore
from netstorm.kvstore.process.runtime import runtime_of_this_process

__all__ = ["register_types", "take_over_dist_types"]

_NAME: Final = "dist_sync_netstorm"
_SHORT_NAME: Final = "netstorm"

_SYNCHRONOUS: Final = ("dist", "dist_sync", "dist_device_sync", "dist_sync_device")
_ASYNCHRONOUS: Final = ("dist_async", "dist_device_async", "dist_async_device")

_ALIKE: Final = 0.8
"""Two names are alike from this on (`difflib`): MXNet's own are not like those of NetStorm."""

_registry: Final = mx.kvstore.KVStoreBase.kv_registry
_create_kvstore: Final[Callable[..., object]] = mx.model._create_kvstore  # noqa: SLF001 -- Module's and Trainer's
_create: Final[Callable[..., object]] = mx.kvstore.create


def register_types() -> None:
    """Make NetStorm's own types known to MXNet."""
    _registry[_NAME] = create_synchronous
    _registry[_SHORT_NAME] = create_synchronous
    _registry["dist_async_netstorm"] = create_asynchronous
    for module in (mx.model, mx.module.module, mx.gluon.trainer):
        module._create_kvstore = _create_by_long_name  # noqa: SLF001
    mx.kvstore.create = _create_if_spelt_right


def take_over_dist_types() -> None:
    """Let the names of MXNet's own distributed types mean NetStorm's, for scripts that stay unedited."""
    for name in _SYNCHRONOUS:
        _registry[name] = create_synchronous
    for name in _ASYNCHRONOUS:
        _registry[name] = _create_asynchronous_or_mixed


@raises_mxnet_errors
def create_synchronous() -> NetStormKVStore:
    """Return a synchronous store, or with MXNET_KVSTORE_USE_HFA=1 one that averages less often."""
    settings = runtime_of_this_process(framework="MXNet").settings
    return HFA() if settings.use_hfa else NetStormKVStore()


@raises_mxnet_errors
def _create_asynchronous_or_mixed() -> NetStormKVStore:
    """Return an asynchronous store, or with NETSTORM_MIXED_SYNC=1 one of sites."""
    settings = runtime_of_this_process(framework="MXNet").settings
    return MixedSync() if settings.mixed_sync else create_asynchronous()


@functools.wraps(_create)
def _create_if_spelt_right(name: object = "local") -> object:
    _check_spelling(name)
    return _create(name)


@raises_mxnet_errors
def _check_spelling(name: object) -> None:
    if not isinstance(name, str) or name.lower() in _registry:
        return
    own = [each for each in _registry if "netstorm" in each]
    for meant in get_close_matches(name.lower(), own, 1, _ALIKE):
        raise UsageError(f"there is no KVStore of type {name!r}: expected {meant!r}")


def _create_by_long_name(kvstore: object, *arguments: object, **named: object) -> object:
    _check_spelling(kvstore)
    if isinstance(kvstore, str) and kvstore.lower() == _SHORT_NAME:
        kvstore = _NAME
    return _create_kvstore(kvstore, *arguments, **named)
