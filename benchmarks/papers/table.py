#!/usr/bin/env python3
"""Make docs/papers.md of its template and of the JSON of the runs.

    python benchmarks/papers/table.py [--check]

page.md has the tables; {{FILE: ROW}} in it stands for our figure in that row of docs/data/papers/FILE.json,
or of another file of docs/data, of which `DERIVED` makes rows. `--check` writes nothing, and fails if the
page differs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "papers.md"
TEMPLATE: Final = Path(__file__).with_name("page.md")
DATA: Final = ROOT / "docs" / "data"
_PLACE: Final = re.compile(r"\{\{([\w-]+): ([^}]+)\}\}")
_TIMES: Final = "\N{MULTIPLICATION SIGN}"
_TOLERATED: Final = 0.5
"""Points of accuracy."""
_NOTE: Final = "<!-- benchmarks/papers/table.py makes this page of benchmarks/papers/page.md. -->\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args(arguments)
    page = _NOTE + rendered(TEMPLATE.read_text(encoding="utf-8"), DATA)
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if page == PAGE.read_text(encoding="utf-8"):
        return 0
    print(f"{PAGE.relative_to(ROOT)} differs from its data: run python benchmarks/papers/table.py")
    return 1


def rendered(template: str, data: Path) -> str:
    """Return a page with our figures in their places.

    Raises:
        KeyError: there is no such row; names it and those that there are.
        FileNotFoundError: there is no such file.
    """
    known: dict[str, Mapping[str, str]] = {}

    def figure(found: re.Match[str]) -> str:
        name, row = found.groups()
        if name not in known:
            known[name] = rows_of(name, data)
        if row not in known[name]:
            raise KeyError(f"{name} has no row {row!r}, only {', '.join(known[name])}")
        return known[name][row]

    return _PLACE.sub(figure, template)


def rows_of(name: str, data: Path) -> Mapping[str, str]:
    """Return the figures of a file of the folder, by row."""
    path = data / "papers" / f"{name}.json"
    content = json.loads((path if path.exists() else data / f"{name}.json").read_text(encoding="utf-8"))
    if name in DERIVED:
        return DERIVED[name](content)
    return {row["what"]: _typeset(row["ours"]) for row in content["rows"]}


def _typeset(text: str) -> str:
    return text.replace(" - ", "\N{EN DASH}").replace(" x", f" {_TIMES}")


def _change(ratio: float) -> str:
    percent = round(100 * (ratio - 1))
    return f"{percent:+d} %".replace("-", "\N{MINUS SIGN}") if percent else "0 %"


def _job_priorities(content: Any) -> Mapping[str, str]:
    """Return medians and longest makespans over those of stars that share fairly, and of fair trees."""
    by_case: dict[str, dict[int, list[float]]] = {}
    for row in content["rows"]:
        by_case.setdefault(row["case"], {})[row["seed"]] = row["makespans_s"]
    found = {}
    for base in ("star, fair", "trees, fair"):
        for case, of_seed in by_case.items():
            medians = [
                statistics.median(of_seed[seed]) / statistics.median(by_case[base][seed]) for seed in of_seed
            ]
            longest = [max(of_seed[seed]) / max(by_case[base][seed]) for seed in of_seed]
            least, most = _change(min(medians)), _change(max(medians))
            found[f"{case} over {base}: median"] = f"{_change(statistics.fmean(medians))} ({most} to {least})"
            found[f"{case} over {base}: longest"] = _change(statistics.fmean(longest))
    return found


def _tree_staleness(content: Any) -> Mapping[str, str]:
    """Return seconds and MB a clock over those of owners, by bound: the range of networks."""
    by_case = {(row["network"], row["staleness"], row["rules"]): row for row in content["rows"]}
    networks = sorted({network for network, _, _ in by_case})
    found = {}
    for base, rules in (("owners, cached", "trees, cached"), ("nodes: owners", "nodes: rounds")):
        for what in ("seconds", "megabytes"):
            for bound in content["options"]["staleness"]:
                pairs = [(by_case[one, bound, rules], by_case[one, bound, base]) for one in networks]
                if what in pairs[0][0]:
                    ratios = [one[what] / other[what] for one, other in pairs]
                    name = f"{rules} over {base}, bound {bound}: {what}"
                    found[name] = f"{_change(min(ratios))} to {_change(max(ratios))}"
    return found


def _medians(content: Any) -> Mapping[str, str]:
    """Return median seconds of systems in a race, and how many times as fast as another one each is."""
    seconds = {row["system"]: row["median_s"] for row in content["results"]}
    found = {system: f"{median:.2f} s" for system, median in seconds.items()}
    for system, median in seconds.items():
        found |= {
            f"{system} over {other}": f"{slower / median:.1f} {_TIMES}" for other, slower in seconds.items()
        }
    return found


def _seconds(content: Any) -> Mapping[str, str]:
    """Return the mean seconds of rows, and how they are related to the first one's."""
    first, *_ = content["rows"]
    found = {}
    for row in content["rows"]:
        found[row["what"]] = f"{row['mean_s']:.2f} s"
        found[f"{row['what']} over {first['what']}"] = _change(row["mean_s"] / first["mean_s"])
    return found


def _turns(content: Any) -> Mapping[str, str]:
    """Return the medians of rounds of all turns, over those alone."""
    times: dict[str, list[float]] = {}
    for row in content["rows"]:
        times.setdefault(row["what"], []).extend(row["rounds_s"])
    alone = statistics.median(times["alone"])
    return {
        what: f"{statistics.median(found):.2f} s ({statistics.median(found) / alone:.2f} {_TIMES})"
        for what, found in times.items()
    }


def _codecs(content: Any) -> Mapping[str, str]:
    """Return what parts of the bytes and the time of float32 codecs have."""
    return {
        f"{row['codec']}: {what}": f"{row['parts'][what]:.3f}".removeprefix("0")
        for row in content["results"]
        for what in ("bytes", "seconds")
    }


def _trainings(content: Any) -> Mapping[str, str]:
    """Return the times to the accuracy, and how many times as fast as MXNet each is."""
    rows = {row["system"]: row for row in content["results"]}
    mxnet = rows["mxnet-star-best"]["seconds_to_target"]
    found = {}
    for system, row in rows.items():
        name, took = system.removeprefix("netstorm-"), row["seconds_to_target"]
        found[name] = f"{took:.0f} s" if took else "not reached"
        found[f"{name}: times"] = f"{mxnet / took:.1f} {_TIMES}" if took else "not reached"
        found[f"{name}: accuracy"] = f"{100 * row['accuracy']:.1f} %"
    return found


def _lanes(content: Any) -> Mapping[str, str]:
    """Return the seconds of a step, and how many times as fast as another mode each is, of all turns.

    A name begins with the loss, and "bursts" if there are any; the bound ends it if there are several.
    """
    bounds = {row["bound"] for row in content["rows"] if row["mode"] == "datagrams"}
    turns: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in content["rows"]:
        case = f"{row['loss']:g}" + (" bursts" if row["bursts"] else "")
        mode = row["mode"] + (f" {row['bound']:g}" if len(bounds) > 1 else "")
        turns.setdefault(case, {}).setdefault(mode, []).append(row)
    found = {}
    for case, modes in turns.items():
        for mode, rows in modes.items():
            used = statistics.fmean(row.get("cpu", math.nan) for row in rows)
            found[f"{case} {mode}: processor"] = f"{used:.0%}".replace("%", " %")
            for what in ("mean", "p50", "p99", "first"):
                own = [row[f"{what}_s"] for row in rows]
                found[f"{case} {mode}: {what}"] = f"{statistics.fmean(own):.2f} s"
                for other, beside in modes.items():
                    ratios = [there[f"{what}_s"] / here for here, there in zip(own, beside, strict=True)]
                    mean, ends = statistics.fmean(ratios), (min(ratios), max(ratios))
                    span = f" ({ends[0]:.2f}\N{EN DASH}{ends[1]:.2f})" if len(ratios) > 1 else ""
                    found[f"{case} {mode} over {other}: {what}"] = f"{mean:.2f} {_TIMES}{span}"
    return found


def _loss_bounds(content: Any) -> Mapping[str, str]:
    """Return accuracies and points beside no loss, and the largest bound that costs at most half a point."""
    found = {}
    cases: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in content["rows"]:
        name = f"{row['model']} {row['rule']} {row['bound']:g}"
        found[f"{name}: accuracy"] = f"{row['accuracy']:.1f} %"
        if row["bound"]:
            sign = f"{row['difference']:+.1f}".replace("-", "\N{MINUS SIGN}")
            found[name] = f"{sign} ± {row['deviation']:.1f}"
            cases.setdefault((row["model"], row["rule"]), []).append(row)
    for (model, rule), rows in cases.items():
        costs = [row["bound"] for row in rows if row["difference"] < -_TOLERATED]
        good = [row["bound"] for row in rows if not costs or row["bound"] < min(costs)]
        found[f"{model} {rule}: tolerable"] = (
            f"{max(good):.0%}".replace("%", " %") if good else "none of these"
        )
    return found


def _packet_paths(content: Any) -> Mapping[str, str]:
    """Return how much longer steps of one mode take than another's: mean, and range of networks."""
    modes = [mode for mode in content["rows"][0] if mode != "seed"]
    found = {}
    for mode in modes:
        for other in modes:
            ratios = [row[mode] / row[other] for row in content["rows"]]
            span = f"({_change(min(ratios))} to {_change(max(ratios))})"
            found[f"{mode} over {other}"] = f"{_change(statistics.fmean(ratios))} {span}"
    return found


def _trained_alexnet(content: Any) -> Mapping[str, str]:
    """Return the hours that sums of an epoch of Fashion-MNIST take: 60,000 samples, nine batches of 32."""
    steps = 60_000 // (9 * 32)
    found = {row["what"]: _typeset(row["ours"]) for row in content["rows"]}
    for system, seconds in re.findall(r"(star|FAPT) ([\d.]+) s", found["AlexNet (244 MB)"]):
        found[f"epoch, {system}"] = f"{steps * float(seconds) / 3600:.1f} h"
    return found


DERIVED: Final[Mapping[str, Callable[[Any], Mapping[str, str]]]] = {
    "job-priorities": _job_priorities,
    "tree-staleness": _tree_staleness,
    "internet2-quarter": _medians,
    "wan_topologies": _medians,
    "paper_preset": _seconds,
    "wan_priorities": _turns,
    "wan_compression": _codecs,
    "wan_alexnet": _trainings,
    "wan_training_1": _trainings,
    "wan_training_2": _trainings,
    "wan_paper": _medians,
    "mlt_ablation": _lanes,
    "mlt_loss": _lanes,
    "mlt_dips": _lanes,
    "mlt_bounds": _lanes,
    "mlt_cpu": _lanes,
    "loss_bounds": _loss_bounds,
    "packet_paths": _packet_paths,
    "netstorm_fig19": _trained_alexnet,
}


if __name__ == "__main__":
    sys.exit(main())
