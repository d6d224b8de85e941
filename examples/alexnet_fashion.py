#!/usr/bin/env python3
"""Trains AlexNet on Fashion-MNIST as NetStorm's paper does (section IX-A): Adam, 1e-4, batches of 32.

netstorm launch -n 3 -- python examples/alexnet_fashion.py --data-dir FOLDER
netstorm launch -n 3 -- python examples/alexnet_fashion.py --framework torch --data-dir FOLDER --epochs 2

FOLDER has the four IDX files of Fashion-MNIST. It takes all options of gluon_digits.py, with
`--framework torch` those of torch_digits.py; they beat the paper's. `--json FILE` writes loss, accuracy and
seconds of each epoch.
"""

from __future__ import annotations

import argparse
import sys

_PAPERS = [
    *("--dataset", "fashion-mnist", "--model", "alexnet"),
    *("--optimizer", "adam", "--lr", "1e-4", "--batch-size", "32"),
]


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--framework", choices=("mxnet", "torch"), default="mxnet")
    given, others = parser.parse_known_args()
    sys.argv[1:] = [*_PAPERS, *others]
    if given.framework == "torch":
        import torch_digits as example  # noqa: PLC0415 - neither framework needs the other
    else:
        import gluon_digits as example  # type: ignore[no-redef]  # noqa: PLC0415
    example.main()


if __name__ == "__main__":
    main()
