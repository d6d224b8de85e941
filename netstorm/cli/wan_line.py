"""One line on an emulated network, which goes with every result made in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netstorm.lab.emulation.wan import Wan

__all__ = ["wan_line"]


def wan_line(wan: Wan) -> str:
    """Return what a reader of results must know of the network they were made in."""
    return (
        f"an emulated network of {wan.network.size} nodes and {len(wan.network.links)} links; "
        f"backend: {wan.backend_why}; congestion control: {wan.congestion}"
    )
