"""Keys and rounds: which policy each round of each key runs under, the same at every rank. Pure.

Beside these bindings (design, §7): the key registry, who may say what of keys and rounds, comparisons of
waiting calls and of replicas, and how many local steps each node takes (ESync).

Keys advance at different paces, so bindings are per key: a table of (first round, version). What has been
granted never changes; a new version starts, for each key, one round after the highest that any rank has been
granted. A rank asks about round t + 1 when it begins round t, so that a topology request (TRP,
arXiv 2404.11352 §VII-A) costs no waiting.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from netstorm.errors import NotAuthorised, ProtocolViolation
from netstorm.protocol.codecs import (
    COLLECTIVE,
    FACTORS,
    ITEM_BYTES,
    LEAST_FACTORS,
    QUANTISED,
    ROW_SPARSE,
    ChunkSizes,
    aligned,
    counted_bytes,
    encoded_fraction,
    granted_at_first,
    granted_by,
    pitch,
    rounds_under_way,
    row_length,
    slot_of,
)
from netstorm.protocol.frames import bits_from_wire, bits_of, ranks_in
from netstorm.protocol.messages import (
    ANY_RULE,
    Binding,
    CallTimedOut,
    KeyGrant,
    KeySpec,
    Moved,
    ReplicaDigest,
    RoundBegun,
    RoundResults,
    StepTimes,
    ViewReport,
    WaitingCall,
)
from netstorm.topology.policy import Policy
from netstorm.topology.tree import MemberTree

__all__ = [
    "ROUNDS_AHEAD",
    "CallConflict",
    "CallOrder",
    "Consistency",
    "Drift",
    "Grant",
    "KeyConflict",
    "KeyRegistry",
    "NodeTimes",
    "ReplicaCheck",
    "RoundAuthority",
    "RuleConflict",
    "StateServer",
    "balanced_steps",
    "policies_needed",
    "ready_at",
    "under_way_of",
]


ROUNDS_AHEAD: Final = 1024
"""How far a rank may be ahead of the slowest in one key. A general node is never more than a few ahead: it
contributes to two rounds beyond its last complete one. This only bounds what a faulty rank can make the
scheduler remember."""

_MOST_LEAD: Final = 256
"""Rounds: what a log's reader assumes to be granted is bounded, however short rounds are."""

_NEW_PACE: Final = 0.25
"""What the time between two rounds counts in the pace of their key."""

_PACE_OVER_S: Final = 0.02
"""Time over which a key's pace is measured: reports name several short rounds, and ranks report in turn."""

_TAKEOVERS: Final = 8
"""Of this many newest versions, those that took chunks over are kept even if no round is bound to them:
chunks of rounds in progress may have moved there."""


@dataclass(frozen=True, slots=True)
class RuleConflict:
    """Two ranks would apply different update rules to the sum of one round."""

    first_rank: int
    first_rule: str
    rank: int
    rule: str
    collective: bool = False
    """The rules are collective calls."""

    def __str__(self) -> str:
        if self.collective:
            return (
                f"{self.first_rule} at rank {self.first_rank} and {self.rule} at rank {self.rank} meet: "
                "every member of a group must make the same calls, of the same types and shapes, in the same "
                "order"
            )
        return (
            f"rank {self.first_rank} updates with {self.first_rule or 'no rule'!r}, rank {self.rank} with "
            f"{self.rule or 'no rule'!r}: every rank must use the same optimizer and hyper-parameters, and "
            "push the same kind of arrays"
        )


@dataclass(slots=True)
class _Begun:
    """A round that some ranks have begun and some have not."""

    rule: str = ANY_RULE
    """What all ranks name that name any."""
    named_by: list[int] = field(default_factory=list)
    """They, the first one first."""
    ranks: int = 0
    """Bit set of the ranks that have begun it."""

    def without(self, rank: int) -> None:
        """Forget what a rank names that has left: the others may go on otherwise, as their results tell."""
        if rank in self.named_by:
            self.named_by.remove(rank)
            if not self.named_by:
                self.rule = ANY_RULE


@dataclass(slots=True)
class _Table:
    """The bindings of one key."""

    rows: list[tuple[int, int]]
    """(first round, version), by round; the first row covers the slowest rank's next round."""
    everybody: int
    """Bit set of the ranks that push the key."""
    under_way: int
    """A general node begins round t only if it has completed round t minus this."""
    collective: bool
    of_some: bool
    """Of a group of some ranks: nobody takes the place of a rank that leaves."""
    granted: int
    """Highest round whose version some rank knows; those of the first ones come with the registration."""
    complete: int = -1
    """Up to here, every rank has begun every round."""
    restored: bool = False
    """It is not known which ranks have begun which rounds, as a replay log does not say it. A rank that
    begins round t shows that all have begun round t - `under_way`.
    """
    late: dict[int, int] = field(default_factory=dict)
    """By rank that joined later: the first round that it begins."""
    open: dict[int, _Begun] = field(default_factory=dict)
    """By round: rounds beyond `complete` that some rank has begun."""
    newest: int = 0
    """The last round that a rank has begun. The first one is reported at its end, and shows no pace."""
    paced: tuple[int, float] = (-1, math.inf)
    """The round that the pace was last measured at, and when it was reported."""
    pace_s: float = math.inf
    """Between the beginnings of two rounds."""

    def keep_pace(self, round: int, now: float) -> None:
        """Note that a rank has begun a round."""
        if round <= self.newest:
            return
        self.newest = round
        paced, at = self.paced
        known = self.pace_s < math.inf
        if paced >= 0 and now <= at + (_PACE_OVER_S if known else 0.0):
            return
        rounds = round - paced
        between = (now - at) / rounds if paced >= 0 else math.inf
        new = 1 - (1 - _NEW_PACE) ** rounds
        self.pace_s = self.pace_s + new * (between - self.pace_s) if known else between
        self.paced = round, now


class Consistency:
    """Bindings of all keys.

    Attributes:
        tables: those of each key, by its number.
    """

    def __init__(self, ranks: int, version: int, *, lead_s: float = 0.0) -> None:
        """Begin with no keys.

        Args:
            ranks: nodes.
            version: of the policy in force.
            lead_s: ranks are granted the rounds of so many seconds in advance, so that rounds which take less
                go on while there is no scheduler. Another policy applies so much later, unless it takes over.
        """
        self._ranks: Final = ranks
        self._version = version
        self._lead_s: Final = lead_s
        self.tables: Final[dict[int, _Table]] = {}
        self._absent = 0
        """Bit set of the ranks that begin no rounds: they are not in the job, or silent."""
        self._left = 0
        """Bit set of the ranks that have ever left, or joined later."""
        self._silent = 0
        """Bit set of the members that begin no rounds yet, but get their results: they must know which policy
        those run under."""
        self._view_version = -1

    @property
    def version(self) -> int:
        """The version that the next unbound round of every key will run under."""
        return self._version

    def add_key(self, key: int, spec: KeySpec) -> None:
        """Add a key: its first rounds run under the present version. Adding it twice does no harm."""
        if key not in self.tables:
            self.tables[key] = self._new_table(spec, [(0, self._version)])

    def restore(self, key: int, spec: KeySpec, rows: Iterable[tuple[int, int]], granted: int) -> None:
        """Go on where another process stopped.

        Args:
            key: the key.
            spec: its description.
            rows: its (first round, version), by round.
            granted: no round beyond this one was granted.
        """
        self.tables[key] = table = self._new_table(spec, list(rows))
        table.granted, table.restored = granted, True

    def _new_table(self, spec: KeySpec, rows: list[tuple[int, int]]) -> _Table:
        under_way = under_way_of(spec)
        return _Table(
            rows=rows,
            everybody=bits_of(spec.members) & ~self._left if spec.members else (1 << self._ranks) - 1,
            under_way=under_way,
            collective=spec.form == COLLECTIVE,
            of_some=bool(spec.members),
            granted=granted_at_first(under_way),
        )

    def install(self, version: int) -> dict[int, int]:
        """Let `version` apply, in each key, from the first round that no rank has been granted. Returns these
        rounds.
        """
        self._version = version
        for table in self.tables.values():
            start = table.granted + 1
            while table.rows and table.rows[-1][0] >= start:  # no rank knows of that row
                table.rows.pop()
            table.rows.append((start, version))
        return {key: table.granted + 1 for key, table in self.tables.items()}

    def without(self, rank: int) -> None:
        """Wait no more for a rank to begin rounds."""
        self._absent |= 1 << rank
        self._left |= 1 << rank
        for table in self.tables.values():
            table.late.pop(rank, None)
            for begun in table.open.values():
                begun.without(rank)
            if table.of_some:
                table.everybody &= ~(1 << rank)
            self._advance(table)

    def with_rank(self, rank: int, starts: Mapping[int, int]) -> None:
        """Wait for a rank, too: by key, from these rounds on."""
        self._absent &= ~(1 << rank)
        self._silent &= ~(1 << rank)
        for key, start in starts.items():
            if not self.tables[key].of_some:
                self.tables[key].late[rank] = start

    def begin_view(self, version: int, silent: Iterable[int] = ()) -> None:
        """Let everything that was bound to an earlier policy run under that of a new view.

        Args:
            version: of the view's policy.
            silent: members that begin no rounds yet.
        """
        self._view_version = version
        self._silent = bits_of(silent)

    def forget_who_began(self) -> None:
        """Go on with ranks that may begin later rounds than all of which is known: of those before they have
        the results, and the ranks that began them have left.
        """
        for table in self.tables.values():
            table.restored = True

    def check(self, rank: int, event: RoundBegun) -> None:
        """Check that a rank can have begun a round.

        Raises:
            ProtocolViolation: a round that no correct node can have begun.
        """
        table, round = self.tables[event.key], event.round
        if not table.everybody >> rank & 1:
            raise ProtocolViolation(
                f"rank {rank} says that it has begun a round of key {event.key}, of others"
            )
        complete = max(table.complete, round - table.under_way) if table.restored else table.complete
        if not 0 <= round <= complete + ROUNDS_AHEAD:
            raise ProtocolViolation(
                f"rank {rank} says that it has begun round {round} of key {event.key}, of which every rank "
                f"has begun round {complete}: more than {ROUNDS_AHEAD} rounds ahead"
            )
        if round > table.granted:
            raise ProtocolViolation(
                f"rank {rank} says that it has begun round {round} of key {event.key}, which no rank was "
                f"granted: the last one is {table.granted}"
            )

    def begun(self, rank: int, event: RoundBegun, now: float) -> RuleConflict | None:
        """Record that a rank has begun a round, which `check` allows. That grants it those that it may begin
        before it is complete, and those of the lead.
        """
        table, round = self.tables[event.key], event.round
        if table.restored and round - table.under_way > table.complete:
            table.complete = round - table.under_way
            table.open = {other: begun for other, begun in table.open.items() if other > table.complete}
        lead = 0
        if self._lead_s and not table.of_some:  # no policy takes over what a group has begun
            table.keep_pace(round, now)
            lead = min(_MOST_LEAD, int(self._lead_s / max(table.pace_s, 1e-9)))
        table.granted = max(table.granted, granted_by(round, table.under_way) + lead)
        if round <= table.complete:  # reported before
            return None
        begun = table.open.setdefault(round, _Begun())
        begun.ranks |= 1 << rank
        conflict = None
        if event.rule != ANY_RULE:
            if not begun.named_by:
                begun.rule = event.rule
            elif event.rule != begun.rule:
                first = begun.named_by[0]
                conflict = RuleConflict(first, begun.rule, rank, event.rule, collective=table.collective)
            if rank not in begun.named_by:
                begun.named_by.append(rank)
        self._advance(table)
        return conflict

    def granted(self, key: int) -> int:
        """Return the last round of a key that some rank has been granted."""
        return self.tables[key].granted

    def version_of(self, key: int, round: int) -> int | None:
        """Return the version that a round is bound to; None: all ranks have begun later ones, and it is not
        remembered, or none has been granted it.
        """
        table = self.tables[key]
        if round > table.granted:
            return None
        versions = [version for start, version in table.rows if start <= round]
        return max(versions[-1], self._view_version) if versions else None

    def is_complete(self, key: int, round: int) -> bool:
        """Return whether every rank is known to have completed a round."""
        return round <= self.tables[key].complete - self.tables[key].under_way

    def bindings(self, key: int, round: int) -> list[Binding]:
        """Return the bindings of a key from `round` on. Later answers only add to them."""
        table = self.tables[key]
        after = [index for index, (start, _) in enumerate(table.rows) if start > round]
        first = max(0, (after[0] if after else len(table.rows)) - 1)
        # What is forgotten was bound before this view, and runs under its policy, unless all ranks have it.
        forgotten = self._view_version >= 0 and bool(table.rows) and table.rows[0][0] > round
        earlier = [Binding(key=key, from_round=round, version=0, granted=table.granted)] if forgotten else []
        return earlier + [
            Binding(key=key, from_round=start, version=version, granted=table.granted)
            for start, version in table.rows[first:]
            if start <= table.granted
        ]

    def _advance(self, table: _Table) -> None:
        """Go on to the last round that every rank has begun."""
        while table.complete + 1 in table.open:
            following = table.complete + 1
            late = bits_of(rank for rank, start in table.late.items() if start > following)
            if table.everybody & ~self._absent & ~late & ~table.open[following].ranks:
                break
            table.complete = following
            del table.open[following]
            for rank in [rank for rank, start in table.late.items() if start <= following]:
                del table.late[rank]
        while not self._silent and len(table.rows) > 1 and table.rows[1][0] <= table.complete:
            table.rows.pop(0)

    def versions_in_use(self) -> set[int]:
        """Return the versions that some rank may still have to be told, and the present one."""
        used = {self._version} if self._view_version < 0 else {self._version, self._view_version}
        return used.union(version for table in self.tables.values() for _, version in table.rows)


def under_way_of(spec: KeySpec) -> int:
    """Return how many rounds of a key a rank may have begun and not completed."""
    return rounds_under_way(math.prod(spec.shape), spec.form)


def policies_needed(policies: Mapping[int, Policy], in_use: Container[int]) -> dict[int, Policy]:
    """Return the policies, by version, that some node may still have to be told.

    Args:
        in_use: versions that rounds are bound to.
    """
    newest = max(policies)
    return {
        version: policy
        for version, policy in policies.items()
        if version in in_use or (policy.takes_over and version > newest - _TAKEOVERS)
    }


# The keys of a job: their shapes, numbers, chunk sizes, and offsets among the job's bytes.

_MOST_DIMENSIONS: Final = 64
"""NumPy 2's own limit. The product of a million dimensions would keep the scheduler busy."""

MOST_KEYS: Final = 2**17
_MOST_NAME_CHARACTERS: Final = 4096
"""Of a key's name. Together they bound what a member can make the scheduler, and all nodes, store."""

_FORMS: Final = {
    0: "",
    FACTORS: " of factors",
    QUANTISED: " under gradient compression",
    COLLECTIVE: " of a process group",
    ROW_SPARSE: " row_sparse",
}

_NAMED_SLOTS: Final = 2**20
"""More than policies have trees, and far from any bound of slots."""

_MOST_BYTES: Final = 2**62
"""Offsets travel as 64-bit integers."""


@dataclass(frozen=True, slots=True)
class KeyConflict:
    """Two ranks register one key with different shapes or types."""

    first_rank: int
    first: KeySpec
    rank: int
    spec: KeySpec

    def __str__(self) -> str:
        store = f" (of store {self.spec.namespace})" if self.spec.namespace else ""
        return (
            f"rank {self.rank} has {self.spec.name}{store} as {_kind(self.spec)}, rank {self.first_rank} as "
            f"{_kind(self.first)}: every rank must give a key the same shape and type"
        )


@dataclass(frozen=True, slots=True)
class _KeyEntry:
    spec: KeySpec
    grant: KeyGrant
    first_rank: int


class KeyRegistry:
    """Keys by namespace and name. The first registration defines a key; all others must agree with it."""

    def __init__(self, sizes: ChunkSizes, *, by_name: bool = False) -> None:
        """Begin without keys.

        Args:
            sizes: of chunks.
            by_name: a key's trees follow from its name, not from its place among the job's bytes: groups of
                other ranks register theirs now earlier, now later.
        """
        self._sizes: Final = sizes
        self._by_name: Final = by_name
        self._entries: dict[tuple[int, str], _KeyEntry] = {}
        self._specs: list[KeySpec] = []
        self._end = 0
        self._factor_bytes = 0
        """Of all keys of factors."""
        self._key_bytes: list[int] = []
        self._chunk_bytes: dict[int, int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        """By name of a process group, whose keys are named after it: its ranks; empty: all."""

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, key: int) -> bool:
        return 0 <= key < len(self._specs)

    @property
    def total_bytes(self) -> int:
        """Bytes of all keys together, with the gaps that alignment makes."""
        return self._end

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each key, in order of registration, which is that of first use."""
        return tuple(self._key_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Size of a full chunk, of the kind that holds most of the job's bytes; 0 while there is no key."""
        return max(self._chunk_bytes, key=self._chunk_bytes.__getitem__, default=0)

    def first(self, most: int) -> tuple[tuple[KeySpec, int], ...]:
        """Return the first keys that were registered, and their bytes."""
        return tuple(zip(self._specs[:most], self._key_bytes[:most], strict=True))

    def spec(self, key: int) -> KeySpec:
        """Return what a key was registered as."""
        return self._specs[key]

    def grant(self, key: int) -> KeyGrant:
        """Return a key's number and layout."""
        spec = self._specs[key]
        return self._entries[spec.namespace, spec.name].grant

    def name(self, key: int) -> str:
        """Return the user's name of a key."""
        return self._specs[key].name

    def members_of_group(self, group: str) -> tuple[int, ...]:
        """Return the ranks of a process group; empty: all, or the group has no key."""
        return self._groups.get(group, ())

    def register(self, rank: int, spec: KeySpec) -> KeyGrant | KeyConflict:
        """Register a key. Returns its number and layout, or a conflict with what another rank registered.

        Raises:
            ProtocolViolation: no correct node sends such a key.
        """
        item_bytes = ITEM_BYTES.get(spec.dtype)
        if item_bytes is None:
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} as {spec.dtype!r}; what can be summed: "
                + ", ".join(ITEM_BYTES)
            )
        entry = self._entries.get((spec.namespace, spec.name))
        if entry is not None:
            same = entry.spec == spec
            return entry.grant if same else KeyConflict(entry.first_rank, entry.spec, rank, spec)
        if len(self._specs) >= MOST_KEYS or len(spec.name) > _MOST_NAME_CHARACTERS:
            raise ProtocolViolation(
                f"rank {rank} registers key number {len(self._specs)}, with a name of {len(spec.name)} "
                f"characters: expected at most {MOST_KEYS} keys, and {_MOST_NAME_CHARACTERS} characters"
            )
        if len(spec.shape) > _MOST_DIMENSIONS:
            raise ProtocolViolation(f"rank {rank} registers {spec.name!r} with {len(spec.shape)} dimensions")
        offset = aligned(self._end, item_bytes)
        size = item_bytes
        for side in spec.shape:
            if side < 0:
                raise ProtocolViolation(f"rank {rank} registers {spec.name!r} with the shape {spec.shape}")
            size *= side
        if offset + size > _MOST_BYTES:
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} with {size} bytes: too large for any job"
            )
        chunk_size = self._chunk_size(rank, spec, size // item_bytes)
        grant = KeyGrant(
            namespace=spec.namespace,
            name=spec.name,
            key=len(self._specs),
            first_slot=self._slot(spec, offset, size),
            offset=offset,
            chunk_size=chunk_size,
        )
        self.restore(rank, spec, grant)
        return grant

    def restore(self, rank: int, spec: KeySpec, grant: KeyGrant) -> None:
        """Add a key as another scheduler has numbered it. Call it in the order of their numbers."""
        item_bytes = ITEM_BYTES[spec.dtype]
        own_bytes = item_bytes * math.prod(spec.shape)
        size = counted_bytes(own_bytes, grant.chunk_size, item_bytes, spec.form)
        self._end = max(self._end, grant.offset + size)
        self._specs.append(spec)
        if spec.form == COLLECTIVE:
            self._groups.setdefault(spec.name.rpartition("/")[0], spec.members)
        if spec.form == FACTORS:
            self._factor_bytes += own_bytes
        self._key_bytes.append(size)
        step = pitch(grant.chunk_size, item_bytes, spec.form)
        self._chunk_bytes[step] = self._chunk_bytes.get(step, 0) + size
        self._entries[spec.namespace, spec.name] = _KeyEntry(spec, grant, rank)

    def _slot(self, spec: KeySpec, offset: int, size: int) -> int:
        """Return the slot of the first chunk.

        Factors are under way alone, so they are shared among the trees by their own bytes. Keys within one
        chunk of the job's bytes share a slot, and so a tree; owners of asynchronous blocks go by the number
        of the key (ADR 4).
        """
        if self._by_name:
            return zlib.crc32(f"{spec.namespace} {spec.name}".encode()) % _NAMED_SLOTS
        if spec.form == FACTORS:
            return slot_of(self._factor_bytes, LEAST_FACTORS)
        return slot_of(offset, self._sizes.smallest)

    def _chunk_size(self, rank: int, spec: KeySpec, elements: int) -> int:
        if encoded_fraction(spec.form) < 1:
            return self._sizes.of_encoded(elements, spec.form)
        if spec.form == FACTORS:
            return self._sizes.of_factors(elements)
        if spec.form == COLLECTIVE:
            return self._sizes.of_collective(elements)
        if spec.form != ROW_SPARSE:
            return self._sizes.of(elements)
        chunk_size = self._sizes.of_rows(spec.shape)
        if chunk_size == 0:
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} with rows of {row_length(spec.shape)} elements, too "
                "long for a message"
            )
        return chunk_size


def _kind(spec: KeySpec) -> str:
    members = f" of ranks {list(spec.members)}" if spec.members else ""
    return f"{tuple(spec.shape)} {spec.dtype}{_FORMS.get(spec.form, f' in form {spec.form}')}{members}"


# Who may say what of keys and rounds: checks of messages against what the scheduler has fixed.

_BEYOND: Final = 1024
"""Rounds after the last granted one that a report may still name: a scheduler that took the job over from
what some nodes have said may know of fewer."""


class RoundAuthority:
    """Checks what the nodes of one job say."""

    def __init__(self, keys: KeyRegistry, consistency: Consistency, nodes: int) -> None:
        self._keys: Final = keys
        self._consistency: Final = consistency
        self._nodes: Final = nodes

    def check_moved(
        self, rank: int, message: Moved, moves: Sequence[Moved], policies: Mapping[int, Policy]
    ) -> None:
        """Check that a rank is the root of chunks that it moves to a later policy.

        Args:
            rank: the sender.
            message: a new one.
            moves: earlier ones of the same round.
            policies: by version, those that are remembered.

        Raises:
            ProtocolViolation: it is not, or the policy takes nothing over.
        """
        key, later = message.key, policies.get(message.version)
        spec, grant = self._keys.spec(key), self._keys.grant(key)
        chunks = len(message.chunks)
        if spec.form != COLLECTIVE:
            chunks = -(-math.prod(spec.shape) // grant.chunk_size)
        bound = self._consistency.version_of(key, message.round)
        if bound is None and message.round > self._consistency.granted(key):
            raise ProtocolViolation(
                f"rank {rank} moves chunks of round {message.round} of key {key}, which no rank was granted"
            )
        if spec.members or min(message.chunks, default=0) < 0 or (later is not None and not later.takes_over):
            raise ProtocolViolation(
                f"rank {rank} moves chunks of key {self._keys.name(key)!r} to policy {message.version}, "
                "which takes none of them over"
            )
        if spec.form != COLLECTIVE and max(message.chunks, default=0) >= chunks:
            raise ProtocolViolation(
                f"rank {rank} moves chunk {max(message.chunks)} of key {self._keys.name(key)!r}, which has "
                f"{chunks}"
            )
        if bound is None or message.version <= bound:
            return  # nodes ignore it: all have begun later rounds, or are in a later view
        for chunk in message.chunks:
            now = max(
                (move.version for move in moves if move.version < message.version and chunk in move.chunks),
                default=bound,
            )
            root = _root(policies.get(now), grant.first_slot + chunk)
            if root is not None and root != rank:
                raise NotAuthorised(
                    f"rank {rank} moves chunk {chunk} of round {message.round} of key "
                    f"{self._keys.name(key)!r}; its root under policy {now} is rank {root}"
                )

    def check_digest(self, rank: int, message: ReplicaDigest) -> None:
        """Check that a rank can have a value of a key after a round.

        Raises:
            ProtocolViolation: it cannot.
        """
        if message.key not in self._keys:
            raise ProtocolViolation(f"rank {rank} reports key {message.key}, which nobody has registered")
        members, granted = self._keys.spec(message.key).members, self._consistency.granted(message.key)
        if (members and rank not in members) or not 0 <= message.round <= granted:
            raise ProtocolViolation(
                f"rank {rank} reports its value after round {message.round} of key {message.key}: expected a "
                f"rank of that key, and a round up to {granted}, the last one granted"
            )

    def check_call(self, rank: int, call: WaitingCall) -> None:
        """Check that a rank can wait for a call of a group.

        Raises:
            ProtocolViolation: it is no member of the group.
        """
        members = self._keys.members_of_group(call.group)
        if call.number < 0 or (members and rank not in members):
            raise NotAuthorised(
                f"rank {rank} waits for call {call.number} of group {call.group[:100]!r}, of ranks "
                f"{list(members[:16])}"
            )

    def check_timed_out(self, rank: int, message: CallTimedOut) -> None:
        """Check that a rank can have waited for a call in vain.

        Raises:
            ProtocolViolation: it is no member of the group, or no group has such members.
        """
        self.check_call(rank, message.call)
        members = message.members
        if rank not in members or max(members) >= self._nodes or not 0 <= message.seconds < math.inf:
            raise ProtocolViolation(
                f"rank {rank} says that a call of ranks {list(members[:16])} has timed out after "
                f"{message.seconds} s: expected ranks below {self._nodes}, its own among them"
            )

    def report_problem(self, message: ViewReport) -> str:
        """Return what no correct node can say of its results; empty: nothing."""
        for key, round in (*message.complete.items(), *message.begins.items()):
            if not self._may_know(key, round):
                return f"round {round} of key {key}"
        for results in message.results:
            if not self._may_know(results.key, results.round) or not _is_whole(results):
                return f"results of round {results.round} of key {results.key}"
        return ""

    def _may_know(self, key: int, round: int) -> bool:
        return key in self._keys and -1 <= round <= self._consistency.granted(key) + _BEYOND


def _is_whole(results: RoundResults) -> bool:
    """Return whether the chunks are those of the round."""
    chunks = bits_from_wire(results.chunks) | bits_from_wire(results.known)
    return results.of == 0 or chunks.bit_length() <= results.of


def _root(policy: Policy | None, slot: int) -> int | None:
    """Return the root of a slot's tree; None: the policy is not remembered."""
    if policy is None:
        return None
    tree = policy.trees[policy.tree_of(slot)]
    return MemberTree(tree, policy.members).root if policy.members else int(tree.root)


# Comparing collective calls that wait: whether all members of a group make the same calls in the same order.

_REPORTS_S: Final = 1.25
"""How long to wait, once a call has timed out at one rank, for the reports of those that have made it: they
come after a second."""

_OPEN_CALLS: Final = 10_000
"""Most calls that are remembered; the oldest are forgotten."""

_OPEN_CALL_CHARACTERS: Final = 16 * 2**20
"""Most characters of their texts together."""

_MOST_CALL_CHARACTERS: Final = 2**18
"""Of one call: an all-to-all of thousands of ranks names a shape for each."""


@dataclass(frozen=True, slots=True)
class CallConflict:
    """Two ranks make different calls at the same place."""

    group: str
    number: int
    first_rank: int
    first: str
    rank: int
    text: str

    def __str__(self) -> str:
        return (
            f"call {self.number} of group {self.group!r} is {self.first} at rank {self.first_rank} and "
            f"{self.text} at rank {self.rank}: every member of a group must make the same calls, of the same "
            "types and shapes, in the same order"
        )


@dataclass(slots=True)
class _Waiting:
    first_rank: int
    text: str
    ranks: int = 0
    """Bit set of the ranks that have reported the call."""


class CallOrder:
    """The calls that ranks have reported as waiting."""

    def __init__(self) -> None:
        self._seen: Final[dict[tuple[str, int], _Waiting]] = {}
        """By group and number."""
        self._characters = 0
        self._timed_out: tuple[int, CallTimedOut] | None = None
        self._decide_at = math.inf

    def record(self, rank: int, call: WaitingCall) -> CallConflict | None:
        """Record a call that waits at a rank. Returns the conflict with another rank's call, if there is
        one.

        Raises:
            ProtocolViolation: no call has such a text.
        """
        place = (call.group, call.number)
        seen = self._seen.get(place)
        if seen is None:
            size = len(call.group) + len(call.text)
            if size > _MOST_CALL_CHARACTERS:
                raise ProtocolViolation(
                    f"rank {rank} describes a call in {size} characters: "
                    f"expected at most {_MOST_CALL_CHARACTERS}"
                )
            seen = self._seen[place] = _Waiting(rank, call.text)
            self._characters += size
        while len(self._seen) > _OPEN_CALLS or self._characters > _OPEN_CALL_CHARACTERS:
            self._forget(next(iter(self._seen)))
        seen.ranks |= 1 << rank
        if seen.text == call.text:
            return None
        return CallConflict(call.group, call.number, seen.first_rank, seen.text, rank, call.text)

    def without(self, rank: int) -> None:
        """Forget what a rank has reported that has left: the others may go on otherwise, as their results
        tell.
        """
        for place, seen in list(self._seen.items()):
            seen.ranks &= ~(1 << rank)
            if not seen.ranks:
                self._forget(place)
            elif seen.first_rank == rank:
                seen.first_rank = ranks_in(seen.ranks)[0]

    def _forget(self, place: tuple[str, int]) -> None:
        self._characters -= len(place[0]) + len(self._seen.pop(place).text)

    def timed_out(self, rank: int, message: CallTimedOut, now: float) -> None:
        """Record that a call has reached its time-out at a rank. Other ranks may have made it just now.

        Raises:
            ProtocolViolation: no group has such members.
        """
        members = message.members
        if min(members, default=0) < 0 or any(one >= other for one, other in pairwise(members)):
            raise ProtocolViolation(
                f"rank {rank} says that a call of ranks {list(members[:16])} has timed out: expected ranks "
                "from 0 up, in order"
            )
        if self._decide_at == math.inf:
            self._timed_out, self._decide_at = (rank, message), now + _REPORTS_S

    def decide_at(self) -> float:
        """Return when `decision` has something to say."""
        return self._decide_at

    def decision(self, now: float) -> str | None:
        """Return what to tell all ranks of a call that has timed out; None: there is none, or not yet."""
        if now < self._decide_at or self._timed_out is None:
            return None
        return self.timeout_text(*self._timed_out)

    def timeout_text(self, rank: int, message: CallTimedOut) -> str:
        """Return what to tell all ranks of a call that has reached its time-out at a rank."""
        call = message.call
        text = (
            f"call {call.number} of group {call.group!r}, {call.text}, has not completed within "
            f"its timeout of {message.seconds:g} s at rank {rank}"
        )
        seen = self._seen.get((call.group, call.number))
        have = 1 << rank | (seen.ranks if seen else 0)
        missing = [member for member in message.members if not have >> member & 1]
        if not missing:
            return f"{text}: every member has made it; the network is slower than the time-out allows"
        some = f"ranks {', '.join(map(str, missing))} have" if len(missing) > 1 else f"rank {missing[0]} has"
        return f"{text}: {some} not made it"


# Comparing replicas: whether all ranks still hold the same values, which an optimizer could make differ.

_OPEN_DIGESTS: Final = 10_000
"""Most (key, round) pairs that some ranks have reported and others have not; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Two ranks hold different values of a key after the same round."""

    key: int
    round: int
    first_rank: int
    rank: int


@dataclass(slots=True)
class _Report:
    rank: int
    digest: int
    ranks: int
    """Bit set of the ranks that reported this digest."""


class ReplicaCheck:
    """Compares the digests that ranks report."""

    def __init__(self, ranks: int) -> None:
        self._everybody = (1 << ranks) - 1
        self._open: Final[dict[tuple[int, int], _Report]] = {}

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Compare the values of these ranks from now on."""
        self._everybody = bits_of(ranks)
        self._open.clear()

    def record(self, rank: int, key: int, round: int, digest: int) -> Drift | None:
        """Record a rank's digest of a key's value after a round. Returns the first difference, if any."""
        if not self._everybody >> rank & 1:
            return None
        report = self._open.setdefault((key, round), _Report(rank, digest, 0))
        if report.digest != digest:
            return Drift(key, round, report.rank, rank)
        report.ranks |= 1 << rank
        if report.ranks == self._everybody:
            del self._open[key, round]
        while len(self._open) > _OPEN_DIGESTS:
            del self._open[next(iter(self._open))]
        return None


# How many local steps each node takes so that all are ready to exchange at the same time (ESync).
#
# A node is ready k·c + m after the last exchange: k local steps of c seconds each, and m seconds until its
# values are where they are summed. The slowest node takes the fewest steps, and all others as many as they
# can until then.
#
# Source: Li et al., "ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data Centers", IEEE
# TSC 15 (4), 2022. There a node asks after each step whether to take another one; here it is told once a
# round, since a question takes a round trip over the WAN.

_LATE: Final = 0.1
"""A node takes one more step if that makes it late by at most this part of the step: measured times scatter,
and four steps of 1.01 s beside one of 4 s are better than three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """What is known of one node."""

    step_s: float
    """Duration of a local step; more than 0."""
    exchange_s: float = 0.0
    """From its last step until its values are where they are summed, without waiting for other nodes."""
    least: int = 1
    most: int = 1
    """Fewest and most local steps of a round."""


def ready_at(nodes: Mapping[int, NodeTimes]) -> float:
    """Return how long after the last exchange the slowest node is ready, with its fewest steps."""
    return max(node.least * node.step_s + node.exchange_s for node in nodes.values())


def balanced_steps(nodes: Mapping[int, NodeTimes]) -> dict[int, int]:
    """Return the local steps of each node's next round, by rank.

    No node is ready more than a tenth of its step after the slowest one, and none could take another step
    before that, unless it has its most.

    Args:
        nodes: by rank, at least one.
    """
    end = ready_at(nodes)
    return {
        rank: max(
            node.least,
            min(node.most, math.floor((end - node.exchange_s) / node.step_s + _LATE)),
        )
        for rank, node in nodes.items()
    }


# The state server of ESync: collects how long nodes' local steps take, and answers with their number.
#
# A node reports when it has taken its steps and begins to exchange. When all have, the answers go out, while
# the exchange is under way; so a node that has the sum knows how many steps follow. How long a node has
# waited for the others in an exchange is known here, by when their reports came. The rest of the exchange is
# its own time to communicate.

_MOST_TRAININGS: Final = 4096
_MOST_STEPS: Final = 1_000_000
_LONGEST_S: Final = 1e6
"""Bounds on what a node may report: eleven days a step."""

Grant = tuple[int, int, int]
"""A rank, the round that it has reported, and the number of steps of its next one."""


class _Training:
    """One training whose steps are balanced."""

    def __init__(self) -> None:
        self.reports: Final[dict[int, StepTimes]] = {}
        """The last one of each rank."""
        self.times: Final[dict[int, NodeTimes]] = {}
        self.arrived: Final[dict[int, float]] = {}
        """When each rank's last report came."""
        self.waited: Final[dict[int, float]] = {}
        """How long each rank has waited for others in the last exchange that all have begun."""
        self.answered = -1
        """The last round for which all have an answer."""


class StateServer:
    """The state server of one job."""

    def __init__(self) -> None:
        self._trainings: Final[dict[int, _Training]] = {}

    def report(self, rank: int, report: StepTimes, members: Collection[int], now: float) -> list[Grant]:
        """Record a rank's report; return what is to be answered now, and to whom.

        A report that comes again, because its answer may be lost, is answered again. So is one of an earlier
        round than another rank's: that one's answer cannot have been computed without this rank, so a process
        that served the job before has computed it. A rank that is not among `members` is told to take its
        fewest steps: it has joined later, and nobody waits for it until it has caught up.

        Args:
            rank: the sender.
            report: what it says.
            members: the ranks whose values count, and that have not finished.
            now: the time.

        Raises:
            ProtocolViolation: no correct node reports that.
        """
        _check(rank, report)
        training = self._trainings.setdefault(report.training, _Training())
        last = training.reports.get(rank)
        if last is None or report.round > last.round:
            _record(training, rank, report, now)
        if rank not in members:
            return [(rank, report.round, report.least)]
        if report.round <= training.answered or _is_behind(training, report):
            steps = balanced_steps(training.times)[rank]
            return [(rank, report.round, steps)]
        return _grants(training, members)

    def members_changed(self, members: Collection[int], present: Collection[int]) -> list[tuple[int, Grant]]:
        """Return what is to be answered now that ranks have left, finished, or caught up, with the training
        of each.

        Args:
            members: as in `report`.
            present: all ranks that are in the job; what is known of others is forgotten.
        """
        grants = []
        for number, training in self._trainings.items():
            for rank in [rank for rank in training.reports if rank not in present]:
                for by_rank in (training.reports, training.times, training.arrived, training.waited):
                    by_rank.pop(rank, None)
            grants += [(number, grant) for grant in _grants(training, members)]
        return grants


def _check(rank: int, report: StepTimes) -> None:
    times_ok = 0 < report.step_s <= _LONGEST_S and 0 <= report.exchange_s <= _LONGEST_S
    steps_ok = 1 <= report.least <= report.most <= _MOST_STEPS
    if not (0 <= report.training < _MOST_TRAININGS and report.round >= 0 and times_ok and steps_ok):
        raise ProtocolViolation(
            f"rank {rank} reports {report}: expected one of {_MOST_TRAININGS} trainings, a step of more than "
            f"0 and at most {_LONGEST_S:g} s, an exchange of at most as long, and 1 to {_MOST_STEPS} steps"
        )


def _record(training: _Training, rank: int, report: StepTimes, now: float) -> None:
    before = training.times.get(rank)
    step_s = report.step_s if before is None else (before.step_s + report.step_s) / 2
    training.reports[rank] = report
    training.arrived[rank] = now
    training.times[rank] = NodeTimes(
        step_s=step_s,
        exchange_s=max(0.0, report.exchange_s - training.waited.get(rank, math.inf)),
        least=report.least,
        most=report.most,
    )


def _is_behind(training: _Training, report: StepTimes) -> bool:
    return any(other.round > report.round for other in training.reports.values())


def _grants(training: _Training, members: Collection[int]) -> list[Grant]:
    """Return the answers to all members that wait for one, once all have reported that round or a later one.

    A rank that has caught up was answered before, so it may be a round ahead.
    """
    reports = training.reports
    if not members or any(rank not in reports for rank in members):
        return []
    number = min(reports[rank].round for rank in members)
    if number <= training.answered:
        return []
    training.answered = number
    latest = max(training.arrived[rank] for rank in members)
    for rank in members:
        training.waited[rank] = latest - training.arrived[rank]
    steps = balanced_steps({rank: training.times[rank] for rank in members})
    return [(rank, number, steps[rank]) for rank in sorted(members) if reports[rank].round == number]
