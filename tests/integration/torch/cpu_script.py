"""Runs a script that asks for a GPU a rank with tensors of the CPU in their place.

torchrun --nproc-per-node 2 -m tests.integration.torch.cpu_script SCRIPT ARGUMENT...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

from tests.integration.torch.wheel.cpu_for_gpu import use_the_cpu_for_gpus


def main(script: str, *arguments: str) -> None:
    """Run a script as if it were the program."""
    use_the_cpu_for_gpus()
    # PyTorch's tests, whose import has changed the process, set no global flags; scripts do.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
