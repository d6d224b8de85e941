"""Scripts of elastic jobs that train asynchronously with MXNet, until the test asks for the end."""

PROLOGUE = """
import os, sys, time
from pathlib import Path
import numpy as np
import netstorm.frontends.mxnet
from netstorm import errors
from netstorm.frontends.mxnet.compat import mx

def show(*words):
    print(*words, flush=True)

STOP = Path(__file__).with_name("stop")
NUMBER = int(os.environ["NUMBER"])  # of this process: another one may have its rank later
kv = mx.kv.create("dist_async_netstorm")
"""

PLACES = 8
"""Elements that are one process's each, over and over."""

COUNTS = (
    PROLOGUE
    + f"""
PLACES = {PLACES}
SHAPES = {{"small": (1, PLACES), "large": (30_000, PLACES), "rows": (500, PLACES)}}
"""
    + """
# Each process adds ones to its own elements, so a value says how many of its pushes are in it.
if os.environ.get("COMPRESSION"):
    kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    del SHAPES["rows"]
if os.environ.get("FUNCTION"):
    def add(key, gradient, stored):
        stored -= gradient
    kv._set_updater(add)
else:
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
ones = {}
for key, shape in SHAPES.items():
    gradient = np.zeros(shape, "float32")
    gradient[:, NUMBER] = -1
    ones[key] = mx.nd.array(gradient)
    initial = mx.nd.full(shape, 0 if NUMBER < 3 else 99)  # that of a newcomer counts for nothing
    if key == "rows":
        ones[key], initial = ones[key].tostype("row_sparse"), initial.tostype("row_sparse")
    kv.init(key, initial)
kv._barrier()
outs = {key: mx.nd.zeros(shape, stype="row_sparse" if key == "rows" else "default")
        for key, shape in SHAPES.items()}
before = {key: np.zeros(shape, "float32") for key, shape in SHAPES.items()}
everything = mx.nd.arange(500)

def pull():
    for key, out in outs.items():
        if key == "rows":
            kv.row_sparse_pull(key, out=out, row_ids=everything)
        else:
            kv.pull(key, out=out)
    for key, out in outs.items():
        found = out.asnumpy()
        assert (found[:, NUMBER] == steps).all(), (key, steps, found[:3])
        assert (found >= before[key]).all(), (key, steps, found[:3], before[key][:3])
        before[key] = found

def check_refused(call, reason):
    try:
        call()
    except errors.UsageError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(f"not refused: {reason}")

check_refused(lambda: kv.attach_state("place", dict, print), "leave the call out")
check_refused(lambda: mx.kv.create("dist_async_netstorm"), "one store a process")
steps, live = 0, None
while not STOP.exists():
    if kv.live_ranks != live:
        live = kv.live_ranks
        assert kv.num_workers == int(os.environ["DMLC_NUM_WORKER"])
        show("with ranks", live)
    steps += 1
    for key, gradient in ones.items():
        kv.push(key, gradient)
    if os.environ.get("CLOCK"):
        kv.clock()
    pull()
    show("confirmed", steps)
check_refused(lambda: kv.set_optimizer(mx.optimizer.NAG()), "after")
if os.environ.get("CLOCK"):
    kv.clock()  # who is ahead may be in a last step, and wait for this rank
mx.nd.waitall()
kv._barrier()
pull()
for key, found in before.items():
    show("least", key, *found.min(axis=0).astype(int))
    show("most", key, *found.max(axis=0).astype(int))
found = kv.statistics()
show("handed over:", sum(found.get(f"blocks_{how}_over", 0) for how in ("taken", "handed")))
"""
)

ALONE = (
    PROLOGUE
    + """
# Rank 1 alone pushes, so that the order is known: as MXNet's own updater does it.
SHAPE, DTYPE = (50, 601), os.environ.get("DTYPE", "float32")
KIND, ARGUMENTS = eval(os.environ["OPTIMIZER"])
STEPS = Path(__file__).with_name("steps")

def optimizer():
    scheduler = mx.lr_scheduler.FactorScheduler(step=3, factor=0.5, base_lr=0.25)
    return getattr(mx.optimizer, KIND)(learning_rate=0.25, lr_scheduler=scheduler, **ARGUMENTS)

def arrays_of(state):
    found = state if isinstance(state, (tuple, list)) else [state]
    return [one.asnumpy() for part in found for one in (part if isinstance(part, tuple) else [part])
            if one is not None]

def close(found, right):
    tolerance = 1e-5 if DTYPE == "float32" else 1e-2
    return np.allclose(found, right, rtol=tolerance, atol=tolerance)

mx.random.seed(os.getpid())
kv.set_optimizer(optimizer())
value, never = (mx.nd.random.normal(shape=SHAPE).astype(dtype) for dtype in (DTYPE, "float32"))
kv.init("takes part", mx.nd.zeros((1,)))
kv.broadcast("pushed", value, value)
kv.broadcast("never", never, never)
at_first = never.asnumpy()
kv.push("takes part", mx.nd.zeros((1,)))
mx.nd.waitall()
expected, updater = value.copy(), mx.optimizer.get_updater(optimizer())
updater.optimizer.multi_precision = ARGUMENTS.get("multi_precision", False)
steps, live = 0, None
while not STOP.exists():
    if kv.live_ranks != live:
        live = kv.live_ranks
        show("with ranks", live)
    if kv.rank == 1 and steps < int(STEPS.read_text() or 0):
        gradient = mx.nd.array(np.random.RandomState(steps).randn(*SHAPE)).astype(DTYPE)
        steps += 1
        updater("pushed", gradient, expected)
        kv.pushpull("pushed", gradient, out=value)
        difference = abs(value.asnumpy() - expected.asnumpy()).max()
        assert close(value.asnumpy(), expected.asnumpy()), (steps, difference)
        show("step", steps)
    else:
        time.sleep(0.01)
kv.pull("never", out=never)
assert (never.asnumpy() == at_first).all()
if kv.rank == 1:
    path = STOP.with_name("states")
    kv.save_optimizer_states(str(path))
    saved = mx.optimizer.get_updater(optimizer())
    saved.set_states(path.read_bytes())
    pairs = zip(arrays_of(updater.states["pushed"]), arrays_of(saved.states["pushed"]))
    assert all(close(own, other) for own, other in pairs)
    show("states are equal:", len(arrays_of(saved.states["pushed"])))
"""
)

RESTARTED = """
import os, signal, time
import numpy as np
import netstorm.frontends.mxnet
from netstorm.frontends.mxnet.compat import mx

attempt = int(os.environ.get("NETSTORM_RESTART", 0))
kv = mx.kv.create("dist_async_netstorm")
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
kv.init("counts", mx.nd.zeros((3000, 8)))
place, out = kv.rank + 4 * attempt, mx.nd.zeros((3000, 8))
gradient = np.zeros((3000, 8), "float32")
gradient[:, place] = -1
gradient = mx.nd.array(gradient)
for step in range(1, 31):
    kv.pushpull("counts", gradient, out=out)
    assert (out.asnumpy()[:, place] == step).all()
    if (kv.rank, attempt, step) == (1, 0, 5):
        os.kill(os.getpid(), signal.SIGKILL)
    while step == 20 and attempt == 0 and not out.asnumpy()[:, 5].all():  # until who came back has trained
        time.sleep(0.01)
        kv.pull("counts", out=out)
mx.nd.waitall()
kv._barrier()
kv.pull("counts", out=out)
counts = out.asnumpy().astype(int)
print("least", *counts.min(axis=0), flush=True)
print("most", *counts.max(axis=0), flush=True)
"""

DIGITS = (
    PROLOGUE.replace('NUMBER = int(os.environ["NUMBER"])', "NUMBER = os.getpid()")
    + """
from mxnet import autograd, gluon

STEPS, BATCH = 240, 32
digits = np.load(Path(__file__).with_name("digits.npz"))
images, labels = (digits["images"] / 16).astype("float32"), digits["labels"].astype("float32")
train, test = slice(0, 1440), slice(1440, None)
mx.random.seed(NUMBER)  # a newcomer's own weights are others
order = np.random.default_rng(NUMBER)

net = gluon.nn.Sequential()
net.add(gluon.nn.Dense(64, in_units=64, activation="relu"), gluon.nn.Dense(10, in_units=64))
net.initialize(mx.init.Xavier())
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(net.collect_params(), "dcasgd", {"learning_rate": 0.1, "lamda": 0.04}, kvstore=kv)
for step in range(1, STEPS + 1):
    mine = order.integers(1440, size=BATCH)
    with autograd.record():
        loss = loss_of(net(mx.nd.array(images[train][mine])), mx.nd.array(labels[train][mine]))
    loss.backward()
    trainer.step(BATCH)
    loss.wait_to_read()
    if step % 20 == 0:
        show("step", step)
mx.nd.waitall()
kv._barrier()
for number, parameter in enumerate(trainer._params):
    kv.pull(number, out=parameter.list_data())
found = net(mx.nd.array(images[test])).argmax(axis=1).asnumpy()
show(f"accuracy: {(found == labels[test]).mean():.4f}")
"""
)

LATE_GRADIENT = (
    PROLOGUE
    + """
from netstorm.frontends.mxnet.engine import push_async

# Rank 0's gradient is not computed yet when its clock ends. Rank 1 must not go on without it.
kv.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
kv.init("counts", mx.nd.zeros((2,)))
gradient = np.zeros((2,), "float32")
gradient[kv.rank] = -1
gradient, out = mx.nd.array(gradient), mx.nd.zeros((2,))
ASKED, ANNOUNCED = STOP.with_name("asked"), STOP.with_name("announced")

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

if kv.rank == 0:
    def compute(completion):
        import threading
        threading.Thread(target=lambda: (wait_for(ASKED), completion.succeed())).start()

    push_async(compute, reads=(), writes=(gradient,), name="compute")
    kv.push("counts", gradient)
    kv.clock()
    ANNOUNCED.touch()
else:
    wait_for(ANNOUNCED)
    for _ in range(2):
        kv.push("counts", gradient)
        kv.clock()
    kv.pull("counts", out=out)
    time.sleep(0.5)
    ASKED.touch()
    show("counts", *out.asnumpy().astype(int))
mx.nd.waitall()
kv._barrier()
"""
)
