"""An optimiser's updates in two halves: the same bytes as at once, however late the second half comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.updates import CalledUpdater, can_be_captured

SHAPES = {0: (4, 3), 1: (5, 2), 2: (1, 1)}

STEPS = 6

NAMES = sorted(
    name
    for name, kind in mx.optimizer.Optimizer.opt_registry.items()
    if kind.__module__.startswith("mxnet.") and can_be_captured(mx.optimizer.create(name))
)

Change = Callable[[Any, int], None]


def gradients() -> list[dict[int, Any]]:
    drawn = np.random.RandomState(5)
    return [{key: mx.nd.array(drawn.randn(*shape)) for key, shape in SHAPES.items()} for _ in range(STEPS)]


def updated(
    make: Callable[[], Any], change: Change, dtype: str = "float32", *, late: bool, together: bool = False
) -> list[bytes]:
    """Return weights and states after some steps, with a change of the optimiser after each update.

    Args:
        make: makes the optimiser.
        change: given the optimiser and the number of the update.
        dtype: of the weights.
        late: the second half of each update comes after all steps, in another thread, one key after the
            other; else all is at once.
        together: late ones of a step are made together as far as they may be.
    """
    optimizer = make()
    rule = CalledUpdater.of_optimizer(optimizer)
    weights = {key: mx.nd.ones(shape, dtype=dtype) for key, shape in SHAPES.items()}
    second_halves: list[tuple[Any, Any, Any]] = []
    number = 0
    for totals in gradients():
        for key, total in totals.items():
            pushed = total.astype(dtype)
            captured = rule.capture(key) if late else None
            if captured is None:
                rule.update(key, pushed, weights[key], round="any", rank=0)
            else:
                second_halves.append((captured, pushed, weights[key]))
            change(optimizer, number)
            number += 1
    assert len(second_halves) == (len(SHAPES) * (STEPS - 1) if late else 0)

    def apply() -> None:
        if not together:  # sums of different keys come in any order
            second_halves.sort(key=lambda half: str(half[0].key), reverse=True)
        while second_halves:
            assert rule.of_states is not None
            group = [second_halves.pop(0)]
            while (
                together
                and second_halves
                and len(group) < rule.of_states.most_together
                and second_halves[0][0].goes_together_with(group[0][0])
                and second_halves[0][0].key not in {captured.key for captured, _, _ in group}
            ):
                group.append(second_halves.pop(0))
            rule.apply(*zip(*group, strict=True))

    thread = threading.Thread(target=apply)
    thread.start()
    thread.join()
    assert optimizer._index_update_count == dict.fromkeys(SHAPES, STEPS)
    assert optimizer.num_update == STEPS
    assert rule.of_states is not None
    return [weight.asnumpy().tobytes() for weight in weights.values()] + [rule.of_states.get_states(False)]


def nothing(_optimizer: Any, _number: int) -> None:
    """Change nothing."""


def every_hyper_parameter(optimizer: Any, number: int) -> None:
    """What scripts change in the middle of training, and some things that they hardly do."""
    optimizer.set_learning_rate(0.1 / (number + 1))
    optimizer.rescale_grad = 1.0 / (1 + number % 3)
    optimizer.wd = 0.001 * number if not isinstance(optimizer, mx.optimizer.contrib.GroupAdaGrad) else 0
    optimizer.clip_gradient = 0.5 + number
    optimizer.set_lr_mult({1: 1.0 + number})
    for name in ("momentum", "beta1", "gamma1", "rho", "lamda1"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, 0.5 + 0.02 * number)


@pytest.mark.parametrize("change", [nothing, every_hyper_parameter])
@pytest.mark.parametrize("name", NAMES)
def test_the_second_half_may_come_late_and_with_those_of_other_keys(name: str, change: Change) -> None:
    def make() -> Any:
        optimizer = mx.optimizer.create(name, wd=0.0 if name == "groupadagrad" else 0.01)
        if change is not nothing and hasattr(optimizer, "momentum"):
            optimizer.momentum = 0.5  # with none there is no state for it, and it cannot be changed later
        return optimizer

    at_once, late = (updated(make, change, late=late) for late in (False, True))
    assert late == at_once
    assert updated(make, change, late=True, together=True) == at_once
    if change is not nothing:
        assert at_once != updated(make, nothing, late=False)  # it does change something


def test_most_of_mxnets_optimisers_can_be_captured() -> None:
    assert {"sgd", "nag", "adam", "adagrad", "rmsprop", "lamb"} < set(NAMES)
    for name in ("lars", "lbsgd", "dcasgd", "nadam", "sgld", "test"):
        assert not can_be_captured(mx.optimizer.create(name))

    class OneOfTheUsers(mx.optimizer.SGD):
        """Of which nothing is known."""

    assert not can_be_captured(OneOfTheUsers())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_half_precision_keeps_its_copy_in_single(momentum: float) -> None:
    def make() -> Any:
        return mx.optimizer.SGD(momentum=momentum, multi_precision=True)

    at_once = updated(make, nothing, "float16", late=False)
    assert updated(make, nothing, "float16", late=True) == at_once
    assert updated(make, nothing, "float16", late=True, together=True) == at_once


def test_a_schedule_is_asked_when_the_update_is_counted() -> None:
    asked: list[int] = []

    def own_schedule(number: int) -> float:
        asked.append(number)
        return 0.5**number

    own_schedule.base_lr = 0.01  # type: ignore[attr-defined]
    for schedule in (
        lambda: mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1),
        lambda: own_schedule,
    ):

        def make(schedule: Callable[[], Any] = schedule) -> Any:
            return mx.optimizer.Adam(lr_scheduler=schedule())

        def later_base(optimizer: Any, number: int) -> None:
            optimizer.lr_scheduler.base_lr *= 1 + number / 10

        assert updated(make, later_base, late=True) == updated(make, later_base, late=False)
    assert asked == sorted(asked[: len(asked) // 2]) * 2


def test_multipliers_of_gluons_parameters_are_looked_up_when_the_update_is_counted() -> None:
    def make() -> Any:
        parameters = {key: SimpleNamespace(lr_mult=1.0, wd_mult=1.0) for key in SHAPES}
        return mx.optimizer.SGD(momentum=0.9, wd=0.1, param_dict=parameters)

    def freeze(optimizer: Any, number: int) -> None:
        optimizer.param_dict[0].lr_mult = number % 2
        optimizer.param_dict[1].wd_mult = number

    assert updated(make, freeze, late=True) == updated(make, freeze, late=False)


def test_loaded_states_come_with_an_optimiser_that_is_captured_from_then_on(tmp_path: Any) -> None:
    path = str(tmp_path / "states")
    rule = CalledUpdater.of_optimizer(mx.optimizer.Adam(learning_rate=0.25))
    weight = mx.nd.ones((3,))
    rule.update("w", weight, weight, round="any", rank=0)
    rule.save(path, dump_optimizer=True)
    other = CalledUpdater.of_optimizer(mx.optimizer.Adam(learning_rate=0.5))
    other.update("w", weight, weight, round="any", rank=0)
    before = other.capture("w")
    other.load(path)
    captured = other.capture("w")
    assert before is not None
    assert captured is not None
    assert (before.learning_rates, captured.learning_rates) == ([0.5], [0.25])
    assert captured.updates == 2
    assert captured.optimizer_copy is not before.optimizer_copy
