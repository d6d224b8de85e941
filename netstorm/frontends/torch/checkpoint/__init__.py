"""Checkpoints of a PyTorch job: `save` and `load`, over any backend of `torch.distributed`, or without one.

    from netstorm.frontends.torch import checkpoint

    saving = checkpoint.save("checkpoints", {"model": model, "optimizer": optimizer}, step=step, keep=3)
    ...
    loaded = checkpoint.load("checkpoints", missing_ok=True)
    if loaded is not None:
        loaded.restore({"model": model, "optimizer": optimizer})

The format holds tensors and plain values, and is not pickle: reading a checkpoint runs no code of its own.
"""

from netstorm.checkpoint.background import Saving
from netstorm.checkpoint.reading import latest_step
from netstorm.frontends.torch.checkpoint.api import LoadedCheckpoint, load, save

__all__ = ["LoadedCheckpoint", "Saving", "latest_step", "load", "save"]
