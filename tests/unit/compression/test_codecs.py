"""What all codecs keep, over random trees and with values of every kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.compression.quantised import quantised
from netstorm.compression.registry import codec_of
from netstorm.lab.testing.codec_trees import CodecTrees

# ------------------------------------------------------------------------------------------------------ sums
# Each codec's sum along any tree, in any order of arrival, is its definition computed on one process.


SIZES = (0, 1, 7, 8, 9, 255, 256, 257, 600)
CODECS = ("none", "fp16", "bf16", "int8", "2bit", "1bit", "topk", "bsc", "mpq", "powersgd")
PLAIN_SPARSE = {"momentum": 0, "size_lower_bound": 1}
"""With momentum correction more is applied than gradients have."""

WITH_RESIDUALS = (
    "int8",
    {"type": "int8", "rounding": "stochastic"},
    "2bit",
    "1bit",
    {"type": "topk", "ratio": 0.1},
    {"type": "topk", "ratio": 0.1, "kept": 0},
    {"type": "bsc", "ratio": 0.05, **PLAIN_SPARSE},
    {"type": "mpq", "ratio": 0.05, **PLAIN_SPARSE},
    {"type": "powersgd", "rank": 2},
)


@st.composite
def jobs(draw, ranks=9, sizes=SIZES):
    """Draw how many ranks sum what, and the seed of trees, orders and values."""
    return (
        draw(st.integers(1, ranks)),
        draw(st.sampled_from(sizes)),
        draw(st.sampled_from((8, 13, 256, 10_000))),
        draw(st.integers(0, 1 << 30)),
    )


def trees(description, job, shape=None):
    ranks, size, chunk, seed = job
    return CodecTrees(codec_of(description), shape or (size,), ranks, chunk=chunk, seed=seed)


def whole_numbers(job, shape=None, most=8):
    ranks, size, _, seed = job
    drawn = np.random.default_rng(seed).integers(-most, most + 1, (ranks, *(shape or (size,))))
    return list(drawn.astype(np.float32))


def normal(job, shape=None):
    ranks, size, _, seed = job
    return list(np.random.default_rng(seed).standard_normal((ranks, *(shape or (size,)))).astype(np.float32))


def the_sum(summing, gradients, **more):
    """Return the sum, the same bits at all ranks, as float64."""
    results = summing.sum(gradients, **more)
    assert all(one.tobytes() == results[0].tobytes() for one in results)
    return results[0].astype(np.float64)


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "bsc", "mpq"])
@given(job=jobs())
@settings(max_examples=8)
def test_sums_of_small_whole_numbers_are_exact_without_a_scale(codec, job):
    gradients = whole_numbers(job)
    assert the_sum(trees(codec, job), gradients).tolist() == np.sum(gradients, axis=0).tolist()


@pytest.mark.parametrize(("codec", "digits"), [("fp16", 11), ("bf16", 8)])
@given(job=jobs())
@settings(max_examples=8)
def test_each_hop_rounds_a_sum_of_16_bits_once(codec, digits, job):
    gradients = normal(job)
    error = np.abs(the_sum(trees(codec, job), gradients) - np.sum(gradients, axis=0, dtype=np.float64))
    most = np.abs(gradients).sum(axis=0) * 2.0**-digits * (len(gradients) + 1) + 1e-7
    assert (error <= most).all()


def blocks(values):
    return [values[start : start + 256] for start in range(0, len(values), 256)]


@given(jobs())
@settings(max_examples=12)
def test_int8_is_the_nearest_of_the_levels_between_the_largest_magnitudes(job):
    gradients = normal(job)
    levels = max(7, min(127, 255 // job[0]))
    expected = []
    for parts in zip(*map(blocks, gradients), strict=True):
        scale = np.float32(max(np.abs(part).max() for part in parts))
        numbers = sum(np.rint(part * (np.float32(levels) / scale)) for part in parts)
        expected += (numbers * (scale / np.float32(levels))).tolist()
    summing = trees("int8", job)
    assert the_sum(summing, gradients).tolist() == expected
    assert all(np.abs(state["residual"]).max(initial=0) < 5 / levels for state in summing.states)


@given(jobs())
@settings(max_examples=12)
def test_1bit_counts_signs_and_gives_them_the_average_magnitude(job):
    gradients = normal(job)
    expected = []
    for parts in zip(*map(blocks, gradients), strict=True):
        magnitude = np.mean([np.abs(part).mean(dtype=np.float64) for part in parts])
        expected += (sum(np.where(part < 0, -1, 1) for part in parts) * magnitude).tolist()
    np.testing.assert_allclose(the_sum(trees("1bit", job), gradients), expected, rtol=1e-5)


@given(jobs(), st.integers(0, 3))
@settings(max_examples=12)
def test_ranks_that_have_ended_change_no_bit_of_what_1bit_and_int8_count(job, ended):
    """Their magnitudes are zeros, so the average is less; signs of others count as they are."""
    gradients = whole_numbers(job, most=1)
    ranks, *rest = job
    more = (ranks + ended, *rest)
    values = the_sum(trees("1bit", more), [*gradients, *[None] * ended])
    for sums, *parts in zip(blocks(values), *map(blocks, gradients), strict=True):
        magnitude = sum(np.abs(part).mean(dtype=np.float64) for part in parts) / (ranks + ended)
        np.testing.assert_allclose(
            sums, sum(np.where(part < 0, -1, 1) for part in parts) * magnitude, rtol=1e-5
        )
    zeros = [np.zeros_like(gradients[0])] * ended
    assert (
        the_sum(trees("int8", more), [*gradients, *[None] * ended]).tobytes()
        == the_sum(trees("int8", more), [*gradients, *zeros]).tobytes()
    )


@given(jobs())
@settings(max_examples=8)
def test_2bit_is_mxnets_quantisation_of_each_rank(job):
    gradients = whole_numbers(job)
    signs = []
    for gradient in gradients:
        residual = np.zeros_like(gradient)
        quantised(gradient, residual, np.float32(0.5))
        signs.append(gradient - residual)
    assert the_sum(trees("2bit", job), gradients).tolist() == np.sum(signs, axis=0).tolist()


@given(jobs(), st.sampled_from([0.01, 0.1, 1.0]))
@settings(max_examples=12)
def test_topk_that_keeps_all_is_the_sum_of_each_ranks_largest(job, ratio):
    ranks, size, _, seed = job
    chance = np.random.default_rng(seed)
    distinct = [chance.permutation(size) + 1 for _ in range(ranks)]  # no ties
    gradients = [(one * chance.choice((-1, 1), size)).astype(np.float32) for one in distinct]
    sent = [np.where(one > size - max(1, round(size * ratio)), values, 0)
            for one, values in zip(distinct, gradients, strict=True)]  # fmt: skip
    summing = trees({"type": "topk", "ratio": ratio, "kept": 0}, job)
    total = the_sum(summing, gradients)
    assert total.tolist() == np.sum(sent, axis=0).tolist()
    for state, gradient, own in zip(summing.states, gradients, sent, strict=True):
        kept = np.where(total == 0, gradient, gradient - own)  # a sum of 0 looks as if nobody had sent
        assert state["residual"].tolist() == kept.tolist()


@given(jobs(sizes=(1, 8, 257, 600)), st.sampled_from([0.0, 0.9]))
@settings(max_examples=12)
def test_bsc_is_geomxs_bi_sparse(job, momentum):
    """Velocity and residual as in GeoMX's BSCompress; the sum has the elements of all ranks."""
    ranks, size, _, _ = job
    summing = trees({"type": "bsc", "ratio": 0.1, "momentum": momentum, "size_lower_bound": 1}, job)
    velocities, residuals = np.zeros((2, ranks, size), np.float32)
    for step in range(3):
        gradients = normal((*job[:3], job[3] + step))
        expected = np.zeros(size)
        velocities = velocities * np.float32(momentum) + gradients
        residuals = residuals + velocities
        for velocity, residual in zip(velocities, residuals, strict=True):
            sent = np.abs(residual) >= np.sort(np.abs(residual))[-max(1, round(size * 0.1))]
            expected[sent] += residual[sent]
            velocity[sent] = residual[sent] = 0
        total = the_sum(summing, gradients)
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
        assert (np.count_nonzero(total) > round(size * 0.1)) or ranks == 1 or size < 100


@given(jobs(), st.sampled_from([("bsc", "none"), ("mpq", "fp16")]))
@settings(max_examples=8)
def test_bsc_and_mpq_are_sparse_from_their_bound_on(job, names):
    gradients, size = normal(job), job[1]
    codec, small = names
    large = {"type": "topk", "ratio": 0.1, "kept": 0, "momentum": 0.9}
    for bound, other in ((size + 1, small), (max(1, size), large)):
        if size >= 1:
            given = {"type": codec, "ratio": 0.1, "size_lower_bound": bound}
            assert (
                the_sum(trees(given, job), gradients).tobytes()
                == the_sum(trees(other, job), gradients).tobytes()
            )


@given(jobs(sizes=(0,)), st.sampled_from([(20, 30), (64, 8, 3), (33, 100)]), st.integers(1, 3))
@settings(max_examples=8)
def test_powersgd_is_the_projection_of_the_sum_on_its_product_with_the_right_factor(job, shape, rank):
    gradients = normal(job, shape)
    summing = trees({"type": "powersgd", "rank": rank}, job, shape)
    rows = shape[0]
    for _ in range(2):
        rights = [state.get("right") for state in summing.states]
        before = [np.array(state.get("residual", np.zeros(gradients[0].size))) for state in summing.states]
        total = the_sum(summing, gradients).reshape(rows, -1)
        exact = sum(
            one.astype(np.float64).reshape(rows, -1) + rest.reshape(rows, -1)
            for one, rest in zip(gradients, before, strict=True)
        )
        if rights[0] is not None:
            basis, _ = np.linalg.qr(exact @ rights[0])
            np.testing.assert_allclose(total, basis @ basis.T @ exact, atol=2e-3)
        assert np.linalg.matrix_rank(total, tol=1e-3) <= rank
        np.testing.assert_allclose(exact.T @ total, total.T @ total, atol=0.05)  # a projection


@pytest.mark.parametrize("codec", WITH_RESIDUALS, ids=str)
@given(job=jobs())
@settings(max_examples=5)
def test_what_was_applied_and_the_residuals_are_all_gradients(codec, job):
    shape = (job[1] // 20, 20) if job[1] > 256 else (job[1],)
    summing, total, applied = trees(codec, job, shape), np.zeros(shape), np.zeros(shape)
    for step in range(4):
        gradients = normal((*job[:3], job[3] + step), shape)
        total += np.sum(gradients, axis=0, dtype=np.float64)
        applied += the_sum(summing, gradients).reshape(shape)
    kept = sum(state.get("residual", np.zeros(shape)).reshape(shape) for state in summing.states)
    np.testing.assert_allclose(applied + kept, total, atol=1e-4)


PUT_BACK = (
    *WITH_RESIDUALS[:2],
    "1bit",
    {"type": "topk", "ratio": 0.1},
    {"type": "bsc", "ratio": 0.05, **PLAIN_SPARSE},
    {"type": "powersgd", "rank": 2},
)


@pytest.mark.parametrize("codec", PUT_BACK, ids=str)
@given(job=jobs(), late=st.integers(0, 30))
@settings(max_examples=5)
def test_what_a_rank_sent_without_being_counted_returns_to_its_residual(codec, job, late):
    """Members of a round may differ from chunk to chunk, and from one round of a codec to the next."""
    shape = (20, 30) if "powersgd" in str(codec) else (job[1],)  # small tensors travel as they are
    summing, total, applied = trees(codec, job, shape), np.zeros(shape), np.zeros(shape)

    def silent(round, start):
        chance = np.random.default_rng([late, round, start, step])
        return [rank for rank in range(job[0]) if chance.random() < 0.3]

    for step in range(4):
        gradients = normal((*job[:3], job[3] + step), shape)
        total += np.sum(gradients, axis=0, dtype=np.float64)
        applied += the_sum(summing, gradients, silent=silent).reshape(shape)
    kept = sum(state.get("residual", np.zeros(shape)).reshape(shape) for state in summing.states)
    np.testing.assert_allclose(applied + kept, total, atol=1e-4)


def test_stochastic_rounding_is_right_on_the_average():
    values = np.full(20_000, 0.3, np.float32)
    values[::256] = 1.0  # the scale of each block
    codec = {"type": "int8", "rounding": "stochastic"}
    found = CodecTrees(codec_of(codec), values.shape, 1).sum([values])[0]
    step = 1 / 127
    assert abs(found.mean() - values.mean()) < 4 * step * 0.5 / len(values) ** 0.5
    assert {round(float(one) / step) for one in found} == {38, 39, 127}


@pytest.mark.parametrize("codec", [*CODECS, *WITH_RESIDUALS], ids=str)
def test_all_ranks_have_the_same_bits_gradient_after_gradient(codec):
    summing = CodecTrees(codec_of(codec), (30, 40), 5, chunk=104, seed=4)
    for step in range(3):
        the_sum(summing, normal((5, 0, 0, step), (30, 40)))


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        *[("none", 1), ("fp16", 0.5), ("bf16", 0.5), ("int8", 0.29), ("2bit", 0.16), ("1bit", 0.13)],
        *[
            ("topk", 0.12),
            ({"type": "bsc", "size_lower_bound": 1}, 0.2),
            ({"type": "mpq", "size_lower_bound": 1}, 0.2),
            ("powersgd", 0.04),
        ],
    ],
)
def test_the_largest_payload_has_this_part_of_the_bytes_of_float32(codec, most):
    summing = CodecTrees(codec_of(codec), (256, 256), 9, seed=2)
    summing.sum(normal((9, 0, 0, 1), (256, 256)))
    assert sum(summing.payloads) <= most * (1 << 18) + 200


# ---------------------------------------------------------------------------------------- adversarial values
# What codecs make of NaN, infinity, denormal, huge, equal and no values: defined, the same at all ranks.


NAN, INF, TINY, HUGE = np.nan, np.inf, np.float32(1e-42), np.float32(3e38)

MATRIX = (40, 26)
ELEMENTS = 1040


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


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "bsc", "mpq"])
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


@pytest.mark.parametrize(
    "codec", ["topk", {"type": "bsc", "size_lower_bound": 1}, {"type": "mpq", "size_lower_bound": 1}], ids=str
)
def test_sparse_codecs_send_nan_and_infinity_first_and_do_not_keep_them(codec):
    for value in (NAN, INF, -INF):
        total, residuals = sums_of(codec, {5: value}, states=True)
        np.testing.assert_equal(total[5], value)
        assert all(np.isfinite(one).all() for one in residuals)


@pytest.mark.parametrize("codec", ["topk", {"type": "bsc", "size_lower_bound": 1}], ids=str)
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
