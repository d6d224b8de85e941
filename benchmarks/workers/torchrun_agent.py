"""torchrun, which ends with the benchmark that started it, as do the ranks that it started."""

from __future__ import annotations

import importlib
import sys

from harness.lifeline import commands_from_stdin

if __name__ == "__main__":
    commands_from_stdin()
    importlib.import_module("torch.distributed.run").main(sys.argv[1:])
