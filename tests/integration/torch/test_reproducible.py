"""`torch.use_deterministic_algorithms(True)`: a program's bits are the same in each run.

They depend on the order in which values are added, with ranks that come at other times.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netstorm.frontends.torch.asynchronous import AsynchronousSGD
from netstorm.frontends.torch.gradient_codecs import CodecHookState
from tests.integration.forking import Forker
from tests.integration.torch.begin import begin, error_of
from tests.integration.torch.ranks import Ranks, on_ranks


def train(*, backwards: bool) -> str:
    """Return the digest of what was summed and trained; ranks are late in ascending or descending order."""
    torch.use_deterministic_algorithms(mode=True)
    rank, size = begin()

    def be_late() -> None:
        time.sleep(0.01 * (size - 1 - rank if backwards else rank))

    be_late()
    groups: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1, 2], [1, 2, 3], None)]
    if backwards:
        groups.reverse()  # keys of groups come to the scheduler in another order
    found = {}
    for group in groups:
        if dist.get_rank(group) >= 0:
            values = values_of(rank, 40_000)
            be_late()
            dist.all_reduce(values, group=group)
            found[dist.get_world_size(group), dist.get_process_group_ranks(group)[0]] = values
    part = torch.empty(5000)
    be_late()
    dist.reduce_scatter_tensor(part, values_of(rank, 5000 * size))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    trained: Any = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        be_late()
        (trained(values_of(rank, 640).reshape(10, 64).clamp(-1, 1)) ** 2).mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for tensor in (*(found[key] for key in sorted(found)), part, *model.parameters()):
        digest.update(tensor.detach().numpy().tobytes())
    for what, refused in (
        ("AsynchronousSGD", error_of(AsynchronousSGD, model, lr=0.1)),
        ("the codec 'auto'", error_of(CodecHookState, "auto", model)),
    ):
        assert f"{what} with NETSTORM_REPRODUCIBLE=1: expected one of them" in refused
    dist.destroy_process_group()
    return digest.hexdigest()


def values_of(rank: int, count: int) -> torch.Tensor:
    """Return values of many magnitudes, the same in each run."""
    chance = torch.Generator().manual_seed(rank)
    magnitudes = 10.0 ** torch.randint(-4, 4, (count,), generator=chance)
    return torch.randn(count, generator=chance) * magnitudes


def test_two_runs_end_with_the_same_bits_though_other_ranks_are_late(forker: Forker, tmp_path: Path) -> None:
    runs = []
    for backwards in (False, True):
        folder = tmp_path / str(backwards)
        folder.mkdir()
        with Ranks(forker, folder) as ranks:
            ranks.start(train, 4, backwards=backwards)
            runs.append(ranks.answers())
    assert runs[0] == runs[1]


@on_ranks(1, NETSTORM_LOSS_BOUND=0.1)
def test_what_cannot_be_reproduced_is_refused_with_what_asks_for_it() -> None:
    torch.use_deterministic_algorithms(mode=True)
    said = error_of(begin)
    assert "NETSTORM_REPRODUCIBLE=1 with NETSTORM_LOSS_BOUND=0.1: expected one of them" in said
    assert "PyTorch's use_deterministic_algorithms(True) sets the former" in said
