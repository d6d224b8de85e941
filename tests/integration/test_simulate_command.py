"""The command with its worker process: what it prints, and that nothing of it is left behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import run_netstorm

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "netstorm", "simulate", "--model", "100kB", "--chunk", "10kB"]


def run(folder, *arguments):
    return run_netstorm(folder, *COMMAND[3:], *map(str, arguments))


def test_json_is_printed_alone(tmp_path):
    result = run(tmp_path, "--nodes", 3, "--seeds", 2, "--topology", "star", "--json", "-")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["engine"]["used"] == "cluster"
    assert [one["seed"] for one in found["seeds"]] == [0, 1]
    assert 0 < found["summary"]["star"]["of_optimum"] < 1


def test_a_network_file_is_simulated_as_one_network(tmp_path):
    network = ROOT / "examples" / "networks" / "internet2.yaml"
    arguments = ("--topology", "fapt,mst", "--rounds", 3, "--json", "out.json")
    result = run(tmp_path, "--network", network, *arguments)
    assert result.code == 0, result.err
    assert "internet2.yaml" in result.out
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["seeds"]) == 1
    assert len(found["seeds"][0]["schemes"]["mst"]["rounds_s"]) == 3


def test_a_limit_that_nothing_keeps_leaves_no_result_and_says_so(tmp_path):
    result = run(tmp_path, "--nodes", 3, "--seeds", 2, "--topology", "star", "--limit", "1ms")
    assert result.code == 1
    assert "star: not formed for seed 0: it took longer than the limit of 1ms (--limit)" in result.out


def test_an_interrupt_prints_what_is_done_and_leaves_no_process(tmp_path):
    file = tmp_path / "out.json"
    arguments = ["--nodes", "4", "--seeds", "5000", "--topology", "star,fapt", "--json", str(file)]
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        done = re.match(r"(\d+) of 15000 done", line)
        if done and int(done[1]) > 3:  # the first seed's: the optimum and both schemes
            break
    workers = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 130, errors
    assert "interrupted" in output
    assert "Traceback" not in errors
    found = json.loads(file.read_text())
    assert found["interrupted"]
    assert found["summary"]["star"]["seeds"] > 0
    assert workers
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["netstorm_fig19.py", "netstorm_fig20.py", "mlnet_fig1.py"])
def test_a_paper_s_table_has_the_paper_s_figure_and_ours_in_each_row(script, tmp_path):
    file = tmp_path / "rows.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "papers" / script),
        "--seeds",
        "1",
        "--json",
        str(file),
        *(["--lasts", "20"] if script == "netstorm_fig20.py" else []),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["rows"]
    assert all(row["paper"] and row["ours"] for row in rows)
    if script == "mlnet_fig1.py":
        # 800 workers to 50 servers: 16 gradients into each; an aggregator of a full rack takes in 7.
        (rack,) = [
            row for row in rows if row["what"] == "1a: RACK, one aggregator for all servers, 50 servers"
        ]
        assert rack["value"] == pytest.approx(7 / 16)
