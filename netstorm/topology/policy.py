"""A policy, which the scheduler decides: trees, shares and detours; and a plan, one node's part of it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import msgspec

from netstorm.errors import UsageError
from netstorm.topology.network import Rank, next_hops
from netstorm.topology.tree import CHUNK_BYTES, MemberTree, Tree

__all__ = [
    "MAX_DETOURS",
    "MAX_EXPLORERS",
    "MAX_TOTAL_WEIGHT",
    "PARTS",
    "Detour",
    "Forest",
    "Options",
    "Plan",
    "Policy",
    "Tree",
    "interleave",
    "owner_weights",
    "paths_from",
    "quantise",
    "receivers",
    "staggered",
]


MAX_TOTAL_WEIGHT: Final = 1_000_000
"""Bounds the size of the table behind `Policy.tree_of`, since policies come from a peer."""

MAX_DETOURS: Final = 2
"""Most detours of a tree hop: a third path is rarely disjoint, and rarely faster than waiting."""

MAX_EXPLORERS: Final = 16
"""Most detours of a tree hop for measuring links, which take turns; and most of any kind in a policy."""


class Detour(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An auxiliary path: a detour from a rank to its neighbour in a tree.

    Raises:
        UsageError: not a path around a hop (`msgspec.ValidationError` in decoding).
    """

    path: tuple[int, ...]
    """Its ranks, both ends included (the paper's PATH); those between only forward."""
    links: tuple[tuple[float, float], ...]
    """For each of its links: bit/s that the trees leave unused, and latency in s."""
    explore: bool = False
    """It is there to measure a link: a few chunks take it, whether it is faster or not."""
    load: float = 0.0
    """Utilisation by the trees of its most used link except the first, relative to the hop's utilisation: the
    part of the waiting time for the hop that a chunk waits on the detour.
    """
    again: bool = False
    """The link was measured before: no chunk need be late to measure it again."""

    def __post_init__(self) -> None:
        if not 0 <= self.load < math.inf:
            raise UsageError(f"detour with a load of {self.load}: expected a finite number, 0 or more")
        if len(self.path) < 3 or len(set(self.path)) < len(self.path) or min(self.path) < 0:
            raise UsageError(
                f"detour over ranks {list(self.path[:16])}: expected three or more, each of them once"
            )
        if len(self.links) != len(self.path) - 1 or not all(
            0 < rate < math.inf and 0 <= latency < math.inf for rate, latency in self.links
        ):
            raise UsageError(
                f"detour over ranks {list(self.path[:16])} with links of {list(self.links[:16])}: expected "
                "for each of its links a rate above 0 and a latency of 0 or more"
            )

    def seconds(self, link: int, size: int) -> float:
        """Return the expected seconds of `size` bytes over one of its links."""
        rate, latency = self.links[link]
        return 8 * size / rate + latency


class Policy(msgspec.Struct, frozen=True, kw_only=True, array_like=True, dict=True):
    """Numbered trees with their shares. Every node computes the same schedule from it.

    Raises:
        UsageError: trees and weights that do not fit together (`msgspec.ValidationError` in decoding).
    """

    version: int
    trees: tuple[Tree, ...]
    weights: tuple[int, ...]
    """Of all slots, tree t gets weights[t] / sum(weights)."""
    reason: str = ""
    """How it was formed, as text."""
    look_ahead: int = 0
    """Bytes beyond its first chunk without a result up to which a rank sends sums to its parents; 0: no limit
    (`topology.look_ahead`).
    """
    look_ahead_s: float = 0.0
    """Seconds for which a rank respects the look-ahead in a round without a result."""
    detours: tuple[Detour, ...] = ()
    """Auxiliary paths around hops of the trees; for each hop the fastest first."""
    leads: tuple[int, ...] = ()
    """By tree: slots by which its chunks come earlier than in an even sequence; empty: none. A chunk of a
    slow tree should start early.
    """
    takes_over: bool = False
    """Open rounds change to it, too: with those chunks that no root has summed yet."""
    slow: tuple[tuple[int, int], ...] = ()
    """(source, target) of links that have become much slower. If the policy takes over, chunks with a
    contribution at their root stay in trees that use none of these links; empty: all chunks change.
    """
    keeps_begun: bool = False
    """If the policy takes over: chunks with a contribution at their root stay in their trees."""
    members: tuple[int, ...] = ()
    """The ranks that are in the job, ascending: the trees are contracted to them. Empty: all ranks."""
    silent: tuple[int, ...] = ()
    """Members that contribute nothing: they have joined, and do not have the job's state yet."""
    later: tuple[int, ...] = ()
    """Members that joined later. Groups of some ranks go on without them: they do not know which calls these
    have made."""

    def __post_init__(self) -> None:
        if self.look_ahead < 0 or not 0 <= self.look_ahead_s < math.inf:
            raise UsageError(
                f"policy {self.version} has a look-ahead of {self.look_ahead} bytes and {self.look_ahead_s} "
                "s: expected 0 (none) or more, and a finite time"
            )
        if self.version < 0:
            raise UsageError(f"policy version {self.version}: expected 0 or more")
        if not self.trees or len(self.trees) != len(self.weights):
            raise UsageError(
                f"policy {self.version} has {len(self.trees)} trees and {len(self.weights)} weights: "
                "expected as many weights as trees, and at least one"
            )
        sizes = sorted({tree.size for tree in self.trees})
        if len(sizes) > 1:
            raise UsageError(f"policy {self.version} has trees of {sizes} ranks: expected the same in all")
        if min(self.weights) < 1 or sum(self.weights) > MAX_TOTAL_WEIGHT:
            raise UsageError(
                f"policy {self.version} has weights from {min(self.weights)} up, {sum(self.weights)} in all: "
                f"expected 1 or more each, {MAX_TOTAL_WEIGHT} at most in all"
            )
        if self.leads and (len(self.leads) != len(self.trees) or min(self.leads) < 0):
            raise UsageError(
                f"policy {self.version} has {len(self.trees)} trees and leads of {list(self.leads[:16])} "
                "slots: expected one of 0 or more for each, or none"
            )
        if max(self.leads, default=0) > MAX_TOTAL_WEIGHT:
            raise UsageError(
                f"policy {self.version} has leads of up to {max(self.leads)} slots: expected "
                f"{MAX_TOTAL_WEIGHT} at most"
            )
        for pair in self.slow:
            if not all(0 <= rank < self.size for rank in pair):
                raise UsageError(
                    f"policy {self.version} says that {pair[0]}→{pair[1]} is slow: expected ranks of 0 to "
                    f"{self.size - 1}"
                )
        if self.detours:
            _check_detours(self)
        if self.members or self.silent or self.later:
            _check_members(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.trees[0].size

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """The trees of successive slots, for one period: `sum(weights)` slots, or without leads the fewest
        slots that have all trees in proportion.
        """
        if self.leads:
            return staggered(self.weights, self.leads)
        divisor = math.gcd(*self.weights)
        return interleave([weight // divisor for weight in self.weights])

    def tree_of(self, slot: int) -> int:
        """Return the index of the tree for a slot, the number that the scheduler gave a chunk."""
        schedule = self.schedule
        return schedule[slot % len(schedule)]


class Plan:
    """One rank's part in a policy, as tables by tree index, since it is read for every chunk.

    A group of ranks has the policy's trees, contracted to its members. So has a job that ranks have left.
    """

    __slots__ = (
        "_masks",
        "_period",
        "_schedule",
        "_trees",
        "broadcast_children",
        "broadcast_mask",
        "broadcast_parent",
        "detours",
        "everybody",
        "expected",
        "policy",
        "rank",
        "ranks",
        "reduce_children",
        "reduce_parent",
        "root",
        "version",
    )

    def __init__(self, policy: Policy, rank: int, members: tuple[int, ...] = ()) -> None:
        """Make the tables of `rank` under `policy`.

        Args:
            policy: of the whole job.
            rank: this node's; one of the members.
            members: the ranks that take part, ascending; empty: all.

        Raises:
            UsageError: the policy has no such rank.
        """
        if not 0 <= rank < policy.size:
            raise UsageError(
                f"policy {policy.version} has no rank {rank}: it is for ranks 0 to {policy.size - 1}"
            )
        present = _present(policy, members)
        trees: tuple[Tree | MemberTree, ...] = policy.trees
        if present:
            trees = tuple(MemberTree(tree, present) for tree in policy.trees)
        self.policy: Final = policy
        self.version: Final = policy.version
        self.rank: Final = rank
        self.ranks: Final = len(members) or policy.size
        """How many ranks take part, or could."""
        self.root: Final = tuple(tree.root for tree in trees)
        self.reduce_parent: Final = tuple(tree.reduce_parent[rank] for tree in trees)
        """Receiver of the sum over this rank's subtree; -1: this rank is the root."""
        self.broadcast_parent: Final = tuple(tree.broadcast_parent[rank] for tree in trees)
        """Sender of the result; -1: this rank is the root."""
        self.reduce_children: Final = tuple(tree.reduce_children[rank] for tree in trees)
        self.broadcast_children: Final = tuple(tree.broadcast_children[rank] for tree in trees)
        present_bits = sum(1 << one for one in present) if present else (1 << policy.size) - 1
        self.everybody: Final = present_bits & ~sum(1 << one for one in policy.silent)
        """Bit set of all ranks that contribute to a result."""
        self.expected: Final = tuple(tree.subtree_mask[rank] & self.everybody for tree in trees)
        """Bit set of the contributions of a complete sum at this rank; 0: it sends none."""
        self.broadcast_mask: Final = tuple(tree.broadcast_mask for tree in trees)
        """By tree and rank: bit set of the ranks in the rank's broadcast subtree."""
        self.detours: Final[dict[int, tuple[Detour, ...]]] = {}
        """Detours by neighbour in a tree, for those that have some."""
        for detour in policy.detours:
            if detour.path[0] == rank and not (policy.members and set(detour.path) - set(policy.members)):
                target = detour.path[-1]
                self.detours[target] = (*self.detours.get(target, ()), detour)
        self._trees: Final = trees
        self._masks: Final = tuple(tree.subtree_mask for tree in trees)
        self._schedule: Final = policy.schedule
        self._period: Final = len(policy.schedule)

    def tree_of(self, slot: int) -> int:
        """Return the index of the tree for a slot, as `Policy.tree_of` does."""
        return self._schedule[slot % self._period]

    def path_to(self, slot: int, target: int) -> tuple[int, ...]:
        """Return the ranks on the path from here to another rank in the tree of a slot, both included."""
        return self._trees[self.tree_of(slot)].path(self.rank, target)

    def mask_of(self, tree: int, rank: int) -> int:
        """Return the bit set of the contributions that `rank` forwards in a tree."""
        return self._masks[tree][rank] & self.everybody


def _present(policy: Policy, members: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of some ranks (none: of all) that are in the job; empty: all ranks are."""
    if not policy.members:
        return members
    if not members:
        return policy.members
    return tuple(rank for rank in members if rank in policy.members and rank not in policy.later)


def _check_members(policy: Policy) -> None:
    members = policy.members or tuple(range(policy.size))
    ascending = list(members) == sorted(set(members)) and members[0] >= 0 and members[-1] < policy.size
    if not ascending or not {*policy.silent, *policy.later} <= set(members):
        raise UsageError(
            f"policy {policy.version} has members {list(members[:16])}, silent members "
            f"{list(policy.silent[:16])} and later ones {list(policy.later[:16])}: expected ascending ranks "
            f"of 0 to {policy.size - 1}, and silent and later ones among them"
        )


def _check_detours(policy: Policy) -> None:
    hops = {(rank, parent) for tree in policy.trees for rank, parent in enumerate(tree.reduce_parent)}
    hops |= {(parent, rank) for tree in policy.trees for rank, parent in enumerate(tree.broadcast_parent)}
    count: dict[tuple[int, int, bool], int] = {}
    for detour in policy.detours:
        ends = (detour.path[0], detour.path[-1])
        if max(detour.path) >= policy.size or ends not in hops:
            raise UsageError(
                f"policy {policy.version} has a detour over ranks {list(detour.path[:16])}: expected ranks "
                f"from 0 to {policy.size - 1}, and neighbours in a tree at its ends"
            )
        kind = (*ends, detour.explore)
        count[kind] = count.get(kind, 0) + 1
        if count[kind] > MAX_EXPLORERS:
            raise UsageError(
                f"policy {policy.version} has more than {MAX_EXPLORERS} detours of a kind from rank "
                f"{ends[0]} to {ends[1]}: too many"
            )


# Shares as integer weights, and weights as an even sequence: exact, and so the same on every node.

PARTS: Final = 1000
"""Shares are rounded to thousandths: far below the error of a link's rate."""

_PARTS_EACH: Final = 40
"""Average weight of a tree if there are many, since a thousandth is then no small part of a share. With 10,
rounding costs 2 % of the rate of 114 trees.
"""


def quantise(shares: Sequence[float]) -> tuple[int, ...]:
    """Return whole weights in proportion to positive `shares`: at least 1 each, 1000 in all.

    With more than 25 shares, 40 times their number in all. Largest remainders; of equals the larger share,
    then the first.

    Raises:
        UsageError: no shares, or one that is not positive and finite.
    """
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise UsageError(f"shares {list(shares)}: expected at least one, all positive and finite")
    spare = max(PARTS, _PARTS_EACH * len(shares)) - len(shares)  # what is left when each has its one part
    largest = max(shares)
    relative = [share / largest for share in shares]  # so that no sum overflows
    total = sum(relative)
    exact = [max(0.0, share / total * (spare + len(shares)) - 1) for share in relative]
    scale = spare / sum(exact)
    exact = [value * scale for value in exact]
    weights = [int(value) for value in exact]
    # To 9 digits, or noise in the last one would give a smaller share more than a larger one.
    by_remainder = sorted(range(len(shares)), key=lambda i: (round(weights[i] - exact[i], 9), -shares[i], i))
    for i in by_remainder[: spare - sum(weights)]:
        weights[i] += 1
    return tuple(weight + 1 for weight in weights)


def interleave(weights: Sequence[int]) -> tuple[int, ...]:
    """Return one period (of sum(weights) slots) of an even sequence in which index i occurs weights[i] times.

    After any number of slots from its start, the count of each index is within 1 of its exact share, and so
    within 2 in any window. Earliest deadline first among those that are not ahead of their share: the quota
    method [1]_, a smooth weighted round robin with a bound that the usual greedy rule does not keep.
    O(period · log n).

    References:
        .. [1] Balinski and Young, The quota method of apportionment, Amer. Math. Monthly 82 (1975).
    """
    period = sum(weights)
    due: list[list[int]] = [[] for _ in range(period + 1)]
    due[0] = list(range(len(weights)))
    counts = [0] * len(weights)
    ready: list[tuple[float, int]] = []
    sequence = []
    for slot in range(period):
        for i in due[slot]:
            # Quotients of whole numbers below 2**26, correctly rounded, are ordered as the exact ratios are.
            heapq.heappush(ready, ((counts[i] + 1) / weights[i], i))
        _, i = heapq.heappop(ready)
        sequence.append(i)
        counts[i] += 1
        due[max(slot + 1, counts[i] * period // weights[i])].append(i)
    return tuple(sequence)


def staggered(weights: Sequence[int], leads: Sequence[int]) -> tuple[int, ...]:
    """Return one period in which index i occurs weights[i] times, leads[i] slots earlier than evenly.

    Each of the weights[i] is due in the middle of its part of the period, less the lead; they come in the
    order in which they are due. So slow trees get none of the last chunks, for which all ranks wait.
    O(period · log period).
    """
    period = sum(weights)
    # Quotients of whole numbers below 2**53, correctly rounded: the same on every machine.
    due = sorted(
        (((2 * nth + 1) * period - 2 * weight * lead) / (2 * weight), i)
        for i, (weight, lead) in enumerate(zip(weights, leads, strict=True))
        for nth in range(weight)
    )
    return tuple(i for _, i in due)


# A forest: trees with their shares, which every scheme returns.


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Trees over the same ranks, and the share of the bytes of each."""

    trees: tuple[Tree, ...]
    shares: tuple[float, ...]
    """Positive, by tree; only their proportion counts."""
    reason: str
    """How it was formed, as text."""
    whole: bool = False
    """Shares are numbers of chunks, whose sum is the whole tensor."""
    leads: tuple[int, ...] = ()
    """Of whole shares; see `Policy.leads`."""
    look_ahead: int = 0
    """Bytes; see `Policy`."""
    look_ahead_s: float = 0.0

    def policy(self, version: int) -> Policy:
        """Return the numbered policy, its shares in whole weights."""
        weights = tuple(map(int, self.shares)) if self.whole else quantise(self.shares)
        return Policy(
            version=version,
            trees=self.trees,
            weights=weights,
            reason=self.reason,
            look_ahead=self.look_ahead,
            look_ahead_s=self.look_ahead_s,
            leads=self.leads,
        )


# Options of the schemes. A new option of a scheme belongs here.


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of all schemes; each scheme reads those that concern it.

    Raises:
        UsageError: a value that no scheme can use.
    """

    num_roots: int = 0
    """Number of roots; 0: all ranks."""
    hub: Rank | None = None
    """Hub of a star; None: the best placed rank."""
    chunk_bytes: int = CHUNK_BYTES
    """Bytes of a full chunk."""
    tensors: tuple[int, ...] = (100_000_000,)
    """Bytes of each tensor that is to be reduced, in order of priority."""
    degree: int = 2
    """Most children of a rank in balanced and k-ary trees."""
    custom: str = ""
    """Path of the file that describes a custom topology."""
    known: bool = True
    """Rates and latencies are known or measured; if they are assumed, no look-ahead is computed from them."""
    auxiliary: bool = False
    """The policy gets detours around its busiest hops."""
    unmeasured: tuple[tuple[int, int], ...] = ()
    """(source, target) of links without a recent measurement: with `auxiliary`, some detours lead over them.
    """
    measured: tuple[tuple[int, int], ...] = ()
    """Those of `unmeasured` that were measured before: to measure them again is not urgent."""
    aux_search: Literal["spare", "paper"] = "spare"
    """With `auxiliary`: detours over what trees leave unused, or those of the paper's Algorithm 3."""
    seed: int = 0
    """Seed of random searches: the same seed gives the same policy."""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise UsageError(f"chunk_bytes is {self.chunk_bytes}: expected at least 1")
        if not self.tensors or min(self.tensors) < 0 or not sum(self.tensors):
            raise UsageError(
                f"tensors of {list(self.tensors)[:12]} bytes: expected at least one that is not empty"
            )
        if self.degree < 1:
            raise UsageError(f"degree {self.degree}: expected at least 1, the most children that a rank has")

    def tree_bytes(self, trees: int) -> int:
        """Return the bytes that each edge of one of so many trees carries, and at least a chunk.

        Trees that are formed by the delays of their edges need it, to weigh rates against latencies: formed
        for single chunks, N-root FAPTs take 1.6 times as long for 244 MB.
        """
        return max(self.tensor_bytes // trees, min(self.chunk_bytes, self.tensor_bytes))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(self.tensors)


# Owners in asynchronous training: their weights, and the paths to them. Pure functions of a policy.


def owner_weights(policy: Policy) -> tuple[int, ...]:
    """Return each rank's weight as an owner: the share of the trees of which it is the root, in lowest terms.

    The shares of the roots suit the links. Ranks that are no root own nothing.
    """
    weights = [0] * policy.size
    for tree, weight in zip(policy.trees, policy.weights, strict=True):
        weights[tree.root] += weight
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def receivers(policy: Policy, rank: int) -> frozenset[int]:
    """Return the ranks to which a rank sends in a policy's trees: its parents, and its children."""
    parents = {tree.reduce_parent[rank] for tree in policy.trees} - {-1}
    return frozenset(parents.union(*(tree.broadcast_children[rank] for tree in policy.trees)))


def paths_from(policy: Policy, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return, by target, the path of fewest hops from `rank`, over pairs that the policy's trees use.

    Only those pairs are sure to be linked. Both ends are on a path; `rank`'s own is that alone. Ranks
    that are not in the job are on no path, and the path to one is empty.
    """
    targets: list[set[int]] = [set() for _ in range(policy.size)]
    trees: Sequence[Tree | MemberTree] = policy.trees
    if policy.members:
        trees = [MemberTree(tree, policy.members) for tree in policy.trees]
    for tree in trees:
        for node, parent in enumerate(tree.reduce_parent):
            if parent >= 0:
                targets[node].add(parent)
        for node, parent in enumerate(tree.broadcast_parent):
            if parent >= 0:
                targets[parent].add(node)
    hops = next_hops([sorted(ends) for ends in targets])
    paths = []
    for target in range(policy.size):
        path = [rank]
        while path[-1] not in (target, -1):
            path.append(hops[target][path[-1]])
        paths.append(() if path[-1] < 0 else tuple(path))
    return tuple(paths)
