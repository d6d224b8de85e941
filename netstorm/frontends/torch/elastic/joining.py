"""Joins an elastic job, at its begin or later. PyTorch's rendezvous waits for ranks that may never come."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from netstorm.errors import UsageError
from netstorm.frontends.torch.errors import raises_torch_errors
from netstorm.frontends.torch.names import NAME
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.settings import Settings, foreign_variable

__all__ = ["init_process_group"]

_TIMEOUT: Final = timedelta(minutes=30)
"""PyTorch's own, for process groups on CPUs."""


@raises_torch_errors
def init_process_group(timeout: timedelta = _TIMEOUT) -> None:
    """Join the job, and make the default process group.

    In an elastic job (NETSTORM_ELASTIC=MIN:MAX) the group has MAX ranks, whether they have come or not. This
    process's rank is that of NETSTORM_RANK or RANK; without both, or with NETSTORM_RANK=-1, the lowest that
    is free. Groups made by `new_group` have NetStorm's backend.

    In any other job this is `torch.distributed.init_process_group("netstorm")`.

    Args:
        timeout: of calls, and of the wait until the job begins.

    Raises:
        UsageError: an elastic job without a scheduler that its environment names.
        NetStormError: the job does not come together, or has no place left.
    """
    settings = Settings.from_environment()
    if settings.elastic_range is None:
        dist.init_process_group(NAME, timeout=timeout)
        return
    if {settings.source("scheduler_host"), settings.source("scheduler_port")} == {"default"}:
        raise UsageError(
            f"NETSTORM_ELASTIC={settings.elastic}, and no scheduler is named, which must outlive every rank: "
            "start the job with `netstorm launch`, or name one in DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
        )
    # Seconds of imports, when DDP is made. Before it joins: results of the others then wait for this process.
    importlib.import_module("torch._dynamo.utils")
    changed: dict[str, object] = {"rank": _rank(settings)}
    if settings.source("wait_timeout_s") == "default":
        changed["wait_timeout_s"] = timeout.total_seconds()
    runtime = runtime_of_this_process(settings.changed(**changed), framework="PyTorch")
    # What PyTorch keeps in a store dies with the rank that holds it. NetStorm's groups need none.
    dist.init_process_group(
        NAME, store=HashStore(), rank=runtime.rank, world_size=runtime.size, timeout=timeout
    )


def _rank(settings: Settings) -> int:
    text = foreign_variable("RANK")
    if settings.source("rank") != "default" or not text:
        return settings.rank
    if not (text.isascii() and text.isdecimal() and int(text) < settings.places):
        raise UsageError(
            f"RANK={text}: expected a number from 0 to {settings.places - 1}, since "
            f"NETSTORM_ELASTIC={settings.elastic}; leave it out for any rank that is free"
        )
    return int(text)
