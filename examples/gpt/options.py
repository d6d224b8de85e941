"""The options that both scripts have."""

from __future__ import annotations

import argparse

from digits.options import positive_number, whole_number

__all__ = ["add_gpt_options"]


def add_gpt_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the model, its training and the job."""
    add = parser.add_argument
    add("--backend", default="netstorm", help="what init_process_group is asked for")
    add("--steps", type=whole_number, default=200)
    add("--batch-size", type=whole_number, default=8, help="samples in a batch of one rank")
    add("--context", type=whole_number, default=64, help="characters of a sample")
    add("--width", type=whole_number, default=128, help="of the model; a multiple of --heads")
    add("--layers", type=whole_number, default=4)
    add("--heads", type=whole_number, default=4)
    add("--lr", type=positive_number, default=1e-3, help="learning rate of AdamW")
    add("--seed", type=int, default=1, help="of initial weights and of the batches")
    add("--report", type=whole_number, default=20, metavar="STEPS", help="how often rank 0 writes a line")
