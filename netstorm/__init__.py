"""NetStorm: data-parallel training across data centres, along topologies that follow the network.

What is here is stable. It is imported when it is first used, so that `import netstorm` costs nothing.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["Group", "GroupFuture", "NetStormError", "PeerError", "Unavailable", "UsageError", "__version__"]

__version__ = "0.2.0"

_MODULES = {
    "Group": "netstorm.frontends.numpy",
    "GroupFuture": "netstorm.frontends.numpy",
    "NetStormError": "netstorm.errors",
    "PeerError": "netstorm.errors",
    "Unavailable": "netstorm.errors",
    "UsageError": "netstorm.errors",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'netstorm' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
