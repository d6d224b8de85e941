"""`netstorm.ray.run` on a real Ray of one host: the page's example, PyTorch, a failure, no room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.docs.pages import blocks
from tests.integration.jobs import PYTHONPATH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("ray", reason="pip install 'netstorm[ray]'")
pytest.importorskip("torch", reason="pip install 'netstorm[torch]'")

MORE = """
import os
from netstorm.errors import UsageError

def with_torch():
    import torch, torch.distributed as dist
    dist.init_process_group("netstorm")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return os.environ["RANK"], total.item(), os.environ["NETSTORM_TOPOLOGY"]

def fails():
    import netstorm
    group = netstorm.Group()
    group.barrier()
    if group.rank == 1:
        raise ValueError("disk full")
    group.barrier()

print(run(with_torch, nodes=2, variables={"NETSTORM_TOPOLOGY": "star"}))
try:
    run(fails, nodes=3)
except ValueError as error:
    print("failed:", str(error).splitlines()[-1])
try:
    run(fails, nodes=4, placed_within_s=2.0)
except UsageError as error:
    print("refused:", error)

ray.shutdown()
"""


def test_a_function_runs_at_all_ranks_and_a_failure_ends_them(tmp_path: Path) -> None:
    page = "docs/guides/slurm-and-kubernetes.md"
    (block,) = (block.text for block in blocks("python") if block.page == page)
    (tmp_path / "job.py").write_text(block + MORE)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "job.py")],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "[('0', 2.0, 'star'), ('1', 2.0, 'star')]" in ended.stdout
    assert "failed: ValueError: disk full" in ended.stdout
    assert "refused: nodes=4: Ray has not placed them within 2 s" in ended.stdout
