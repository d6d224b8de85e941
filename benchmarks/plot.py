#!/usr/bin/env python3
"""Draws a race again from its JSON file.

    netstorm bench plot docs/data/internet2-quarter.json docs/images/race.svg
    netstorm bench plot 16MB.json 64MB.json race.png --title "Nine sites" --systems gloo,netstorm-packing

Several files of one network become one picture: later ones add systems and sizes to earlier ones, and ratios
to MXNet's best hub are taken among all rows of a size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.arguments import writable
from race.plot import BEST, draw_race


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and return the exit code."""
    parser = argparse.ArgumentParser(prog="netstorm bench plot", description="Draws a race again.")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json", help="of netstorm bench wan")
    parser.add_argument("picture", type=writable, metavar="PICTURE", help="such as race.png or race.svg")
    parser.add_argument("--title", default="", metavar="TEXT", help="default: the network and its rates")
    parser.add_argument("--systems", default="", metavar="NAME,...", help="only these; default all")
    options = parser.parse_args(arguments)
    content = joined([json.loads(path.read_text(encoding="utf-8")) for path in options.results])
    wanted = options.systems.split(",") if options.systems else None
    content["results"] = [row for row in content["results"] if wanted is None or row["system"] in wanted]
    if not any(row["median_s"] for row in content["results"]):
        print("error: no such system has done a round", file=sys.stderr)
        return 1
    draw_race(content, options.picture, title=options.title)
    return 0


def joined(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the races as one: what ran is of the first, rows of the same system and size are of the last."""
    rows = {(row["bytes"], row["system"]): row for content in contents for row in content["results"]}
    best = {size: row["median_s"] for (size, system), row in rows.items() if system == BEST}
    if not contents[0]["network"]["dynamic"]:
        for (size, _), row in rows.items():
            if best.get(size) and row["median_s"]:
                row["vs_star_best"] = best[size] / row["median_s"]
    network = dict(contents[0]["network"])
    for name in ("optimum_s", "course"):
        known = {
            size: value for content in contents for size, value in content["network"].get(name, {}).items()
        }
        network[name] = known
    return {**contents[0], "network": network, "results": list(rows.values())}


if __name__ == "__main__":
    sys.exit(main())
