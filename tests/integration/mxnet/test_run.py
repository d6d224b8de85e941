"""`python -m netstorm.run`: scripts written for MXNet's own distributed stores, unedited."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import PYTHONPATH, Job, run_job

RUN = ("-m", "netstorm.run")

UNEDITED = """
import sys
import mxnet as mx
from neighbour import NAME

stores = [mx.kv.create(name) for name in ("dist_sync", "dist_device_sync", "dist_sync_device", "dist")]
for kv in stores:
    kv.init(3, mx.nd.zeros((2, 3)))
    kv.push(3, mx.nd.ones((2, 3)) * (kv.rank + 1))
    out = mx.nd.zeros((2, 3))
    kv.pull(3, out=out)
    assert (out.asnumpy() == 3).all()

net = mx.gluon.nn.Dense(2, in_units=3)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_sync")
with mx.autograd.record():
    loss = net(mx.nd.ones((1, 3)))
loss.backward()
trainer.step(1)
net.weight.data().wait_to_read()

print(mx.kv.create("dist_async").type)
print(__name__, NAME, len(sys.argv), sys.argv[0] == __file__, stores[0].num_workers)
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *RUN, *arguments],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_unedited_script_trains_under_all_names_of_mxnets_distributed_stores(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'imported from beside the script'")
    for end in run_job(tmp_path, 2, UNEDITED, module=RUN, NETSTORM_LOG="error"):
        assert (end.code, end.err) == (0, "")
        asynchronous, last = end.out.splitlines()
        assert asynchronous == "dist_async_netstorm"
        assert last == "__main__ imported from beside the script 1 True 2"


def test_a_module_runs_as_under_pythons_own_m(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import sys, mxnet as mx\n"
        "kv = mx.kv.create('dist_sync')\n"
        "print(__name__, __package__, sys.argv[0] == __file__, len(sys.argv), kv.type, kv.num_workers)\n"
    )
    with Job(tmp_path, 1) as job:
        path = f"{PYTHONPATH}{os.pathsep}{tmp_path}"
        job.start(
            0, "its path is the module's argument", module=(*RUN, "-m", "package.train"), PYTHONPATH=path
        )
        end = job.end(0)
    assert (end.code, end.err) == (0, "")
    assert end.out == "__main__ package True 2 dist_sync_netstorm 1\n"


def test_an_exception_is_shown_as_the_scripts_own_and_reaches_the_others(tmp_path: Path) -> None:
    script = """
import mxnet as mx
kv = mx.kv.create("dist_sync")
def fail():
    raise RuntimeError("disk full")
if kv.rank == 0:
    fail()
kv._barrier()
"""
    guilty, other = run_job(tmp_path, 2, script, module=RUN, NETSTORM_LOG="error")
    assert guilty.code == other.code == 1
    lines = guilty.error_lines
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('script0.py", line 7, in <module>')
    assert lines[-1] == "RuntimeError: disk full"
    assert "runpy" not in guilty.err + other.err
    assert "netstorm.errors.NodeFailed: rank 0 (127.0.0.1:" in other.err
    assert "failed: RuntimeError: disk full" in other.err


def test_the_frameworks_objects_are_left_out_of_collections_and_an_exit_code_is_the_scripts(
    tmp_path: Path,
) -> None:
    script = """
import gc, sys
import mxnet as mx
print(gc.get_freeze_count() > 50_000)
mx.kv.create("dist_sync")
sys.exit(3)
"""
    (end,) = run_job(tmp_path, 1, script, module=RUN)
    assert (end.code, end.out, end.err) == (3, "True\n", "")


def test_a_server_of_an_old_launcher_has_nothing_to_do_and_prints_that() -> None:
    end = run("train.py", DMLC_ROLE="server")
    assert (end.returncode, end.stderr) == (0, "")
    assert end.stdout.startswith("netstorm: DMLC_ROLE=server has nothing to do")


def test_a_scheduler_of_an_old_launcher_is_ours(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    script = tmp_path / "train.py"
    script.write_text("import mxnet as mx; print(mx.kv.create('dist_sync').num_workers)")
    shared = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": "1"}
    command = [sys.executable, *RUN, str(script)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **shared, "DMLC_NUM_SERVER": "2"}
    scheduler = subprocess.Popen(
        command, env={**environment, "DMLC_ROLE": "scheduler"}, stdout=subprocess.PIPE, text=True
    )
    try:
        node = run(str(script), **shared, DMLC_ROLE="worker", DMLC_NUM_SERVER="2")
        output, _ = scheduler.communicate(timeout=30)
    finally:
        scheduler.kill()
        scheduler.wait()
    assert (node.returncode, node.stdout) == (0, "1\n")
    assert scheduler.returncode == 0
    assert "has ended well: 1 nodes" in output


@pytest.mark.parametrize(
    ("arguments", "variables", "text"),
    [
        ([], {}, "usage: python -m netstorm.run"),
        (["-m"], {}, "netstorm: -m needs the name of a module"),
        (["nowhere.py"], {}, "netstorm: no script 'nowhere.py'"),
        (["train.py"], {"DMLC_NUM_WORKER": "many"}, "netstorm: DMLC_NUM_WORKER='many'"),
        (["train.py"], {"DMLC_ROLE": "boss"}, "netstorm: DMLC_ROLE='boss'"),
        (
            ["train.py"],
            {"DMLC_ROLE": "scheduler", "NETSTORM_NETWORK": "/nowhere.yaml"},
            "netstorm: /nowhere.yaml",
        ),
    ],
    ids=["nothing", "no module", "no script", "wrong setting", "wrong role", "no network file"],
)
def test_what_cannot_be_run_is_an_error_of_one_line(
    arguments: list[str], variables: dict[str, str], text: str
) -> None:
    end = run(*arguments, **variables)
    assert end.returncode == 2
    assert end.stderr.startswith(text)
    assert end.stderr.count("\n") == 1
    assert end.stdout == ""


def test_help_describes_the_command() -> None:
    end = run("--help")
    assert (end.returncode, end.stderr) == (0, "")
    assert "run an unedited MXNet or PyTorch script" in end.stdout


def test_under_the_naive_engine_a_script_trains_too_and_prints_what_it_gives_up(tmp_path: Path) -> None:
    script = """
import mxnet as mx
kv = mx.kv.create("dist_sync")
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
kv.init(["a", "b"], [mx.nd.zeros((30_000,)), mx.nd.zeros((5,))])
outs = [mx.nd.zeros((30_000,)), mx.nd.zeros((5,))]
for _ in range(3):
    kv.pushpull(["a", "b"], [mx.nd.ones((30_000,)), mx.nd.ones((5,))], out=outs)
print([float(out[0].asscalar()) for out in outs])
kv._barrier()
if kv.rank == 0:
    raise ValueError("no more")
kv.push("a", outs[0])
"""
    guilty, other = run_job(tmp_path, 2, script, module=RUN, MXNET_ENGINE_TYPE="NaiveEngine")
    for end in (guilty, other):
        assert end.out == "[-3.0, -3.0]\n", end.text
        assert "MXNET_ENGINE_TYPE=NaiveEngine: nothing overlaps with the network" in end.err
        assert end.code == 1
    assert "netstorm.errors.NodeFailed: rank 0 (127.0.0.1:" in other.err
    assert "failed: ValueError: no more" in other.err
