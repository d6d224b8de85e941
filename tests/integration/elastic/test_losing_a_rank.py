"""Scripts that know nothing of elastic jobs go on when a rank dies: idioms of MXNet, examples of all ways."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.elastic.scripts import TIMEOUTS
from tests.integration.jobs import PYTHONPATH, Job

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"

DIES = """
import os, signal
from netstorm.kvstore.process.runtime import Runtime

def die_at(operations):
    '''Have this process killed in the middle of its training, whatever the time.'''
    submit, left = Runtime.submit, [operations]

    def counted(runtime, operation):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        submit(runtime, operation)

    Runtime.submit = counted
"""

IDIOM = (
    DIES
    + """
import json
import mxnet as mx
from mxnet import autograd, gluon
import netstorm.frontends.mxnet

BATCH, STEPS = 4, 12
variant = os.environ["VARIANT"]
kv = mx.kv.create("dist_sync_netstorm")
if kv.rank == 2:
    die_at(2 + STEPS // 2)  # it has initialised the key, and pushed it 6 times

def weights_with_gluon():
    # A weight whose gradient is rank + 1 in each sample, so each step shows the mean over who contributed.
    net = gluon.nn.Dense(1, use_bias=False, in_units=1)
    net.initialize(mx.init.Zero())
    trainer = gluon.Trainer(
        net.collect_params(),
        mx.optimizer.SGD(learning_rate=1, lr_scheduler=mx.lr_scheduler.FactorScheduler(step=4, factor=0.5)),
        kvstore=kv,
        update_on_kvstore=variant != "replicas",
    )
    pieces = 2 if variant == "replicas" else 1  # whose gradients are accumulated, too
    net.weight.grad_req = "add"
    for step in range(STEPS):
        for _ in range(pieces):
            with autograd.record():
                loss = net(mx.nd.full((BATCH // pieces, 1), kv.rank + 1))
            loss.backward()
        trainer.step(BATCH * kv.num_workers)
        net.weight.zero_grad()
        yield net.weight.data().asscalar()

def weights_with_module():
    data = mx.sym.var("data")
    out = mx.sym.FullyConnected(data, num_hidden=1, no_bias=True, name="fc")
    module = mx.mod.Module(mx.sym.MakeLoss(out), label_names=None)
    module.bind([("data", (BATCH, 1))])
    module.init_params(mx.init.Zero())
    scheduler = mx.lr_scheduler.FactorScheduler(step=4, factor=0.5)
    module.init_optimizer(kv, "sgd", {"learning_rate": 1, "lr_scheduler": scheduler})
    batch = mx.io.DataBatch([mx.nd.full((BATCH, 1), kv.rank + 1)])
    for step in range(STEPS):
        module.forward_backward(batch)
        module.update()
        yield module.get_params()[0]["fc_weight"].asscalar()

weights = weights_with_module() if variant == "module" else weights_with_gluon()
print(json.dumps([float(weight) for weight in weights]), flush=True)
"""
)


@pytest.mark.parametrize(
    "variant", ["gluon", *(pytest.param(one, marks=pytest.mark.slow) for one in ("replicas", "module"))]
)
def test_steps_by_batch_size_and_num_workers_are_the_mean_over_who_contributes(
    variant: str, tmp_path: Path
) -> None:
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:3", VARIANT=variant, **TIMEOUTS) as job:
        for rank in range(3):
            job.start(rank, IDIOM)
        ended = job.end_all()
    assert [one.code for one in ended] == [0, 0, -signal.SIGKILL], [one.text for one in ended]
    printed = [json.loads(one.out.splitlines()[-1]) for one in ended[:2]]
    assert printed[0] == printed[1]
    weights = [0.0, *printed[0]]
    rates = [1.0] * 4 + [0.5] * 4 + [0.25] * 4
    gradients = [
        (before - after) / rate for before, after, rate in zip(weights[:-1], weights[1:], rates, strict=True)
    ]
    # Ranks 0 to 2 contribute 1, 2 and 3.
    assert gradients == [2.0] * 6 + [1.5] * 6


EXAMPLE = (
    DIES
    + """
import runpy, sys
from pathlib import Path

for name in ("sklearn", "scipy.stats"):  # `quick_start` has taken these away, and examples need them
    if sys.modules.get(name, name) is None:
        del sys.modules[name]
if os.environ["NETSTORM_RANK"] == "1":
    die_at({operations})
script, *arguments = {command}
sys.argv = [script, *arguments]
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")
"""
)


def example(operations: int, *command: str) -> str:
    """Return a script that runs an example, in which rank 1 is killed at its n-th operation."""
    path = str(EXAMPLES / command[0])
    return EXAMPLE.format(operations=operations, command=[path, *command[1:]])


def digests(said: str) -> list[str]:
    """Return the digests of the weights with which ranks have ended."""
    return re.findall(r"weights (?:sha256 )?([0-9a-f]{64})", said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operations", "command"),
    [
        (200, "gluon_digits.py --epochs 3 --digest"),
        (100, "geomx/gradient_compression.py --cpu -ep 1 --type mpq --threshold 0.05"),
        (40, "geomx/mixed_sync.py --cpu -ep 1"),
    ],
    ids=lambda value: value.split()[0].removesuffix(".py") if isinstance(value, str) else "",
)
def test_examples_of_mxnet_go_on(operations: int, command: str, tmp_path: Path) -> None:
    script = "import mxnet\n" + example(operations, *command.split())
    sites = ["a", "a", "b"]
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:3", **TIMEOUTS) as job:
        for rank, site in enumerate(sites):
            job.start(rank, script, NETSTORM_SITE=site)
        ended = job.end_all()
    assert [one.code for one in ended] == [0, -signal.SIGKILL, 0], [one.text for one in ended]
    if "--digest" in command:
        assert len(set(digests(ended[0].out + ended[2].out))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operations", "command"),
    [
        (100, "unedited/train_digits.py --kv-store dist_sync --num-epochs 3"),
        (100, "unedited/word_language_model.py --kvstore dist_sync"),
    ],
    ids=lambda value: value.split()[0].removesuffix(".py") if isinstance(value, str) else "",
)
def test_unedited_scripts_of_mxnet_go_on(operations: int, command: str, tmp_path: Path) -> None:
    script = example(operations, *command.split())
    with Job(tmp_path, 3, NETSTORM_ELASTIC="1:3", **TIMEOUTS) as job:
        for rank in range(3):
            job.start(rank, script, module=("-m", "netstorm.run"))
        ended = job.end_all()
    assert [one.code for one in ended] == [0, -signal.SIGKILL, 0], [one.text for one in ended]
    assert len(set(digests(ended[0].out))) == 1
    assert digests(ended[0].out) == digests(ended[2].out)


SMALL = "--width 32 --layers 1 --heads 2 --batch-size 4 --context 32"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize(
    ("operations", "command"),
    [
        (60, "torch_digits.py --epochs 3 --digest"),
        (20, f"torch_hsdp.py --sites 3 --steps 10 --digest {SMALL}"),
    ],
    ids=lambda value: value.split()[0].removesuffix(".py") if isinstance(value, str) else "",
)
def test_examples_of_pytorch_go_on(operations: int, command: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(example(operations, *command.split()))
    result = subprocess.run(
        [sys.executable, "-m", "netstorm", "launch", "-n", "3", "--", sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "OMP_NUM_THREADS": "1",
            "NETSTORM_ELASTIC": "1:3",
            **{name: str(value) for name, value in TIMEOUTS.items()},
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert "rank 1 on 127.0.0.1 was killed by SIGKILL; the job goes on with 2 nodes" in said, said
    found = digests(said)
    assert len(found) == 2, said
    assert len(set(found)) == 1, said
