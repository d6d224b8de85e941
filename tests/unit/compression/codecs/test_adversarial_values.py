"""What codecs make of NaN, infinity, denormal, huge, equal and no values: defined, the same at all ranks."""

import numpy as np
import pytest

from netstorm.compression.registry import codec_of
from netstorm.lab.testing.codec_trees import CodecTrees
from tests.unit.compression.codecs.test_sums import CODECS, WITH_RESIDUALS

NAN, INF, TINY, HUGE = np.nan, np.inf, np.float32(1e-42), np.float32(3e38)

MATRIX = (40, 26)
ELEMENTS = 1040
ALL_RANKS = slice(None)


def sums_of(codec, filled, *, ranks=3, values=1.0, states=False):
    """Return a sum of equal values but for those that rank 0 has at some places, and residuals."""
    gradients = [np.full(ELEMENTS, values, np.float32) for _ in range(ranks)]
    for place, value in filled.items():
        gradients[0][place] = value
    summing = CodecTrees(codec_of(codec), MATRIX, ranks, chunk=104, seed=3)
    results = summing.sum([one.reshape(MATRIX) for one in gradients])
    assert all(one.tobytes() == results[0].tobytes() for one in results)
    residuals = [state["residual"].reshape(-1) for state in summing.states if "residual" in state]
    return (results[0], residuals) if states else results[0]


@pytest.mark.parametrize("codec", [*CODECS, *WITH_RESIDUALS], ids=str)
def test_no_value_raises_warns_or_makes_ranks_differ(codec):
    summing = CodecTrees(codec_of(codec), MATRIX, 3, chunk=520, seed=3)
    for where in ([5], [5, 6, 300], list(range(ELEMENTS))):
        for value in (NAN, INF, -INF, TINY, HUGE, -HUGE, 0.0, -0.0):
            gradients = [np.full(ELEMENTS, rank + 1, np.float32) for rank in range(3)]
            gradients[1][where] = value
            results = summing.sum([one.reshape(MATRIX) for one in gradients])
            assert all(one.tobytes() == results[0].tobytes() for one in results)


@pytest.mark.parametrize("codec", [*CODECS, *WITH_RESIDUALS], ids=str)
def test_zeros_of_all_sizes_stay_zeros(codec):
    for size in (0, 1, 7, 8, 9, 255, 256, 257):
        summing = CodecTrees(codec_of(codec), (size,), 3, chunk=104)
        for _ in range(2):
            assert not summing.sum([np.zeros(size, np.float32)] * 3)[0].any()


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "mpq"])
def test_without_a_scale_nan_and_infinity_are_sums_of_their_own_elements_alone(codec):
    total = sums_of(codec, {5: NAN, 6: INF, 7: -INF})
    assert np.isnan(total[5])
    assert total[6:8].tolist() == [INF, -INF]
    assert (np.delete(total, [5, 6, 7]) == 3).all()


def test_fp16_sums_beyond_65504_are_infinite_and_those_of_bf16_are_not():
    assert sums_of("fp16", {5: 65504.0, 6: -1e6, 7: 65000.0})[5:8].tolist() == [65504, -INF, 64992]
    assert sums_of("fp16", {5: 3e4}, values=3e4)[5] == INF
    assert np.isfinite(sums_of("bf16", {5: 1e38, 6: -1e6})).all()


def test_fp16_rounds_magnitudes_below_3e_8_to_0_and_bf16_keeps_them():
    assert sums_of("fp16", {5: 2e-8}, values=0)[5] == 0
    assert sums_of("bf16", {5: 2e-8}, values=0)[5] == pytest.approx(2e-8, rel=2.0**-8)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_int8_makes_the_block_nan_and_keeps_no_residual_of_it(value):
    total, residuals = sums_of("int8", {300: value}, states=True)
    assert np.isnan(total[256:512]).all()
    assert np.allclose(np.delete(total, np.arange(256, 512)), 3)
    assert all(not one[256:512].any() and np.isfinite(one).all() for one in residuals)


def test_int8_leaves_blocks_of_tiny_magnitudes_to_the_residual_until_they_have_grown():
    tiny = np.float32(2.0**-101)
    total, residuals = sums_of("int8", {}, values=tiny, states=True)
    assert not total.any()
    assert all((one == tiny).all() for one in residuals)
    assert np.allclose(sums_of("int8", {}, values=2.0**-99) / 2.0**-99, 3)


def test_int8_of_huge_values_is_finite_where_the_sum_is():
    assert np.isfinite(sums_of("int8", {5: -HUGE}, values=1e38)).all()


@pytest.mark.parametrize(("value", "found"), [(NAN, np.isnan), (INF, lambda one: ~np.isfinite(one))])
def test_1bit_makes_the_block_nan_or_infinite_and_keeps_no_residual_of_it(value, found):
    total, residuals = sums_of("1bit", {300: value}, states=True)
    assert found(total[256:512]).all()
    assert np.allclose(np.delete(total, np.arange(256, 512)), 3)
    assert all(not one[256:512].any() and np.isfinite(one).all() for one in residuals)


def test_1bit_makes_blocks_infinite_whose_magnitudes_add_up_to_more_than_float32_has():
    assert np.isinf(sums_of("1bit", {}, values=HUGE)).all()


def test_1bit_counts_a_negative_zero_as_negative():
    summing = CodecTrees(codec_of("1bit"), (3,), 1)
    values = np.array([-0.0, 0.0, 3.0], np.float32)
    assert summing.sum([values])[0].tolist() == [-1, 1, 1]
    assert summing.states[0]["residual"].tolist() == [1, -1, 2]


def test_2bit_keeps_nan_in_the_residual_and_sends_the_threshold_of_infinity_each_time_as_mxnet_does():
    summing = CodecTrees(codec_of("2bit"), (3,), 1)
    values = np.array([NAN, INF, 1], np.float32)
    assert summing.sum([values])[0].tolist() == [0, 0.5, 0.5]
    assert summing.sum([np.zeros(3, np.float32)])[0].tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize("codec", ["topk", "bsc", {"type": "mpq", "size_lower_bound": 1}], ids=str)
def test_sparse_codecs_send_nan_and_infinity_first_and_do_not_keep_them(codec):
    for value in (NAN, INF, -INF):
        total, residuals = sums_of(codec, {5: value}, states=True)
        np.testing.assert_equal(total[5], value)
        assert all(np.isfinite(one).all() for one in residuals)


@pytest.mark.parametrize("codec", ["topk", "bsc"])
def test_of_equal_values_sparse_codecs_send_as_many_as_of_others(codec):
    total = sums_of(codec, {}, values=2.0)
    assert np.count_nonzero(total) <= 3 * 2 * (ELEMENTS // 100 + 1)
    assert np.count_nonzero(total) >= ELEMENTS // 100


def test_a_clipped_gradient_of_huge_values_keeps_its_direction():
    summing = CodecTrees(codec_of({"type": "topk", "ratio": 1.0, "clip": 1.0}), (4,), 1)
    assert np.allclose(summing.sum([np.array([3e20, 4e20, 0, 0], np.float32)])[0], [0.6, 0.8, 0, 0])


@pytest.mark.parametrize("value", [NAN, INF])
def test_powersgd_makes_all_of_the_tensor_nan_keeps_no_residual_and_begins_anew(value):
    summing = CodecTrees(codec_of("powersgd"), MATRIX, 3, seed=1)
    ones = np.ones(MATRIX, np.float32)
    bad = ones.copy()
    bad[:, 1] = value
    assert np.isnan(summing.sum([bad, ones, ones])[0]).all()
    assert np.allclose(summing.sum([ones, ones, ones])[0], 3, atol=1e-4)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e10, 1e25])
def test_powersgd_is_as_good_for_gradients_of_any_magnitude(magnitude):
    summing = CodecTrees(codec_of({"type": "powersgd", "rank": 1}), MATRIX, 2, seed=1)
    matrix = np.outer(np.arange(1, 41), np.arange(1, 27)).astype(np.float32) * np.float32(magnitude)
    for _ in range(3):
        total = summing.sum([matrix, matrix])[0].reshape(MATRIX)
        assert np.allclose(total / magnitude, 2 * matrix / magnitude, rtol=1e-4)
