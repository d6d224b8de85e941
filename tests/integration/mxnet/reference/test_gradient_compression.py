"""Gradient compression and float16 on NetStorm and on MXNet's own servers: one script, the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.jobs import run_job
from tests.integration.mxnet.reference.servers import run_with_servers

NODES = 3

SCRIPT = """
import warnings
import numpy as np
from netstorm.frontends.mxnet.compat import mx

STORE, FOLDER = {store!r}, {folder!r}
kv = mx.kv.create(STORE)
chance = np.random.RandomState(kv.rank)
SIZES = [(1,), (5, 7), (1001,), (3, 40, 21)]
found = {{}}

def keep(name, key, shape, dtype="float32"):
    out = mx.nd.zeros(shape, dtype=dtype)
    kv.pull(key, out=out)
    found[name] = out.asnumpy()

def quarters(shape, dtype):  # their sums are exact in float16
    return mx.nd.array(chance.randint(-8, 9, shape) / 4, dtype=dtype)

for n, shape in enumerate(SIZES):
    kv.init(f"half{{n}}", quarters(shape, "float16"))
    keep(f"half {{n}} first", f"half{{n}}", shape, "float16")
    for step in range(2):
        kv.push(f"half{{n}}", [quarters(shape, "float16") for _ in range(2)])
        keep(f"half {{n}} sum {{step}}", f"half{{n}}", shape, "float16")

for threshold in (0.5, 0.1):
    kv.set_gradient_compression(dict(type="2bit", threshold=threshold))
    for n, shape in enumerate(SIZES):
        key = f"key{{n}} {{threshold}}"
        kv.init(key, mx.nd.array(chance.standard_normal(shape)))
        keep(f"{{key}} first", key, shape)
        for step in range(6):
            gradient = chance.standard_normal(shape) * [1, 0.1, 0, 30, 1e-3, 1][step]
            kv.push(key, mx.nd.array(gradient))
            keep(f"{{key}} push {{step}}", key, shape)
    kv.push(key, [mx.nd.ones(shape) * 0.02, mx.nd.ones(shape)])
    keep(f"{{key}} devices", key, shape)

kv.set_gradient_compression(dict(type="2bit", threshold=0.25))
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, momentum=0.5))
kv.init("trained", mx.nd.zeros((50,)))
for step in range(6):
    kv.push("trained", mx.nd.array(chance.standard_normal(50)))
    keep(f"trained {{step}}", "trained", (50,))
np.savez(f"{{FOLDER}}/{{STORE}}.{{kv.rank}}.npz", **found)
kv._barrier()
"""

HALF_SCRIPT = """
import numpy as np
from netstorm.frontends.mxnet.compat import mx

STORE, FOLDER = {store!r}, {folder!r}
kv = mx.kv.create(STORE)
chance = np.random.RandomState(kv.rank)
found = {{}}

class Scaled(mx.gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(1, 64), init=mx.init.One(), dtype="float16")
        self.initialize()

    def forward(self, values):
        return values * self.weight.data()

net = Scaled()
options = dict(learning_rate=2.0**-9, momentum=0.5, multi_precision=True)
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kv, update_on_kvstore=True)
for step in range(10):
    with mx.autograd.record():
        loss = net(mx.nd.array(chance.randint(-3, 4, (4, 64)), dtype="float16")).sum()
    loss.backward()
    trainer.step(4)
    found[f"step {{step}}"] = net.weight.data().asnumpy()
np.savez(f"{{FOLDER}}/{{STORE}}.{{kv.rank}}.npz", **found)
kv._barrier()
"""


def compared(folder: Path, script: str) -> dict[str, tuple[list[Any], list[Any]]]:
    """Run a script on both; return by name what MXNet's workers have found, and what our nodes have."""
    settings: dict[str, Any] = {"MXNET_KVSTORE_BIGARRAY_BOUND": 500, "CHUNK_SIZE": 300}
    given = {
        store: script.format(store=store, folder=str(folder)) for store in ("dist_sync", "dist_sync_netstorm")
    }
    run_with_servers(folder, NODES, given["dist_sync"], **settings)
    ended = run_job(folder, NODES, given["dist_sync_netstorm"], **settings)
    assert [end.code for end in ended] == [0] * NODES, ended
    theirs, ours = (
        [dict(np.load(folder / f"{store}.{rank}.npz")) for rank in range(NODES)] for store in given
    )
    assert list(theirs[0]) == list(ours[0])
    return {name: ([one[name] for one in theirs], [one[name] for one in ours]) for name in theirs[0]}


@pytest.mark.slow
def test_compressed_and_float16_sums_are_those_of_mxnets_servers(tmp_path: Path) -> None:
    found = compared(tmp_path, SCRIPT)
    assert len(found) > 60
    for name, (theirs, ours) in found.items():
        assert len({one.tobytes() for one in ours}) == 1, name
        for their, our in zip(theirs, ours, strict=True):
            assert their.dtype == our.dtype
            if " 0.1 " in name:  # n times 0.1 rounds once, and 0.1 added up n times oftener
                np.testing.assert_allclose(our, their, rtol=3e-7, atol=0, err_msg=name)
            else:
                np.testing.assert_array_equal(our, their, name)


@pytest.mark.slow
def test_float16_weights_trained_with_multi_precision_have_the_servers_bits(tmp_path: Path) -> None:
    found = compared(tmp_path, HALF_SCRIPT)
    for name, (theirs, ours) in found.items():
        for their, our in zip(theirs, ours, strict=True):
            np.testing.assert_array_equal(our, their, name)
    last = found["step 9"][1][0]
    assert len(set(last.ravel().tolist())) > 10
