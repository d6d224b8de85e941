"""Some values of a tensor in memory of their own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from netstorm.frontends.torch.gradient_codecs import PartOf  # noqa: E402 - torch may be missing
from netstorm.frontends.torch.tensors import Staged  # noqa: E402


def test_all_of_a_tensor_in_its_own_type_is_used_in_place():
    tensor = torch.arange(6.0)
    part = PartOf(Staged(tensor), [slice(0, 2), slice(2, 6)], torch.float32)
    part.wait_until_read()
    part.host.mul_(2)
    part.copy_back()
    assert not part.is_copy
    assert tensor.tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_read_in_the_order_and_type_that_is_wanted_and_given_back_to_their_places(dtype):
    tensor = torch.arange(6, dtype=dtype)
    part = PartOf(Staged(tensor), [slice(4, 6), slice(1, 3)], torch.float32)
    part.wait_until_read()
    assert part.host.tolist() == [4, 5, 1, 2]
    assert part.host.dtype == torch.float32
    part.host.add_(10)
    part.copy_back()
    assert tensor.tolist() == [0, 11, 12, 3, 14, 15]


def test_nothing_is_read_before_it_is_there():
    tensor = torch.zeros(4)
    part = PartOf(Staged(tensor), [slice(0, 2)], torch.float32)
    tensor += 1
    part.wait_until_read()
    assert part.host.tolist() == [1, 1]
