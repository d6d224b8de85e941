"""DDP and DiLoCo under codecs, on real ranks: what they sum, keep, refuse, and survive."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.integration.torch.ranks import Ranks
from tests.integration.torch.test_elastic import Started, job

__all__ = ["job"]

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
if find_spec("torch") is not None:
    from tests.integration.torch.programs import gradient_codecs as programs

RULES = {"*.bias": "none", "first.*": {"type": "powersgd", "rank": 2}, "*": "int8"}

BI_SPARSE: dict[str, Any] = {"type": "bsc", "size_lower_bound": 1}

ROUNDED: dict[str, tuple[Any, float]] = {
    "none": ("none", 1e-6),
    "fp16": ("fp16", 1e-3),
    "bf16": ("bf16", 1e-2),
    "mpq": ({"type": "mpq", "momentum": 0, "size_lower_bound": 10_000}, 1e-3),
    "auto": ("auto", 1e-3),  # it may have chosen fp16
}
"""With the largest error of what was applied, beside what is kept."""

FED_BACK: dict[str, tuple[Any, float]] = {
    "int8": ("int8", 1e-5),
    "stochastic int8": ({"type": "int8", "rounding": "stochastic"}, 1e-5),
    "2bit": ({"type": "2bit", "threshold": 0.001}, 1e-5),
    "1bit": ("1bit", 1e-5),
    "topk": ("topk", 1e-5),
    "bsc": (BI_SPARSE | {"momentum": 0}, 1e-5),
    "powersgd": ("powersgd", 1e-5),
    "rules": (RULES, 1e-5),
}


def check_sums(ranks: Ranks, cases: dict[str, tuple[Any, float]], dtype: str = "float32") -> None:
    codecs = {name: codec for name, (codec, _) in cases.items()}
    ranks.start(
        programs.sums, 3, codecs=codecs, tolerances={name: t for name, (_, t) in cases.items()}, dtype=dtype
    )
    assert ranks.answers() == [[]] * 3


def test_averages_and_what_is_kept_are_the_mean_of_all_gradients_and_the_same_bits_at_all_ranks(ranks):
    check_sums(ranks, {name: FED_BACK[name] for name in ("rules",)})


@pytest.mark.slow
def test_averages_under_each_codec_are_right_and_the_same_bits_at_all_ranks(ranks):
    check_sums(ranks, ROUNDED | FED_BACK)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_16_bits_travel_under_codecs(ranks, dtype):
    check_sums(ranks, {name: (FED_BACK[name][0], 0.02) for name in ("int8", "powersgd")}, dtype)


def test_training_that_goes_on_from_a_checkpoint_has_the_same_bits(ranks):
    ranks.start(programs.resumed, 2, codecs=[RULES])
    first, second = ranks.answers()
    assert first == second
    [[whole, resumed, without]] = first
    assert resumed == whole
    assert without != whole


@pytest.mark.slow
def test_training_under_each_codec_goes_on_from_a_checkpoint_with_the_same_bits(ranks):
    codecs = ["int8", "1bit", {"type": "topk", "momentum": 0.9, "warmup": 4}, BI_SPARSE, "powersgd"]
    ranks.start(programs.resumed, 2, codecs=codecs)
    first, second = ranks.answers()
    assert first == second
    for whole, resumed, without in first:
        assert resumed == whole
        assert without != whole


@pytest.mark.slow
def test_what_is_kept_goes_along_when_ddp_makes_its_buckets_anew(ranks):
    ranks.start(programs.rebuilt, 2, codec={"type": "2bit", "threshold": 0.001})
    for buckets, error in ranks.answers():
        assert buckets[0] != buckets[1]
        assert error < 1e-5


def test_misuse_says_what_is_wrong_and_what_to_do(ranks):
    ranks.start(programs.refusals, 2)
    for rank in range(2):
        ranks.end(rank)
    for rank in range(2):
        found = json.loads((ranks.folder / f"answer{rank}").read_text())
        assert "codec 'int4': expected one of auto, none, fp16" in found["name"]
        assert "ratio=2" in found["parameter"]
        assert "matches none of '*.bias'; let '*' be the last one" in found["pattern"]
        assert "give the model, too" in found["no names"]
        assert "float64: codecs take float32, float16 and bfloat16; exempt it" in found["double"]
        assert "expected one of backend netstorm" in found["gloo"]
        assert "expected what state_dict() of the same kind of object has returned" in found["no state"]
        assert "'x', which is no parameter of the model" in found["other model"]
        assert "residual of 'last.bias' has 3 elements, the model's parameter 30" in found["other shape"]
        assert "give it the same model" in found["hook of another model"]
        assert "Disagreement" in found["different"]
        assert "codec *: int8 rounding=nearest" in found["different"]
        assert "codec *: fp16" in found["different"]


def test_an_unedited_script_gets_the_codec_for_its_models_and_for_nothing_else(ranks):
    ranks.start(programs.unedited, 2, NETSTORM_GRADIENT_CODEC='{"*.bias": "none", "*": "fp16"}')
    for found in ranks.answers():
        assert 1e-6 < found["error"] < 1e-3
        assert found["all_reduce"] == pytest.approx(0.6, rel=1e-7)
        assert found["codec"] == "*.bias: none; *: fp16"
        assert "NETSTORM_GRADIENT_CODEC, and DDP takes one hook only" in found["hook"]


@pytest.mark.parametrize("text", ["int4"])
def test_a_wrong_setting_is_refused_before_the_job_begins(ranks, text):
    ranks.start(programs.unedited, 1, NETSTORM_GRADIENT_CODEC=text)
    ended = ranks.end(0)
    assert ended.code != 0
    assert "NETSTORM_GRADIENT_CODEC=" in ended.err.splitlines()[-1]


def test_training_under_a_codec_goes_on_when_a_rank_dies(job: Started) -> None:
    ranks = job(3, "1:3")
    options = {"codec": {"*.bias": "none", "0.*": "powersgd", "*": "int8"}}
    for rank in range(3):
        ranks.start(str(rank), rank, programs.elastic_training, **options)
    ranks.wait_until_said("0", "step 3 ")
    ranks.kill("1")
    ranks.wait_until_said("0", "of [0, 2]")
    (ranks.folder / "end").touch()
    assert ranks.answer("0") == ranks.answer("2")
    ranks.end()


@pytest.mark.slow
def test_a_rank_that_joins_training_under_a_codec_ends_with_the_same_bits(job: Started) -> None:
    ranks = job(2, "1:3")
    options = {"codec": {"*.bias": "int8", "0.*": {"type": "auto", "every": 2}, "*": "topk"}}
    for rank in range(2):
        ranks.start(str(rank), rank, programs.elastic_training, **options)
    ranks.wait_until_said("0", "step 3 ")
    ranks.start("new", 2, programs.elastic_training, **options)
    ranks.wait_until_said("new", "of [0, 1, 2]")
    ranks.kill("1")
    ranks.wait_until_said("new", "of [0, 2]")
    (ranks.folder / "end").touch()
    assert ranks.answer("0") == ranks.answer("new")
    ranks.end()


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "none"])
def test_an_average_is_over_the_ranks_that_are_in_the_job(job: Started, codec: str) -> None:
    ranks = job(3, "2:3")
    for rank in range(3):
        ranks.start(str(rank), rank, programs.elastic_average, codec=codec)
    for name in "012":
        ranks.wait_until_said(name, "running")
    ranks.kill("2")
    for name in "01":
        assert ranks.answer(name) == pytest.approx([1.5, 1.5], rel=0.02)
    ranks.end()


def test_diloco_has_the_codecs_and_goes_on_from_a_checkpoint_with_the_same_bits(ranks):
    ranks.start(programs.outer_gradients, 2, codecs=[{"*.bias": "none", "0.*": "powersgd", "*": "int8"}])
    first, second = ranks.answers()
    assert first == second
    assert all(whole == resumed for whole, resumed in first)


@pytest.mark.slow
def test_diloco_chooses_its_codec_alike_at_all_ranks(ranks):
    ranks.start(programs.outer_gradients, 2, codecs=[{"type": "auto", "every": 1}])
    first, second = ranks.answers()
    assert first == second  # the choice goes by times, so a resumed training may choose otherwise


@pytest.mark.slow
def test_diloco_has_every_codec(ranks):
    codecs = ["none", "fp16", "bf16", {"type": "2bit", "threshold": 0.001}, "1bit", "topk", BI_SPARSE, "mpq"]
    ranks.start(programs.outer_gradients, 2, codecs=codecs)
    first, second = ranks.answers()
    assert first == second
    assert all(whole == resumed for whole, resumed in first)
