"""Trainings of many ranks in one process, on models of a few parameters."""

from __future__ import annotations

import importlib
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from netstorm.errors import UsageError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def bench(monkeypatch):
    """The benchmarks' own modules."""
    root = Path(__file__).parents[3]
    monkeypatch.syspath_prepend(str(root / "examples"))
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    names = ("race.one_process_gpt", "race.technique")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other
    yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})
    torch.set_num_threads(threads)


def trained(bench, name, steps):
    technique = bench.technique.split_name(f"netstorm-packing+{name}")[1]
    options = Namespace(width=16, layers=1, ranks=2, batch_size=2, lr=1e-2, steps=steps)
    return bench.one_process_gpt.train_gpt(technique, 1, options)


def test_ranks_that_train_alone_have_one_model_after_an_average(bench):
    plain, local = trained(bench, "none", 3), trained(bench, "local:steps=2", 3)
    assert local.steps == [1, 2, 3]
    assert local.values[0] == pytest.approx(plain.values[0], rel=1e-6)  # nobody has learnt anything
    assert local.values[1] == pytest.approx(plain.values[1], rel=0.05)  # one step of AdamW, near that of all


def test_diloco_gives_the_average_to_an_outer_optimiser(bench):
    local, diloco, encoded = (
        trained(bench, name, 4) for name in ("local:steps=2", "diloco:steps=2", "diloco:steps=2+int8")
    )
    assert diloco.values[:2] == local.values[:2]
    assert diloco.values[2] != local.values[2]  # 0.7 x (1 + 0.9) of the way
    assert encoded.values[2] == pytest.approx(diloco.values[2], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "why"), [("local:steps=2+int8", "LocalSGD has no codec"), ("late", "needs a job")]
)
def test_what_pytorch_does_not_have_is_refused_with_the_reason(bench, name, why):
    with pytest.raises(UsageError, match=why):
        trained(bench, name, 1)


@pytest.mark.skipif(find_spec("mxnet") is None, reason="MXNet is not installed")
@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_an_average_under_a_codec_is_the_base_and_the_mean_of_what_ranks_have_learnt(bench, codec):
    digits = importlib.import_module("race.one_process_digits")

    def after_an_average(name):
        technique = bench.technique.split_name(f"netstorm-packing+{name}")[1]
        job = digits._Job(technique, 1, Namespace(width=8, ranks=2, batch_size=2, lr=0.05))
        first = [one.data().asnumpy().copy() for one in job.parameters]
        job.local_step()
        job.average()
        for values in job.values:
            assert all(
                bool((value == one.data()).asnumpy().all())
                for value, one in zip(values, job.parameters, strict=True)
            )
        last = [one.data().asnumpy() for one in job.parameters]
        return [after - before for before, after in zip(first, last, strict=True)]

    exact, found = after_an_average("local:steps=1"), after_an_average(f"local:steps=1+{codec}")
    for one, other in zip(exact, found, strict=True):
        lost = abs(one - other).max() / abs(one).max()
        assert lost < 0.01
