"""Sums over all ranks that cross the WAN once a site: inside, across sites, inside.

Each rank of a site gets the sum of one slice (reduce-scatter), adds it to the same slice of the other sites
(all-reduce), and gives it to its neighbours (all-gather). So a site of n ranks sends and receives each value
once, not n times, and all n of them take part in sending.

Several sums may be under way. Every rank must begin the operations of a group in the same order, but they end
in any order. So the second and the third step of the sums are begun by a thread each, in the order of the
calls, and each step has process groups of its own.
"""

# Annotations are not postponed here: DDP compares those of a hook with its own classes.
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from netstorm.errors import UsageError
from netstorm.frontends.torch.internals import GradBucket, work_of_future
from netstorm.frontends.torch.site_mesh import LOCAL, SITE

__all__ = ["hierarchical_all_reduce", "site_hook"]

Sum: TypeAlias = torch.futures.Future[torch.Tensor]

_OPERATIONS: Final = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.PRODUCT,
)


def hierarchical_all_reduce(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce a tensor over all ranks of a mesh, in place. All ranks must call it, in the same order.

    Args:
        tensor: dense, of the same shape at all ranks. It is copied once more if it is not contiguous, or if
            the ranks of a site cannot share its elements equally.
        mesh: as `site_mesh` returns it.
        op: SUM, AVG, MIN, MAX or PRODUCT.
        async_op: whether to return at once; the result is there when the returned `Work` is done.

    Raises:
        UsageError: the mesh has other dimensions, or the tensor or the operation is none of these.
    """
    if op not in _OPERATIONS:
        raise UsageError(f"op={op}: expected SUM, AVG, MIN, MAX or PRODUCT")
    if tensor.layout != torch.strided or tensor.is_complex():
        raise UsageError(
            f"a tensor of {tensor.dtype} with the layout {tensor.layout}: expected a dense one of real "
            "numbers; see torch.view_as_real and torch.distributed.all_reduce"
        )
    if op == dist.ReduceOp.AVG and not tensor.is_floating_point():
        raise UsageError(f"op=AVG for a tensor of {tensor.dtype}: expected a floating-point type; use SUM")
    result = _reducer(mesh).reduce(tensor, op)
    if async_op:
        return cast("dist.Work", work_of_future(result))
    result.wait()
    return None


def site_hook(mesh: DeviceMesh, bucket: GradBucket) -> Sum:
    """Average a bucket of DDP's gradients over all ranks of a mesh, and return at once.

    `ddp_model.register_comm_hook(site_mesh(), site_hook)`. DDP's own group must have the mesh's ranks.
    """
    return _reducer(mesh).reduce(bucket.buffer(), dist.ReduceOp.AVG)


@dataclass(slots=True, kw_only=True)
class _Step:
    """A sum under way."""

    work: dist.Work
    """What is being done."""
    op: dist.ReduceOp.RedOpType
    whole: torch.Tensor
    """All values; as many for each rank of the site."""
    slice: torch.Tensor
    """The values that this rank adds up across sites."""
    tensor: torch.Tensor
    """The caller's; `whole` is a view of it, or a copy."""
    result: Sum


_END_S: Final = 5.0
"""How long a process that ends waits for sums that are still under way: peers may be waiting for them."""

# PyTorch 2.13 has new names for these.
_reduce_scatter: Final = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Final = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_Steps: TypeAlias = queue.SimpleQueue[_Step | None]
"""None: no more will come."""


class _Reducer:
    """The sums over one mesh. All ranks must create it, because it creates process groups."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._ranks: Final = mesh.size()
        self._at_a_site: Final = mesh.size(1)
        sites: list[list[int]] = mesh.mesh.tolist()
        slices = [list(ranks) for ranks in zip(*sites, strict=True)]
        inside, across = (dist.get_backend(mesh.get_group(name)) for name in (LOCAL, SITE))
        self._scattering: Final = _own_group(sites, inside)
        self._adding: Final = _own_group(slices, across)
        self._gathering: Final = _own_group(sites, inside)
        adding, gathering = self._adding, self._gathering
        self._stream: Final = _new_stream() if mesh.device_type == "cuda" else None
        self._scattered: Final[_Steps] = queue.SimpleQueue()
        added: _Steps = queue.SimpleQueue()

        def add(step: _Step) -> None:
            step.work = _begun(dist.all_reduce(step.slice, step.op, group=adding, async_op=True))
            added.put(step)

        def gather(step: _Step) -> None:
            _begun(_all_gather(step.whole, step.slice, group=gathering, async_op=True)).wait()
            if step.whole.data_ptr() != step.tensor.data_ptr():
                step.tensor.copy_(step.whole[: step.tensor.numel()].view(step.tensor.shape))
            step.result.set_result(step.tensor)

        # The threads know nothing of this object: they end with it, or with the process.
        for name, steps, begin_next in (("sites", self._scattered, add), ("local", added, gather)):
            thread = threading.Thread(
                target=_work_off, args=(steps, begin_next, self._stream), name=f"netstorm-{name}", daemon=True
            )
            thread.start()
            weakref.finalize(self, _end, thread, steps)

    def reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> Sum:
        """Begin a sum; its future gets the tensor itself."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            tensor.record_stream(self._stream)
        with _on(self._stream):
            tensor = tensor.detach()
            whole = self._whole(tensor)
            part = whole.new_empty(whole.numel() // self._at_a_site)
            if op == dist.ReduceOp.AVG:  # divided before it is added, as DDP does: float16 does not overflow
                whole.mul_(1.0 / self._ranks)
                op = dist.ReduceOp.SUM
            result: Sum = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
            scattering = _reduce_scatter(part, whole, op, group=self._scattering, async_op=True)
            work = _begun(scattering)
        self._scattered.put(
            _Step(work=work, op=op, whole=whole, slice=part, tensor=tensor, result=result),
        )
        return result

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all values in a row that can be cut into equal slices, without a copy if possible."""
        missing = -tensor.numel() % self._at_a_site
        if tensor.is_contiguous() and not missing:
            return tensor.view(-1)
        row = tensor.new_zeros(tensor.numel() + missing)
        row[: tensor.numel()].view(tensor.shape).copy_(tensor)
        return row


_reducers: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, _Reducer]] = weakref.WeakKeyDictionary()
"""By the mesh's own group of this rank's site."""


def _reducer(mesh: DeviceMesh) -> _Reducer:
    if mesh.mesh_dim_names != (SITE, LOCAL):
        raise UsageError(
            f"a mesh with the dimensions {mesh.mesh_dim_names}: expected {(SITE, LOCAL)}, as of site_mesh()"
        )
    key = mesh.get_group(LOCAL)
    if key not in _reducers:
        _reducers[key] = _Reducer(mesh)
    return _reducers[key]


def _own_group(groups: list[list[int]], backend: str) -> dist.ProcessGroup:
    """Create one process group for each list of ranks; return the one that this rank is in."""
    made = {tuple(ranks): dist.new_group(ranks, backend=backend) for ranks in groups}
    return cast("dist.ProcessGroup", next(made[ranks] for ranks in made if dist.get_rank() in ranks))


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _work_off(steps: _Steps, begin_next: Callable[[_Step], None], stream: torch.cuda.Stream | None) -> None:
    """Wait for each step in turn, and begin the next one; a failure reaches whoever waits for the sum."""
    while (step := steps.get()) is not None:
        try:
            with _on(stream):
                step.work.wait()
                begin_next(step)
        except Exception as error:  # noqa: BLE001 -- whatever it was, nobody may be left waiting
            step.result.set_exception(error)  # type: ignore[arg-type]  # PyTorch's own annotation is wrong


def _end(thread: threading.Thread, steps: _Steps) -> None:
    steps.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_S)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group, and the operation is asynchronous"
    return work


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
