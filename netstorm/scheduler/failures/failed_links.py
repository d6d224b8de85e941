"""Links that have failed while both of their ends are alive: ways around them, policies without them. Pure.

Nodes send what they cannot deliver over a failed link along the way that they are told here, at once and
whatever policy it is of. That keeps the job alive. A policy without the link, which is formed meanwhile,
makes it fast again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import Final

import msgspec

from netstorm.errors import Unreachable
from netstorm.protocol.messages import FailedLink
from netstorm.scheduler.awareness.failed_link import FailedLinkRecord
from netstorm.scheduler.awareness.network_estimate import NetworkEstimate
from netstorm.scheduler.policies.assumptions import InitialAssumptions, Workload
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult, tree_pairs
from netstorm.topology.networks.elements import Link, Rank
from netstorm.topology.networks.network import Network, Routing
from netstorm.topology.policy import Policy

__all__ = ["LinkFailures"]

_ERROR: Final = 0.25
"""Of rates that nobody has measured, as a fraction."""

_GENERAL: Final = "fapt"
"""The scheme that finds trees in every network that is connected."""


class LinkFailures:
    """Of one job.

    Attributes:
        failures: by (source, target).
    """

    def __init__(self, size: int, planned: InitialAssumptions | None) -> None:
        """Begin with all links in order.

        Args:
            size: number of nodes.
            planned: the network, and what policies are formed for; None: any pair may talk, and the policies
                are somebody else's.
        """
        self.failures: Final[dict[tuple[int, int], FailedLinkRecord]] = {}
        self._network: Final = _as_overlay(Network.uniform(size) if planned is None else planned.planned)
        self._planned: Final = planned
        self._first: Policy | None = None
        """The policy before the first of the present failures."""
        self._mine = -1
        """Version of the last policy from here."""
        self._why = ""
        """What a new policy is wanted for; empty: none is."""
        self._asked: FormationRequest | None = None
        self._asked_for = ""
        self._general = False
        """The topology of the job has none without a link that it needs: ask for one that does."""
        self._numbers = 0

    # ------------------------------------------------------------------------------------------ what happens

    def fail(self, failure: FailedLinkRecord, policy: Policy) -> bool:
        """Note that a link has failed, under `policy`; False: the job cannot go on without it.

        It can if each node still has a way to each other one.
        """
        pair = failure.source, failure.target
        if _without(self._network, {*self.failures, pair}).separated() is not None:
            return False
        if not self.failures:
            self._first = policy
        self.failures[pair] = failure
        self._why = f"link {failure.source}→{failure.target} has failed"
        return True

    def restore(self, source: int, target: int) -> bool:
        """Note that a link works again; False: it was not known to have failed."""
        if self.failures.pop((source, target), None) is None:
            return False
        self._why = f"link {source}→{target} works again"
        return True

    # ------------------------------------------------------------------------------------------ what follows

    @property
    def avoided(self) -> frozenset[tuple[int, int]]:
        """What policies do without: links that have failed, and their other directions if they can.

        What breaks one direction mostly breaks both, and who has nothing to send does not notice.
        """
        both = frozenset(pair for one in self.failures for pair in (one, one[::-1]))
        spared = _without(self._network, both).separated() is None
        return both if spared else frozenset(self.failures)

    def told(self) -> tuple[FailedLink, ...]:
        """Return what nodes are told: all failed links, each with a way around it."""
        avoided = self.avoided
        return tuple(
            FailedLink(source, target, _way(self._network, source, target, avoided))
            for source, target in sorted(self.failures)
        )

    def suits(self, policy: Policy) -> bool:
        """Return whether a policy does without the links that have failed."""
        return not self.failures or not tree_pairs(policy) & self.avoided

    def due(self) -> float:
        """Return when `look` may have something to ask."""
        wanted = self._why and self._asked is None and self._planned is not None
        return -math.inf if wanted else math.inf

    def look(
        self, policy: Policy, summed: Workload | None, picture: NetworkEstimate | None, *, restoring: bool
    ) -> Policy | FormationRequest | None:
        """Return the policy that is to follow `policy`, or what is to be formed to get one.

        Args:
            policy: the one in force.
            summed: what the job sums; None: not known yet.
            picture: the network as it is measured; None: nothing is.
            restoring: once links are back, to use them is decided here; else by others.
        """
        if self.due() > -math.inf or self._planned is None:
            return None
        why, self._why = self._why, ""
        if not self.failures:
            first, self._first = self._first, None
            mine = first is not None and restoring and policy.version == self._mine
            return self._next(first, policy, why) if mine and first is not None else None
        if self.suits(policy) and not (restoring and policy.version == self._mine):
            return self._without_detours(policy, why)
        return self._ask(policy, summed, picture, why, self._planned.settings.topology)

    def formed(self, answer: FormationResult, policy: Policy) -> Policy | None:
        """Return the policy that is to follow `policy`, now in force, if there is one."""
        asked = self._asked
        if asked is None or answer.number != asked.number:
            return None
        self._asked = None
        if self._why:  # more has happened since
            return None
        if answer.policy is None or not self.suits(answer.policy):
            if asked.topology != _GENERAL and not self.suits(policy):
                self._why = f"{self._asked_for}; {asked.topology} cannot do without it"
                self._general = True
            return None
        return self._next(answer.policy, policy, self._asked_for)

    # ------------------------------------------------------------------------------------------------ inside

    def _ask(
        self,
        policy: Policy,
        summed: Workload | None,
        picture: NetworkEstimate | None,
        why: str,
        topology: str,
    ) -> FormationRequest:
        assert self._planned is not None
        settings = self._planned.settings
        if self._general:
            topology, self._general = _GENERAL, False
        if picture is None:
            network = replace(self._network, changes=())
            picture = NetworkEstimate(
                network=network, errors=(_ERROR,) * len(network.links), cap_error=0.0, measured=frozenset()
            )
        picture = _pictured_without(picture, self.avoided)
        self._numbers += 1
        self._asked_for = why
        self._asked = FormationRequest.of(
            picture,
            number=-self._numbers,  # those of `Adaptation` count up
            topology=topology,
            options=settings.options(
                summed or self._planned.workload, known=self._planned.known or bool(picture.measured)
            ),
            in_force=policy,
            frozen=policy if settings.freeze_roots else None,
        )
        return self._asked

    def _without_detours(self, policy: Policy, why: str) -> Policy | None:
        """Return a policy whose trees do without failed links without its auxiliary paths over them."""
        avoided = self.avoided
        left = tuple(one for one in policy.detours if avoided.isdisjoint(pairwise(one.path)))
        if len(left) == len(policy.detours):
            return None
        return self._next(msgspec.structs.replace(policy, detours=left), policy, why)

    def _next(self, found: Policy, policy: Policy, why: str) -> Policy:
        self._mine = policy.version + 1
        return msgspec.structs.replace(found, version=self._mine, reason=f"{why}; {found.reason}")


def _as_overlay(network: Network) -> Network:
    """Return a network in which each pair that may talk has a link of its own."""
    if network.routing is Routing.OVERLAY:
        return network
    return Network(
        nodes=network.nodes,
        links=tuple(
            Link(source=source, target=target, rate=link.rate, latency=link.latency, loss=link.loss)
            for source, target in network.pairs()
            for link in (network.link(source, target),)
        ),
    )


def _without(network: Network, avoided: Collection[tuple[int, int]]) -> Network:
    return replace(
        network,
        links=tuple(link for link in network.links if (link.source, link.target) not in avoided),
        changes=(),
    )


def _pictured_without(picture: NetworkEstimate, avoided: Collection[tuple[int, int]]) -> NetworkEstimate:
    network = _as_overlay(picture.network)
    errors = (
        picture.errors
        if network is picture.network
        else (max(picture.errors, default=_ERROR),) * len(network.links)
    )
    kept = [
        (link, error)
        for link, error in zip(network.links, errors, strict=True)
        if (link.source, link.target) not in avoided
    ]
    return replace(
        picture,
        network=replace(network, links=tuple(link for link, _ in kept), changes=()),
        errors=tuple(error for _, error in kept),
    )


def _way(network: Network, source: int, target: int, avoided: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """Return the way with the fewest nodes between, of these the fastest, over none of the links `avoided`.

    Raises:
        Unreachable: there is none.
    """
    heap: list[tuple[int, float, int, tuple[int, ...]]] = [(0, 0.0, source, (source,))]
    seen = set()
    while heap:
        hops, cost, here, path = heapq.heappop(heap)
        if here == target:
            return path
        if here in seen:
            continue
        seen.add(here)
        for there in network.neighbours(Rank(here)):
            if there not in seen and (here, there) not in avoided:
                link = network.link(Rank(here), there)
                step = 1e6 / link.rate + link.latency
                heapq.heappush(heap, (hops + 1, cost + step, int(there), (*path, int(there))))
    raise Unreachable(f"there is no way from rank {source} to rank {target} without the links that failed")
