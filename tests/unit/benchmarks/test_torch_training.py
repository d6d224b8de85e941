"""PyTorch's part of the benchmarks, without any process: names, sizes, times to a loss, commands."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from netstorm.topology.network import Link, Network, Node, Rank


@pytest.fixture
def bench(monkeypatch):
    """The benchmarks' own modules."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    names = (
        "race.torch_training",
        "systems.base",
        "systems.entrants",
        "systems.torch_ddp",
        "systems.torch_training",
        "torch_loopback",
        "train",
    )
    return SimpleNamespace(**{name.replace(".", "_"): importlib.import_module(name) for name in names})


NETWORK = Network(
    nodes=(Node(rank=Rank(0)), Node(rank=Rank(1))),
    links=tuple(
        Link(source=Rank(source), target=Rank(1 - source), rate=1e8, latency=0.01) for source in range(2)
    ),
)

FIGURES = (
    "step_s",
    "step_cpu_s",
    "small_s",
    "broadcast_s",
    "gather_s",
    "scatter_s",
    "send_s",
    "copies_cpu_s",
    "issue_large_s",
    "issue_small_s",
    "issue_large_cpu_s",
    "issue_small_cpu_s",
)


def point(seconds, loss):
    return {"seconds": seconds, "loss": loss}


def test_the_time_to_a_loss_is_on_the_line_between_two_points(bench):
    points = [point(0.0, 5.0), point(10.0, 4.0), point(20.0, 3.0)]
    assert bench.race_torch_training.seconds_to(3.5, points) == pytest.approx(15.0)
    assert bench.race_torch_training.seconds_to(4.0, points) == pytest.approx(10.0)


def test_a_loss_that_was_never_reached_has_no_time(bench):
    assert bench.race_torch_training.seconds_to(2.0, [point(0.0, 5.0), point(10.0, 4.0)]) is None
    assert bench.race_torch_training.seconds_to(2.0, []) is None


def test_a_loss_that_rises_again_was_reached_when_it_first_was(bench):
    points = [point(0.0, 4.0), point(1.0, 2.0), point(2.0, 4.0), point(3.0, 1.0)]
    assert bench.race_torch_training.seconds_to(3.0, points) == pytest.approx(0.5)


@pytest.mark.parametrize(("width", "layers", "context"), [(32, 1, 16), (64, 3, 32)])
def test_the_size_of_the_gpt_is_that_of_the_examples_model(bench, monkeypatch, width, layers, context):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    model = importlib.import_module("gpt.model").GPT(context=context, width=width, layers=layers, heads=4)
    expected = sum(parameter.numel() for parameter in model.parameters())
    found = bench.race_torch_training.gpt_parameters(width=width, layers=layers, context=context)
    assert found == expected


def test_one_array_becomes_layers_of_about_a_million_values_and_none_is_lost(bench):
    sizes = bench.systems_torch_ddp.layer_sizes(bench.systems_base.Case(nodes=2, bytes=16_000_012))
    assert sum(sizes) == 4_000_003
    assert len(sizes) == 5
    assert max(sizes) <= 1_000_000


def test_arrays_that_the_case_names_stay_as_they_are(bench):
    case = bench.systems_base.Case(nodes=2, bytes=40, keys=3)
    assert bench.systems_torch_ddp.layer_sizes(case) == case.sizes == [4, 3, 3]


def test_every_training_has_a_process_a_rank_or_says_what_is_missing(bench, tmp_path):
    case = bench.systems_base.Case(nodes=2, bytes=1000)
    entry = bench.systems_entrants.Entry(network=NETWORK, folder=tmp_path, bytes=1000)
    for name in bench.systems_torch_training.TRAININGS:
        launch = bench.systems_torch_training.training_launch(name, case, entry, ["{}"])
        if isinstance(launch, str):
            assert "pip install" in launch
            continue
        assert [worker.rank for worker in launch.workers] == [0, 1]
        assert all(worker.command[2] == name for worker in launch.workers)
        assert {worker.environment["RANK"] for worker in launch.workers} == {"0", "1"}


def test_torchft_has_a_lighthouse_and_each_rank_a_store_of_its_own(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.systems_torch_training, "why_not", lambda _name: "")
    ports = iter(range(1000, 2000))
    case = bench.systems_base.Case(nodes=2, bytes=1000, free_port=lambda _rank: next(ports))
    entry = bench.systems_entrants.Entry(network=NETWORK, folder=tmp_path, bytes=1000)
    launch = bench.systems_torch_training.training_launch("diloco-torchft", case, entry, ["{}"])
    [lighthouse] = launch.helpers
    host, port, ranks = lighthouse.command[2:]
    assert ranks == "2"
    assert {worker.environment["BENCHMARK_LIGHTHOUSE"] for worker in launch.workers} == {
        f"http://{host}:{port}"
    }
    taken = [worker.environment["BENCHMARK_PORT"] for worker in launch.workers]
    assert len({*taken, port}) == 3


def test_netstorms_ddp_can_be_given_settings_and_gloos_cannot(bench, tmp_path):
    entry = bench.systems_entrants.Entry(network=NETWORK, folder=tmp_path, bytes=1000)
    [changed] = bench.systems_entrants.enter(["torch-netstorm@CHUNK_SIZE=1000"], entry)
    [system] = changed.systems
    assert system.name == "torch-netstorm@CHUNK_SIZE=1000"
    assert system.settings["CHUNK_SIZE"] == "1000"
    launch = system.launch(bench.systems_base.Case(nodes=2, bytes=1000))
    assert all(worker.environment["CHUNK_SIZE"] == "1000" for worker in launch.workers)
    assert all(worker.environment["WORLD_SIZE"] == "2" for worker in launch.workers)
    assert launch.workers[0].command[2] == "torch-netstorm"
    with pytest.raises(bench.systems_entrants.UsageError, match="torch-gloo@CHUNK_SIZE"):
        bench.systems_entrants.check_name("torch-gloo@CHUNK_SIZE=1000")


def test_the_ratio_is_netstorms_median_over_gloos(bench):
    def times(step):
        return dict.fromkeys(FIGURES, step)

    found = bench.torch_loopback.summary(
        {"torch-netstorm": times([3.0, 1.0, 2.0]), "torch-gloo": times([4.0, 4.0])}
    )
    assert found["step_s"] == {"torch-netstorm": 2.0, "torch-gloo": 4.0, "count": 2, "ratio": 0.5}


def test_without_a_turn_there_is_no_ratio(bench):
    empty: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    found = bench.torch_loopback.summary({"torch-netstorm": empty, "torch-gloo": empty})
    assert found["small_s"]["ratio"] is None


def test_defaults_of_the_training_benchmark_are_the_frameworks(bench, capsys):
    options = bench.train.parse_options(["network.yaml", "--framework", "torch"])
    assert options.systems == list(bench.systems_torch_training.TRAININGS)
    assert options.target > 1
    assert bench.train.parse_options(["network.yaml"]).target < 1
    with pytest.raises(SystemExit):
        bench.train.parse_options(["network.yaml", "--framework", "torch", "--systems", "gloo"])
    assert "no PyTorch training 'gloo'" in capsys.readouterr().err
