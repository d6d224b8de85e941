"""What an optimizer keeps between updates besides its states, as plain values: counts, rates, a schedule.

Checkpoints hold these instead of a pickle of the optimizer: reading one runs no code. A new job makes its
optimizer by its own script, and then takes these values over.
"""

from __future__ import annotations

from typing import Final

from netstorm.errors import CheckpointError
from netstorm.frontends.mxnet.compat import mx

__all__ = ["optimizer_values", "restore_optimizer_values"]

_SCRIPTS: Final = frozenset({"rescale_grad", "aggregate_num", "allow_np_array", "multi_precision"})
"""Attributes that the script, or MXNet, sets anew: a gradient's scale depends on the number of ranks."""
_COUNTS: Final = "_all_index_update_counts"
_SCHEDULE: Final = "lr_scheduler"


def optimizer_values(optimizer: mx.optimizer.Optimizer) -> dict[str, object]:
    """Return the class, the hyper-parameters that are plain values, the counts of updates, and the rates'
    schedule.
    """
    schedule = optimizer.lr_scheduler
    return {
        "class": type(optimizer).__name__,
        "values": _plain(optimizer),
        "counts": {device: dict(counts) for device, counts in vars(optimizer)[_COUNTS].items()},
        "schedule": None
        if schedule is None
        else {"class": type(schedule).__name__, "values": _plain(schedule)},
    }


def restore_optimizer_values(optimizer: mx.optimizer.Optimizer, values: object) -> None:
    """Set what `optimizer_values` has returned; nothing is set if the classes differ.

    Raises:
        CheckpointError: the optimizer or its schedule is of another class.
    """
    if not isinstance(values, dict):
        raise CheckpointError("the checkpoint has no values of an optimizer")
    _check_class("an optimizer", values.get("class"), optimizer)
    schedule, kept = optimizer.lr_scheduler, values.get("schedule")
    _check_class("a schedule of learning rates", None if kept is None else kept["class"], schedule)
    if kept is not None:
        vars(schedule).update(kept["values"])
    vars(optimizer).update(values["values"])
    for device, counts in values["counts"].items():
        vars(optimizer)[_COUNTS].setdefault(device, {}).update(counts)


def _plain(thing: object) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(thing).items()
        if name not in _SCRIPTS and (value is None or type(value) in {bool, int, float, str})
    }


def _check_class(what: str, kept: object, live: object) -> None:
    name = None if live is None else type(live).__name__
    if kept != name:
        raise CheckpointError(
            f"the checkpoint was written with {what} {kept}, and this store has {name}: use the same, or "
            "load_checkpoint(…, states=False) to load the values alone"
        )
