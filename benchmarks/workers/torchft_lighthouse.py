"""torchft's lighthouse, which ends with the benchmark that started it."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.lifeline import die_with_stdin

_JOIN_MS = 120_000
"""How long ranks may take to come: beginning with fewer would be another training."""

die_with_stdin()
host, port, ranks, *times = sys.argv[1:]
join_ms, heartbeat_ms = map(int, times or (_JOIN_MS, _JOIN_MS))
lighthouse: Any = importlib.import_module("torchft.coordination").LighthouseServer(
    bind=f"{host}:{port}", min_replicas=int(ranks), join_timeout_ms=join_ms, heartbeat_timeout_ms=heartbeat_ms
)
threading.Event().wait()
