"""Commands that show progress on a terminal write no escapes where there is none, whatever rich believes."""

from __future__ import annotations

import pytest

from tests.integration.forking import ROOT
from tests.integration.jobs import run_netstorm

FOUR_SITES = str(ROOT / "examples/networks/four_sites.yaml")


@pytest.mark.parametrize(
    "words",
    [
        ("doctor", "--quick"),
        ("plan", FOUR_SITES, "--model", "1MB", "--topology", "star"),
        ("simulate", "--network", FOUR_SITES, "--seeds", "1", "--model", "1MB", "--topology", "star"),
    ],
    ids=lambda words: words[0],
)
def test_what_a_file_would_hold_is_text(tmp_path, words):
    ended = run_netstorm(tmp_path, *words, FORCE_COLOR="1", TTY_COMPATIBLE="1")
    assert ended.code in {0, 1}, ended.text
    assert "\x1b" not in ended.err
    assert "\x1b[?25" not in ended.out  # colours were asked for, and nothing that moves
