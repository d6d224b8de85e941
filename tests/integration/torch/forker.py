"""A process that has imported PyTorch, and forks ranks: to import it for each of them would take seconds.

A request (`fork_server`) has the rank's program, its arguments, its environment, and the file for its answer.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from tests.integration.fork_server import serve
from tests.integration.torch.forked_scheduler import fork_schedulers

_IMPORTED_BY_DDP = "torch._dynamo.utils"
"""With 800 modules, when the first model is wrapped: 1.2 s of processor time."""


def main() -> None:
    """Import everything, and serve."""
    import torch

    importlib.import_module("netstorm.frontends.torch.elastic")
    importlib.import_module(_IMPORTED_BY_DDP)
    fork_schedulers()
    torch.set_num_threads(1)
    serve(_run, _import_program)


def _import_program(request: dict[str, Any]) -> Any:
    """Return the program; of a test (`ranks.on_ranks`), what its ranks do."""
    module, _, name = request["program"].partition(":")
    found = getattr(importlib.import_module(module), name)
    return getattr(found, "program", found)


def _run(request: dict[str, Any]) -> None:
    os.environ.update(request["environment"])
    answer = _import_program(request)(**request["arguments"])
    Path(request["answer"]).write_text(json.dumps(answer))
    # As a script ends, but for taking PyTorch's modules apart, which takes 0.4 s of processor time.
    interpreter: tuple[Any, Any] = (threading, atexit)
    interpreter[0]._shutdown()
    interpreter[1]._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
