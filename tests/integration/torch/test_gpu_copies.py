"""The copies between a GPU and the host are ordered: on a device that does nothing until it must."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist

from netstorm.frontends.torch.tensors import stream_of
from tests.integration.torch.begin import begin
from tests.integration.torch.lazy_device import NAME, LazyTensor, lazy, on_device, use_the_lazy_device
from tests.integration.torch.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_acc"), reason="this PyTorch has no devices that are written in Python"
)


def ready() -> tuple[int, int]:
    """Begin, and have the device."""
    use_the_lazy_device()
    return begin()


@on_ranks(2)
def test_a_sum_has_what_was_queued_before_it_and_what_is_queued_after_it_has_the_sum() -> None:
    rank, _ = ready()
    later: list[int] = []
    for turn in range(3):
        tensor = on_device([0.0, 1.0])
        tensor.change(lambda values: values.add_(rank + 1))
        work = dist.all_reduce(tensor, async_op=True)
        lazy.current_stream().add(lambda: later.append(0))
        work.wait()
        assert not later, "a sum waits for what was queued after it, or for nothing at all"
        tensor.change(lambda values: values.mul_(2))
        assert tensor.read() == [6.0, 10.0], turn
        later.clear()


@on_ranks(2)
def test_all_calls_order_their_copies() -> None:
    rank, _ = ready()

    def made(*values: float) -> LazyTensor:
        tensor = on_device([torch.nan] * len(values))
        tensor.change(lambda memory: memory.copy_(torch.tensor(values)))
        return tensor

    first, second = made(rank), made(rank + 10)
    dist.broadcast(first, src=1)
    dist.reduce(second, dst=0)
    assert (first.read(), second.read()) == ([1.0], [21.0] if rank == 0 else [11.0])
    outputs = [made(0.0), made(0.0)]
    dist.all_gather(list(outputs), made(rank + 5))
    assert [output.read() for output in outputs] == [[5.0], [6.0]]
    whole, part = made(0.0, 0.0), made(0.0)
    dist.all_gather_into_tensor(whole, made(rank + 7))
    dist.reduce_scatter(part, [made(1.0 + rank), made(3.0 + rank)])
    assert (whole.read(), part.read()) == ([7.0, 8.0], [3.0 + 4 * rank])
    got = made(0.0)
    if rank == 0:
        dist.send(made(4.0), dst=1)
        dist.recv(got, src=1)
    else:
        dist.recv(got, src=0)
        got.change(lambda values: values.add_(1))
        dist.send(got, dst=0)
    assert got.read() == [5.0]
    swapped = [made(0.0), made(0.0)]
    dist.all_to_all(list(swapped), [made(10.0 * rank), made(10.0 * rank + 1)])
    assert [output.read() for output in swapped] == [[float(rank)], [10.0 + rank]]


@on_ranks(2)
def test_memory_that_is_freed_before_its_result_is_there_gets_no_result() -> None:
    ready()
    tensor = on_device([1.0, 2.0])
    before = lazy.freed
    work = dist.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 30
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    del tensor, work
    while lazy.freed == before:
        assert time.monotonic() < deadline, "something still refers to the tensor"
        time.sleep(0.001)
    other = on_device([7.0, 7.0])
    assert other.read() == [7.0, 7.0]
    dist.barrier()
    stream_of(torch.device(NAME, 0)).synchronize()
    assert other.read() == [7.0, 7.0]
    assert on_device([0.0, 0.0]).memory.values is not other.memory.values
