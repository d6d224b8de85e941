"""`python -m netstorm.run`: scripts written for MXNet's own distributed stores, unedited."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.integration.forking import ForkedProcess
from tests.integration.jobs import PYTHONPATH, Ended, Job, run_job

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


def test_an_unedited_script_trains_under_all_names_of_mxnets_distributed_stores(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'imported from beside the script'")
    for end in run_job(tmp_path, 2, UNEDITED, module=RUN, NETSTORM_LOG="error"):
        assert (end.code, end.err) == (0, "")
        asynchronous, last = end.out.splitlines()
        assert asynchronous == "dist_async_netstorm"
        assert last == "__main__ imported from beside the script 1 True 2"


def test_a_module_runs_as_under_pythons_own_m_and_the_scheduler_of_an_old_launcher_is_ours(
    tmp_path: Path,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import gc, sys, mxnet as mx\n"
        "kv = mx.kv.create('dist_sync')\n"
        "print(__name__, __package__, sys.argv[0] == __file__, sys.argv[1:], kv.type, kv.num_workers)\n"
        "assert gc.get_freeze_count() > 50_000  # the framework's objects are left out of collections\n"
    )
    shared = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port, "DMLC_NUM_WORKER": "1"}
    path = f"{PYTHONPATH}{os.pathsep}{tmp_path}"
    processes = {
        role: subprocess.Popen(
            [sys.executable, *RUN, "-m", "package.train", "argument"],
            env={**os.environ, "PYTHONPATH": path, **shared, "DMLC_NUM_SERVER": "2", "DMLC_ROLE": role},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in ("scheduler", "worker")
    }
    try:
        said = {role: process.communicate(timeout=90) for role, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes.values()] == [0, 0], said
    assert said["worker"] == ("__main__ package True ['argument'] dist_sync_netstorm 1\n", "")
    assert "has ended well: 1 nodes" in said["scheduler"][0]


def test_what_cannot_be_run_is_an_error_of_one_line_and_help_describes_the_command(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("import runpy; runpy.run_module('netstorm.run', run_name='__main__', alter_sys=True)")

    def ended(arguments: list[str], variables: dict[str, str]) -> Ended:
        files = {name: str(tmp_path / name) for name in ("out", "err")}
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **variables}
        assert Job.forker is not None
        process = ForkedProcess(Job.forker, words=[str(script), *arguments], environment=environment, **files)
        return Ended(process.wait(), *(Path(file).read_text() for file in files.values()))

    wrong: list[tuple[list[str], dict[str, str], str]] = [
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
    ]
    for arguments, variables, text in wrong:
        end = ended(arguments, variables)
        assert (end.code, end.out) == (2, "")
        assert end.err.startswith(text)
        assert end.err.count("\n") == 1
    end = ended(["--help"], {})
    assert (end.code, end.err) == (0, "")
    assert "run an unedited MXNet or PyTorch script" in end.out
    end = ended(["train.py"], {"DMLC_ROLE": "server"})  # of an old launcher
    assert (end.code, end.err) == (0, "")
    assert end.out.startswith("netstorm: DMLC_ROLE=server has nothing to do")


def test_under_the_naive_engine_a_script_trains_and_its_exception_is_shown_and_reaches_the_others(
    tmp_path: Path,
) -> None:
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
def fail():
    raise RuntimeError("disk full")
if kv.rank == 0:
    fail()
kv.push("a", outs[0])
kv._barrier()
"""
    guilty, other = run_job(tmp_path, 2, script, module=RUN, MXNET_ENGINE_TYPE="NaiveEngine")
    for end in (guilty, other):
        assert end.out == "[-3.0, -3.0]\n", end.text
        assert "MXNET_ENGINE_TYPE=NaiveEngine: nothing overlaps with the network" in end.err
        assert end.code == 1
        assert "runpy" not in end.err
    lines = guilty.error_lines
    first = lines.index("Traceback (most recent call last):")
    assert lines[first + 1].endswith('script0.py", line 14, in <module>')
    assert lines[-1] == "RuntimeError: disk full"
    assert "netstorm.errors.NodeFailed: rank 0 (127.0.0.1:" in other.err
    assert "failed: RuntimeError: disk full" in other.err
