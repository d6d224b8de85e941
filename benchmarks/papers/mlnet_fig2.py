#!/usr/bin/env python3
"""MLNET, Fig. 2: how traffic is distributed over links, 800 workers and 200 servers, not oversubscribed.

python benchmarks/papers/mlnet_fig2.py [--seeds N] [--json FILE]
"""

from __future__ import annotations

import numpy as np
from common import Row, arguments, report
from mlnet_fig1 import SHAPES, loads

_SERVERS = 200
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_WHY = (
    "the paper's distributions are in its figure only; its text says that both have less traffic on a link. "
    "Ours are pushes, in gradients a link, of the links of hosts and those above together."
)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__ or "", seeds=2)
    found = {}
    for name in SHAPES:
        drawn = [loads(name, _SERVERS, seed) for seed in range(options.seeds)]
        found[name] = np.quantile(np.concatenate([(*one.hosts, *one.core) for one in drawn]), _QUANTILES)
    rows = []
    for name, traffic in found.items():
        share = float(traffic[0] / found["BASELINE"][0])
        each = ", ".join(f"{value:.2f}" for value in traffic)
        paper = "-" if name == "BASELINE" else "less than BASELINE"
        rows.append(Row(what=name, paper=paper, ours=each, why=_WHY, value=share))
    report("MLNET Fig. 2: gradients a link: median, 90 %, 99 %, most", rows, options)


if __name__ == "__main__":
    main()
