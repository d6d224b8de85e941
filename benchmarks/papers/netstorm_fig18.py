#!/usr/bin/env python3
"""NetStorm, Fig. 18: MXNet's star, then multi-root FAPT (lite), awareness (std), auxiliary paths (pro).

python benchmarks/papers/netstorm_fig18.py [--seeds N] [--json FILE]
"""

from __future__ import annotations

import statistics

from common import Row, arguments, changing, form, internet2, report, rounds

_LITE = (
    "the paper names neither rates nor the star's hub; in a changing network trees of the beginning lose "
    "what awareness is there to win back."
)
_MEASURED = (
    "measuring and detours are no part of the predictor. `netstorm bench wan --dynamic` runs lite, std and "
    "pro on real nodes; docs/benchmarks/changing.md has its figures."
)
_BOUND = (
    "no row of the paper: the trees are formed anew before each round from the true rates, so it bounds what "
    "measuring can give."
)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__ or "", seeds=6)
    best, mean, bound = [], [], []
    for seed in range(options.seeds):
        network = changing(internet2(seed), seed)
        lite = rounds(network, form(network, "fapt"))
        stars = [rounds(network, form(network, "star", hub=hub)) for hub in network.ranks]
        best.append(min(stars) / lite)
        mean.append(statistics.fmean(stars) / lite)
        bound.append(lite / rounds(network))
    rows = [
        _row("lite (9-root FAPT) over star, best hub", "5.5 x", best, _LITE),
        _row("lite (9-root FAPT) over star, mean of all hubs", "5.5 x", mean, _LITE),
        Row(what="std: + awareness", paper="+20 %", ours="on real nodes", why=_MEASURED),
        Row(what="pro: + auxiliary paths", paper="7.5 x", ours="on real nodes", why=_MEASURED),
        _row("true rates before each round, over lite", "-", bound, _BOUND),
    ]
    report("NetStorm Fig. 18: ablation, AlexNet, 9 nodes, changing network (median of seeds)", rows, options)


def _row(what: str, paper: str, ratios: list[float], why: str) -> Row:
    middle = statistics.median(ratios)
    spread = f"{middle:.2f} x ({min(ratios):.2f} - {max(ratios):.2f})"
    return Row(what=what, paper=paper, ours=spread, why=why, value=middle)


if __name__ == "__main__":
    main()
