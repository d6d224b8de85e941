"""A scheduler or server of MXNet's own store: importing MXNet with such a DMLC_ROLE runs it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.lifeline import die_with_stdin

die_with_stdin()

import netstorm.frontends.mxnet.compat  # noqa: E402, F401
