"""What a step of a PyTorch job waited for."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist

from netstorm.errors import UsageError
from netstorm.frontends.torch.step_report import step_report
from tests.integration.torch.begin import PATIENCE, begin, store
from tests.integration.torch.ranks import on_ranks

LATE_S = 0.5


@on_ranks(3)
def test_a_report_names_the_rank_that_is_late_and_begins_anew_with_each_step() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        step_report()
    rank, _ = begin()
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    step_report()
    for turn in range(3):
        if rank == 2:
            store().wait([f"{turn} at 0", f"{turn} at 1"], PATIENCE)  # from now on this rank alone is late
            time.sleep(LATE_S)
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            store().set(f"{turn} at {rank}", "")
            work.wait()
    report = step_report()
    assert report.seconds >= 3 * LATE_S
    assert report.bytes_sent > 100_000
    assert report.policy >= 1
    if rank == 2:
        assert report.compute_s >= 3 * LATE_S
        assert report.ranks.get(0, 0.0) + report.ranks.get(1, 0.0) < report.seconds / 2
    else:
        assert report.network_s >= 3 * LATE_S
        assert max(report.ranks, key=report.ranks.__getitem__) == 2
        assert report.ranks[2] >= LATE_S
        assert report.links[2, rank] >= LATE_S
        assert "waited for rank 2" in str(report)
        assert report.scalars()["netstorm/waiting_s/rank_2"] == report.ranks[2]
    if rank == 2:
        work = dist.barrier(async_op=True)
        store().set("at the end", "")
        work.wait()
    else:
        store().wait(["at the end"], PATIENCE)
        dist.barrier()
    again = step_report()
    assert 0 < again.bytes_sent < report.bytes_sent / 2
    assert again.ranks.get(2, 0.0) < LATE_S
    dist.destroy_process_group()
