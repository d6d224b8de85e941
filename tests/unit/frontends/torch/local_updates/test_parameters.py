"""Parameters as vectors."""

from __future__ import annotations

import pytest

from netstorm.errors import UsageError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.frontends.torch.parameters import by_kind, everything_in, own_gradients  # noqa: E402 - torch may be missing


def test_each_type_is_one_vector_in_the_order_of_parameters():
    parts = [
        torch.nn.Parameter(torch.full(shape, value, dtype=dtype))
        for shape, value, dtype in [
            ((2, 2), 1.0, torch.float32),
            ((), 2.0, torch.bfloat16),
            ((3,), 3.0, torch.float32),
        ]
    ]

    single, half = by_kind(parts)

    assert single.read().tolist() == [1.0] * 4 + [3.0] * 3
    assert half.read().tolist() == [2.0]
    assert (single.size, half.size) == (7, 1)


def test_what_is_written_can_be_read_also_through_parameters_that_are_not_contiguous():
    base = torch.nn.Parameter(torch.zeros(2, 3).t())
    [flat] = by_kind([base])

    flat.write(torch.arange(6.0))

    assert base.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert flat.read().tolist() == [0, 1, 2, 3, 4, 5]


def test_reading_copies():
    parameter = torch.nn.Parameter(torch.zeros(3))
    values = by_kind([parameter])[0].read()

    with torch.no_grad():
        parameter.fill_(1.0)

    assert values.tolist() == [0.0] * 3


def test_gradients_have_the_parameters_type_and_shape():
    parameter = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))

    by_kind([parameter])[0].set_gradients(torch.arange(4.0))

    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.grad.tolist() == [[0, 1], [2, 3]]


def test_everything_has_frozen_parameters_and_buffers_and_shared_ones_once():
    norm = torch.nn.BatchNorm1d(4)
    norm.weight.requires_grad_(False)

    single, count = everything_in([norm, norm])

    assert (single.size, count.size) == (4 * 4, 1)


def test_a_model_that_has_been_converted_is_refused():
    module = torch.nn.Linear(2, 2)
    [flat] = by_kind(module.parameters())
    module.to(torch.float64)

    with pytest.raises(
        UsageError, match=r"of the model was torch.float32 \(2, 2\) on cpu and is now torch.float64"
    ):
        flat.check_unchanged("the model")


def test_an_outer_optimiser_sees_its_own_gradients_and_the_script_finds_its_own_again():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    kept = torch.tensor([5.0])
    first.grad = kept
    optimizer = torch.optim.SGD([first, second], lr=1.0)

    with own_gradients(optimizer):
        assert first.grad is None
        second.grad = torch.tensor([1.0])
        optimizer.step()

    assert [parameter.grad for parameter in (first, second)] == [kept, None]
    assert (first.item(), second.item()) == (0.0, -1.0)
