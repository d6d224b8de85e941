"""NetStorm: data-parallel training across data centres, along topologies that follow the network."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.2.0"
