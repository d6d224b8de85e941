#!/usr/bin/env python3
"""GeoMX's compression: Bi-Sparse, FP16, and mixed-precision quantisation.

netstorm launch -n 4 -- python examples/geomx/gradient_compression.py --cpu --type bsc --threshold 0.01
netstorm launch -n 4 -- python examples/geomx/gradient_compression.py --cpu --type fp16
MXNET_KVSTORE_SIZE_LOWER_BOUND=1000 \
    netstorm launch -n 4 -- python examples/geomx/gradient_compression.py --cpu --type mpq

Gradients travel so in both directions, and every other codec is there, too (docs/guides/compression.md).
"""

from __future__ import annotations

from typing import Any

from training import mx, parser_of, positive_number, run


def main() -> None:
    """Train as the command line says."""
    parser = parser_of("Gradients under a codec.", learning_rate=0.005)
    parser.add_argument("-t", "--type", default="bsc", help="of GeoMX: bsc, fp16 or mpq; of NetStorm: any")
    parser.add_argument("--threshold", type=positive_number, help="share of the values that a rank sends")
    given = parser.parse_args()
    parameters: dict[str, Any] = {"type": given.type}
    if given.threshold is not None:
        parameters["threshold"] = given.threshold

    def make_store() -> Any:
        kvstore = mx.kv.create("dist_sync_netstorm")
        kvstore.set_gradient_compression(parameters)
        return kvstore

    run(
        given,
        make_store,
        lambda rate: mx.optimizer.Adam(learning_rate=rate),
        summed_over=lambda kvstore: kvstore.num_workers,
    )


if __name__ == "__main__":
    main()
