"""Which compression `netstorm plan --compute` names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app

FILE = Path(__file__).parents[4] / "examples/networks/four_sites.yaml"


@pytest.mark.parametrize(
    ("seconds", "codec"), [(100, "none"), (17, "fp16"), (11, "int8"), (0.5, "powersgd rank=16")]
)
def test_the_mildest_codec_that_keeps_up_with_a_steps_computation_is_named(
    seconds: float, codec: str
) -> None:
    arguments = ["plan", str(FILE), "--topology", "fapt", "--compute", str(seconds)]
    said = CliRunner().invoke(app, arguments)
    assert f"compression: {codec} " in said.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["codecs"]
    assert found["chosen"] == codec
    times = list(found["times_s"].values())
    assert times == sorted(times, reverse=True)
