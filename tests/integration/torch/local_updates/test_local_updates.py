"""LocalSGD and DiLoCo in real processes over Gloo, against a simulation of all ranks in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.integration.torch.local_updates import task
from tests.integration.torch.local_updates.rank_pool import RankPool

pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.integration.torch.local_updates import programs

SGD: dict[str, Any] = {"lr": 1.0}
NESTEROV: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def start(seed: int = 0) -> task.Values:
    return programs.arrays(programs.make_model(seed).parameters())


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stop_at", [0, 2])
def test_local_sgd_averages_parameters_every_few_steps(pool: RankPool, stop_at):
    found = pool.run(programs.local_sgd, 3, steps=6, sync_every=3, stop_at=stop_at)

    expected = task.averaged(start(), 3, steps=6, sync_every=3)
    for values in found:
        assert_close(values, expected)


def test_diloco_after_every_step_with_a_plain_outer_sgd_is_averaging(pool: RankPool):
    found = pool.run(programs.diloco, 3, steps=5, sync_every=1, outer=SGD)

    expected = task.averaged(start(), 3, steps=5, sync_every=1)
    for local, shared in found:
        assert_close(local, expected)
        assert_close(shared, expected)


@pytest.mark.parametrize(
    ("sync_every", "applied_at", "delay", "alpha"),
    [
        (6, (3, 6), 0, 0.0),
        (6, (3, 6), 1, 0.0),
        (6, (3, 6), 2, 0.3),
        (6, (3, 6), 5, 0.3),
        (5, (3, 5), 2, 0.5),
        (1, (1, 1), 0, 0.5),
    ],
    ids=["at once", "one step late", "two steps late", "longer than the stagger", "uneven", "each step"],
)
def test_streamed_fragments_equal_a_simulation_of_all_ranks(
    pool: RankPool, sync_every, applied_at, delay, alpha
):
    found = pool.run(
        programs.diloco,
        3,
        steps=16,
        sync_every=sync_every,
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    )

    local, shared = task.simulate(
        start(),
        ranks=3,
        steps=16,
        sync_every=sync_every,
        applied_at=applied_at,
        outer=task.Outer(**NESTEROV),
        delay=delay,
        alpha=alpha,
    )
    for rank, (found_local, found_shared) in enumerate(found):
        assert_close(found_local, local[rank])
        assert_close(found_shared, shared)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_codec_of_the_scripts_own_averages_in_as_many_collectives_as_it_likes(pool: RankPool, delay):
    settings = {"steps": 13, "sync_every": 4, "fragment_sync_delay": delay}
    expected = pool.run(programs.diloco, 3, codec="float32", **settings)

    found = pool.run(programs.diloco, 3, codec=programs.InThirds, **settings)

    for (local, shared), (other_local, other_shared) in zip(found, expected, strict=True):
        assert_close(local, other_local)
        assert_close(shared, other_shared)


def test_local_sgd_changes_nothing_if_the_average_is_not_finite(pool: RankPool):
    answers = pool.run(programs.local_sgd_diverging, 3)

    assert [error[0] for error, _ in answers] == ["NonFiniteUpdate"] * 3
    assert [value for _, value in answers] == [7.0, np.inf, 7.0]


def test_all_ranks_begin_with_the_parameters_of_the_first(pool: RankPool):
    found = pool.run(programs.diloco, 3, steps=2, sync_every=2, outer=SGD, seeds=True)

    _, expected = task.simulate(
        start(seed=0), ranks=3, steps=2, sync_every=2, applied_at=(1, 2), outer=task.Outer(**SGD)
    )
    for _, shared in found:
        assert_close(shared, expected)


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_global_parameters_have_the_same_bits_at_all_ranks(pool: RankPool, codec):
    first, *others = pool.run(programs.diloco_of_single_precision, 3, steps=8, codec=codec, size=100)

    assert others == [first, first]


@pytest.mark.parametrize(
    ("codec", "stop_at"),
    [
        pytest.param("float32", 4, id="a sum has just begun", marks=pytest.mark.slow),
        pytest.param("int8", 7, id="in between"),
        pytest.param("float32", 9, id="one has been applied", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(pool: RankPool, codec, stop_at):
    expected = pool.run(programs.interrupted, 2, steps=14, stop_at=None, codec=codec)

    found = pool.run(programs.interrupted, 2, steps=14, stop_at=stop_at, codec=codec)

    assert found == expected


def test_a_checkpoint_of_other_settings_is_refused_with_both_values(pool: RankPool):
    [(interval, fragments, simple)] = pool.run(programs.checkpoints_of_others, 1)

    assert interval[0] == fragments[0] == simple[0] == "UsageError"
    assert "saved with sync_every=10, this DiLoCo has 20" in interval[1]
    assert "saved with model_fragments=" in fragments[1]
    assert "saved with sync_every=4, but this LocalSGD has 3" in simple[1]


@pytest.mark.parametrize(
    ("codec", "value", "delay"),
    [("float32", np.nan, 0), ("bfloat16", -np.inf, 1), ("int8", np.nan, 0), ("int8", np.inf, 3)],
)
def test_a_value_that_is_not_finite_is_an_error_at_all_ranks_that_names_the_fragment(
    pool: RankPool, codec, value, delay
):
    errors = pool.run(programs.diverging, 3, codec=codec, value=value, delay=delay)

    assert [name for name, _ in errors] == ["NonFiniteUpdate"] * 3
    assert all("fragment 1 (Linear)" in text for _, text in errors)
    assert ["1 of this rank's parameters are not finite" in text for _, text in errors] == [
        False,
        True,
        False,
    ]


def test_ranks_with_different_settings_are_told_so_at_all_ranks(pool: RankPool):
    errors = pool.run(programs.different_settings, 3)

    assert {name for name, _ in errors} == {"Disagreement"}
    assert {text for _, text in errors} == {
        "DiLoCo: sync_every is 10 at rank 0 and 11 at rank 1: all ranks must be given the same"
    }


def test_a_member_that_pickles_a_bomb_runs_no_code_in_others(pool: RankPool, tmp_path):
    answers = pool.run(programs.hostile_pickles, 2, folder=str(tmp_path))

    assert answers == [["no error"] * 4] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "announced", "said"),
    [
        (b"\x80\x04.", None, "what rank 1 has sent does not decode"),
        (b"\x90", None, "what rank 1 has sent does not decode: Expected `object`, got `array`"),
        (b"", 2**40, "rank 1 announces 1099511627776 bytes; expected 1 to 1048576"),
    ],
    ids=["a pickle", "another type", "a terabyte"],
)
def test_settings_that_do_not_decode_are_an_error_at_the_others_that_names_their_rank(
    pool: RankPool, content, announced, said
):
    errors = pool.run(programs.hostile_values, 2, content=content, announced=announced)

    assert errors[0][0] == "ProtocolViolation"
    assert said in errors[0][1]


def test_one_rank_trains_as_many_do(pool: RankPool):
    [(local, shared)] = pool.run(programs.diloco, 1, steps=7, sync_every=4, codec="float32")

    [expected_local], expected = task.simulate(
        start(), ranks=1, steps=7, sync_every=4, applied_at=(2, 4), outer=task.Outer(**NESTEROV)
    )
    assert_close(local, expected_local)
    assert_close(shared, expected)


def test_sums_under_way_are_applied_when_the_context_is_left(pool: RankPool):
    found = pool.run(programs.left_in_mid_interval, 2)

    # The sum began after step 2, and the outer SGD has learning rate 1.
    expected = task.averaged(start(), 2, steps=2, sync_every=2)
    for before, after, steps in found:
        assert not np.allclose(before[0], after[0])
        assert_close(after, expected)
        assert steps == 3


def test_an_exception_loses_sums_under_way_and_a_checkpoint_brings_them_back(pool: RankPool):
    for left, refused, again, steps in pool.run(programs.left_by_an_exception, 2, delay=2):
        assert left == "the script's own"
        assert refused[0] == again[0] == "UsageError"
        assert "fragment 0 (Sequential)" in refused[1]
        assert steps == 4


def test_an_exception_between_sums_loses_nothing(pool: RankPool):
    for left, refused, again, steps in pool.run(programs.left_by_an_exception, 2, delay=0):
        assert left == "the script's own"
        assert refused == again == ("", "no error")
        assert steps == 3


def test_parameters_of_several_types_keep_them_and_scripts_find_their_gradients(pool: RankPool):
    answers = pool.run(programs.mixed_types, 3)

    for rank, (types, kept, values) in enumerate(answers):
        assert types == ["torch.float32"] * 2 + ["torch.bfloat16"] * 2 + ["torch.float64"] * 2
        assert kept == [1.0 + rank, None, 1.0 + rank, 1.0 + rank, 1.0 + rank, 1.0 + rank]
        assert values == answers[0][2]


def test_a_group_trains_without_the_others(pool: RankPool):
    first, outsider, last = pool.run(programs.subgroup, 3)

    assert outsider[0][0] == "UsageError"
    assert "rank 1 is not a member" in outsider[0][1]
    assert_close(outsider[1], start(seed=1))
    assert_close(first[1], last[1])
    assert not np.allclose(first[1][0], start()[0])


def test_sharded_parameters_are_averaged_shard_by_shard(pool: RankPool):
    found = pool.run(programs.sharded, 4, steps=13, codec="float32")

    _, expected = task.simulate(
        start(),
        ranks=2,
        steps=13,
        sync_every=6,
        applied_at=(3, 6),
        outer=task.Outer(**NESTEROV),
        delay=2,
    )
    for shared, sizes in found:
        assert sum(sizes) < sum(value.size for value in expected)
        assert_close(shared, expected)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_diloco_on_digits_is_within_a_point_of_ddp(pool: RankPool, codec):
    ddp, *_ = pool.run(programs.digits, 3, way="ddp", epochs=30)

    found = pool.run(programs.digits, 3, way=codec, epochs=30)

    assert len(set(found)) == 1
    assert ddp > 0.95
    assert found[0] >= ddp - 0.01
