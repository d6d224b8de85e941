#!/usr/bin/env python3
"""GeoMX's fully-synchronous algorithm on HiPS: two sites, each with nodes inside.

netstorm launch -n 4 --site a,a,b,b --topology hierarchical -- python examples/geomx/hips.py --cpu

Gradients are summed within a site first, and cross the WAN once a site, as with GeoMX's local and global
servers. Here one node of each site sends for it. Without --topology the trees are those that the network
carries best.
"""

from __future__ import annotations

from training import mx, parser_of, run


def main() -> None:
    """Train as the command line says."""
    given = parser_of("HiPS: sums within sites, then across them.", learning_rate=0.005).parse_args()
    run(
        given,
        lambda: mx.kv.create("dist_sync_netstorm"),
        lambda rate: mx.optimizer.Adam(learning_rate=rate),
        summed_over=lambda kvstore: kvstore.num_workers,
    )


if __name__ == "__main__":
    main()
