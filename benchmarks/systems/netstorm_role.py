"""NetStorm's scheduler, which ends with the benchmark that started it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.lifeline import die_with_stdin
from netstorm.cli.main import app

die_with_stdin()
app(["scheduler"])
