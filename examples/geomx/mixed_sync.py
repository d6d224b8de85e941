#!/usr/bin/env python3
"""GeoMX's mixed-synchronous algorithm: nodes of a site in step, and no site waits for another one.

netstorm launch -n 4 --site a,a,b,b -- python examples/geomx/mixed_sync.py --cpu --dcasgd
"""

from __future__ import annotations

from netstorm.frontends.mxnet.local_updates import MixedSync
from training import mx, parser_of, run


def main() -> None:
    """Train as the command line says."""
    parser = parser_of("MixedSync: synchronous in a site, asynchronous between sites.", learning_rate=0.003)
    parser.add_argument("-dc", "--dcasgd", action="store_true", help="correct late gradients (DCASGD)")
    given = parser.parse_args()
    run(
        given,
        MixedSync,
        lambda rate: (
            mx.optimizer.DCASGD(learning_rate=5 * rate, momentum=0.9)
            if given.dcasgd
            else mx.optimizer.Adam(learning_rate=rate)
        ),
        summed_over=lambda kvstore: len(kvstore.sites.local),
    )


if __name__ == "__main__":
    main()
