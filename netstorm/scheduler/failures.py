"""Links that have failed while both of their ends are alive: detours around them, policies without them.
Pure.

Nodes send what they cannot deliver over a failed link along the detour that they are given here, at once and
whatever policy it belongs to. That keeps the job alive. A policy without the link, which is formed meanwhile,
makes the job fast again.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from netstorm.errors import Unreachable
from netstorm.protocol.messages import FailedLink
from netstorm.scheduler.awareness import FailedLinkRecord, NetworkEstimate
from netstorm.scheduler.link_columns import NetworkColumns
from netstorm.scheduler.policies import (
    FormationRequest,
    FormationResult,
    InitialAssumptions,
    Workload,
    tree_pairs,
)
from netstorm.topology.network import Link, Network, Rank, Routing
from netstorm.topology.policy import Policy

__all__ = ["LinkFailures"]


_ERROR: Final = 0.25
"""Error of rates that are not measured, as a fraction."""

_GENERAL: Final = "fapt"
"""A scheme that finds trees in every connected network."""


class LinkFailures:
    """The failed links of one job.

    Attributes:
        failures: by (source, target).
    """

    def __init__(self, size: int, planned: InitialAssumptions | None) -> None:
        """Begin with all links in order.

        Args:
            size: number of nodes.
            planned: the network, and what policies are formed for. None: every pair has a link, and no policy
                is formed here.
        """
        self.failures: Final[dict[tuple[int, int], FailedLinkRecord]] = {}
        self._absent: Final[set[int]] = set()
        """Ranks that are not in the job: no detour leads over them."""
        self._network: Final = _as_overlay(Network.uniform(size) if planned is None else planned.planned)
        self._planned: Final = planned
        self._first: Policy | None = None
        """The policy before the first of the present failures."""
        self._own_version = -1
        """Version of the last policy that was formed because of failures."""
        self._why = ""
        """Why a new policy is wanted; empty: none is."""
        self._request: FormationRequest | None = None
        self._request_why = ""
        self._general = False
        """The job's topology needs a link that has failed: the next request is for the general scheme."""
        self._requests = 0

    # ------------------------------------------------------------------------------------------- events

    def without(self, rank: int) -> None:
        """Forget the failed links of a rank that is in the job no more."""
        for pair in [pair for pair in self.failures if rank in pair]:
            del self.failures[pair]
        self._absent.add(rank)

    def without_all(self, ranks: Iterable[int]) -> None:
        """Lead no detour over ranks that are not in the job."""
        self._absent.update(ranks)

    def with_rank(self, rank: int) -> None:
        """Lead detours over a rank again, which has come back."""
        self._absent.discard(rank)

    def fail(self, failure: FailedLinkRecord, policy: Policy) -> bool:
        """Record that a link has failed, under `policy`. Returns whether the job can go on without it.

        It can if a path still leads from each node to each other one.
        """
        pair = failure.source, failure.target
        if self._groups({*self.failures, pair})[1:]:
            return False
        if not self.failures:
            self._first = policy
        self.failures[pair] = failure
        self._why = f"link {failure.source}→{failure.target} has failed"
        return True

    def restore(self, source: int, target: int) -> bool:
        """Record that a link works again. Returns whether it had failed."""
        if self.failures.pop((source, target), None) is None:
            return False
        self._why = f"link {source}→{target} works again"
        return True

    # --------------------------------------------------------------------------------------- consequences

    @property
    def avoided(self) -> frozenset[tuple[int, int]]:
        """Links that policies do without: those that have failed, and their reverse directions if possible.

        What breaks one direction mostly breaks both, and a node with nothing to send does not notice.
        """
        both = frozenset(pair for failed in self.failures for pair in (failed, failed[::-1]))
        return frozenset(self.failures) if self._groups(both)[1:] else both

    def detours(self) -> tuple[FailedLink, ...]:
        """Return all failed links, each with a detour around it, as nodes are told.

        Links without a detour are left out: one of their ends is about to leave the job.
        """
        unusable = self.avoided.union(
            (link.source, link.target)
            for link in self._network.links
            if link.source in self._absent or link.target in self._absent
        )
        found = []
        for source, target in sorted(self.failures):
            with contextlib.suppress(Unreachable):
                way = _shortest_path(self._network, source, target, unusable)
                found.append(FailedLink(source, target, way))
        return tuple(found)

    def cut_off(self, silent: Collection[int], failing: Collection[tuple[int, int]] = ()) -> tuple[int, ...]:
        """Return the members that the job has to go on without, since no path leads from each node to each
        other one. Those with the most contributors stay; of as many, those with the most nodes.

        Args:
            silent: members that contribute nothing yet.
            failing: links that are about to fail, beside those that have.
        """
        groups = self._groups({*self.failures, *failing})
        stays = max(groups, key=lambda group: (len(group - set(silent)), len(group), -min(group)))
        return tuple(sorted(rank for group in groups if group is not stays for rank in group))

    def _groups(self, failed: Collection[tuple[int, int]]) -> list[set[int]]:
        """Return the members in groups, in each of which a path leads from each node to each other one."""
        ways: dict[int, set[int]] = {
            int(node.rank): set() for node in self._network.nodes if node.rank not in self._absent
        }
        for link in self._network.links:
            if link.source in ways and link.target in ways and (link.source, link.target) not in failed:
                ways[link.source].add(int(link.target))
        reached = {rank: _reached(ways, rank) for rank in ways}
        groups: list[set[int]] = []
        while ways:
            first = min(ways)
            groups.append({rank for rank in ways if rank in reached[first] and first in reached[rank]})
            for rank in groups[-1]:
                del ways[rank]
        return groups

    def usable(self, policy: Policy) -> bool:
        """Return whether a policy uses none of the avoided links."""
        return not self.failures or not tree_pairs(policy) & self.avoided

    def due(self) -> float:
        """Return when `check` may have something to do: at once, or never."""
        wanted = self._why and self._request is None and self._planned is not None
        return -math.inf if wanted else math.inf

    def check(
        self, policy: Policy, summed: Workload | None, estimate: NetworkEstimate | None, *, restoring: bool
    ) -> Policy | FormationRequest | None:
        """Return the policy to install next, or the formation to ask for.

        Args:
            policy: the one in force.
            summed: what the job sums; None: not known yet.
            estimate: the network as measured; None: nothing is measured.
            restoring: the use of restored links is decided here; if not, by awareness.
        """
        if self.due() > -math.inf or self._planned is None:
            return None
        why, self._why = self._why, ""
        if not self.failures:
            first, self._first = self._first, None
            if first is None or not restoring or policy.version != self._own_version:
                return None
            return self._next(first, policy, why)
        if self.usable(policy) and not (restoring and policy.version == self._own_version):
            return self._without_detours(policy, why)
        return self._ask(self._planned, policy, summed, estimate, why)

    def formed(self, answer: FormationResult, policy: Policy) -> Policy | None:
        """Return the policy to install in place of `policy`, if the formation found one."""
        request = self._request
        if request is None or answer.number != request.number:
            return None
        self._request = None
        if self._why:  # another link failed or was restored since
            return None
        if answer.policy is None or not self.usable(answer.policy):
            if request.topology != _GENERAL and not self.usable(policy):
                self._why = f"{self._request_why}; {request.topology} cannot do without it"
                self._general = True
            return None
        return self._next(answer.policy, policy, self._request_why)

    # ------------------------------------------------------------------------------------------------ inside

    def _ask(
        self,
        planned: InitialAssumptions,
        policy: Policy,
        summed: Workload | None,
        estimate: NetworkEstimate | None,
        why: str,
    ) -> FormationRequest:
        settings = planned.settings
        topology = _GENERAL if self._general else settings.topology
        self._general = False
        if estimate is None:
            network = replace(self._network, changes=())
            estimate = NetworkEstimate.of(network, errors=(_ERROR,) * len(network.links), cap_error=0.0)
        estimate = _estimate_without(estimate, self.avoided)
        workload, known = summed or planned.workload, planned.known or bool(estimate.known.any())
        self._requests += 1
        self._request_why = why
        self._request = FormationRequest.of(
            estimate,
            number=-self._requests,  # `Adaptation` counts up
            topology=topology,
            options=settings.options(workload, known=known),
            in_force=policy,
            frozen=policy if settings.freeze_roots else None,
        )
        return self._request

    def _without_detours(self, policy: Policy, why: str) -> Policy | None:
        """Return `policy` without its auxiliary paths over failed links; None: it has no such paths."""
        avoided = self.avoided
        left = tuple(detour for detour in policy.detours if avoided.isdisjoint(pairwise(detour.path)))
        if len(left) == len(policy.detours):
            return None
        return self._next(msgspec.structs.replace(policy, detours=left), policy, why)

    def _next(self, found: Policy, policy: Policy, why: str) -> Policy:
        self._own_version = policy.version + 1
        return msgspec.structs.replace(found, version=self._own_version, reason=f"{why}; {found.reason}")


def _as_overlay(network: Network) -> Network:
    """Return the network with a link of its own for each pair that may communicate."""
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


def _reached(ways: Mapping[int, Collection[int]], start: int) -> set[int]:
    """Return where one gets from `start`, itself included."""
    found, left = {start}, [start]
    while left:
        further = [rank for rank in ways[left.pop()] if rank not in found]
        found.update(further)
        left += further
    return found


def _estimate_without(estimate: NetworkEstimate, avoided: Collection[tuple[int, int]]) -> NetworkEstimate:
    columns, errors = estimate.columns, estimate.errors
    if columns.routing is not Routing.OVERLAY:
        columns = NetworkColumns.of(_as_overlay(estimate.network))
        errors = np.full(len(columns.links), errors.max(initial=0.0) or _ERROR)
    usable = ~np.isin(columns.ids, [source * len(columns.nodes) + target for source, target in avoided])
    return replace(
        estimate, columns=replace(columns, links=columns.links.chosen(usable)), errors=errors[usable]
    )


def _shortest_path(
    network: Network, source: int, target: int, avoided: Collection[tuple[int, int]]
) -> tuple[int, ...]:
    """Return the path with the fewest hops over links that are not `avoided`; of several, the fastest.

    Raises:
        Unreachable: there is no such path.
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
    raise Unreachable(f"there is no path from rank {source} to rank {target} without the links that failed")
