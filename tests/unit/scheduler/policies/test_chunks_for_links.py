"""Chunks on links that are known to be slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from netstorm.scheduler.policies import initial_assumptions
from netstorm.settings import Settings


def network_file(folder: Path, *rates: str) -> str:
    """Return the name of a file with a line of nodes, and these links between them."""
    file = folder / "network.yaml"
    nodes = ", ".join(f"{rank}: {{}}" for rank in range(len(rates) + 1))
    links = ", ".join(
        f"{{between: [{rank}, {rank + 1}], rate: {rate}, latency: 5ms}}" for rank, rate in enumerate(rates)
    )
    file.write_text(f"nodes: {{{nodes}}}\nlinks: [{links}]\n")
    return str(file)


@pytest.mark.parametrize(
    ("rates", "given", "smallest"),
    [
        (("155Mbit", "155Mbit", "20Mbit"), {}, 32_768),
        (("30Mbit", "30Mbit", "155Mbit"), {}, 16_384),
        (("14Mbit", "13Mbit", "2Mbit"), {}, 8_192),
        (("1Mbit", "2Mbit", "3Mbit"), {}, 8_192),
        (("1Mbit", "2Mbit", "3Mbit"), {"PROBE_CHUNK_SIZE": "64KiB"}, 16_384),
    ],
    ids=["fast", "slower", "slow", "very slow", "but measuring"],
)
def test_chunks_take_the_typical_link_20_ms_but_do_not_become_tiny(
    tmp_path: Path, rates: tuple[str, ...], given: dict[str, str], smallest: int
) -> None:
    file = network_file(tmp_path, *rates)
    settings = Settings.from_environment({"DMLC_NUM_WORKER": "4", "NETSTORM_NETWORK": file, **given})
    found = initial_assumptions(settings)
    assert found.chunks is not None
    assert (found.chunks.smallest, found.chunks.largest) == (smallest, 65_536)


@pytest.mark.parametrize(
    ("rates", "given"),
    [
        (("1Mbit", "2Mbit", "3Mbit"), {"CHUNK_SIZE": "32768"}),
        (("1Mbit", "1Mbit", "1Mbit"), {}),
    ],
    ids=["asked for", "rates not known"],
)
def test_what_somebody_asks_for_stays_and_so_does_what_nobody_knows_better(
    tmp_path: Path, rates: tuple[str, ...], given: dict[str, str]
) -> None:
    file = network_file(tmp_path, *rates)
    settings = Settings.from_environment({"DMLC_NUM_WORKER": "4", "NETSTORM_NETWORK": file, **given})
    assert initial_assumptions(settings).chunks is None
