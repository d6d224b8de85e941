from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

timeline: Any = importlib.import_module("benchmarks.studies.timeline")


def write_trace(path: Path, rank: int, target: int, sent_us: float, machine: str) -> None:
    details = {"round": 4, "bytes": 250_000, "sent_us": sent_us, "queued_ms": 1.0, "rtt_ms": 20.0}
    details |= {"window": 1_000_000, "in_flight": 0, "waiting": 0, "transmissions": 1}
    event = {"ph": "X", "name": "chunk", "pid": rank, "tid": target + 1, "ts": sent_us, "dur": 50_000.0}
    offset = {"rank": rank, "forgotten": 0, "machine": machine, "cluster_offset_us": -sent_us}
    trace = {"displayTimeUnit": "ms", "otherData": offset, "traceEvents": [{**event, "args": details}]}
    path.write_text(json.dumps(trace))


def test_the_traces_of_a_job_s_nodes_are_one_timeline_by_the_cluster_s_clock(tmp_path, capsys):
    files = [tmp_path / f"trace.{rank}.json" for rank in range(2)]
    for rank, file in enumerate(files):
        write_trace(file, rank, 1 - rank, 1e6 * (5 + 1000 * rank), machine=f"host{rank}")
    assert timeline.main([str(file) for file in files]) == 0
    printed = capsys.readouterr().out
    assert "round 4: 0.051 s until the last acknowledgement" in printed
    assert "0→1" in printed
    assert "1→0" in printed
