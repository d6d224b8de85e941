"""What the store's methods mean, on three ranks.

Rank r contributes r + 1 times something unless a test says otherwise, so that sums tell who is in them.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netstorm.errors import KeyMismatch, UsageError
from netstorm.frontends.mxnet import arrays as staging
from netstorm.frontends.mxnet.compat import mx
from tests.integration.mxnet.on_nodes import (
    NODES,
    everywhere,
    on_nodes,
    same_everywhere,
    shared_folder,
)

EVERYBODY = sum(range(1, NODES + 1))


def ones(*shape: int, times: float = 1, dtype: str = "float32", device: int = 0) -> Any:
    return mx.nd.full(shape, times, dtype=dtype, ctx=mx.cpu(device))


# ------------------------------------------------------------------------------------------------- what it is


@on_nodes
def test_a_store_has_type_rank_and_size(kv: Any) -> None:
    assert kv.type == "dist_sync_netstorm"
    assert kv.num_workers == NODES
    assert kv.rank == int(os.environ["NETSTORM_RANK"])
    assert kv.is_capable("optimizer")
    assert isinstance(kv, mx.kvstore.KVStore)
    assert isinstance(mx.kv.create("netstorm"), type(kv))
    assert sorted(everywhere(kv, kv.rank)) == list(range(NODES))
    with pytest.raises(ValueError, match="Unknown capability"):  # MXNet's own class
        kv.is_capable("telepathy")


# ------------------------------------------------------------------------------------------- init, push, pull


@on_nodes
def test_every_rank_begins_with_the_values_of_rank_0(kv: Any) -> None:
    kv.init(7, ones(2, 3, times=kv.rank + 10))
    out = mx.nd.zeros((2, 3))
    kv.pull(7, out=out)
    assert (out.asnumpy() == 10).all()


@on_nodes
def test_without_an_optimiser_a_push_replaces_the_value_by_the_sum_over_ranks(kv: Any) -> None:
    kv.init("k", ones(30_000, times=100))
    out = mx.nd.zeros((30_000,))
    for step in range(3):
        kv.push("k", ones(30_000, times=(kv.rank + 1) * 10**step))
        kv.pull("k", out=out)
        assert (out.asnumpy() == EVERYBODY * 10**step).all()


@on_nodes
def test_neighbours_read_what_is_pushed_where_it_is_staged_and_the_next_push_changes_no_sum(kv: Any) -> None:
    kv.init("k", ones(300_000, times=kv.rank))
    kv.set_optimizer(mx.optimizer.create("test", rescale_grad=1.0))  # adds
    [(entry, _)] = kv._keys.find([("k", [ones(300_000)])], "push")
    out, total = mx.nd.zeros((300_000,)), 0.0
    for step in range(30):
        kv.push("k", ones(300_000, times=(kv.rank + 1) * (step % 3)))
        total += EVERYBODY * (step % 3)
        if step % 10 == 9:
            kv.pull("k", out=out)
            assert (out.asnumpy() == total).all()
    assert entry._merged.is_shared
    assert kv.statistics()["payloads_in_shared_memory"] > 10


@on_nodes
def test_lists_of_keys_and_of_devices_arrays_are_summed_key_by_key(kv: Any) -> None:
    keys = [3, 5, 9]
    kv.init(keys, [ones(4)] * 3)
    values = [[ones(4, times=(kv.rank + 1) * key, device=device) for device in range(2)] for key in keys]
    kv.push(keys, values)
    outs = [[mx.nd.zeros((4,), ctx=mx.cpu(device)) for device in range(2)] for _ in keys]
    kv.pull(keys, out=outs)
    for key, row in zip(keys, outs, strict=True):
        assert [out.context for out in row] == [mx.cpu(0), mx.cpu(1)]
        assert all((out.asnumpy() == 2 * EVERYBODY * key).all() for out in row)


@on_nodes
def test_a_key_that_a_list_names_twice_gets_the_sum_of_both_arrays(kv: Any) -> None:
    kv.init("k", ones(4))
    kv.push(["k", "k"], [ones(4, times=kv.rank + 1), ones(4, times=10)])
    outs = [mx.nd.zeros((4,)), mx.nd.zeros((4,))]
    kv.pull(["k", "k"], out=outs)
    assert all((out.asnumpy() == EVERYBODY + 10 * NODES).all() for out in outs)


@on_nodes
def test_pushpull_and_broadcast_are_the_calls_that_they_stand_for(kv: Any) -> None:
    outs = [mx.nd.zeros((6,)), mx.nd.zeros((6,), ctx=mx.cpu(1))]
    kv.broadcast("a", ones(6, times=kv.rank + 4), out=outs)
    assert all((out.asnumpy() == 4).all() for out in outs)
    kv.broadcast(["b", "c"], [ones(2, times=5), ones(3, times=6)], out=[mx.nd.zeros((2,)), mx.nd.zeros((3,))])
    kv.pushpull("a", [ones(6, times=kv.rank), ones(6)], out=outs)
    assert all((out.asnumpy() == EVERYBODY).all() for out in outs)
    value, b, c = ones(6, times=kv.rank + 1), ones(2, times=kv.rank + 1), ones(3)
    kv.pushpull(["b", "c"], [b, c])
    assert (b.asnumpy() == EVERYBODY).all()
    assert (c.asnumpy() == NODES).all()
    kv.pushpull("a", value)
    assert (value.asnumpy() == EVERYBODY).all()


@on_nodes
def test_a_pull_never_changes_what_was_pushed(kv: Any) -> None:
    kv.init("k", ones(4))
    value, other = ones(4, times=kv.rank + 1), mx.nd.zeros((4,))
    kv.push("k", value)
    kv.pull("k", out=other)
    kv.push("k", value)
    kv.pushpull("k", value, out=other)
    assert (other.asnumpy() == EVERYBODY).all()
    assert (value.asnumpy() == kv.rank + 1).all()


@on_nodes
def test_every_type_that_mxnet_and_the_network_share_is_summed_exactly(kv: Any) -> None:
    for dtype in ("float16", "float32", "float64", "int8", "int32", "int64", "uint8"):
        kv.init(dtype, mx.nd.zeros((5, 3), dtype=dtype))
        out = mx.nd.zeros((5, 3), dtype=dtype)
        kv.pushpull(dtype, mx.nd.full((5, 3), kv.rank + 1, dtype=dtype), out=out)
        found = out.asnumpy()
        assert found.dtype == np.dtype(dtype)
        assert (found == EVERYBODY).all(), dtype


@on_nodes
def test_large_integers_and_halves_keep_every_bit(kv: Any) -> None:
    big = mx.nd.array([2**53 + 1, -(2**60)], dtype="int64")
    kv.init("big", big)
    out = mx.nd.zeros((2,), dtype="int64")
    kv.pushpull("big", big, out=out)
    assert out.asnumpy().tolist() == [NODES * (2**53 + 1), -NODES * 2**60]
    half = mx.nd.array([0.5, 1024, 16384], dtype="float16")
    kv.init("half", half)
    sums = mx.nd.zeros((3,), dtype="float16")
    kv.pushpull("half", half, out=sums)
    assert sums.asnumpy().tolist() == [1.5, 3072, 3 * 16384]


@on_nodes
def test_scalars_and_empty_arrays_have_their_rounds_too(kv: Any) -> None:
    with mx.util.np_shape(True):
        scalar, empty = mx.nd.ones(()) * (kv.rank + 1), mx.nd.zeros((0, 3))
        kv.init(["scalar", "empty", "single"], [scalar, empty, ones(1)])
        out, nothing, single = mx.nd.zeros(()), mx.nd.zeros((0, 3)), mx.nd.zeros((1,))
        for _ in range(2):
            kv.pushpull(["scalar", "empty", "single"], [scalar, empty, ones(1)], out=[out, nothing, single])
        assert out.asnumpy() == EVERYBODY
        assert nothing.asnumpy().shape == (0, 3)
        assert single.asnumpy() == NODES


@on_nodes
def test_numpy_style_arrays_and_transposed_views_keep_their_values(kv: Any) -> None:
    x = mx.np.arange(6).reshape(2, 3).T * (kv.rank + 1)
    kv.init("k", mx.np.zeros((3, 2)))
    out = mx.np.zeros((3, 2))
    kv.pushpull("k", x, out=out)
    assert (out.asnumpy() == EVERYBODY * np.arange(6).reshape(2, 3).T).all()


@on_nodes
def test_several_stores_of_one_process_have_keys_of_their_own(kv: Any) -> None:
    others = [mx.kv.create("netstorm") for _ in range(3)]
    for index, store in enumerate([kv, *others]):
        store.init(0, ones(2 + index, times=index))
    for index, store in enumerate([kv, *others]):
        out = mx.nd.zeros((2 + index,))
        store.pull(0, out=out)
        assert (out.asnumpy() == index).all()
        store.pushpull(0, ones(2 + index, times=kv.rank + 1), out=out)
        assert (out.asnumpy() == EVERYBODY).all()


@on_nodes
def test_ranks_may_use_their_keys_in_different_orders(kv: Any) -> None:
    keys = [str(number) for number in range(40)]
    shuffled = list(np.random.RandomState(kv.rank).permutation(keys))
    for key in shuffled:
        kv.init(key, ones(3 + int(key)))
    outs = {}
    for key in reversed(shuffled):
        outs[key] = mx.nd.zeros((3 + int(key),))
        kv.pushpull(key, ones(3 + int(key), times=int(key) * (kv.rank + 1)), out=outs[key])
    assert all((outs[key].asnumpy() == EVERYBODY * int(key)).all() for key in keys)


@on_nodes
def test_a_barrier_holds_everybody_back_until_the_last_has_come(kv: Any) -> None:
    with shared_folder(kv) as folder:
        for number in range(3):
            (folder / f"{number}-{kv.rank}").touch()
            kv._barrier()
            assert len(list(folder.glob(f"{number}-*"))) == NODES


@on_nodes
def test_statistics_tell_what_the_network_has_done(kv: Any) -> None:
    kv.init("k", mx.nd.zeros((50_000,)))
    out = mx.nd.zeros((50_000,))
    kv.pull("k", out=out)
    out.wait_to_read()
    kv._barrier()
    before = kv.statistics()
    kv._barrier()  # nobody's data may come before
    kv.pushpull("k", ones(50_000), out=out)
    out.wait_to_read()
    kv._barrier()
    after = kv.statistics()
    least = 50_000 * 4 * 2 * (NODES - 1)  # what all ranks together must send at least
    sent = sum(everywhere(kv, after["bytes_sent"] - before["bytes_sent"]))
    assert least <= sent <= 1.1 * least
    assert sum(everywhere(kv, after["bytes_received"] - before["bytes_received"])) >= least
    assert 0 < after["network_s"] - before["network_s"] < 60
    assert after["rounds"] - before["rounds"] == 1


# --------------------------------------------------------------------------------------------------- updating


@on_nodes
def test_an_optimiser_updates_the_stored_value_with_the_sum(kv: Any) -> None:
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, wd=0.0, rescale_grad=0.5))
    kv.init("w", ones(5, times=100))
    out = mx.nd.zeros((5,))
    for step in range(1, 4):
        kv.pushpull("w", ones(5, times=kv.rank + 1), out=out)
        assert (out.asnumpy() == 100 - 0.25 * EVERYBODY * step).all()


@on_nodes
def test_a_function_of_the_users_updates_the_stored_value(kv: Any) -> None:
    seen = []

    def add_twice(key: object, total: Any, stored: Any) -> None:
        seen.append(key)
        stored += 2 * total

    kv._set_updater(add_twice)
    kv.init([5, 6], [ones(3), ones(4)])
    kv.push([5, 6], [ones(3, times=kv.rank + 1), ones(4)])
    kv.push(6, ones(4))
    outs = [mx.nd.zeros((3,)), mx.nd.zeros((4,))]
    kv.pull([5, 6], out=outs)
    assert seen == [5, 6, 6]  # int as int
    assert (outs[0].asnumpy() == 1 + 2 * EVERYBODY).all()
    assert (outs[1].asnumpy() == 1 + 4 * NODES).all()


@on_nodes
def test_optimiser_states_are_saved_and_loaded_as_mxnets_own(kv: Any) -> None:
    folder = Path(tempfile.mkdtemp())
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    kv.init(0, ones(3))
    out, again = mx.nd.zeros((3,)), mx.nd.zeros((3,))
    kv.push(0, ones(3, times=kv.rank + 1))
    kv.save_optimizer_states(str(folder / "states"))
    kv.save_optimizer_states(str(folder / "states-and-optimizer"), dump_optimizer=True)
    kv.pull(0, out=out)
    value = out.copy()
    kv.pushpull(0, ones(3, times=kv.rank + 1), out=out)

    for name in ("states", "states-and-optimizer"):
        other = mx.kv.create("netstorm")
        other.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
        other.init(0, value)
        other.load_optimizer_states(str(folder / name))
        other.pushpull(0, ones(3, times=kv.rank + 1), out=again)
        assert again.asnumpy().tolist() == out.asnumpy().tolist(), name
        # A learning rate that is changed afterwards counts, and is compared between ranks.
        other._updater.optimizer.set_learning_rate(0.01 * (kv.rank // NODES + 1))
        other.pushpull(0, ones(3, times=kv.rank + 1), out=again)
    assert [file.name for file in sorted(folder.iterdir())] == ["states", "states-and-optimizer"]
    assert same_everywhere(kv, out, again)


@on_nodes
def test_states_of_no_optimiser_cannot_be_saved_or_loaded(kv: Any) -> None:
    with pytest.raises(UsageError, match="call set_optimizer first"):
        kv.save_optimizer_states("states")
    with pytest.raises(UsageError, match="call set_optimizer first"):
        kv.load_optimizer_states("states")
    kv.set_optimizer(mx.optimizer.SGD())
    with pytest.raises(FileNotFoundError):
        kv.load_optimizer_states("/nowhere/states")
    with pytest.raises(FileNotFoundError):
        kv.save_optimizer_states("/nowhere/states")


@on_nodes
def test_where_there_are_gpus_values_go_through_pinned_memory_and_are_the_same(kv: Any) -> None:
    """What can be seen of it without one: MXNet's CPU build has the context, and everything works there."""
    found = {}
    path = str(Path(tempfile.mkdtemp()) / "states")
    as_it_is = staging._host
    for host in (mx.cpu, mx.cpu_pinned):
        vars(staging)["_host"] = host
        try:
            store = mx.kv.create(kv.type)
            store.set_optimizer(mx.optimizer.Adam())
            store.init("k", ones(5, 4))
            outs = [mx.nd.zeros((5, 4), ctx=mx.cpu(device)) for device in range(3)]
            for step in range(3):
                store.push("k", [ones(5, 4, times=kv.rank + device, device=device) for device in range(3)])
                if step == 1:
                    store.save_optimizer_states(path, dump_optimizer=True)
                    store.load_optimizer_states(path)
            store.pull("k", out=outs)
            assert store._keys._entries["k"]._stored.array.context == host()
            found[host] = [out.asnumpy().tobytes() for out in outs]
        finally:
            staging._host = as_it_is
    assert found[mx.cpu] == found[mx.cpu_pinned]
    assert len(set(found[mx.cpu])) == 1


@on_nodes
def test_a_damaged_file_of_states_is_refused_by_name_and_changes_nothing(kv: Any) -> None:
    path = Path(tempfile.mkdtemp()) / "states"
    kv.set_optimizer(mx.optimizer.Adam())
    kv.init(0, ones(3))
    kv.push(0, ones(3))
    kv.save_optimizer_states(str(path), dump_optimizer=True)
    whole, before = path.read_bytes(), kv._rule.fingerprint()
    for damaged in (
        b"",
        b"no pickle",
        whole[:-1],
        whole[: len(whole) // 2],
        pickle.dumps([1]),
        pickle.dumps(()),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"states \(\d+ bytes\) is damaged, or not a file that"):
            kv.load_optimizer_states(str(path))
    out = mx.nd.zeros((3,))
    kv.pushpull(0, ones(3), out=out)
    assert kv._updater.optimizer._index_update_count == {0: 2}
    assert kv._rule.fingerprint() == before
    assert same_everywhere(kv, out)


@on_nodes
def test_the_fingerprint_of_an_update_tells_which_states_have_been_loaded(kv: Any) -> None:
    path = str(Path(tempfile.mkdtemp()) / "states")
    fingerprints = []
    for times in (1, 1, 2):
        store = mx.kv.create("netstorm")
        store.set_optimizer(mx.optimizer.SGD(momentum=0.9))
        store.init(0, ones(3))
        store.push(0, ones(3, times=times))
        store.save_optimizer_states(path)
        store.load_optimizer_states(path)
        fingerprints.append(store._rule.fingerprint())
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


# ------------------------------------------------------------------------------------- commands for servers


@on_nodes
def test_profiling_the_server_profiles_this_node_in_a_file_with_its_rank(kv: Any) -> None:
    folder = Path(tempfile.mkdtemp())
    mx.profiler.set_config(profile_all=True, filename=str(folder / "server.json"), profile_process="server")
    kv.init("k", ones(3))
    out = mx.nd.zeros((3,))
    mx.profiler.set_state("run", "server")
    mx.profiler.set_state("run")  # of the workers, which are the same processes
    for pause_or_go_on in (mx.profiler.pause, mx.profiler.resume):
        kv.pushpull("k", ones(3), out=out)
        out.wait_to_read()
        pause_or_go_on(profile_process="server")
    mx.profiler.set_state("stop", profile_process="server")
    mx.profiler.dump(True, "server")
    mx.profiler.dump()  # has been written
    assert [file.name for file in folder.iterdir()] == [f"rank{kv.rank}_server.json"]
    [file] = folder.iterdir()
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert "netstorm_allreduce" in names


@on_nodes
def test_commands_for_servers_are_accepted_and_no_node_is_dead(kv: Any) -> None:
    for head in (1, 2, 3):  # multi-precision, stop, synchronous mode
        kv._send_command_to_servers(head, "")
    assert [kv.get_num_dead_node(group) for group in (1, 2, 4, 7)] == [0] * 4
    assert kv.get_num_dead_node(node_id=4, timeout=1) == 0


# ----------------------------------------------------------------------------------------------------- misuse


def refused(call: Callable[[], Any], pattern: str, error: type[Exception] = UsageError) -> None:
    with pytest.raises(error, match=pattern):
        call()


@on_nodes
def test_keys_that_cannot_be_used_are_refused_by_name(kv: Any) -> None:
    kv.init(["a", "b"], [ones(3), ones(4)])
    refused(lambda: kv.push("c", ones(3)), r"push of key 'c', which has not been initialised.*keys: a, b")
    refused(lambda: kv.pull("c", out=ones(3)), "pull of key 'c', which has not been initialised")
    refused(lambda: kv.pushpull("c", ones(3)), "key 'c', which has not been initialised")
    refused(lambda: kv.init("a", ones(3)), "key 'a' has been initialised before")
    refused(lambda: kv.init(["d", "d"], [ones(3), ones(3)]), "key 'd'.*one array")
    refused(lambda: kv.init([1, "d"], [ones(3), ones(3)]), "all int or all str")
    refused(lambda: kv.init(1, ones(3)), "int.*str")
    refused(lambda: kv.push(1, ones(3)), "int.*str")
    refused(lambda: kv.init(1.5, ones(3)), r"must be int or str, not float \(1.5\)")
    refused(lambda: kv.init(["d", "e"], [ones(3)]), "2 keys with 1 values")
    refused(lambda: kv.push("a", []), "empty list")
    kv.pushpull(["a", "b"], [ones(3), ones(4)])  # nothing of all that has done harm


@on_nodes
def test_arrays_that_do_not_fit_their_key_are_refused_with_both_shapes_and_types(kv: Any) -> None:
    kv.init("a", ones(3, 2))
    refused(lambda: kv.push("a", ones(2, 3)), r"\(2, 3\) float32.*\(3, 2\) float32", KeyMismatch)
    refused(lambda: kv.pull("a", out=ones(6)), r"\(6,\) float32.*\(3, 2\)", KeyMismatch)
    refused(lambda: kv.push("a", ones(3, 2, dtype="float16")), "float16.*float32", KeyMismatch)
    refused(lambda: kv.push("a", [ones(3, 2), ones(2, 2)]), r"\(2, 2\)", KeyMismatch)
    refused(lambda: kv.pushpull("a", ones(3, 2), out=ones(2)), r"\(2,\)", KeyMismatch)
    refused(lambda: kv.push("a", np.ones((3, 2))), "ndarray")
    refused(lambda: kv.push("a", 5), "int")
    refused(lambda: kv.pull("a"), "needs out")
    refused(lambda: kv.init("flags", mx.nd.zeros((3,), dtype="bool")), "bool")
    out = mx.nd.zeros((3, 2))
    kv.pushpull("a", ones(3, 2), out=out)  # of all that, nothing has been counted as a push
    assert (out.asnumpy() == NODES).all()


@on_nodes
def test_a_list_with_one_bad_array_pushes_nothing(kv: Any) -> None:
    kv.init(["a", "b"], [ones(3), ones(4)])
    if kv.rank == 0:  # the others would wait for its half of the step
        refused(lambda: kv.push(["a", "b"], [ones(3), ones(5)]), r"\(5,\)", KeyMismatch)
        values, outs = [ones(3), ones(4)], [ones(3), ones(9)]
        refused(lambda: kv.pushpull(["a", "b"], values, out=outs), r"\(9,\)", KeyMismatch)
        refused(lambda: kv.init(["c", "b"], [ones(3), ones(4)]), "key 'b' has been initialised before")
    kv.init("c", ones(2))
    outs = [mx.nd.zeros((3,)), mx.nd.zeros((4,))]
    kv.pushpull(["a", "b"], [ones(3), ones(4)], out=outs)
    assert all((out.asnumpy() == NODES).all() for out in outs)


@on_nodes
def test_what_this_version_does_not_have_is_refused_with_what_to_do(kv: Any) -> None:
    sparse = ones(3, 2).tostype("csr")
    refused(lambda: kv.init("s", sparse), "csr")
    kv.init("a", ones(3, 2))
    refused(lambda: kv.push("a", sparse), r"csr.*tostype\('row_sparse'\)")
    refused(lambda: kv.pull("a", out=sparse, ignore_sparse=False), "csr")
    refused(lambda: kv._send_command_to_servers(0, ""), "set_optimizer on every rank")
    refused(
        lambda: kv._send_command_to_servers(4, "2bit,0.5"), r"set_gradient_compression\(…\) on every rank"
    )
    refused(lambda: kv.get_num_dead_node(9), "1 is the scheduler, 2 are servers and 4 workers")
    refused(lambda: kv.set_optimizer("sgd"), "mxnet Optimizer, not str")
    refused(lambda: kv._set_updater("sgd"), "function")
    with pytest.raises(mx.base.MXNetError):  # a device that does not exist is MXNet's to refuse
        kv.pull("a", out=mx.nd.zeros((3, 2), ctx=mx.gpu(5)))


# ------------------------------------------------------------------------------------------------- at the end


@on_nodes
def test_what_the_script_never_reads_is_finished_all_the_same(kv: Any) -> None:
    kv.init("k", ones(40_000))
    for _ in range(3):
        kv.push("k", ones(40_000))
    kv.pull("k", out=mx.nd.zeros((40_000,)))
