"""Codecs and techniques in benchmarks, without any process: names, tables, times that are computed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from netstorm.compression.registry import CODECS
from netstorm.errors import UsageError


@pytest.fixture
def bench(monkeypatch):
    """The benchmarks' own modules."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    names = ("compression", "race.mxnet_training", "race.technique", "train")
    return SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})


def test_a_name_has_a_system_and_what_is_added_to_it(bench):
    system, technique = bench.technique.split_name(
        "netstorm-packing+topk:ratio=0.001:warmup=8+late:bound=0.4"
    )
    assert system == "netstorm-packing"
    assert technique.compression == {"type": "topk", "ratio": 0.001, "warmup": 8}
    assert technique.variables["NETSTORM_LOSS_BOUND"] == "0.4"
    assert technique.momentum


def test_a_codec_with_momentum_leaves_none_to_the_optimiser(bench):
    _, technique = bench.technique.split_name("netstorm-packing+topk:momentum=0.9")
    assert technique.for_worker()["momentum"] is False


@pytest.mark.parametrize(
    ("codec", "described"),
    [
        ("int8", {"type": "int8"}),
        ("fp16", {"type": "fp16"}),
        ("powersgd:rank=16", {"type": "powersgd", "rank": 16}),
    ],
)
def test_averages_of_local_steps_may_have_a_codec(bench, codec, described):
    _, technique = bench.technique.split_name(f"netstorm-packing+local:steps=4+{codec}")
    assert (technique.local_steps, technique.compression) == (4, described)
    assert not technique.outer


def test_diloco_has_local_steps_and_an_outer_optimiser(bench):
    _, technique = bench.technique.split_name("netstorm-packing+diloco:steps=20+int8")
    assert (technique.local_steps, technique.outer) == (20, True)
    assert technique.compression == {"type": "int8"}


def test_each_codec_is_a_technique(bench):
    for name in CODECS:
        _, technique = bench.technique.split_name(f"netstorm-packing+{name}")
        assert technique.compression == (None if name == "none" else {"type": name})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("netstorm-packing+int9", "no technique 'int9'; there are"),
        ("netstorm-packing+topk:share=1", "share=1"),
        ("netstorm-packing+local:k=8", "'local' with k"),
        ("netstorm-packing+local:steps=0", "from 1"),
        ("netstorm-packing+int8:x", "expected NAME or NAME:PARAMETER=VALUE"),
        ("netstorm-packing+int8+fp16", "a system has one"),
        ("netstorm-packing+local+diloco", "two kinds of local steps"),
        ("netstorm-packing+diloco:steps=0", "diloco with steps=0"),
        ("mxnet-star-best+int8", "for NetStorm"),
    ],
)
def test_a_name_that_means_nothing_is_an_error_that_says_why(bench, name, why):
    with pytest.raises(UsageError, match=why):
        bench.technique.split_name(name)


def measured(seconds, nbytes, link_bytes=0):
    return {"seconds": seconds, "bytes": nbytes, "link_bytes": link_bytes, "cpu_s": 1.0}


def test_rows_are_medians_and_parts_of_plain_rounds(bench):
    plain, int8 = bench.compression.summary(
        {
            "none": [measured(4.0, 400), measured(9.0, 400), measured(5.0, 400)],
            "int8": [measured(1.0, 100), measured(2.0, 100)],
        }
    )
    assert plain["parts"] == {"seconds": 1.0, "bytes": 1.0, "link_bytes": None, "cpu_s": 1.0}
    assert (int8["seconds"], int8["parts"]["seconds"], int8["parts"]["bytes"]) == (1.5, 0.3, 0.25)
    assert not int8["too_many"]


def test_a_codec_that_sends_more_than_its_definition_is_marked(bench):
    rows = bench.compression.summary({"none": [measured(1.0, 100)], "int8": [measured(1.0, 29)]})
    assert [row["too_many"] for row in rows] == [False, True]
    [*_, most] = bench.compression.table(rows, "").columns[3].cells
    assert most == "0.28 !"


def test_plain_rounds_are_measured_first_and_once(bench):
    options = bench.compression.parse_options(["network.yaml", "--codecs", "int8,none,topk:ratio=0.001"])
    assert list(options.codecs) == ["none", "int8", "topk:ratio=0.001"]
    assert options.codecs["topk:ratio=0.001"] == {"type": "topk", "ratio": 0.001}


@pytest.mark.parametrize("wrong", [["--codecs", "int9"], ["--system", "gloo"], ["--system", "netstorm-none"]])
def test_a_comparison_of_unknown_codecs_or_systems_does_not_begin(bench, wrong, capsys):
    with pytest.raises(SystemExit):
        bench.compression.parse_options(["network.yaml", *wrong])
    assert wrong[1] in capsys.readouterr().err


def epoch(accuracy, seconds=2.0, link_bytes=10):
    return {
        "seconds": seconds,
        "steps": 8,
        "samples": 64,
        "accuracy": accuracy,
        "link_bytes": link_bytes,
    }


def row(bench, system, epochs):
    summary = bench.mxnet_training.summary(epochs, 0.9)
    return {"system": system, "epochs": epochs, "error": None, **summary}


def test_what_it_took_to_the_target_ends_with_the_epoch_that_reaches_it(bench):
    found = row(bench, "netstorm-packing", [epoch(0.5), epoch(0.9), epoch(0.8), epoch(0.95)])
    assert (found["epochs_to_target"], found["seconds_to_target"]) == (2, 4.0)
    assert found["link_bytes_to_target"] == 20
    assert found["accuracy"] == pytest.approx((0.9 + 0.8 + 0.95) / 3)
    assert found["step_s"] == 0.25


def test_few_epochs_of_mxnet_are_completed_by_the_steps_of_plain_netstorm(bench):
    star = row(bench, "mxnet-star-best", [epoch(0.5, seconds=60.0, link_bytes=100)])
    plain = row(bench, "netstorm-packing", [epoch(0.5), epoch(0.7), epoch(0.92)])
    codec = row(bench, "netstorm-packing+int8", [epoch(0.5)])
    bench.mxnet_training.complete([star, plain, codec])
    assert (star["seconds_to_target"], star["link_bytes_to_target"], star["computed"]) == (180.0, 300, True)
    assert star["accuracy"] == plain["accuracy"]
    assert codec["seconds_to_target"] is None


def test_techniques_are_added_to_the_last_system(bench, capsys):
    given = [
        "network.yaml",
        "--systems",
        "mxnet-star-best,netstorm-packing",
        "--techniques",
        "int8,local:steps=4",
    ]
    assert bench.train.parse_options(given).systems == [
        "mxnet-star-best",
        "netstorm-packing",
        "netstorm-packing+int8",
        "netstorm-packing+local:steps=4",
    ]
    with pytest.raises(SystemExit):
        bench.train.parse_options([*given[:-1], "int9"])
    assert "no technique 'int9'" in capsys.readouterr().err
