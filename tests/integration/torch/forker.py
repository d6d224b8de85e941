"""A process that has imported PyTorch, and forks ranks: to import it for each of them would take seconds.

A request (`fork_server`) has the rank's program, its arguments, its environment, and the file for its answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.fork_server import serve

_IMPORTED_BY_DDP = "torch._dynamo.utils"
"""With 800 modules, when the first model is wrapped: 1.2 s of processor time."""


def main() -> None:
    """Import everything, and serve."""
    import numpy as np  # noqa: F401 -- the ranks have it, too
    import torch

    importlib.import_module("netstorm.frontends.torch.elastic")
    importlib.import_module(_IMPORTED_BY_DDP)
    torch.set_num_threads(1)
    serve(_run)


def _run(request: dict[str, Any]) -> None:
    os.environ.update(request["environment"])
    module, _, name = request["program"].partition(":")
    answer = getattr(importlib.import_module(module), name)(**request["arguments"])
    Path(request["answer"]).write_text(json.dumps(answer))
    sys.exit(0)


if __name__ == "__main__":
    main()
