"""`netstorm wan check` on the nine-node network. Tolerances are the command's own, and wider where noted.

All links at once have a quarter of their rates here: 3 Gbit/s through one process are a matter of how much of
the machine it gets. docs/guides/emulated-wan.md has what full rates come to.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.wan.traces import ROOT, netstorm

FILE = ROOT / "examples/networks/internet2.yaml"

STOLEN = 0.02
"""Part of the processors' time that a virtual machine's host keeps back with which rates and round trips are
not the emulation's doing any more: whoever carries the packets stands still for milliseconds."""


@contextlib.contextmanager
def unless_stolen() -> Iterator[None]:
    """Tell what fails for want of a processor from what is wrong: the former is skipped."""
    before = psutil.cpu_times()
    try:
        yield
    except AssertionError:
        after = psutil.cpu_times()
        share = (after.steal - before.steal) / max(sum(after) - sum(before), 1e-9)
        if share >= STOLEN:
            pytest.skip(f"the machine's host kept back {share:.0%} of the processors' time")
        raise


def links(file: Path, *words: str, timeout: float) -> list[dict[str, Any]]:
    done = netstorm("wan", "check", str(file), "--json", *words, timeout=timeout)
    assert done.returncode in {0, 1}, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["links"]
    return rows


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_each_link_alone_has_its_rate_within_3_percent_and_its_round_trip_within_1_ms(tmp_path):
    content = yaml.safe_load(FILE.read_text())
    del content["changes"]
    content["nodes"] = {rank: content["nodes"][rank] for rank in range(3)}
    content["links"] = [link for link in content["links"] if max(link["between"]) < 3]  # of 22 and 141 Mbit/s
    file = tmp_path / "west.yaml"
    file.write_text(yaml.safe_dump(content))
    with unless_stolen():
        rows = links(file, timeout=90)
        assert len(rows) == 4
        if any(row["wrong"] for row in rows):  # a machine with other work stalls a measurement now and then
            again = links(file, timeout=90)
            off = [two for one, two in zip(rows, again, strict=True) if one["wrong"] and two["wrong"]]
            assert not off, off


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_all_links_at_once_have_their_rates_within_10_percent(tmp_path):
    file = tmp_path / "quarter.yaml"
    file.write_text(yaml.safe_dump(quarter(yaml.safe_load(FILE.read_text()))))
    with unless_stolen():
        rows = links(file, "--all", timeout=180)
        assert len(rows) == 28
        off = [row for row in rows if "rate" in row["wrong"]]
        assert len(off) <= 3, off
        assert all(abs(row["rate_error"]) < 0.2 for row in off), off
        mean = sum(row["rate_error"] for row in rows) / len(rows)
        assert abs(mean) < 0.1
        assert abs(statistics.median(row["rate_error"] for row in rows)) < 0.05


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
    done = netstorm("wan", "check", str(file), "--seconds", "1.5", "--warm-up", "1", "--json")
    found = json.loads(done.stdout)
    # Its own tolerances are for a machine that has nothing else to do: the slow tests hold it to them.
    off = [row for row in found["links"] if row["wrong"]]
    assert done.returncode == (1 if off else 0), done.stderr
    assert len(found["links"]) == 2
    for row in found["links"]:
        assert -0.5 < row["rate_error"] < 0.1, row
        assert -0.001 < row["round_trip_error"] < 1, row
