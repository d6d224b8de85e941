"""Smaller chunks on links that are known to be slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.topology.files import load_network

SLOW = """
nodes: {0: {}, 1: {}, 2: {}, 3: {}}
links:
  - {between: [0, 1], rate: 13Mbit, latency: 5ms}
  - {between: [1, 2], rate: 14Mbit, latency: 5ms}
  - {between: [2, 3], rate: 12Mbit, latency: 5ms}
"""


def test_a_job_uses_them_and_a_round_over_slow_links_is_shorter(tmp_path: Path) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(SLOW)
    ones = [np.ones(500_000, np.float32)] * 4
    seconds = []
    for asked in (["chunk_size"], []):
        settings: dict[str, Any] = dict.fromkeys(asked, 32_768)
        network = load_network(file)
        cluster = SimulatedCluster(4, network=network, network_file=str(file), model="2MB", **settings).join()
        cluster.allreduce("w", ones)
        began = cluster.now
        for total in cluster.allreduce("w", ones):
            assert (total == 4.0).all()
        seconds.append(cluster.now - began)
    assert seconds[1] < 0.9 * seconds[0]
