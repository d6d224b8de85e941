"""Staging buffers: values of every type and layout get in and out unchanged, and nothing waits for itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays import StagingBuffer, memory_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import Completion, push_async
from tests.integration.mxnet.script_process import Script


def values_of(buffer: StagingBuffer) -> NDArray[Any]:
    mx.nd.waitall()
    return np.frombuffer(buffer.memory(), buffer.dtype).reshape(buffer.shape)


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"]
)
def test_values_of_every_type_come_in_and_go_out_and_devices_are_summed(dtype: str) -> None:
    source = mx.nd.array(np.arange(6).reshape(2, 3) % 2, dtype=dtype)
    out = mx.nd.zeros((2, 3), dtype=dtype)
    buffer = StagingBuffer.like(source)
    buffer.copy_from(source)
    buffer.copy_to(out)
    assert values_of(buffer).tolist() == source.asnumpy().tolist() == out.asnumpy().tolist()
    sources = [mx.nd.array([[1, 2], [3, 4]], dtype=dtype, ctx=mx.cpu(device)) for device in range(3)]
    total = StagingBuffer((2, 2), dtype)
    if dtype == "bool":
        with pytest.raises(UsageError, match="MXNet does not add arrays of type bool"):
            total.sum_of(sources)
    else:
        total.sum_of(sources)
        assert values_of(total).tolist() == [[3, 6], [9, 12]]
        assert sources[0].asnumpy().tolist() == [[1, 2], [3, 4]]


def test_what_is_written_to_the_memory_is_what_mxnet_reads() -> None:
    buffer, out = StagingBuffer((3,), "float32"), mx.nd.zeros((3,))

    def start(completion: Completion) -> None:
        np.frombuffer(buffer.memory(), "float32")[:] = [7, 8, 9]
        completion.succeed()

    push_async(start, reads=(), writes=(buffer.array,), name="test")
    buffer.copy_to(out)
    assert out.asnumpy().tolist() == [7, 8, 9]


def test_memory_outlives_the_array_that_it_belongs_to() -> None:
    buffer = StagingBuffer((1000,), "int64")
    buffer.copy_from(mx.nd.array(range(1000), dtype="int64"))
    mx.nd.waitall()
    memory = buffer.memory()
    assert (memory.format, memory.nbytes, memory.readonly) == ("B", 8000, False)
    del buffer
    gc.collect()
    mx.nd.waitall()
    others = [mx.nd.zeros((1000,), dtype="int64") for _ in range(100)]  # would be given the freed memory
    mx.nd.waitall()
    assert np.frombuffer(memory, "int64").tolist() == list(range(1000))
    assert len(others) == 100


@pytest.mark.parametrize(("shape", "np_shape"), [((), False), ((), True), ((2, 3), False)])
def test_numpy_style_arrays_and_scalars_are_copied_too(shape: tuple[int, ...], *, np_shape: bool) -> None:
    with mx.util.np_shape(True):
        source = mx.np.ones(shape) * 3.5
        out = mx.np.zeros(shape)
    with mx.util.np_shape(np_shape):
        buffer = StagingBuffer.like(source)
        buffer.sum_of([source, source])
        buffer.copy_to(out)
    assert (values_of(buffer) == 7).all()
    with mx.util.np_shape(True):
        assert (out.asnumpy() == 7).all()


def test_copies_within_a_recorded_forward_pass_are_no_part_of_its_graph() -> None:
    x = mx.nd.array([3.0])
    x.attach_grad()
    buffer = StagingBuffer((1,), "float32")
    with mx.autograd.record():
        y = x * 5
        buffer.sum_of([y, y])
        buffer.copy_to(x)  # MXNet refuses to record a change of an array that the graph uses
        z = y * 2
    z.backward()
    assert x.grad.asnumpy() == [10.0]
    assert x.asnumpy() == [30.0]


def test_what_has_no_place_there_is_refused() -> None:
    with pytest.raises(UsageError, match="MXNet has no arrays of type complex64"):
        StagingBuffer((2,), "complex64")
    with pytest.raises(UsageError, match="at least one array"):
        StagingBuffer((2,), "float32").sum_of([])
    with pytest.raises(UsageError, match=r"a row_sparse array .* use a StagingBuffer"):
        memory_of(mx.nd.zeros((2, 3)).tostype("row_sparse"))


def test_a_blocked_weight_is_copied_and_summed_right_and_our_way_of_asking_for_its_memory_fails(
    script: Callable[..., Script],
) -> None:
    process = script("""
# A predict-mode forward pass leaves the weight in oneDNN's blocked layout.
convolution = mx.gluon.nn.Conv2D(32, 3, padding=1, in_channels=16, use_bias=False)
convolution.initialize(mx.init.Uniform(1))
image = mx.nd.random.uniform(shape=(2, 16, 8, 8))
weight = convolution.weight.data()
values = weight.asnumpy()
convolution(image).wait_to_read()
buffer = StagingBuffer.like(weight)
seen = []
def double(completion):
    memory = np.frombuffer(buffer.memory(), np.float32)
    seen.append(memory.copy())
    memory *= 2
    completion.succeed()
buffer.copy_from(weight)
push_async(double, reads=(), writes=(buffer.array,), name="double")
convolution(image)  # blocked again by the time the copy to it runs
buffer.copy_to(weight)
doubled = mx.nd.array(2 * values)
expected = mx.nd.Convolution(image, doubled, no_bias=True, kernel=(3, 3), pad=(1, 1), num_filter=32)
assert (convolution(image).asnumpy() == expected.asnumpy()).all()
assert (seen[0] == values.ravel()).all()
buffer.sum_of([weight, weight, weight])  # blocked still
mx.nd.waitall()
assert (np.frombuffer(buffer.memory(), np.float32) == 6 * values.ravel()).all()
for _ in range(3):  # the last two by a way that is kept
    np.frombuffer(buffer.memory(), np.float32)[:] = 0
    convolution(image).wait_to_read()
    buffer.sum_of([weight])
    mx.nd.waitall()
    assert (np.frombuffer(buffer.memory(), np.float32) == 2 * values.ravel()).all()
show("right")
from netstorm.frontends.mxnet.arrays import memory_of
convolution(image).wait_to_read()
def ask(completion):
    memory_of(weight)
    completion.succeed()
push_async(ask, reads=(weight,), writes=(buffer.array,), name="asking")
try:
    mx.nd.waitall()
except MXNetError as error:
    show(type(error).__name__, error)
assert (weight.asnumpy() == 2 * values).all()
""")
    assert process.end() == 0, process.errors
    assert "right" in process.output
    assert "UsageError an array of shape (32, 16, 3, 3) is in oneDNN's blocked layout" in process.output
