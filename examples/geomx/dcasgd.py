#!/usr/bin/env python3
"""GeoMX's DCASGD: asynchronous training whose late gradients are corrected by what has changed meanwhile.

netstorm launch -n 4 -- python examples/geomx/dcasgd.py --cpu
"""

from __future__ import annotations

from training import mx, parser_of, run


def main() -> None:
    """Train as the command line says."""
    parser = parser_of("DCASGD: asynchronous, with late gradients corrected.", learning_rate=0.1)
    parser.add_argument("--lamda", type=float, default=0.04, help="weight of the correction; 0: none")
    parser.set_defaults(epoch=8)  # plain steps learn slower than Adam's
    given = parser.parse_args()
    run(
        given,
        lambda: mx.kv.create("dist_async_netstorm"),
        lambda rate: mx.optimizer.DCASGD(learning_rate=rate, lamda=given.lamda),
    )


if __name__ == "__main__":
    main()
