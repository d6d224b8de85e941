"""Outer optimizers: steps on values that all ranks have."""

from __future__ import annotations

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.training.outer import OuterSGD, merge


@pytest.mark.parametrize("outer", [OuterSGD(0.7, 0.0, nesterov=False), OuterSGD(nesterov=False), OuterSGD()])
def test_steps_are_those_of_pytorchs_sgd(outer: OuterSGD) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    draw = np.random.default_rng(5)
    parameter = torch.nn.Parameter(torch.from_numpy(draw.normal(size=40)))
    theirs = torch.optim.SGD([parameter], lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov)
    values = parameter.detach().numpy().copy()
    velocity = np.zeros(40) if outer.momentum else None
    for _ in range(5):
        gradient = draw.normal(size=40)
        parameter.grad = torch.from_numpy(gradient.copy())
        theirs.step()
        outer.step(values, gradient, velocity)
        np.testing.assert_allclose(values, parameter.detach().numpy(), rtol=1e-12)


def test_a_rank_keeps_a_share_of_its_own_values() -> None:
    values, shared = np.array([4.0, 8.0]), np.array([8.0, 8.0])
    merge(values, shared, 0.25)
    assert values.tolist() == [7.0, 8.0]
    merge(values, shared, 0.0)
    assert values.tolist() == shared.tolist() == [8.0, 8.0]


@pytest.mark.parametrize("values", [(0.0, 0.9, True), (0.7, 1.0, True), (0.7, 0.0, True)])
def test_values_that_are_none_are_refused(values: tuple[float, float, bool]) -> None:
    with pytest.raises(UsageError, match="expected an lr above 0"):
        OuterSGD(*values)
