"""Deep Gradient Compression: momentum correction, local clipping, warm-up; refused parameters."""

import numpy as np
import pytest

from netstorm.compression.registry import codec_of
from netstorm.compression.sparse import TopK
from netstorm.errors import UsageError
from netstorm.lab.testing.codec_trees import CodecTrees


def one_rank(**parameters):
    return CodecTrees(TopK(**parameters), (10,), 1)


def test_momentum_correction_accumulates_velocities_and_forgets_those_of_what_it_sent():
    summing = one_rank(ratio=0.1, momentum=0.5)
    gradient = np.zeros(10, np.float32)
    gradient[[2, 7]] = 4, 3
    assert np.flatnonzero(summing.sum([gradient])[0]).tolist() == [2]
    second = summing.sum([gradient])[0]
    assert second[7] == 3 + 3 * 1.5  # residual and velocity of the first gradient
    assert summing.states[0]["velocity"][7] == 0
    assert summing.states[0]["velocity"][2] == 4


def test_the_velocity_of_what_the_root_has_left_out_goes_on():
    summing = CodecTrees(TopK(ratio=0.1, kept=1, momentum=0.5), (10,), 2)
    gradients = np.zeros((2, 10), np.float32)
    gradients[0, 2], gradients[1, 7] = 4, 3  # two elements, of which the root keeps the larger one
    assert np.flatnonzero(summing.sum(list(gradients))[0]).tolist() == [2]
    assert summing.states[0]["velocity"][2] == 0
    assert summing.states[1]["velocity"][7] == summing.states[1]["residual"][7] == 3


def test_a_state_without_velocity_gets_one():
    summing = one_rank(ratio=0.1, momentum=0.5)
    summing.states[0]["residual"] = np.ones(10, np.float32)
    summing.sum([np.ones(10, np.float32)])
    assert "velocity" in summing.states[0]


def test_clipping_bounds_the_norm_of_a_rank_by_the_square_root_of_their_number():
    summing = CodecTrees(TopK(ratio=1.0, clip=10.0), (2,), 4)
    found = summing.sum([np.array([30, 40], np.float32)] * 4)[0]
    assert found.tolist() == [4 * 3, 4 * 4]  # a norm of 10 / 2 each
    small = CodecTrees(TopK(ratio=1.0, clip=10.0), (2,), 4)
    assert small.sum([np.array([3, 4], np.float32)] * 4)[0].tolist() == [12, 16]


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.01, [250, 50, 10, 10]), (0.25, [250] * 4), (0.5, [500] * 4)]
)
def test_warm_up_begins_with_a_quarter_and_reaches_the_ratio_by_equal_factors(ratio, expected):
    summing = CodecTrees(TopK(ratio=ratio, warmup=2, kept=0), (1000,), 1)
    sent = [np.count_nonzero(summing.sum([np.arange(1, 1001, dtype=np.float32)])[0]) for _ in range(4)]
    assert sent == expected


def test_of_a_large_tensor_about_the_ratio_is_sent():
    summing = CodecTrees(TopK(ratio=0.01), (300, 1000), 1)
    values = np.random.default_rng(2).standard_normal((300, 1000)).astype(np.float32)
    assert 0.008 < np.count_nonzero(summing.sum([values])[0]) / values.size < 0.012


def test_a_tensor_whose_columns_differ_is_sampled_in_all_of_them():
    values = np.ones((300, 1024), np.float32)
    values[:, 0] = 9
    values += np.random.default_rng(2).random(values.shape, np.float32)
    found = CodecTrees(TopK(ratio=0.01), values.shape, 1).sum([values])[0]
    assert 0.006 < np.count_nonzero(found) / values.size < 0.02


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"ratio": 0}, "topk with ratio=0: expected more than 0, up to 1"),
        ({"ratio": float("nan")}, "topk with ratio=nan"),
        ({"kept": 0.001}, "topk with kept=0.001: expected 0, or from 0.01 to 1000"),
        ({"momentum": 1.0}, "topk with momentum=1.0: expected from 0 to less than 1"),
        ({"clip": -1.0}, "topk with clip=-1.0: expected 0 or more"),
        ({"warmup": -1}, "topk with warmup=-1: expected 0 or more"),
        ({"ratio": "much"}, "codec 'topk' with {'ratio': 'much'}"),
    ],
)
def test_a_parameter_out_of_its_range_is_refused(parameters, message):
    with pytest.raises(UsageError) as refused:
        codec_of({"type": "topk", **parameters})
    assert str(refused.value).startswith(message)
