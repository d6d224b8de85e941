"""The variables of one node: what it finds in its environment besides what all nodes have in common."""

from __future__ import annotations

from typing import Final

from netstorm.cli.launch.variables.pytorch import SET_FOR_EACH_RANK, Master, Place, torch_variables

__all__ = ["RESERVED", "node_variables"]

RESERVED: Final = (
    "DMLC_ROLE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_NUM_WORKER",
    "NETSTORM_RANK",
    "NETSTORM_RESTART",
    *SET_FOR_EACH_RANK,
)
"""Variables that the launcher sets for each process."""


def node_variables(
    *,
    rank: int,
    size: int,
    host: str,
    port: int | None,
    site: str | None,
    place: Place,
    master: Master | None,
) -> dict[str, str | int]:
    """Return the variables with a node's rank, the scheduler's address, and what PyTorch needs.

    NetStorm's rank is PyTorch's.

    Args:
        rank: the node's.
        size: number of nodes.
        host: the scheduler's.
        port: the scheduler's; None: it is in the environment, or the default.
        site: the node's; None: not set.
        place: where the node is among those of its host.
        master: where rank 0 listens for PyTorch; None: not set.
    """
    variables: dict[str, str | int] = {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": host,
        "DMLC_NUM_WORKER": size,
        "NETSTORM_RANK": rank,
        **torch_variables(rank=rank, size=size, place=place, master=master),
    }
    if port is not None:
        variables["DMLC_PS_ROOT_PORT"] = port
    if site is not None:
        variables["NETSTORM_SITE"] = site
    return variables
