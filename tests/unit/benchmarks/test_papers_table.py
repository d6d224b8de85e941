"""The papers' page is made of its template and the JSON of the runs."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

PAPERS = Path(__file__).parents[3] / "benchmarks" / "papers"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PAPERS))
    return importlib.import_module("table")


def test_the_page_is_up_to_date(table: Any) -> None:
    assert table.main(["--check"]) == 0


def test_a_figure_stands_in_its_place_and_one_that_is_not_there_is_an_error(
    table: Any, tmp_path: Path
) -> None:
    (tmp_path / "papers").mkdir()
    rows = {"rows": [{"what": "FAPT over star", "ours": "2.4 x (1.6 - 3.3)"}]}
    (tmp_path / "papers" / "fig.json").write_text(json.dumps(rows))
    assert (
        table.rendered("| {{fig: FAPT over star}} |", tmp_path)
        == "| 2.4 \N{MULTIPLICATION SIGN} (1.6\N{EN DASH}3.3) |"
    )
    with pytest.raises(KeyError, match=r"fig has no row 'MST', only FAPT over star"):
        table.rendered("{{fig: MST}}", tmp_path)


def test_rows_of_other_runs_are_ratios_of_the_same_seed_or_network(table: Any, tmp_path: Path) -> None:
    spans = {"star, fair": [2, 4, 8], "star, priorities": [1, 3, 8], "trees, fair": [1, 2, 3]}
    rows = [{"seed": 1, "case": case, "makespans_s": each} for case, each in spans.items()]
    (tmp_path / "job-priorities.json").write_text(json.dumps({"rows": rows}))
    found = table.rows_of("job-priorities", tmp_path)
    assert found["star, priorities over star, fair: median"].count("\N{MINUS SIGN}25 %") == 3
    assert found["star, priorities over star, fair: longest"] == "0 %"


def test_steps_of_lanes_are_compared_turn_by_turn(table: Any, tmp_path: Path) -> None:
    times = {"datagrams": (1.0, 2.0), "tcp-bbr": (2.0, 2.0)}
    rows = [
        {"loss": 0.01, "bursts": False, "bound": 0.2, "mode": mode}
        | {f"{what}_s": took for what in ("mean", "p50", "p99", "first")}
        for mode, turns in times.items()
        for took in turns
    ]
    (tmp_path / "mlt_loss.json").write_text(json.dumps({"rows": rows}))
    found = table.rows_of("mlt_loss", tmp_path)
    assert found["0.01 datagrams: mean"] == "1.50 s"
    assert found["0.01 datagrams over tcp-bbr: p99"] == "1.50 \N{MULTIPLICATION SIGN} (1.00\N{EN DASH}2.00)"


@pytest.mark.parametrize(
    ("differences", "expected"),
    [((-0.1, -0.6, 0.2), "1 %"), ((-0.1, -0.4, -0.5), "30 %"), ((-0.9, 0.0, 0.0), "none of these")],
)
def test_a_bound_is_tolerable_if_no_smaller_one_costs_half_a_point(
    table: Any, tmp_path: Path, differences: tuple[float, ...], expected: str
) -> None:
    base = {"model": "mlp", "accuracy": 90.0, "deviation": 0.1}
    rows: list[dict[str, Any]] = [base | {"rule": "none", "bound": 0.0}]
    for bound, difference in zip((0.01, 0.1, 0.3), differences, strict=True):
        rows.append(base | {"rule": "lost", "bound": bound, "difference": difference})
    (tmp_path / "loss_bounds.json").write_text(json.dumps({"rows": rows}))
    assert table.rows_of("loss_bounds", tmp_path)["mlp lost: tolerable"] == expected


def test_every_row_has_all_columns_and_every_script_is_among_those_that_make_all_anew() -> None:
    columns = None
    for line in (PAPERS / "page.md").read_text(encoding="utf-8").splitlines():
        columns = (columns or line.count("|")) if line.startswith("|") else None
        assert columns is None or line.count("|") == columns, line[:80]
    everything = (PAPERS / "all.sh").read_text(encoding="utf-8")
    scripts = {path.stem for path in PAPERS.glob("*_fig*.py")}
    assert scripts == set(re.findall(r"\w+_fig\d+", everything))
