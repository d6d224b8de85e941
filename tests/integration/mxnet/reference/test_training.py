"""The same script on NetStorm and on MXNet's own scheduler, servers and workers, all real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job
from tests.integration.mxnet.reference.servers import run_with_servers

NODES = 3

# The model is linear: its gradients are products of samples and labels, integers at every step.
TRAIN = """
import hashlib
import numpy as np
from netstorm.frontends.mxnet.compat import mx

STORE, MODULE = {store!r}, {module!r}
kv = mx.kv.create(STORE)
samples = np.random.RandomState(kv.rank)

def integers(*shape):
    return mx.nd.array(samples.randint(-3, 4, size=shape))

def weights_of(arrays):
    return hashlib.sha256(b"".join(array.asnumpy().tobytes() for array in arrays)).hexdigest()

if MODULE:
    data, label = mx.sym.var("data"), mx.sym.var("label")
    out = mx.sym.MakeLoss(mx.sym.sum(mx.sym.FullyConnected(data, num_hidden=3, name="one") * label))
    module = mx.mod.Module(out, data_names=["data"], label_names=["label"])
    batches = mx.io.NDArrayIter(integers(8, 4), integers(8, 3), batch_size=2, label_name="label")
    begin = np.random.RandomState(100)
    shapes = dict(one_weight=(3, 4), one_bias=(3,))
    weights = {{name: mx.nd.array(begin.randint(-3, 4, size=shape)) for name, shape in shapes.items()}}
    module.fit(batches, eval_metric=mx.metric.Loss(), kvstore=kv, num_epoch=2, arg_params=weights,
               optimizer="sgd", optimizer_params=dict(learning_rate=2.0**-6, rescale_grad=1.0))
    print(weights_of(array for _, array in sorted(module.get_params()[0].items())))
else:
    begin = np.random.RandomState(100)
    net = mx.gluon.nn.Dense(3, in_units=4)
    net.initialize()
    for parameter in net.collect_params().values():
        parameter.set_data(mx.nd.array(begin.randint(-3, 4, size=parameter.shape)))
    options = dict(learning_rate=2.0**-6)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kv, update_on_kvstore=True)
    for _ in range(6):
        with mx.autograd.record():
            loss = (net(integers(2, 4)) * integers(2, 3)).sum()
        loss.backward()
        trainer.step(1)
    mx.nd.waitall()
    print(weights_of(parameter.data() for parameter in net.collect_params().values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True], ids=["gluon", "module"])
def test_with_integer_gradients_and_sgd_all_weights_have_the_servers_bits(
    tmp_path: Path, *, module: bool
) -> None:
    """Integers add up exactly in whatever order; so the servers' sums and ours are the same numbers."""
    ours = run_job(tmp_path, NODES, TRAIN.format(store="dist_sync_netstorm", module=module))
    theirs = run_with_servers(tmp_path, NODES, TRAIN.format(store="dist_sync", module=module))
    assert [end.code for end in ours] == [0] * NODES, ours
    assert len({end.out for end in ours} | set(theirs)) == 1, (ours, theirs)
    assert len(theirs[0].strip()) == 64
