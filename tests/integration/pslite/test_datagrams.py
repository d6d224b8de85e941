"""Real nodes whose sums go as packets over loopback sockets, in a job with a key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.jobs import Job

SCRIPT = """
import json
import numpy as np
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.options import loss_terms
from netstorm.kvstore.process.runtime import Runtime
from netstorm.settings import Settings

SIZE, STEPS = 300_000, 8
settings = Settings.from_environment()
runtime = Runtime(settings)
key = runtime.register(runtime.open_namespace(), "w", (SIZE,), "float32")
kept, total, digests = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32), []
given = counted = 0
for step in range(STEPS):
    kept += np.float32(runtime.rank + 1)
    given += runtime.rank + 1
    operation = Operation(
        key=key, round=key.take_round(), source=kept, destination=total, done=print,
        loss=loss_terms(settings),
    )
    runtime.allreduce(operation)
    counted += float(total.astype(np.float64).sum())
    digests.append(hash(total.tobytes()))
runtime.barrier()
counters = {name: count for name, count in runtime.statistics().items() if name.startswith("lane")}
print(json.dumps({"digests": digests, "counted": counted, "kept": float(kept.sum()), "counters": counters}))
runtime.finish()
runtime.close()
"""

NODES, SIZE, STEPS = 3, 300_000, 8


def answers(job: Job) -> list[dict[str, object]]:
    ended = job.end_all()
    assert [one.code for one in ended] == [0] * job.nodes, "\n".join(one.text[-2000:] for one in ended)
    return [json.loads(one.out.strip().splitlines()[-1]) for one in ended]


def started(job: Job) -> Job:
    for rank in range(job.nodes):
        job.start(rank, SCRIPT, PYTHONHASHSEED=1, NETSTORM_DATAGRAMS=1)
    return job


LOSSY = {
    "NETSTORM_LOSS_BOUND": 0.5,
    "NETSTORM_DEADLINE": "20s",
    "NETSTORM_TOPOLOGY": "star",
    "NETSTORM_HUB": 0,
}


def test_sums_of_real_nodes_go_over_lanes_and_are_exact_and_equal(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run([sys.executable, "-m", "netstorm", "keys", "new", str(key)], check=True, cwd=tmp_path)
    settings = {**LOSSY, "NETSTORM_KEY_FILE": key, "CHUNK_SIZE": 30_000}
    with Job(tmp_path, NODES, **settings) as job:
        said = answers(started(job))
    assert len({tuple(one["digests"]) for one in said}) == 1  # type: ignore[arg-type]
    total = SIZE * STEPS * sum(range(1, NODES + 1))
    assert said[0]["counted"] + sum(one["kept"] for one in said) == total  # type: ignore[operator, misc]
    over_lanes = [one["counters"].get("lane_messages", 0) for one in said]  # type: ignore[attr-defined]
    assert over_lanes[0] == 0
    assert min(over_lanes[1:]) >= 10  # the first step goes over TCP while lanes are agreed on


def test_without_the_library_the_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "cryptography.py").write_text("raise ImportError('not installed')\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))),
        "NETSTORM_DATAGRAMS": "1",
        "NETSTORM_LOSS_BOUND": "0.5",
        "DMLC_PS_ROOT_PORT": "9",
    }
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode
    assert "NETSTORM_DATAGRAMS=1 needs the package cryptography" in ended.stderr
    assert "netstorm[datagrams]" in ended.stderr
