#!/usr/bin/env python3
"""NetStorm, Fig. 20: throughput by CHUNK_SIZE, and by UPDATE_TIME.

python benchmarks/papers/netstorm_fig20.py [--seeds N] [--json FILE]
"""

from __future__ import annotations

import statistics

from common import Row, arguments, form, internet2, report, round_time

_CHUNKS = (62_500, 125_000, 250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000)
_WHY = (
    "the paper's text has no numbers: best from 0.5 to 1 million, much worse above. Large chunks lose as in "
    "the paper: trees without chunks, and the time until a chain of nodes is busy. Small ones gain, as the "
    "predictor knows no cost of a message."
)
_MEASURING = (
    "it is about measuring at run time, which is no part of the predictor; docs/concepts/awareness.md."
)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__ or "", seeds=6)
    times: dict[int, list[float]] = {size: [] for size in _CHUNKS}
    for seed in range(options.seeds):
        network = internet2(seed)
        for size, found in times.items():
            found.append(round_time(network, form(network, "fapt", chunk=4 * size), chunk=4 * size))
    rows = []
    for size, found in times.items():
        ratio = _gain(times[1_000_000], found)
        paper = "best" if 500_000 <= size <= 1_000_000 else "lower" if size > 1_000_000 else "about as good"
        what = f"CHUNK_SIZE {size / 1e6:g} million"
        rows.append(Row(what=what, paper=paper, ours=f"{ratio:.2f} x", why=_WHY, value=ratio))
    rows += [
        Row(what=name, paper=paper, ours="not predicted", why=_MEASURING)
        for name, paper in (
            ("UPDATE_TIME", "best at 5 s"),
            ("PROBE_CHUNK_NUM", "good from 4 to 32"),
            ("PROBE_CHUNK_SIZE", "good from 0.01 to 4 million"),
        )
    ]
    title = "NetStorm Fig. 20: throughput over that of 1 million, AlexNet, 9 nodes, 9 roots (median of seeds)"
    report(title, rows, options)


def _gain(base: list[float], times: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(base, times, strict=True))


if __name__ == "__main__":
    main()
