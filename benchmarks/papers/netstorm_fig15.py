#!/usr/bin/env python3
"""NetStorm, Fig. 15: throughput with one to nine roots, in a changing network.

python benchmarks/papers/netstorm_fig15.py [--seeds N] [--json FILE]
"""

from __future__ import annotations

import statistics

from common import Row, arguments, changing, form, internet2, report, round_time, rounds

_WHY = (
    "the paper measures with auxiliary paths, which use links that no tree uses, and with trees that follow "
    "the network; the predictor has neither, so this is what the roots alone give."
)
_BASE = "what the others are compared with."
_LINEAR = "the paper's text says that throughput grows linearly, and gives a number for nine roots only."


def main() -> None:
    """Print the table."""
    options = arguments(__doc__ or "", seeds=6)
    times: dict[int, list[float]] = {roots: [] for roots in range(1, 10)}
    static: dict[int, list[float]] = {roots: [] for roots in times}
    for seed in range(options.seeds):
        network = internet2(seed)
        moving = changing(network, seed)
        for roots, found in times.items():
            policy = form(network, "fapt", num_roots=roots)
            found.append(rounds(moving, policy))
            static[roots].append(round_time(network, policy))
    rows = []
    for roots, found in times.items():
        gain, still = _gain(times[1], found), _gain(static[1], static[roots])
        paper = {1: "1 x", 9: "+180 % (2.8 x)"}.get(roots, "in between")
        why = _BASE if roots == 1 else _WHY if roots == 9 else _LINEAR
        rows.append(
            Row(
                what=f"{roots} roots",
                paper=paper,
                ours=f"{gain:.2f} x; static {still:.2f} x",
                why=why,
                value=gain,
            )
        )
    report("NetStorm Fig. 15: roots, AlexNet, 9 nodes, changing network (median of seeds)", rows, options)


def _gain(one: list[float], several: list[float]) -> float:
    return statistics.median(before / after for before, after in zip(one, several, strict=True))


if __name__ == "__main__":
    main()
