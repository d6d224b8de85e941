"""All-reduce of sparse tensors (COO): indices and values of all ranks, which each rank adds up alike.

It takes three steps, the later of which depend on the sizes that the first finds out. They run on a thread of
their own, one call after the other, so they are in the same order at all ranks.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Final

import torch

from netstorm.frontends.torch.process_group.elements import reduction_name
from netstorm.frontends.torch.process_group.exchanges import Exchanges
from netstorm.frontends.torch.process_group.member import Member
from netstorm.frontends.torch.process_group.memory import described
from netstorm.frontends.torch.process_group.work import CallWork
from netstorm.kvstore.calls import GroupCalls
from netstorm.kvstore.process.runtime import CompletionThread

__all__ = ["SparseSums"]


class SparseSums:
    """The sparse all-reduces of one member of a group."""

    def __init__(self, member: Member, exchanges: Exchanges) -> None:
        self._member: Final = member
        self._exchanges: Final = exchanges
        self._calls: GroupCalls | None = None
        self._thread: Final = CompletionThread("netstorm-sparse")

    def all_reduce(self, tensor: torch.Tensor, op: Any, timeout: timedelta) -> CallWork:
        """Begin to sum a sparse tensor over all ranks, in place.

        Raises:
            NotImplementedError: another layout than COO, or another reduction than SUM.
        """
        if tensor.layout is not torch.sparse_coo:
            raise NotImplementedError(
                f"the netstorm backend sums sparse tensors in COO layout; this one is {tensor.layout}: call "
                "to_sparse_coo() or to_dense() first"
            )
        if reduction_name(op) != "SUM":
            raise NotImplementedError(
                f"the netstorm backend has SUM of sparse tensors, not {reduction_name(op)}: call to_dense() "
                "first"
            )
        if self._calls is None:
            self._calls = self._member.calls("/sparse")
        work = self._member.work(f"all_reduce(SUM) of sparse {described(tensor)}", [tensor], timeout)
        self._thread.run(lambda: self._run(tensor, work))
        return work

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _run(self, tensor: torch.Tensor, work: CallWork) -> None:
        try:
            with torch.no_grad():
                tensor.copy_(self._sum(tensor.detach().coalesce()))
        except Exception as error:  # noqa: BLE001 -- whatever it is, whoever waits must hear of it
            work.finish(error)
        else:
            work.finish(None)

    def _sum(self, mine: torch.Tensor) -> torch.Tensor:
        indices, values = mine.indices().cpu().contiguous(), mine.values().cpu().contiguous()
        counts = self._gather(torch.tensor([values.shape[0]], dtype=torch.int64))
        most = int(max(int(count) for count in counts))
        all_indices = self._gather(_padded(indices.t().contiguous(), most))
        all_values = self._gather(_padded(values, most))
        total = torch.sparse_coo_tensor(
            torch.cat([found[: int(n)] for found, n in zip(all_indices, counts, strict=True)]).t(),
            torch.cat([found[: int(n)] for found, n in zip(all_values, counts, strict=True)]),
            mine.shape,
        )
        return total.coalesce().to(mine.device)

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, by rank."""
        found = [torch.empty_like(mine) for _ in range(self._member.size)]
        ended = threading.Event()
        errors: list[Exception | None] = []

        def done(error: Exception | None) -> None:
            errors.append(error)
            ended.set()

        exchange = self._exchanges.all_gather(found, mine, "all_reduce of sparse tensors: all_gather")
        self._member.begin(exchange, done, calls=self._calls)
        ended.wait()  # the node ends every call, at the latest by NETSTORM_WAIT_TIMEOUT
        if errors[0] is not None:
            raise errors[0]
        return found


def _padded(rows: torch.Tensor, most: int) -> torch.Tensor:
    """Return a tensor with so many rows, the last of which mean nothing."""
    if rows.shape[0] == most:
        return rows
    longer = torch.zeros((most, *rows.shape[1:]), dtype=rows.dtype)
    longer[: rows.shape[0]] = rows
    return longer
