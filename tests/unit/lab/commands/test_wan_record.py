"""`netstorm wan record`: a network file of a recorded job."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from netstorm.lab.commands.wan import wan
from netstorm.topology.files import load_network
from tests.unit.lab.emulation.test_recorded import link, status

MESH = [(a, b) for a in range(3) for b in range(3) if a != b]


@pytest.fixture
def recording(tmp_path):
    """Return a recording of a job whose links halve."""
    path = tmp_path / "night.jsonl"
    lines = [status(at, *(link(a, b, rate) for a, b in MESH)) for at, rate in ((0.0, 10e6), (60.0, 5e6))]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    return path


def run(*words):
    return CliRunner().invoke(wan, ["record", *map(str, words)])


def test_the_file_has_the_links_and_their_changes_and_is_not_overwritten(recording, tmp_path):
    output = tmp_path / "network.yaml"
    done = run(recording, "-o", output)
    assert done.exit_code == 0, done.output
    assert done.output == f"{output}: 3 nodes, 6 links, 6 changes\n"
    network = load_network(output)
    assert {one.rate for one in network.links} == {10e6}
    assert {(one.at, one.rate) for one in network.changes} == {(60.0, 5e6)}
    again = run(recording, "-o", output)
    assert again.exit_code == 2
    assert "File exists" in again.output


def test_a_job_that_is_not_there_and_a_file_that_is_none_are_named(recording, tmp_path):
    done = run(recording, "-o", tmp_path / "n.yaml", "--job", "other")
    assert done.exit_code == 2
    assert "--job other: no such job in" in done.output
    missing = run(tmp_path / "no.jsonl", "-o", tmp_path / "n.yaml")
    assert missing.exit_code == 2
    assert "no.jsonl" in missing.output
    assert not (tmp_path / "n.yaml").exists()
