"""Tables of accuracy: what counts as reached, differences by seed, and times from steps on a WAN."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def study(monkeypatch):
    """The functions of both studies."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    accuracy = importlib.import_module("studies.accuracy")
    techniques = importlib.import_module("studies.techniques")
    return SimpleNamespace(
        rows=accuracy.rows,
        steps_to=accuracy.steps_to,
        options=techniques.parse_options,
        trainings=techniques.trainings,
        merge=techniques.merge,
        table=techniques.table,
    )


def digits(*values):
    return {"steps": [8 * number for number in range(1, len(values) + 1)], "values": list(values)}


def results(**runs):
    return {"model": "digits", "options": {}, "runs": runs}


def test_a_target_counts_from_the_first_look_that_reaches_it(study):
    assert study.steps_to(digits(0.5, 0.9, 0.8, 0.95), 0.9, "digits") == 16
    assert study.steps_to(digits(0.5, 0.6), 0.9, "digits") is None


def test_a_loss_counts_when_ten_steps_have_it_on_the_average(study):
    values = [3.0] * 10 + [1.0] * 10
    run = {"steps": list(range(1, 21)), "values": values}
    assert study.steps_to(run, 2.0, "gpt") == 15  # five of each
    assert study.steps_to(run, 0.5, "gpt") is None


def test_differences_are_between_runs_of_the_same_seed(study):
    plain = {"1": digits(0.9, 0.9, 0.9), "2": digits(0.8, 0.8, 0.8)}
    other = {"2": digits(0.79, 0.79, 0.79), "1": digits(0.88, 0.88, 0.88), "3": digits(0.1, 0.1, 0.1)}
    _, row = study.rows(results(none=plain, int8=other), 0.85)
    assert row["seeds"] == 2  # float32 has no third one
    assert row["difference"] == pytest.approx(-1.5)
    assert row["spread"] == pytest.approx(0.5 * 2**0.5)
    assert row["arrived"] == 1


def wan(**seconds):
    epoch = {"steps": 8, "load": 1.0, "link_bytes": 16e6, "accuracy": 0.1}
    return {
        "results": [
            {"system": system, "epochs": [epoch | {"seconds": 1000.0}, epoch | {"seconds": 8 * time}]}
            for system, time in seconds.items()
        ]
    }


def test_the_steps_of_a_warm_up_take_as_long_as_those_of_float32(study):
    runs = {"none": {"1": digits(0.5, 0.9)}, "topk:warmup=6": {"1": digits(0.9, 0.9)}}
    accuracy = results(**runs)
    measured = wan(**{"netstorm-packing": 3.0, "netstorm-packing+topk": 0.5})
    lines = study.table(accuracy, measured, 0.9)
    assert "| `none` | 16 | 3.00 s | 48 s |" in lines[2]
    assert "| `topk:warmup=6` | 8 | 0.50 s | 19 s |" in lines[3]  # 6 x 3 s + 2 x 0.5 s


def test_what_does_not_arrive_with_every_seed_has_no_time(study):
    accuracy = results(none={"1": digits(0.9), "2": digits(0.9)}, bsc={"1": digits(0.9), "2": digits(0.5)})
    lines = study.table(accuracy, wan(**{"netstorm-packing": 3.0, "netstorm-packing+bsc": 0.5}), 0.9)
    assert "| `bsc` | 8 (1 of 2 seeds) | 0.50 s |  |" in lines[3]


def shape(**runs):
    return results(**runs) | {"options": {"width": 8, "batch_size": 2, "lr": 0.1, "steps": 80}}


def systems(call):
    return call[call.index("--systems") + 1].split(",")


def epochs(call):
    return call[call.index("--epochs") + 1], call[call.index("--epoch-steps") + 1]


def test_each_second_turn_has_the_opposite_order(study):
    runs: dict[str, dict[str, Any]] = {"none": {}, "bf16": {}, "local:steps=4+topk:warmup=8": {}, "mxnet": {}}
    options, _ = study.options(["n.yaml", "--accuracy", "a", "--wan", "/dev/null", "--turns", "2"])
    first, second = study.trainings(shape(**runs), options)
    own = [
        "netstorm-packing",
        "netstorm-packing+bf16",
        "netstorm-packing+local:steps=4+topk",  # a warm-up is all that a short measurement would see
    ]
    assert [systems(call) for call in first] == [["mxnet-star-best"], own]
    assert [systems(call) for call in second] == [own[::-1], ["mxnet-star-best"]]
    assert [epochs(call) for call in first] == [("2", "4"), ("2", "8")]


def test_mxnet_trains_to_the_target_once_if_asked_to(study):
    runs = {"none": {"1": digits(0.1, 0.5, 0.9)}, "int8": {}}
    options, _ = study.options(
        ["n.yaml", "--accuracy", "a", "--wan", "/dev/null", "--turns", "2", "--mxnet-to-target"]
    )
    first, second = study.trainings(shape(**runs), options)
    assert [systems(call)[0] for call in first] == ["mxnet-star-best", "netstorm-packing"]
    assert epochs(first[0]) == ("4", "8")  # 24 steps, and eight more as rounding differs
    assert len(second) == 1


def row(system, *seconds, accuracy=0.5, error=None):
    epochs = [
        {"steps": 8, "load": 1.0, "link_bytes": 16e6, "seconds": one, "accuracy": accuracy} for one in seconds
    ]
    return {"system": system, "epochs": epochs, "error": error, "step_s": 1.0}


def test_the_first_epoch_of_each_turn_makes_connections_and_does_not_count(study):
    together: dict[str, Any] = {}
    for turn, seconds in enumerate([(1000.0, 8.0), (500.0, 24.0)]):
        study.merge(together, {"network": "n", "results": [row("netstorm-packing", *seconds)]}, turn)
    assert together["network"] == "n"
    lines = study.table(results(none={"1": digits(0.9)}), together, 0.9)
    assert "| `none` | 8 | 2.00 s | 16 s |" in lines[2]


def test_what_fails_in_one_turn_keeps_the_epochs_of_the_other(study):
    together: dict[str, Any] = {}
    study.merge(together, {"results": [row("netstorm-packing", 9.0, 8.0)]}, 0)
    study.merge(together, {"results": [row("netstorm-packing", error="it ended")]}, 1)
    [found] = together["results"]
    assert (found["error"], len(found["epochs"])) == ("it ended", 2)
    assert "step_s" not in found  # that of one turn


def test_mxnet_has_its_own_steps_to_the_target_or_those_of_float32(study):
    measured = {"results": [row("mxnet-star-best", 99.0, 80.0), row("netstorm-packing", 9.0, 8.0)]}
    plain = {"none": {"1": digits(0.5, 0.9)}}
    lines = study.table(results(**plain), measured, 0.9)
    assert "| MXNet, best hub | 16, as `none` | 10.00 s | 160 s | 1 | 32 |" in lines[2]
    lines = study.table(results(**plain, mxnet={"1": digits(0.5, 0.5, 0.91)}), measured, 0.9)
    assert "| MXNet, best hub | 24 | 10.00 s | 240 s | 1 | 48 |" in lines[2]
    assert "| `none` | 16 | 1.00 s | 16 s | 15.0 x |" in lines[3]
    assert len(lines) == 4


def test_a_training_of_mxnet_that_has_got_to_the_target_counts_as_it_was(study):
    mxnet = row("mxnet-star-best", 99.0, 80.0, 80.0, accuracy=0.9)
    mxnet["epochs"][0]["accuracy"] = 0.4
    measured = {"results": [mxnet, row("netstorm-packing", 9.0, 8.0)]}
    lines = study.table(results(none={"1": digits(0.5, 0.9)}), measured, 0.9)
    assert "| MXNet, best hub | 16, seed 1 | 10.00 s | 179 s | 1 | 32 |" in lines[2]
