"""Every error of `netstorm.errors` that leaves a store is also MXNet's own, in a call as in an array."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import pytest

from netstorm import errors
from netstorm.errors import NetStormError, NodeLost, UsageError
from netstorm.frontends.mxnet import NetStormKVStore
from netstorm.frontends.mxnet import asynchronous as asynchronous_store
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors, raises_mxnet_errors


@raises_mxnet_errors
def fails(error: BaseException) -> None:
    raise error


def test_each_class_is_caught_as_itself_and_as_mxnets() -> None:
    for name in errors.__all__:
        own = getattr(errors, name)
        for expected in (own, NetStormError, mx.MXNetError):
            with pytest.raises(expected, match=r"^why: two words$") as raised:
                fails(own("why: two words"))
            assert type(raised.value).__name__ == name
            assert set(inspect.getmro(own)) <= set(inspect.getmro(type(raised.value)))


def test_a_converted_error_has_one_traceback_and_its_own_cause() -> None:
    reason = KeyError("reason")
    error = UsageError("what")
    error.__cause__ = reason
    with pytest.raises(UsageError) as raised:
        fails(error)
    assert raised.value.__cause__ is reason
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("netstorm.errors.UsageError: what") == 1
    assert "raise error" in shown


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("netstrom", "netstorm"),
        ("dist_sync_netstrom", "dist_sync_netstorm"),
        ("Dist_Async-netstorm", "dist_async_netstorm"),
    ],
)
def test_a_misspelt_type_is_refused_wherever_mxnet_makes_a_store(name: str, meant: str) -> None:
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=name)
    for make in (lambda: mx.kv.create(name), trainer._init_kvstore):
        with pytest.raises(UsageError, match=f"no KVStore of type '{name}': expected '{meant}'"):
            make()


@pytest.mark.parametrize("name", ["local", "device", "LOCAL_allreduce_cpu"])
def test_stores_of_mxnets_own_are_made_as_ever(name: str) -> None:
    assert mx.kv.create(name).type == name.lower()


def test_what_is_mxnets_already_or_not_netstorms_passes_as_it_is() -> None:
    with pytest.raises(NodeLost) as first:
        fails(NodeLost("rank 2"))
    for error in (first.value, KeyError("k"), OSError("disk"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised:
            fails(error)
        assert raised.value is error


def test_methods_keep_their_signatures_and_helpers_are_left_alone() -> None:
    @methods_raise_mxnet_errors
    class Store:
        def pull(self, key: str, out: Any = None) -> None:
            """What it does."""
            self._check()

        def _barrier(self) -> None:
            self._check()

        @staticmethod
        def is_capable(capability: str) -> bool:
            raise UsageError(capability)

        def _check(self) -> None:
            raise UsageError("closed")

    store = Store()
    assert list(inspect.signature(store.pull).parameters) == ["key", "out"]
    assert store.pull.__doc__ == "What it does."
    for call in (lambda: store.pull("k"), store._barrier, lambda: Store.is_capable("x")):
        with pytest.raises(mx.MXNetError):
            call()
    with pytest.raises(UsageError) as raised:
        store._check()
    assert not isinstance(raised.value, mx.MXNetError)


def test_every_public_method_of_a_store_is_converted() -> None:
    stores = (NetStormKVStore, asynchronous_store.InStepKVStore, asynchronous_store.AsynchronousKVStore)
    kinds = {kind for store in stores for kind in inspect.getmro(store)}
    for kind in (kind for kind in kinds if kind.__module__.startswith("netstorm.")):
        for name, member in vars(kind).items():
            function = member.__func__ if isinstance(member, staticmethod) else member
            if inspect.isfunction(function) and (not name.startswith("_") or hasattr(mx.kv.KVStore, name)):
                assert hasattr(function, "__wrapped__"), f"{kind.__name__}.{name}"
