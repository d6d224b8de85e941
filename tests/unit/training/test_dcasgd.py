"""Delay-compensated SGD on a block, in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.training.dcasgd import DCASGD


def test_a_gradient_is_corrected_in_proportion_to_its_square_and_to_what_has_changed():
    weight, base = np.array([1.0, 2.0]), np.array([0.0, 2.0])
    DCASGD(lamda=0.5).update(weight, None, np.array([2.0, 2.0]), base=base, rate=0.1)
    np.testing.assert_allclose(weight, [1 - 0.1 * (2 + 0.5 * 4 * 1), 2 - 0.1 * 2])


def test_a_momentum_is_over_corrected_gradients_and_weight_decay_is_not_corrected():
    rule = DCASGD(lamda=1.0, momentum=0.5, weight_decay=0.1)
    weight, velocity = np.array([1.0]), np.array([-1.0])
    rule.update(weight, velocity, np.array([3.0]), base=np.array([0.5]), rate=0.01)
    np.testing.assert_allclose(velocity, [-0.5 - 0.01 * (3 + 0.1 + 9 * 0.5)])
    np.testing.assert_allclose(weight, 1 + velocity)


@pytest.mark.parametrize(
    "wrong", [{"momentum": 1.0}, {"momentum": -0.1}, {"lamda": -1.0}, {"weight_decay": -1.0}]
)
def test_values_that_are_not_allowed_are_named(wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        DCASGD(**wrong)
