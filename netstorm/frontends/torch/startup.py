"""Joins the job when a program creates its first NetStorm group, and makes the groups of this process.

The members of the first group are the job's nodes, and its ranks the job's. All later groups are made of
them, over the same connections. If no scheduler is named (`DMLC_PS_ROOT_URI` or `DMLC_PS_ROOT_PORT`), rank 0
starts one beside itself, and the others find it in PyTorch's store: that is how jobs of `torchrun` begin.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from netstorm.errors import SettingsError, UsageError
from netstorm.frontends.torch.errors import let_backward_raise_own_errors, raises_torch_errors
from netstorm.frontends.torch.gradient_codecs.unedited import codec_of_settings, let_models_use_it
from netstorm.frontends.torch.process_group.group import NetStormProcessGroup
from netstorm.frontends.torch.process_group.member import Member
from netstorm.frontends.torch.process_group.monitored_barrier import let_pytorch_call_us
from netstorm.frontends.torch.scheduler_process import SchedulerProcess, meet, refuse
from netstorm.kvstore.calls import CallPositions
from netstorm.kvstore.process.runtime import (
    CompletionThread,
    Runtime,
    after_close,
    leave_job,
    runtime_of_this_process,
)
from netstorm.settings import Settings, foreign_variable

__all__ = ["before_leaving", "create_process_group", "join_before_rendezvous", "untested_version"]

_log = logging.getLogger(__name__)

_NEWEST_TESTED: Final = (2, 13)
"""Of PyTorch's releases."""


class _Job:
    """The job that this process is in, and its groups."""

    def __init__(self, runtime: Runtime, ranks: tuple[int, ...], scheduler: SchedulerProcess | None) -> None:
        self.runtime: Final = runtime
        self.ranks: Final = ranks
        """PyTorch's ranks, by rank in the job."""
        self.namespace: Final = runtime.open_namespace()
        self.thread: Final = CompletionThread("netstorm-completion")
        self.positions: Final = CallPositions(later=runtime.node.requests.needs_state)
        self.groups = 0
        self.made: Final[Counter[str]] = Counter()
        """How many groups of a name there were: PyTorch gives the name of a group that is no more to another
        one of the same ranks (`use_local_synchronization`). All members have made equally many.
        """
        self.before_leaving: Final[list[Callable[[], None]]] = []
        self._scheduler: Final = scheduler

    def close(self) -> None:
        """Clear up when the node has left the job."""
        self.thread.close()
        if self._scheduler is not None:
            self._scheduler.wait()


class _Process:
    """The jobs of this process, one after the other."""

    def __init__(self) -> None:
        self.lock: Final = threading.Lock()
        self.job: _Job | None = None


_process: Final = _Process()


@raises_torch_errors
def create_process_group(options: Any, _: object = None) -> NetStormProcessGroup:
    """Create a group; PyTorch calls it, at every member.

    Args:
        options: PyTorch's `_DistributedBackendOptions`.

    Raises:
        NetStormError: the job does not come together, or a later group has other ranks than the first one.
    """
    let_pytorch_call_us()
    let_backward_raise_own_errors()
    with _process.lock:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        job = _process.job
        if job is None:
            job = _process.job = _join(options.store, ranks, options.group_rank, options.timeout)
        outside = sorted(set(ranks) - set(job.ranks))
        if outside:
            text = (
                f"a NetStorm group of ranks {list(ranks)}: ranks {outside} are not in the first NetStorm "
                f"group, of ranks {list(job.ranks)}, which rank {ranks[options.group_rank]} is still in; "
                "create a group of all ranks first: init_process_group('netstorm'), or "
                "new_group(backend='netstorm')"
            )
            refuse(options.store, options.group_rank, text)  # the others may wait for this one
            raise UsageError(text)
        job.made[options.group_id] += 1
        again = job.made[options.group_id]
        member = Member(
            options.group_id if again == 1 else f"{options.group_id} ({again})",
            [job.ranks.index(rank) for rank in ranks],
            runtime=job.runtime,
            namespace=job.namespace,
            thread=job.thread,
            timeout=options.timeout,
            positions=job.positions,
        )
        job.groups += 1
        return NetStormProcessGroup(member, lambda: _group_closed(job), options.store)


@raises_torch_errors
def join_before_rendezvous(
    backend: str,
    _init_method: object = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    *_: object,
    **others: object,
) -> None:
    """Join the job whose scheduler the environment names, before PyTorch's rendezvous: that waits for minutes
    for a rank that has died, and cannot say which. Takes the arguments of `init_process_group`.

    A group that has other ranks than the job, and an elastic job, join later.

    Raises:
        NetStormError: the job does not come together.
    """
    settings = Settings.from_environment()
    named = settings.source("rank") != "default" and settings.source("num_workers") != "default"
    is_the_job = rank in {-1, settings.rank} and world_size in {-1, settings.num_workers}
    with _process.lock:
        if _process.job is not None or not (named and is_the_job) or settings.elastic or others.get("_ranks"):
            return
        if settings.source("wait_timeout_s") == "default":
            default = dist.distributed_c10d._get_default_timeout(dist.Backend(backend))  # noqa: SLF001
            settings = settings.changed(wait_timeout_s=(timeout or default).total_seconds())
        runtime_of_this_process(settings, framework="PyTorch")


def before_leaving(function: Callable[[], None]) -> None:
    """Have `function` called before this process leaves the job that it is in, with its last group."""
    with _process.lock:
        if _process.job is not None:
            _process.job.before_leaving.append(function)


def _group_closed(job: _Job) -> None:
    """Leave the job with the last group; the node goes on to forward for the others."""
    with _process.lock:
        job.groups -= 1
        if job.groups == 0 and _process.job is job:
            for function in job.before_leaving:
                function()
            _process.job = None
            leave_job()


def untested_version(version: str) -> str | None:
    """Return what to say of a version of PyTorch that is newer than those that are tested; None: nothing."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) <= _NEWEST_TESTED:
        return None
    tested = ".".join(map(str, _NEWEST_TESTED))
    return (
        f"PyTorch {version} is newer than {tested}, with which this release of NetStorm is tested; if "
        f"something fails, try `pip install 'torch=={tested}.*'`"
    )


def _join(store: Store, ranks: tuple[int, ...], rank: int, timeout: timedelta) -> _Job:
    if rank == 0 and (warning := untested_version(torch.__version__)):
        _log.warning("%s", warning)
    if codec_of_settings(Settings.from_environment()) is not None:
        let_models_use_it()
    settings, scheduler = _settings(store, len(ranks), rank, timeout)
    try:
        runtime = runtime_of_this_process(settings, framework="PyTorch")
    except BaseException:
        if scheduler is not None:
            scheduler.stop()
        raise
    job = _Job(runtime, ranks, scheduler)
    after_close(job.close)
    return job


def _reproducible(settings: Settings) -> Settings:
    """Return settings that ask for reproducible results, if the script does and they do not say otherwise."""
    if settings.source("reproducible") != "default" or not torch.are_deterministic_algorithms_enabled():
        return settings
    try:
        return settings.changed(reproducible=True)
    except SettingsError as error:
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise
        _log.warning("results are not reproducible: %s", error)
        return settings


def _settings(
    store: Store, size: int, rank: int, timeout: timedelta
) -> tuple[Settings, SchedulerProcess | None]:
    """Return this process's settings, and the scheduler that it has started, if it has."""
    settings = _reproducible(Settings.from_environment())
    own: dict[str, object] = {"rank": rank}
    if settings.source("num_workers") == "default":
        own["num_workers"] = size
    elif settings.places != size:
        if settings.elastic:
            raise UsageError(
                f"NETSTORM_ELASTIC={settings.elastic} for a first NetStorm group of {size} ranks: expected "
                f"{settings.places}, one for each node that may come; "
                "netstorm.frontends.torch.elastic.init_process_group() makes that group"
            )
        if foreign_variable("WORLD_SIZE") != str(settings.num_workers):
            raise UsageError(
                f"DMLC_NUM_WORKER={settings.num_workers} for a first NetStorm group of {size} ranks: give "
                "both the same number, or leave DMLC_NUM_WORKER out"
            )
        own["num_workers"] = size
    if settings.source("wait_timeout_s") == "default":
        own["wait_timeout_s"] = timeout.total_seconds()
    named = {settings.source("scheduler_host"), settings.source("scheduler_port")} != {"default"}
    # The named scheduler is that of a job of all ranks. A group of some of them is a job of its own.
    if named and own.get("num_workers", settings.places) == settings.places:
        return settings.changed(**own), None
    host, port, scheduler = meet(store, rank, size, settings.changed(**own))
    return settings.changed(**own, scheduler_host=host, scheduler_port=port), scheduler
