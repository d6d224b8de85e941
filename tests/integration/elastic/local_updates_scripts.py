"""A script of elastic jobs whose stores average at times: every average is checked."""

from __future__ import annotations

from tests.integration.elastic.scripts import PROLOGUE

AVERAGES = (
    PROLOGUE.replace('kv = mx.kv.create("dist_sync_netstorm")\n', "")
    + """
import json
from netstorm.frontends.mxnet.local_updates import HFA, DiLoCo, ESync, LocalSGD, OuterSGD

# Each step of each rank adds 1 to all values. So an average adds the mean number of steps of those who are in
# it, however many they are.
kv = eval(os.environ["STORE"])
compression = json.loads(os.environ.get("COMPRESSION", "null"))
if compression:
    kv.set_gradient_compression(compression)
WAIT = STOP.with_name("wait")
most = int(os.environ["MOST_STEPS"])
before = {}
expected = {"small": np.zeros(100, np.float32), "large": np.zeros(300_000, np.float32)}
kv.attach_state("place", lambda: place, place.update)
kv.attach_state(
    "expected",
    lambda: expected,
    lambda given: expected.update({name: array.asnumpy() for name, array in given.items()}),
)
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, momentum=0.0))
names, sizes = ["small", "large", "end"], [100, 300_000, 1]
kv.init(names, [mx.nd.zeros((size,)) for size in sizes])
out = [mx.nd.zeros((size,)) for size in sizes]
ones = [mx.nd.full((size,), -1.0) for size in sizes[:2]]
show("begins at step", place["step"], "after", kv.averages, "averages")
try:
    while not (kv.is_averaged and out[2].asnumpy()[0]):
        while WAIT.exists() and not kv.is_averaged:  # until somebody has asked for the state meanwhile
            if kv._elastic.live.has_newcomers:
                WAIT.unlink(missing_ok=True)
            time.sleep(0.01)
        kv.push(names, [*ones, -asks_for_the_end()])
        kv.pull(names, out=out)
        if kv.is_averaged:
            for name, array in zip(names, out[:2]):
                value, who = array.asnumpy(), kv.contributors(name)
                gained, expected[name] = value - expected[name], value
                # A rank that has gone may be in some chunks and not in others.
                assert (gained >= 0.99).all() and (gained <= most + 0.01).all(), (name, gained, who)
                # Who has just come may have taken fewer steps, and be in some chunks before it is in all.
                if os.environ.get("ALL_STEPS") and who == before.get(name) == kv.live_ranks:
                    assert np.allclose(gained, most, atol=0.01), (name, gained, who)
                before[name] = who
            stepped("small")
except errors.NodeRemoved as error:
    show("removed:", error)
    sys.exit(3)
show("averages:", kv.averages)
end(out)
"""
)
