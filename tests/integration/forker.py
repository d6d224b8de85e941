"""A process that has imported NetStorm, and forks schedulers, nodes and launchers: the import takes 0.6 s.

A request (`fork_server`) has the words of a command, `netstorm ...` or those of a script, and its
environment. Both run as Python runs them. Any other command replaces the process that was forked.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.fork_server import serve

IMPORTED = (
    "netstorm.cli.launch.command",
    "netstorm.cli.launch.hosts",
    "netstorm.cli.launch.local_job",
    "netstorm.cli.main",
    "netstorm.cli.scheduler",
    "netstorm.kvstore.process.runtime",
    "netstorm.scheduler.process.scheduler_process",
)


def main() -> None:
    """Import everything, and serve."""
    for name in IMPORTED:
        importlib.import_module(name)
    serve(run)


def run(request: dict[str, Any]) -> None:
    """Be what a request asks for."""
    os.environ.clear()
    os.environ.update(request["environment"])
    program, *words = request["words"]
    if program == "netstorm":
        sys.argv = ["netstorm", *words]
        importlib.import_module("netstorm.cli.main").app(prog_name="netstorm")
    elif program.endswith(".py"):
        sys.argv = [program, *words]
        _run_script(Path(program))
    else:
        os.execvp(program, request["words"])


def _run_script(script: Path) -> None:
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
