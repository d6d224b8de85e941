#!/usr/bin/env python3
"""GeoMX's hierarchical frequency aggregation: K1 local steps, K2 averages of a site, one of all.

netstorm launch -n 4 --site a,a,b,b -- python examples/geomx/hfa.py --cpu

Without arguments the periods are those of MXNET_KVSTORE_HFA_K1 (20) and MXNET_KVSTORE_HFA_K2 (10), so that an
average of all comes after 200 steps: the default is 20 epochs, which have 440 on four nodes. GeoMX's script
pushes parameters every K1 steps; here the store counts, so the loop is that of every other script.
"""

from __future__ import annotations

from netstorm.frontends.mxnet.local_updates import HFA
from training import mx, parser_of, run, whole_number


def main() -> None:
    """Train as the command line says."""
    parser = parser_of("HFA: local steps, averages of sites, averages of all.", learning_rate=0.005)
    parser.add_argument("--k1", type=whole_number, help="local steps between averages of a site")
    parser.add_argument("--k2", type=whole_number, help="averages of a site to one of all")
    parser.set_defaults(epoch=20)
    given = parser.parse_args()
    store = run(given, lambda: HFA(given.k1, given.k2), lambda rate: mx.optimizer.Adam(learning_rate=rate))
    if store.rank == 0:
        print(f"{store.averages} averages, {store.averages // store.periods.k2} of all", flush=True)


if __name__ == "__main__":
    main()
