"""The map of the code base, which a script writes from docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "docs_map.py"


def test_the_map_of_the_code_base_is_current():
    check = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)

    assert check.returncode == 0, check.stderr
