"""The benchmarks, small: what they measure is right, what fails is a row, and nothing outlives them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.integration.options import run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
LONG = ("--nodes", "2", "--sizes", "1MB", "--rounds", "100000")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
TORCH = importlib.util.find_spec("torch") is not None


def command(benchmark: str, *arguments: object) -> list[str]:
    return [sys.executable, str(BENCHMARKS / benchmark), *map(str, arguments)]


def run(benchmark: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(benchmark, *arguments),
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def compared(path: Path, *arguments: object) -> list[dict[str, Any]]:
    result = run("loopback.py", "--json", path, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return rows


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmarks' own package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for module in ("arguments", "child", "packing", "pattern"):
        importlib.import_module(f"harness.{module}")
    return importlib.import_module("harness")


class Arrays:
    """What a system reduces, as plain NumPy arrays."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.values = [np.zeros(size, np.float32) for size in sizes]

    def write(self, index: int, start: int, values: NDArray[np.float32]) -> None:
        self.values[index][start : start + len(values)] = values

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        return self.values[index][start:stop]


def summed(harness: Any, sizes: list[int], *, nodes: int, number: int) -> Arrays:
    total = Arrays(sizes)
    for rank in range(nodes):
        addend = Arrays(sizes)
        harness.pattern.fill(addend, rank=rank, number=number)
        for so_far, values in zip(total.values, addend.values, strict=True):
            np.add(so_far, values, out=so_far)
    return total


@pytest.mark.parametrize("nodes", [1, 3, 9])
def test_a_right_sum_passes_the_check(harness: Any, nodes: int) -> None:
    total = summed(harness, [3_000_000, 5], nodes=nodes, number=12)
    assert harness.pattern.wrong_sum(total, nodes=nodes, number=12) is None


@pytest.mark.parametrize("fault", ["lost", "twice", "moved", "stale"])
def test_a_chunk_that_is_lost_doubled_moved_or_stale_fails_the_check(harness: Any, fault: str) -> None:
    total = summed(harness, [300_000], nodes=3, number=4)
    addend = Arrays([300_000])
    harness.pattern.fill(addend, rank=1, number=4)
    chunk = slice(65_536, 131_072)
    if fault == "lost":
        total.values[0][chunk] -= addend.values[0][chunk]
    elif fault == "twice":
        total.values[0][chunk] += addend.values[0][chunk]
    elif fault == "moved":
        total.values[0][chunk] = total.values[0][:65_536].copy()
    else:
        total.values[0][chunk] = summed(harness, [300_000], nodes=3, number=3).values[0][chunk]
    said = harness.pattern.wrong_sum(total, nodes=3, number=4)
    assert said is not None
    assert "array 0" in said


def test_systems_run_together_only_as_far_as_memory_goes(harness: Any) -> None:
    pack = harness.packing.pack
    needs = {"a": 4, "b": 6, "c": 3, "d": 11}
    assert pack(needs, 30) == ([["a", "b", "c", "d"]], [])
    sets, too_large = pack(needs, 10)
    assert too_large == ["d"]
    assert sorted(name for together in sets for name in together) == ["a", "b", "c"]
    assert all(sum(needs[name] for name in together) <= 10 for together in sets)


def test_rounds_are_shared_out_without_remainder(harness: Any) -> None:
    assert [list(harness.packing.split_rounds(10, passes)) for passes in (1, 3)] == [[10], [3, 3, 4]]


def test_each_system_sums_exactly_and_is_measured(tmp_path: Path) -> None:
    systems = ["netstorm", "mxnet-1-server", "mxnet-n-servers", *(["gloo"] if TORCH else [])]
    path = tmp_path / "results.json"
    size = ("--nodes", 2, "--sizes", "1MB", "--keys", 2, "--rounds", 3, "--warmup", 1)
    rows = compared(path, "--systems", ",".join(systems), *size, "--memory")
    assert [row["system"] for row in rows] == systems
    for row in rows:
        assert row["error"] is None
        assert (row["nodes"], row["bytes"], row["keys"]) == (2, 1_000_000, 2)
        assert len(row["rounds_s"]) == 3
        assert row["median_s"] == sorted(row["rounds_s"])[1] > 0
        assert row["idle_cpu_share"] < 0.5
        assert row["peak_rss_bytes"] > 50e6
        assert row["baseline_rss_bytes"] > 50e6
    assert json.loads(path.read_text())["machine"]["cores"] >= 1


def test_a_system_that_does_not_start_in_time_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    # No framework is imported in a tenth of a second, so that every system fails, each in a row of its own.
    arguments = ("--systems", "mxnet-1-server,netstorm", "--nodes", 2, "--sizes", "1MB", "--json", path)
    result = run("loopback.py", *arguments, "--timeout", 0.1)
    assert result.returncode == 1, result.stderr
    rows = json.loads(path.read_text())["results"]
    assert [row["system"] for row in rows] == ["mxnet-1-server", "netstorm"]
    for row in rows:
        assert "took longer than 0.1 s to join" in row["error"]
        assert row["median_s"] is None
    assert "failed" in result.stdout


def test_an_interrupted_comparison_keeps_its_results_and_stops_its_processes(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    long = command("loopback.py", *LONG, "--systems", "mxnet-1-server", "--json", path)
    with subprocess.Popen(long, env=ENVIRONMENT, stdout=subprocess.PIPE) as driver:
        children = wait_for_children(driver.pid, 4)
        driver.send_signal(signal.SIGINT)
        output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert b"mxnet-1-server" in output
    found = json.loads(path.read_text())
    assert found["interrupted"]
    _, left = psutil.wait_procs(children, timeout=10)  # what a killed process had started is not the driver's
    assert not left


def test_processes_of_a_driver_that_is_killed_end_by_themselves() -> None:
    long = command("loopback.py", *LONG, "--systems", "mxnet-1-server,netstorm")
    with subprocess.Popen(long, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as driver:
        children = wait_for_children(driver.pid, 7)
        driver.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def wait_for_children(pid: int, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    children: list[psutil.Process] = []
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children(recursive=True)
        if len(children) >= count:
            return children
        time.sleep(0.1)
    pytest.fail(f"only {len(children)} of {count} processes were started")


@pytest.mark.parametrize(("more", "ranks"), [((), 2), (("--alone",), 1)])
def test_blocking_times_every_call_of_every_measured_rank(
    more: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    path = tmp_path / "blocking.json"
    arguments = ("--nodes", 2, "--size", "1MB", "--keys", 4, "--steps", 3, "--rounds", 2)
    result = run("blocking.py", *more, *arguments, "--json", path)
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    for operation in ("push", "pull", "pushpull"):
        wall = found["calls"][operation]["wall"]
        assert wall["count"] == 3 * 4 * ranks
        assert 0 < wall["p50_s"] <= wall["p99_s"] <= wall["max_s"]
    assert set(found["rounds_beside"]) == {"nothing", "native", "python"}
    assert all(len(beside["rounds_s"]) == 2 for beside in found["rounds_beside"].values())


@pytest.mark.timeout(1500)
def test_netstorm_trains_what_mxnets_servers_train(tmp_path: Path) -> None:
    path = tmp_path / "equivalence.json"
    arguments = ("--examples", "gluon", "--optimizers", "sgd", "--nodes", 2, "--runs", 2, "--epochs", 1)
    found: dict[str, Any] = {}
    for _ in range(8):
        run("equivalence.py", *arguments, "--json", path)
        [found] = json.loads(path.read_text())["comparisons"]
        # MXNet's own processes die on a busy machine: servers of !stored.is_none(), workers of empty answers.
        if set(found["errors"]) != {"mxnet"} or "dmlc::Error" not in found["errors"]["mxnet"]:
            break
    else:
        pytest.skip(f"MXNet's own processes died 8 times running: {found['errors']['mxnet']}")
    assert found["errors"] == {}
    assert found["ranks_identical"] == {"mxnet": True, "netstorm": True}
    # Two ranks add the same two numbers, in one order or the other: there is no spread to compare with.
    assert found["spread"] == 0
    assert found["distance"] < 1e-5


def test_a_wrong_option_is_refused() -> None:
    wrong = [
        ("loopback.py", ("--sizes", "4"), "4"),
        ("loopback.py", ("--sizes", "3B"), "whole number of float32 values"),
        ("loopback.py", ("--systems", "glo"), "no system 'glo'"),
        ("loopback.py", ("--nodes", "0"), "whole number from 1"),
        ("loopback.py", ("--keys", "100", "--sizes", "4B"), "fewer values than --keys"),
        ("blocking.py", ("--kv-store", "dist"), "invalid choice: 'dist'"),
        ("equivalence.py", ("--json", "/nowhere/x"), "/nowhere is not a folder"),
    ]
    ends = run_all([(BENCHMARKS / name, *arguments) for name, arguments, _ in wrong], {})
    for (*command, said), end in zip(wrong, ends, strict=True):
        assert end.code == 2, command
        assert said in end.err
        assert "Traceback" not in end.err


def test_estimates_are_compared_with_what_links_are(tmp_path: Path) -> None:
    path = tmp_path / "estimates.json"
    size = ("--nodes", 3, "--rounds", 4, "--megabytes", 4)
    result = run("estimates.py", "--families", "mesh", "--seeds", 1, *size, "--json", path)
    assert result.returncode == 0, result.stdout + result.stderr
    [case] = json.loads(path.read_text())["cases"]
    assert case["links_measured"] >= 2
    assert case["median_error"] < 0.05


def test_two_checkouts_take_turns_and_the_ratio_has_an_interval(tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    small = ("--nodes", "2", "--sizes", "1MB", "--starts", "2", "--rounds", "2", "--warmup", "1")
    result = run("versions.py", ROOT, ROOT, *small, "--limit", "0.0001", "--json", path)
    assert result.returncode == 1, result.stdout + result.stderr  # no version is that much faster
    written = json.loads(path.read_text())
    (found,) = written["results"]
    low, high = found["interval"]
    assert low <= found["ratio"] <= high
    assert [len(start) for name in ("old", "new") for start in found["rounds_s"][name]] == [2, 2, 2, 2]
    assert written["versions"]["old"]["folder"] == str(ROOT)


def test_a_folder_without_netstorm_is_no_version(tmp_path: Path) -> None:
    result = run("versions.py", tmp_path, ROOT)
    assert result.returncode == 2
    assert f"{tmp_path} is no checkout of NetStorm" in result.stderr


@pytest.mark.skipif(not TORCH, reason="PyTorch is not installed")
def test_pytorch_on_loopback_is_measured_beside_gloo(tmp_path: Path) -> None:
    path = tmp_path / "torch.json"
    size = ("--nodes", 2, "--size", "2MB", "--rounds", 2)
    result = run("torch_loopback.py", *size, "--json", path)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(path.read_text())["figures"]
    assert figures["step_s"]["count"] == 2
    assert figures["small_s"]["count"] == 2 * 2 * 20
    for figure in figures.values():
        assert figure["ratio"] == pytest.approx(figure["torch-netstorm"] / figure["torch-gloo"])
        assert figure["torch-gloo"] > 0
