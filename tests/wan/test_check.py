"""`netstorm wan check` on the nine-node network. Tolerances are the command's own.

A value is wrong if it is so in each of several measurements: other work stalls one now and then, and so does
the host of a virtual machine. All links at once have a quarter of their rates: 3 Gbit/s through one process
are a matter of how much of the machine it gets. docs/guides/emulated-wan.md has what full rates come to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.wan.traces import ROOT, netstorm

FILE = ROOT / "examples/networks/internet2.yaml"

RUNS = 4
Row = dict[str, Any]


def wrong_each_time(
    file: Path, *words: str, values: tuple[str, ...]
) -> dict[tuple[int, int, str], list[Row]]:
    """Measure a network until each value of each link was right once, or often enough; return the rest."""
    wrong: dict[tuple[int, int, str], list[Row]] = {}
    for run in range(RUNS):
        done = netstorm("wan", "check", str(file), "--json", *words, timeout=180)
        rows: list[Row] = json.loads(done.stdout)["links"]
        assert done.returncode == (1 if any(row["wrong"] for row in rows) else 0), done.stderr
        assert len(rows) == 2 * len(yaml.safe_load(file.read_text())["links"])
        now = {
            (row["source"], row["target"], value): row
            for row in rows
            for value in values
            if value in row["wrong"]
        }
        wrong = {key: [*wrong.get(key, []), row] for key, row in now.items() if key in wrong or not run}
        if not wrong:
            break
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_link_alone_has_its_rate_within_3_percent_and_its_round_trip_within_1_ms(tmp_path):
    content = yaml.safe_load(FILE.read_text())
    del content["changes"]
    content["nodes"] = {rank: content["nodes"][rank] for rank in range(3)}
    content["links"] = [link for link in content["links"] if max(link["between"]) < 3]  # of 22 and 141 Mbit/s
    file = tmp_path / "west.yaml"
    file.write_text(yaml.safe_dump(content))
    assert not wrong_each_time(file, values=("rate", "round trip", "loss"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_links_at_once_have_their_rates_within_10_percent(tmp_path):
    file = tmp_path / "quarter.yaml"
    file.write_text(yaml.safe_dump(quarter(yaml.safe_load(FILE.read_text()))))
    assert not wrong_each_time(file, "--all", values=("rate",))


def quarter(content: Any) -> Any:
    """A network file's content with a quarter of all rates, which are in Mbit/s."""
    if isinstance(content, list):
        return [quarter(one) for one in content]
    if isinstance(content, dict):
        return {key: a_quarter_of(one) if key == "rate" else quarter(one) for key, one in content.items()}
    return content


def a_quarter_of(rate: str) -> str:
    return f"{float(rate.removesuffix('Mbit')) / 4}Mbit"


def test_a_small_network_passes_its_check(tmp_path):
    file = tmp_path / "pair.yaml"
    file.write_text("nodes: {0: {}, 1: {}}\nlinks: [{between: [0, 1], rate: 20Mbit, latency: 5ms}]\n")
    assert not wrong_each_time(file, "--seconds", "1.5", "--warm-up", "1", values=("rate", "round trip"))
