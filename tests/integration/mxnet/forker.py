"""A process that has imported MXNet, and forks nodes: the import takes 1.6 s of processor time.

A request (`fork_server`) has a script's file and its environment. The script runs as Python runs one.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.fork_server import serve


def main() -> None:
    """Import everything, and serve."""
    importlib.import_module("netstorm.frontends.mxnet")
    serve(_run)


def _run(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    script = Path(request["script"])
    sys.argv = [str(script)]
    sys.path[0] = str(script.parent)
    code = compile(script.read_text(), script, "exec")
    # The script's names replace this module's own: they live until the interpreter's end, as they should.
    names = vars(sys.modules["__main__"])
    script_names = {"__name__": "__main__", "__file__": str(script), "__builtins__": builtins}
    names.clear()
    names.update(script_names)
    exec(code, names)


if __name__ == "__main__":
    main()
