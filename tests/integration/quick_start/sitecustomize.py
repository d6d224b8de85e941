"""Lets processes that tests start do without what MXNet imports if it can: Python runs this first (`site`).

MXNet takes scikit-learn for the base class of one deprecated class, and scipy.stats for the calibration of
quantised networks. They are 0.9 s of the 2 s of processor time that MXNet needs to start, and the tests start
more than a hundred such processes.
"""

from __future__ import annotations

import sys
from typing import Any

modules: dict[str, Any] = sys.modules
modules.update({"sklearn": None, "scipy.stats": None})  # importing them is an ImportError now
