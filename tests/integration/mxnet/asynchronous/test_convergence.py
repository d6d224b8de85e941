"""Digits learned asynchronously: as well on NetStorm as on MXNet's own servers, and as a bound allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job
from tests.integration.mxnet.reference.servers import run_with_servers

NODES = 3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = """
import sys
import numpy as np
for name in ("sklearn", "scipy.stats"):  # `quick_start` has taken these away; scikit-learn has the data
    if sys.modules.get(name, name) is None:
        del sys.modules[name]
from sklearn.datasets import load_digits
from netstorm.frontends.mxnet.compat import mx

STORE = {store!r}
kv = mx.kv.create(STORE)
images, labels = load_digits(return_X_y=True)
order = np.random.RandomState(0).permutation(len(images))
images, labels = (images[order] / 16).astype("float32"), labels[order].astype("float32")
train, test = slice(kv.rank, 1500, kv.num_workers), slice(1500, None)
mx.random.seed(5)
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Dense(64, activation="relu", in_units=64), mx.gluon.nn.Dense(10, in_units=64))
net.initialize(mx.init.Xavier())
options = dict(learning_rate=0.1, momentum=0.5)
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kv)
loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
batches = mx.gluon.data.DataLoader(
    mx.gluon.data.ArrayDataset(images[train], labels[train]), batch_size=25, shuffle=False
)
for epoch in range(12):
    for data, label in batches:
        with mx.autograd.record():
            loss = loss_of(net(data), label)
        loss.backward()
        trainer.step(25)
        loss.wait_to_read()
mx.nd.waitall()
kv._barrier()
for number, parameter in enumerate(trainer._params):
    kv.pull(number, out=parameter.list_data())
right = net(mx.nd.array(images[test])).argmax(axis=1).asnumpy() == labels[test]
print(right.mean(), flush=True)
if "netstorm" in STORE:
    statistics = kv.statistics()
    print("staleness", statistics.get("staleness_mean", 0.0), statistics.get("staleness_max", 0.0))
kv._barrier()
"""


def accuracy(printed: str) -> float:
    return float(printed.split(maxsplit=1)[0])


def test_digits_are_learned_as_well_as_by_mxnets_own_asynchronous_store(tmp_path: Path) -> None:
    theirs = [
        accuracy(out)
        for out in run_with_servers(tmp_path, NODES, TRAIN.format(store="dist_async"), servers=2)
    ]
    for staleness in (-1, 2):
        folder = tmp_path / str(staleness)
        folder.mkdir()
        script = TRAIN.format(store="dist_async_netstorm")
        ended = run_job(folder, NODES, script, NETSTORM_STALENESS=staleness)
        assert [end.code for end in ended] == [0] * NODES, ended
        ours = [accuracy(end.out) for end in ended]
        print(f"staleness {staleness}: {ours}; {[end.out.split()[1:] for end in ended]}; MXNet's: {theirs}")
        assert len(set(ours)) == 1
        assert min(*ours, *theirs) > 0.9
        assert abs(ours[0] - theirs[0]) < 0.04
