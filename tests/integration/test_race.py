"""`netstorm bench wan` and `train` without emulation: real processes, and results that survive Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
NETWORK = """
nodes: {0: {}, 1: {}}
links: [{between: [0, 1], rate: 100Mbit}]
"""
"""Two nodes: each has a process of every system."""


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "pair.yaml"
    path.write_text(NETWORK)
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "netstorm", "bench", *map(str, arguments)]


def bench(network: Path, name: str, *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a benchmark on the network's nodes, without emulation; return what it has written."""
    out = network.with_name("out.json")
    ended = subprocess.run(
        command(name, network, "--loopback", *arguments, "--json", out),
        env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ended.returncode == code, ended.stdout + ended.stderr
    content: dict[str, Any] = json.loads(out.read_text())
    return content | {"stdout": ended.stdout}


SMALL = ("--sizes", "1MB", "--rounds", 2, "--warmup", 1)


def test_the_race_measures_every_system_and_what_fails_is_a_row(network: Path, tmp_path: Path) -> None:
    systems = (
        "mxnet-star-best,mxnet-star-mean,netstorm-pro,netstorm-fapt@NETSTORM_TOPOLOGY=star@NETSTORM_HUB=7"
    )
    trace = ("--trace", tmp_path / "trace.json")
    content = bench(network, "wan", *SMALL, "--systems", systems, *trace, code=1)
    assert {"network", "machine", "results"} <= content.keys()
    assert [row["system"] for row in content["results"]] == systems.split(",")
    *rows, fails = content["results"]
    best, mean, _ = rows
    for row in rows:
        assert row["error"] is None
        assert len(row["rounds_s"]) == 2
        assert row["vs_star_best"] == pytest.approx(best["median_s"] / row["median_s"])
        assert row["vs_star_mean"] == pytest.approx(mean["median_s"] / row["median_s"])
        assert row["of_optimum"] == pytest.approx(
            content["network"]["optimum_s"]["1000000"] / row["median_s"]
        )
    assert sorted(mean["parts"]) == [f"mxnet-star-mean, hub {hub}" for hub in range(2)]
    parts = zip(*(part["rounds_s"] for part in mean["parts"].values()), strict=True)
    assert mean["rounds_s"] == pytest.approx([sum(together) / 2 for together in parts])
    assert "rank 0" in best["settings"]["server"]
    assert "NETSTORM_HUB" in fails["error"]
    assert (fails["rounds_s"], fails["median_s"], fails["of_optimum"]) == ([], None, None)
    assert all({"bytes", "settings"} <= row.keys() for row in content["results"])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert any(event["ph"] == "X" for event in events)


def test_a_dynamic_race_has_every_system_alone_until_the_time_is_over(network: Path) -> None:
    changes = "changes:\n  - {at: 10s, between: [0, 1], rate: 50Mbit}\n"
    network.write_text(network.read_text() + changes)
    arguments = ("--sizes", "1MB", "--dynamic", "--times-scale", 0.1, "--knowledge", "nothing")
    content = bench(network, "wan", *arguments, "--systems", "netstorm-lite,netstorm-std")
    course = content["network"]["course"]["1000000"]
    assert course["begins_s"] == [0, 1]
    assert course["optima_s"][1] == pytest.approx(2 * course["optima_s"][0], rel=1e-3)
    for row in content["results"]:
        [part] = row["parts"].values()
        starts = part["starts_s"]
        assert starts == sorted(starts)
        assert starts[0] >= 0
        assert len(part["rounds_s"]) == len(starts) >= 1
        assert "NETSTORM_NETWORK" not in row["settings"]


@pytest.mark.parametrize(("system", "package"), [("openmpi", "mpi4py"), ("hivemind", "hivemind")])
def test_peers_of_further_packages_sum_right(network: Path, system: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'netstorm[peers]'")
    [row] = bench(network, "wan", *SMALL, "--systems", system)["results"]
    assert row["error"] is None
    assert len(row["rounds_s"]) == 2
    assert row["cpu_s"] > 0


def test_ctrl_c_keeps_the_rounds_that_are_done_and_leaves_no_process(network: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--sizes", "1MB", "--rounds", 100_000, "--systems", "netstorm-fapt", "--json", out)
    running = subprocess.Popen(
        command("wan", network, "--loopback", *arguments),
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while not (out.exists() and json.loads(out.read_text())["results"][0]["rounds_s"]):
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, output
    assert children
    assert not psutil.wait_procs(children, timeout=60)[1]
    content: dict[str, Any] = json.loads(out.read_text())
    assert content["interrupted"]
    assert len(content["results"][0]["rounds_s"]) >= 1
    assert b"netstorm-fapt" in output


def test_training_with_two_stores_has_the_same_accuracy(network: Path, tmp_path: Path) -> None:
    plot = tmp_path / "train.png"
    systems = ("--systems", "mxnet-star-best,netstorm-fapt", "--techniques", "int8,local:steps=4")
    length = ("--width", 32, "--epochs", 1, "--epoch-steps", 12)
    content = bench(network, "train", *length, *systems, "--plot", plot)
    mxnet, netstorm, int8, local = content["results"]
    assert mxnet["epochs"][0]["samples"] == netstorm["epochs"][0]["samples"] == 2 * 12 * 16
    assert abs(mxnet["accuracy"] - netstorm["accuracy"]) < 0.02
    assert mxnet["samples_per_s"] > 0
    assert [row["error"] for row in (int8, local)] == [None, None]
    assert min(int8["accuracy"], local["accuracy"]) > 0.3  # of ten classes
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_codecs_take_turns_and_send_no_more_than_they_may(network: Path) -> None:
    arguments = ("--size", "1MB", "--rounds", 2, "--codecs", "int8,topk:ratio=0.001")
    plain, int8, sparse = bench(network, "compression", *arguments)["results"]
    assert plain["bytes"] == pytest.approx(2 * 1e6, rel=0.02)  # one node sends its values, the other the sum
    assert 0.25 < int8["parts"]["bytes"] < 0.28
    assert 0.001 < sparse["parts"]["bytes"] < 0.01
    assert all(len(row["rounds"]) == 2 for row in (plain, int8, sparse))


TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


@TORCH
def test_ddp_on_netstorm_and_on_gloo_sum_right_and_are_compared(network: Path) -> None:
    arguments = ("--sizes", "6MB", "--rounds", 2, "--warmup", 1, "--systems", "torch-gloo,torch-netstorm")
    content = bench(network, "wan", *arguments)
    gloo, netstorm = content["results"]
    assert (gloo["error"], netstorm["error"]) == (None, None)
    assert netstorm["vs_torch_gloo"] == pytest.approx(gloo["median_s"] / netstorm["median_s"])
    assert netstorm["settings"]["NETSTORM_TOPOLOGY"] == "packing"
    assert "x torch-gloo" in content["stdout"]


@TORCH
def test_pytorch_trainings_of_one_kind_have_the_same_losses_on_both_back_ends(
    network: Path, tmp_path: Path
) -> None:
    plot = tmp_path / "losses.png"
    names = "ddp-gloo,ddp-netstorm,ddp-codec,diloco-gloo,diloco-netstorm,diloco-network-free,diloco-streaming"
    shape = ("--width", 32, "--layers", 1, "--context", 16, "--sync-every", 5, "--target", 4.6)
    arguments = ("--framework", "torch", "--systems", names, *shape, "--seconds", 60, "--plot", plot)
    rows = {row["system"]: row for row in bench(network, "train", *arguments)["results"]}
    for kind in ("ddp", "diloco"):
        gloo, netstorm = rows[f"{kind}-gloo"], rows[f"{kind}-netstorm"]
        assert gloo["seconds_to_target"] > 0
        assert netstorm["seconds_to_target"] > 0
        losses = [[point["loss"] for point in row["points"]] for row in (gloo, netstorm)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-3)
        assert losses[0][0] > losses[0][-1] <= 4.6
    free, emulated = (
        [p["loss"] for p in rows[f"diloco-{of}"]["points"]] for of in ("network-free", "netstorm")
    )
    assert free == pytest.approx(emulated, abs=1e-3)
    assert rows["diloco-streaming"]["seconds_to_target"] > 0
    assert rows["ddp-codec"]["seconds_to_target"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
