"""Whether a job follows what it measures, by what it was told."""

from __future__ import annotations

from pathlib import Path

import pytest

from netstorm.scheduler.awareness import Awareness
from netstorm.scheduler.formation import assumed, first_policy
from netstorm.settings import Settings

RATES = (
    "links: [{between: [0, 1], rate: 10Mbit, latency: 5ms}, {between: [1, 2], rate: 20Mbit, latency: 5ms}]"
)
NO_RATES = RATES.replace("20Mbit", "10Mbit")


@pytest.mark.parametrize(
    ("links", "switch", "follows"),
    [
        (RATES, {}, False),
        (RATES, {"ENABLE_AWARENESS": "1"}, True),
        (NO_RATES, {}, True),
        ("", {}, True),
    ],
    ids=["rates", "rates, and asked to", "links only", "nothing"],
)
def test_rates_that_somebody_knows_are_believed_unless_it_is_asked_for(
    tmp_path: Path, links: str, switch: dict[str, str], *, follows: bool
) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(f"nodes: {{0: {{}}, 1: {{}}, 2: {{}}}}\n{links}\n")
    given = {"DMLC_NUM_WORKER": "3", **({"NETSTORM_NETWORK": str(file)} if links else {}), **switch}
    assumption = assumed(Settings.from_environment(given))
    awareness = Awareness(assumption, first_policy(assumption), 0.0, one_machine=False)
    assert (awareness.due() < 1e9) == follows
