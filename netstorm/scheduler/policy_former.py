"""Form a policy and compare it with the one in force. The formation process runs this, not the scheduler.

A formation takes from hundredths of a second to minutes, and the scheduler must answer its nodes meanwhile.

A policy that is formed for measured rates fits their errors too, so it always looks better than the one in
force. Both are therefore predicted also for networks drawn at random within the errors of the estimate, and
the scheduler installs the new policy only if the gain exceeds what the draws scatter.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from netstorm.errors import UsageError
from netstorm.scheduler.link_columns import LinkColumns
from netstorm.scheduler.policies import FormationRequest, FormationResult, tree_links, tree_pairs
from netstorm.topology.form import form_with_options, with_auxiliary_paths
from netstorm.topology.network import Link, Network, Rank, Routing
from netstorm.topology.policy import Detour, Options, Policy
from netstorm.topology.searched_schemes import expected_policy, frozen
from netstorm.topology.tree import MemberTree, Tree

__all__ = ["Restriction", "form"]


_DRAWS: Final = 6
"""Random networks per comparison. With 12, decisions are the same; what they prevent:
docs/measurements/awareness.md, "Noise changes no policy".
"""

_MOST_NODES_DRAWN: Final = 64
"""With more nodes a prediction takes seconds, and one link's error hardly changes it."""


def form(request: FormationRequest) -> FormationResult:
    """Form a policy and predict it and the one in force; deterministic."""
    result = _form_for_members(request)
    if result.policy is None:
        return result
    packed = np.packbits(tree_links(result.policy)).tobytes()
    return msgspec.structs.replace(result, packed_links=packed)


def _form_for_members(request: FormationRequest) -> FormationResult:
    members = request.in_force.members
    if len(members) in (0, len(request.nodes)):
        return _form(request)
    if len(members) == 1:
        return FormationResult(number=request.number, problem="only one node is left in the job")
    restriction = Restriction(request)
    result = _form(restriction.request)
    policy = None if result.policy is None else restriction.expanded(result.policy)
    return msgspec.structs.replace(result, policy=policy)


def _form(request: FormationRequest) -> FormationResult:
    network, options, in_force = request.network(), request.options, request.in_force
    try:
        policy = _policy(request, network)
    except UsageError as error:
        return FormationResult(number=request.number, problem=str(error))
    if (policy.trees, policy.weights) == (in_force.trees, in_force.weights):
        if _relief_paths(policy) == _relief_paths(in_force):
            return FormationResult(number=request.number, problem="it is the one in force")
        return FormationResult(number=request.number, policy=policy, only_detours=True)
    if not request.judged:
        return FormationResult(number=request.number, policy=policy)
    seconds = expected_policy(network, policy, options)
    if not tree_pairs(in_force) <= set(network.pairs()):
        return FormationResult(number=request.number, policy=policy, seconds=seconds, seconds_before=math.inf)
    before = expected_policy(network, in_force, options)
    gains = [math.log(before / seconds)]
    if gains[0] > 0.0 and network.size <= _MOST_NODES_DRAWN:
        draw = random.Random(f"draws {options.seed} {request.number}")
        for _ in range(_DRAWS):
            drawn = request.drawn_network(draw)
            times = [expected_policy(drawn, candidate, options) for candidate in (in_force, policy)]
            gains.append(math.log(times[0] / times[1]))
    return FormationResult(
        number=request.number,
        policy=policy,
        seconds=seconds,
        seconds_before=before,
        gain=statistics.fmean(gains),
        doubt=statistics.stdev(gains) if len(gains) > 1 else 0.0,
    )


def _policy(request: FormationRequest, network: Network) -> Policy:
    options, kept = request.options, request.frozen
    if kept is None:
        return form_with_options(network, request.topology, options)
    roots = tuple(tree.root for tree in kept.trees)
    forest = frozen(network, request.topology, roots, kept.weights, options, leads=kept.leads)
    return with_auxiliary_paths(network, forest.policy(0), options)


def _relief_paths(policy: Policy) -> set[tuple[int, ...]]:
    """Return the auxiliary paths that relieve links; exploring ones are left out."""
    return {detour.path for detour in policy.detours if not detour.explore}


# Forming policies for the members of a job that nodes have left: for a network of these alone.
#
# The request is about all places of the job. It is restricted to the members, whose ranks are numbered anew;
# what is formed is expanded again. There, places that no node has are leaves of the roots: nobody sends
# anything over these links, since nodes contract trees to the members. A node that comes later is well
# placed.


class Restriction:
    """The members of a job among its places.

    Attributes:
        request: the formation that is asked for, of the members alone.
    """

    def __init__(self, request: FormationRequest) -> None:
        """Restrict a request to the members under the policy in force.

        If pairs of nodes share the links of their routes, each pair of members counts as having its own: a
        route may lead past a place that no node has.
        """
        self._members: Final = request.in_force.members
        self._size: Final = request.in_force.size
        self._number: Final = {rank: Rank(number) for number, rank in enumerate(self._members)}
        pairs = _links(request)
        links = {
            (link.source, link.target): (
                replace(link, source=self._number[link.source], target=self._number[link.target]),
                error,
            )
            for link, error in pairs
            if link.source in self._number and link.target in self._number
        }
        self.request: Final = msgspec.structs.replace(
            request,
            nodes=tuple(replace(request.nodes[rank], rank=self._number[rank]) for rank in self._members),
            packed_links=LinkColumns.of(link for link, _ in links.values()).pack(),
            packed_errors=np.array([error for _, error in links.values()], float).tobytes(),
            routing=Routing.OVERLAY,
            options=self._options(request.options),
            in_force=self._contracted(request.in_force),
            frozen=None if request.frozen is None else self._contracted(request.frozen),
        )

    def expanded(self, policy: Policy) -> Policy:
        """Return a policy of the members as one of all places."""
        trees = []
        for tree in policy.trees:
            root = self._members[tree.root]
            up, down = [root] * self._size, [root] * self._size
            for number, rank in enumerate(self._members):
                up[rank] = _renumbered(tree.reduce_parent[number], self._members)
                down[rank] = _renumbered(tree.broadcast_parent[number], self._members)
            trees.append(Tree(root=Rank(root), reduce_parent=tuple(up), broadcast_parent=tuple(down)))
        return msgspec.structs.replace(
            policy,
            trees=tuple(trees),
            members=self._members,
            detours=tuple(
                msgspec.structs.replace(one, path=tuple(self._members[rank] for rank in one.path))
                for one in policy.detours
            ),
        )

    def _contracted(self, policy: Policy) -> Policy:
        trees = []
        for tree in policy.trees:
            found = MemberTree(tree, self._members)
            trees.append(
                Tree(
                    root=self._number[found.root],
                    reduce_parent=self._parents(found.reduce_parent),
                    broadcast_parent=self._parents(found.broadcast_parent),
                )
            )
        return msgspec.structs.replace(
            policy,
            trees=tuple(trees),
            members=(),
            silent=(),
            later=(),
            slow=(),
            detours=tuple(self._detours(policy, trees)),
        )

    def _parents(self, parents: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(_renumbered(parents[rank], self._number) for rank in self._members)

    def _detours(self, policy: Policy, trees: list[Tree]) -> list[Detour]:
        hops = {
            pair
            for tree in trees
            for rank in range(tree.size)
            for pair in ((rank, tree.reduce_parent[rank]), (tree.broadcast_parent[rank], rank))
        }
        found = []
        for detour in policy.detours:
            if all(rank in self._number for rank in detour.path):
                path = tuple(int(self._number[rank]) for rank in detour.path)
                if (path[0], path[-1]) in hops:
                    found.append(msgspec.structs.replace(detour, path=path))
        return found

    def _options(self, options: Options) -> Options:
        def pairs(given: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            return tuple(
                (int(self._number[one]), int(self._number[other]))
                for one, other in given
                if one in self._number and other in self._number
            )

        return replace(
            options,
            num_roots=min(options.num_roots, len(self._members)),
            hub=None if options.hub is None else self._number.get(options.hub),
            unmeasured=pairs(options.unmeasured),
            measured=pairs(options.measured),
        )


def _renumbered(parent: int, numbers: Mapping[int, int] | tuple[int, ...]) -> int:
    return -1 if parent < 0 else int(numbers[parent])


def _links(request: FormationRequest) -> list[tuple[Link, float]]:
    """Return the links of all pairs that may communicate, with their errors."""
    if request.routing is Routing.OVERLAY:
        return list(zip(request.links, request.errors.tolist(), strict=True))
    network: Network = request.network()
    error = float(request.errors.max(initial=0.0))
    found = []
    for source, target in network.pairs():
        link = network.link(source, target)
        found.append(
            (
                Link(source=source, target=target, rate=link.rate, latency=link.latency, loss=link.loss),
                error,
            )
        )
    return found
