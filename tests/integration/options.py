"""Programs that are given wrong options: all in one process, which imports what they need once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.integration.forking import ROOT
from tests.integration.jobs import Ended

_RUN_ALL = """
import contextlib, io, json, os, runpy, sys

ends = []
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    code, out, err = 0, io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            code = 1
            err.write(end.code)
    ends.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(ends))
"""


def run_all(commands: Sequence[Sequence[object]], variables: Mapping[str, str]) -> list[Ended]:
    """Run scripts with arguments, one after the other, as `__main__`; return how each has ended."""
    words = [[str(word) for word in command] for command in commands]
    ended = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, json.dumps(words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [Ended(*end) for end in json.loads(ended.stdout.splitlines()[-1])]
