"""A script of elastic jobs with MixedSync: every push of every process is counted."""

from __future__ import annotations

from tests.integration.elastic.asynchronous_scripts import PLACES, PROLOGUE

SUMS = (
    PROLOGUE.replace('kv = mx.kv.create("dist_async_netstorm")\n', "")
    + f"""
PLACES = {PLACES}
"""
    + """
from netstorm.frontends.mxnet.local_updates import MixedSync

# Each process adds ones to its own elements, so a value says how many of its gradients are in it. The last
# elements say that the job is to end: a site has them all in the same step.
SHAPES = {"small": (1, PLACES), "large": (30_000, PLACES)}
kv = MixedSync()
kv.set_optimizer(getattr(mx.optimizer, os.environ["OPTIMIZER"])(learning_rate=1.0))
for key, shape in SHAPES.items():
    kv.init(key, mx.nd.full(shape, 0 if NUMBER < 4 else 99))  # that of a newcomer counts for nothing
kv._barrier()
outs = {key: mx.nd.zeros(shape) for key, shape in SHAPES.items()}
before = {key: np.zeros(shape, "float32") for key, shape in SHAPES.items()}

def pull():
    for key, out in outs.items():
        kv.pull(key, out=out)
    for key, out in outs.items():
        found = out.asnumpy()
        assert (found >= before[key]).all(), (key, steps, found[:3], before[key][:3])
        before[key] = found

steps, seen = 0, None
while before["small"][0, -1] == 0:
    ends = STOP.exists()
    for key, shape in SHAPES.items():
        gradient = np.zeros(shape, "float32")
        gradient[:, NUMBER] = -1
        gradient[:, -1] = -float(ends)
        kv.push(key, mx.nd.array(gradient))
    kv.clock()
    steps += 1
    pull()
    show("confirmed", steps)
    if kv.ranks != seen:
        seen = kv.ranks
        show("site of", seen)
kv.clock()  # who is ahead may be in a last step, and wait for this rank
mx.nd.waitall()
kv._barrier()
pull()
for key, found in before.items():
    show("least", key, *found.min(axis=0).astype(int))
    show("most", key, *found.max(axis=0).astype(int))
show("pushes:", kv.statistics().get("pushes_of_blocks", 0))
"""
)
