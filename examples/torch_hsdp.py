#!/usr/bin/env python3
"""Trains a small GPT with HSDP: its parameters are sharded inside each site, and replicated across sites.

Inside a site Gloo gathers parameters and scatters gradients. Across sites NetStorm averages each shard.

netstorm launch -n 4 -- python examples/torch_hsdp.py --sites 2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from digits.errors import ExampleError, usage_errors
from digits.options import whole_number
from gpt.model import GPT
from gpt.options import add_gpt_options
from gpt.report import Report
from gpt.text import Batches, load_text
from torch_start import print_digest, process_group


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="Trains a small GPT with HSDP over sites.")
    add_gpt_options(parser)
    parser.add_argument(
        "--sites",
        type=whole_number,
        metavar="N",
        help="share the ranks of this machine among N sites, to try it; by default a host is a site, "
        "or NETSTORM_SITE names it",
    )
    parser.add_argument("--digest", action="store_true", help="each rank prints its final weights' SHA-256")
    options = parser.parse_args()
    with usage_errors():
        if options.width % options.heads:
            raise ExampleError(f"--width {options.width}: expected a multiple of --heads {options.heads}")
        with process_group(options.backend):
            train(options)


def train(options: argparse.Namespace) -> None:
    """Train together with the other ranks."""
    from netstorm.frontends.torch.site_mesh import site_mesh  # noqa: PLC0415 - see `process_group`

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.sites:
        if ranks % options.sites:
            raise ExampleError(f"--sites {options.sites}: {ranks} ranks cannot be shared equally")
        os.environ["NETSTORM_SITE"] = f"site-{rank * options.sites // ranks}"
    mesh = site_mesh()
    if rank == 0:
        print(f"{mesh.size(0)} sites of {mesh.size(1)} ranks: {mesh.mesh.tolist()}", flush=True)

    torch.manual_seed(options.seed)  # sharding keeps each rank's own values, so all must have the same
    model = GPT(context=options.context, width=options.width, layers=options.layers, heads=options.heads)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    batches = Batches(
        text=load_text(),
        rank=rank,
        batch_size=options.batch_size,
        context=options.context,
        seed=options.seed,
    )
    report = Report(
        rank=rank,
        steps=options.steps,
        every=options.report,
        tokens_per_step=ranks * options.batch_size * options.context,
    )
    for step, (inputs, targets) in enumerate(batches.steps(0, options.steps), 1):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        report.step(step, loss.item())
    if options.digest:
        print_digest(gathered(model))


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters whole, put together from the shards of this rank's site. All ranks call it."""
    whole = {}
    for name, value in model.state_dict().items():
        whole[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return whole


if __name__ == "__main__":
    main()
