"""One door to all schemes: a name and a network in, a policy out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from netstorm.errors import UsageError
from netstorm.topology.fapt import fapt
from netstorm.topology.forest import Forest
from netstorm.topology.metric import CHUNK_BYTES
from netstorm.topology.network import Network, Rank
from netstorm.topology.policy import Policy
from netstorm.topology.star import star

__all__ = ["SCHEMES", "Options", "form_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a scheme may be told; each reads what concerns it."""

    num_roots: int = 0
    """How many ranks are roots; 0: all."""
    hub: Rank | None = None
    """None: the best placed one."""
    chunk_bytes: int = CHUNK_BYTES


SCHEMES: Final[Mapping[str, Callable[[Network, Options], Forest]]] = {
    "fapt": lambda network, options: fapt(network, options.num_roots, chunk_bytes=options.chunk_bytes),
    "star": lambda network, options: star(network, options.hub),
}


def form_policy(
    network: Network,
    topology: str = "fapt",
    *,
    version: int = 0,
    num_roots: int = 0,
    hub: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Policy:
    """Return the policy of a scheme for `network`.

    Args:
        topology: a name in `SCHEMES`.
        num_roots: how many ranks are roots of a tree (`fapt`); 0: all of them.
        hub: rank of the hub (`star`); None or -1: the best placed one.
        chunk_bytes: bytes of a full chunk.

    Raises:
        UsageError: an unknown scheme, or an option that does not suit the network.
        Unreachable: names the ranks without a path.
    """
    scheme = SCHEMES.get(topology)
    if scheme is None:
        raise UsageError(f"topology {topology!r}: expected one of {', '.join(sorted(SCHEMES))}")
    options = Options(
        num_roots=num_roots, hub=None if hub is None or hub == -1 else Rank(hub), chunk_bytes=chunk_bytes
    )
    return scheme(network, options).policy(version)
