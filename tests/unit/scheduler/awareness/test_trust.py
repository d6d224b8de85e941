"""Whether a job follows what it measures, by what it was told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from netstorm.protocol.messages import KeySpec
from netstorm.scheduler.options import chunk_sizes
from netstorm.scheduler.policies import Awareness, FormationRequest, first_policy, initial_assumptions
from netstorm.scheduler.rounds import KeyRegistry
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
    assumption = initial_assumptions(Settings.from_environment(given))
    awareness = Awareness(assumption, first_policy(assumption), 0.0, one_machine=False)
    assert (awareness.due() < 1e9) == follows


@pytest.mark.parametrize(("topology", "forms"), [("auto", True), ("ring", False)])
def test_what_the_job_sums_is_planned_for_where_rates_are_believed_too(
    tmp_path: Path, topology: str, *, forms: bool
) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(f"nodes: {{0: {{}}, 1: {{}}, 2: {{}}}}\nrouting: underlay\n{RATES}\n")
    given = {"DMLC_NUM_WORKER": "3", "NETSTORM_NETWORK": str(file), "NETSTORM_TOPOLOGY": topology}
    settings = Settings.from_environment(given)
    assumption = initial_assumptions(settings)
    policy = first_policy(assumption)
    awareness = Awareness(assumption, policy, 0.0, one_machine=False)
    keys = KeyRegistry(chunk_sizes(settings))
    keys.register(0, KeySpec(namespace=0, name="w", shape=(10_000,), dtype="float32"))
    awareness.record_keys(keys, 1.0)
    assert awareness.due() == (1.3 if forms else math.inf)
    question = awareness.poll(policy, keys, 2.0)
    assert isinstance(question, FormationRequest) == forms
    if isinstance(question, FormationRequest):
        assert question.options.tensors == (40_000,)
        assert not question.options.unmeasured  # what is believed need not be explored
    assert awareness.due() == math.inf
