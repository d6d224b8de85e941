"""Scripts of elastic jobs with MXNet, and how a test drives them.

Each script trains until the test asks for the end: one rank then pushes a number that all ranks get in the
same round. So no script has to be in time for anything.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.jobs import Ended, Job

TIMEOUTS = {"PS_HEARTBEAT_INTERVAL": 0.5, "PS_HEARTBEAT_TIMEOUT": 20, "NETSTORM_LINK_TIMEOUT": 20}
"""Who dies shows it by the end of its connections; a busy machine is silent for seconds."""

PROLOGUE = """
import hashlib, os, sys, time
from pathlib import Path
import numpy as np
import netstorm.frontends.mxnet
from netstorm import errors
from netstorm.frontends.mxnet.compat import mx

def show(*words):
    print(*words, flush=True)

STOP = Path(__file__).with_name("stop")
kv = mx.kv.create("dist_sync_netstorm")
place = {"step": 0}
seen = None

def stepped(key):
    '''Report who was in the step.'''
    global seen
    place["step"] += 1
    if kv.contributors(key) != seen:
        seen = kv.contributors(key)
        show(f"from step {place['step']}: ranks {seen}")

def asks_for_the_end():
    return mx.nd.array([float(STOP.exists())])

def end(arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.asnumpy().tobytes())
    show("digest:", digest.hexdigest())
"""

COUNTS = (
    "import os\nos.environ['NETSTORM_RESCALE'] = '0'  # plain sums\n"
    + PROLOGUE
    + """
# Whole numbers: every value is checked against those who contributed, in every step.
expected = {"value": 0}
kv.attach_state("place", lambda: place, place.update)
kv.attach_state("expected", lambda: expected, expected.update)

def add(key, total, stored):
    stored += total

kv._set_updater(add)
kv.init("small", mx.nd.zeros((100,)))
kv.init("large", mx.nd.zeros((300_000,)))
kv.init("end", mx.nd.zeros((1,)))
small, large, ended = mx.nd.zeros((100,)), mx.nd.zeros((300_000,)), mx.nd.zeros((1,))
show("begins at step", place["step"])
try:
    while not ended.asnumpy()[0]:
        mine = float(kv.rank + 1)
        kv.pushpull("small", mx.nd.ones((100,)) * mine, out=small)
        kv.pushpull("large", mx.nd.ones((300_000,)) * mine, out=large)
        kv.pushpull("end", asks_for_the_end(), out=ended)
        ended.wait_to_read()
        large.wait_to_read()  # or a busy machine falls behind by hundreds of rounds of this key alone
        value = small.asnumpy()
        expected["value"] += sum(rank + 1 for rank in kv.contributors("small"))
        assert (value == expected["value"]).all(), (value[:3], expected, kv.contributors("small"))
        stepped("small")
except errors.NodeRemoved as error:
    show("removed:", error)
    sys.exit(3)
end([small, large])
"""
)

GLUON = (
    PROLOGUE
    + """
import json

from mxnet import autograd, gluon

mx.random.seed(kv.rank + os.getpid())  # a newcomer's own weights are others
net = gluon.nn.Sequential(prefix="net_")
with net.name_scope():
    net.add(gluon.nn.Dense(16, in_units=8, activation="relu"), gluon.nn.BatchNorm(in_channels=16))
    net.add(gluon.nn.Dense(4, in_units=16))
net.initialize(mx.init.Normal(0.3))
on_kvstore = os.environ["UPDATE_ON_KVSTORE"] == "1"
compression = json.loads(os.environ.get("COMPRESSION", "null"))
trainer = gluon.Trainer(
    net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=kv, update_on_kvstore=on_kvstore,
    compression_params=compression,
)
kv.attach_trainer(trainer)
kv.attach_state("place", lambda: place, place.update)
show("begins at step", place["step"])
numbers = np.random.default_rng(os.getpid())
ended = None
while ended is None or not ended.asnumpy()[0]:
    data = mx.nd.array(numbers.standard_normal((5, 8)))
    with autograd.record():
        loss = (net(data) ** 2).sum()
    loss.backward()
    trainer.step(32)
    if ended is None:
        ended = mx.nd.zeros((1,))
        kv.init(1000, ended)
    kv.pushpull(1000, asks_for_the_end(), out=ended)
    ended.wait_to_read()
    stepped(0)
end([one.data() for one in net.collect_params().values() if one.grad_req != "null"])
"""
)


def start(job: Job, rank: int, script: str, **variables: Any) -> None:
    """Start a rank; its output so far is dropped if it ran before."""
    for name in ("out", "err"):
        (job.folder / f"{name}{rank}").write_text("")
    job.start(rank, script, **variables)


def kill(job: Job, rank: int) -> None:
    """Kill a rank, and wait until it is gone."""
    job.send(rank, signal.SIGKILL)
    job.end(rank)


def ask_for_the_end(folder: Path) -> None:
    """Have all ranks end after the same step."""
    (folder / "stop").touch()


def digest_of(ended: Ended) -> str:
    """Return the digest of a rank's values at its end."""
    assert ended.code == 0, ended.text
    return next(line for line in ended.out.splitlines() if line.startswith("digest:"))


DIGITS = (
    PROLOGUE
    + """
from mxnet import autograd, gluon

STEPS, BATCH = 240, 32
digits = np.load(Path(__file__).with_name("digits.npz"))
images, labels = digits["images"], digits["labels"]
images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
train, test = slice(0, 1440), slice(1440, None)

mx.random.seed(1 + kv.rank)
net = gluon.nn.Sequential()
net.add(gluon.nn.Conv2D(8, 3, padding=1, in_channels=1, activation="relu"), gluon.nn.MaxPool2D())
net.add(gluon.nn.Dense(32, in_units=128, activation="relu"), gluon.nn.Dense(10, in_units=32))
net.initialize(mx.init.Xavier())
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(
    net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv
)
kv.attach_trainer(trainer)
kv.attach_state("place", lambda: place, place.update)
show("begins at step", place["step"])
ALL, all_contribute = int(os.environ.get("ALL", "0")), False
while place["step"] < STEPS or not all_contribute:  # a busy machine is slow to let who comes contribute
    step = place["step"]
    while step == STEPS // 2 and len(kv.live_ranks) < ALL:
        show("waits with ranks", kv.live_ranks)
        time.sleep(0.05)  # so that the test need not be in time
    order = np.random.default_rng(step).permutation(1440)  # a rank's part of one step's samples
    mine = order[kv.rank * BATCH : (kv.rank + 1) * BATCH]
    with autograd.record():
        loss = loss_of(net(mx.nd.array(images[train][mine])), mx.nd.array(labels[train][mine]))
    loss.backward()
    trainer.step(BATCH * kv.num_workers)
    trainer._params[0].data().wait_to_read()  # so that contributors are those of this step, at all ranks
    stepped(0)
    all_contribute = len(kv.contributors(0)) >= ALL
found = net(mx.nd.array(images[test])).argmax(axis=1).asnumpy()
show(f"accuracy: {(found == labels[test]).mean():.4f}")
end([one.data() for one in net.collect_params().values()])
"""
)


def accuracy_of(ended: Ended) -> float:
    """Return the accuracy that a rank has reached."""
    line = next(line for line in ended.out.splitlines() if line.startswith("accuracy:"))
    return float(line.split()[1])


def folder_with_digits(folder: Path) -> Path:
    """Make a folder that has the images."""
    folder.mkdir()
    from sklearn.datasets import load_digits  # takes a second

    images, labels = load_digits(return_X_y=True)
    np.savez(folder / "digits.npz", images=images, labels=labels)
    return folder
