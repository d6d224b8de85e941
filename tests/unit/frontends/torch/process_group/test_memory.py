"""Tensors as flat arrays."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from netstorm.frontends.torch.tensors import array_of, element_of
from netstorm.protocol.codecs import Element, Reduction

TYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_array_is_the_memory_of_its_tensor(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)[1:]  # begins within its storage

    array = array_of(tensor, element_of(dtype, Reduction.SUM))

    assert array.tobytes() == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    array[:] = 0
    assert not tensor.any()


def test_an_array_keeps_its_tensor_alive() -> None:
    tensor = torch.ones(1000)
    array = array_of(tensor, Element.FLOAT32)[10:]
    kept = weakref.ref(tensor)

    del tensor

    assert kept() is not None
    del array
    assert kept() is None


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()], ids=str)
def test_a_tensor_may_have_no_elements_or_no_dimensions(shape: tuple[int, ...]) -> None:
    array = array_of(torch.ones(shape, requires_grad=True), Element.FLOAT32)

    np.testing.assert_array_equal(array, np.ones(0 if 0 in shape else 1, np.float32))
