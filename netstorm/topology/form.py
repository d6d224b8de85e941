"""Forms a policy for a network by the name of a scheme. A new scheme is registered here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from netstorm.errors import UsageError
from netstorm.topology.files import custom
from netstorm.topology.network import Network, Routing
from netstorm.topology.policy import Forest, Options, Policy
from netstorm.topology.schemes import balanced, cheapest, fapt, hierarchical, k_ary, mst, ring, sharded, star
from netstorm.topology.tree import Tree

__all__ = ["SCHEMES", "Options", "form_policy", "form_with_options", "with_auxiliary_paths"]


# Imports are local where SciPy is needed: it takes a second to load, and few processes form trees.


def _ring_best(network: Network, options: Options) -> Forest:
    from netstorm.topology.searched_schemes import ring_best

    return ring_best(
        network, tensor_bytes=options.tensor_bytes, chunk_bytes=options.chunk_bytes, seed=options.seed
    )


_MANY: Final = 128
"""With more nodes a first policy for links that are all taken to be equal takes seconds, with 512 nodes 20 s
of a processor: then it is written down instead.
"""


def _many_equal(network: Network, options: Options) -> bool:
    """Return whether there are many nodes, each with a link to each other, all taken to be equal."""
    size = network.size
    return (
        not options.known
        and size > _MANY
        and options.num_roots in (0, size)
        and network.routing is Routing.OVERLAY
        and len(network.links) == size * (size - 1)
        and len({(link.rate, link.latency) for link in network.links}) == 1
        and not any(node.egress or node.ingress for node in network.nodes)
    )


def _stars(network: Network, name: str) -> Forest:
    """Return a star around each rank: the fastest paths of equal links, which load all of them alike."""
    trees = tuple(
        Tree.undirected(root, tuple(-1 if rank == root else int(root) for rank in network.ranks))
        for root in network.ranks
    )
    return Forest(trees=trees, shares=(1.0,) * network.size, reason=f"{name}: a star around each rank")


def _fapt(network: Network, options: Options) -> Forest:
    roots = options.num_roots
    if _many_equal(network, options):
        return _stars(network, "fapt")
    return fapt(network, roots, chunk_bytes=options.tree_bytes(roots or network.size))


def _packing(network: Network, options: Options) -> Forest:
    if _many_equal(network, options):
        return _stars(network, "packing")
    from netstorm.topology.packing import best_packing

    return best_packing(network, options).forest


def _auto(network: Network, options: Options) -> Forest:
    if not options.known:  # predictions from assumed rates mean nothing
        return dataclasses.replace(_fapt(network, options), reason="auto: fapt")
    from netstorm.topology.searched_schemes import auto

    return auto(network, options)


SCHEMES: Final[Mapping[str, Callable[[Network, Options], Forest]]] = {
    "star": lambda network, options: star(network, options.hub),
    "sharded": lambda network, _: sharded(network),
    "balanced": lambda network, options: balanced(network, options.degree),
    "k-ary": lambda network, options: k_ary(network, options.degree, options.num_roots),
    "cheapest": lambda network, options: cheapest(network, chunk_bytes=options.chunk_bytes),
    "mst": lambda network, options: mst(network, chunk_bytes=options.chunk_bytes),
    "ring": lambda network, _: ring(network),
    "ring-best": _ring_best,
    "hierarchical": lambda network, _: hierarchical(network),
    "fapt": _fapt,
    "packing": _packing,
    "auto": _auto,
    "custom": lambda network, options: custom(network, options.custom),
}
"""From the simplest to the most elaborate."""


def form_policy(network: Network, topology: str = "fapt", *, version: int = 0, **options: Any) -> Policy:
    """Return the policy of a scheme for `network`.

    Args:
        topology: a name in `SCHEMES`.
        version: the policy's number.
        options: fields of `Options`; a hub of -1 means the best placed, as in the settings.

    Raises:
        UsageError: an unknown scheme or option, or an option that does not suit the network.
        NetworkFileError: the file of a custom topology is wrong; says where.
        Unreachable: names the ranks without a path, or the links that the scheme lacks.
    """
    known = [field.name for field in dataclasses.fields(Options)]
    for name in options:
        if name not in known:
            raise UsageError(f"option {name!r} of a topology: expected one of {', '.join(known)}")
    if options.get("hub") == -1:
        options["hub"] = None
    return form_with_options(network, topology, Options(**options), version=version)


def form_with_options(network: Network, topology: str, options: Options, *, version: int = 0) -> Policy:
    """Return the policy of a scheme for `network`: see `form_policy`."""
    scheme = SCHEMES.get(topology)
    if scheme is None:
        raise UsageError(f"topology {topology!r}: expected one of {', '.join(SCHEMES)}")
    forest = scheme(network, options)
    if not options.known:  # the times in its reason mean nothing
        name = forest.reason.split(";")[0] if topology == "auto" else topology
        forest = dataclasses.replace(
            forest, reason=f"{name}, for links taken to be equal: no rates are known yet"
        )
    return with_auxiliary_paths(network, forest.policy(version), options)


def with_auxiliary_paths(network: Network, policy: Policy, options: Options) -> Policy:
    """Return a policy with detours, if the options ask for auxiliary paths."""
    if not options.auxiliary or network.size < 3:  # a detour has three ranks
        return policy
    from netstorm.topology.detours import with_auxiliary_set, with_detours

    if options.aux_search == "paper":
        return with_auxiliary_set(network, policy)
    return with_detours(
        network,
        policy,
        chunk_bytes=options.chunk_bytes,
        known=options.known,
        unmeasured=options.unmeasured,
        measured=options.measured,
    )
