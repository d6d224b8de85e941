"""Noise for stochastic rounding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from netstorm.compression.codec import Floats, GradientPlace
from netstorm.compression.quantised import RESOLUTION, noise


def cut(rank: int, round: int, shape: tuple[int, ...] = (1000,), piece: int = 0) -> Floats:
    """Return the noise of a piece."""
    return next(itertools.islice(noise(GradientPlace(shape, 4, rank, round), 32_768), piece, None))


@pytest.mark.parametrize("value", [0.0, 0.25, 1 / 3, 0.5, 0.9999, -0.1, 126.7])
def test_over_the_whole_table_rounding_is_right_to_the_resolution(value):
    table = next(noise(GradientPlace((1,), 1, 0, 0), 1 << 17))
    rounded = np.floor(np.float32(value) + table)
    assert set(rounded) <= {np.floor(value), np.ceil(value)}
    assert abs(rounded.mean(dtype=np.float64) - np.float32(value)) <= RESOLUTION


@pytest.mark.parametrize("level", [7, 28, 63, 127])
@pytest.mark.parametrize("sign", [1, -1])
def test_whole_numbers_stay_though_float32_has_rounded_their_scaling(level, sign):
    extremes = np.array([RESOLUTION, 1 - RESOLUTION], np.float32)
    assert [cut(0, 0).min(), cut(0, 0).max()] == extremes.tolist()
    for error in (0, 2**-22):
        scaled = np.float32(sign * level * (1 + error))
        assert (np.floor(scaled + extremes) == sign * level).all()


def test_noise_is_the_same_again_and_another_one_for_each_rank_gradient_shape_and_piece():
    np.testing.assert_array_equal(cut(1, 2), cut(1, 2))
    others = [cut(0, 2), cut(1, 3), cut(1, 2, (10, 100)), cut(1, 2, piece=1)]
    for one, other in itertools.combinations([cut(1, 2), *others], 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03  # 5 deviations of independent numbers
