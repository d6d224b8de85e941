"""What a step of a PyTorch job spent its time on, for a person or a tracker of experiments."""

from __future__ import annotations

from netstorm.errors import UsageError
from netstorm.frontends.torch.startup import runtime_of_job
from netstorm.kvstore.process.step_report import StepReport

__all__ = ["StepReport", "step_report"]


def step_report() -> StepReport:
    """Return what this rank has waited for since the last call; the first call begins to watch.

    Raises:
        UsageError: this process has no group of NetStorm's.
        NetStormError: the failure of the job.
    """
    runtime = runtime_of_job()
    if runtime is None:
        raise UsageError(
            'step_report() without a group: call torch.distributed.init_process_group("netstorm") first'
        )
    return runtime.step_report()
