#!/usr/bin/env python3
"""NetStorm, Fig. 14: star, balanced tree, maximum spanning tree and one FAPT, static and changing.

python benchmarks/papers/netstorm_fig14.py [--seeds N] [--json FILE]
"""

from __future__ import annotations

import statistics

from common import Row, arguments, changing, form, internet2, report, round_time, rounds, star_times

_HUB = (
    "the paper names neither rates nor the star's hub. Ours are medians over networks drawn as it says; "
    "against a hub at a random site trees gain more than against the best one."
)
_BKT = (
    "edges of a balanced tree in order of rank cross the same links; how often depends on the numbering of "
    "the nodes, which the paper does not give."
)
_MST = (
    "not reproduced. With chunks in a pipeline the slowest edge counts, which is what a maximum spanning "
    "tree is best at; one FAPT is best for a single chunk. The paper's text gives no number."
)
_CHANGING = (
    "the paper's adaptive FAPT follows the network; ours keeps the trees of the beginning, since measuring "
    "is no part of the predictor (`netstorm bench wan --dynamic` has it, on real nodes)."
)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__ or "")
    best, mean, bkt, mst, dynamic = [], [], [], [], []
    for seed in range(options.seeds):
        network = internet2(seed)
        hub, hubs = star_times(network)
        fapt_policy, bkt_policy = form(network, "fapt", num_roots=1), form(network, "balanced")
        fapt = round_time(network, fapt_policy)
        best.append(hub / fapt)
        mean.append(hubs / fapt)
        bkt.append(round_time(network, bkt_policy) / fapt)
        mst.append(round_time(network, form(network, "mst")) / fapt)
        moving = changing(network, seed)
        dynamic.append(rounds(moving, bkt_policy) / rounds(moving, fapt_policy))
    rows = [
        _row("FAPT over star, best hub", "up to 6.7 x", best, _HUB),
        _row("FAPT over star, mean of all hubs", "up to 6.7 x", mean, _HUB),
        _row("FAPT over balanced tree", "+210 % (3.1 x)", bkt, _BKT),
        _row("FAPT over MST", "above 1", mst, _MST),
        _row("FAPT over balanced tree, changing network", "+70 % (1.7 x)", dynamic, _CHANGING),
    ]
    report("NetStorm Fig. 14: topologies, AlexNet, 9 nodes (median; range of the seeds)", rows, options)


def _row(what: str, paper: str, ratios: list[float], why: str) -> Row:
    middle = statistics.median(ratios)
    return Row(
        what=what,
        paper=paper,
        ours=f"{middle:.2f} x ({min(ratios):.2f} - {max(ratios):.2f})",
        why=why,
        value=middle,
    )


if __name__ == "__main__":
    main()
