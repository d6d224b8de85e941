"""Where the calls of a program's groups are: a rank that joins later goes on from there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from netstorm.errors import UsageError
from netstorm.kvstore.operations.group_calls import Position

__all__ = ["CallPositions", "NumberedCalls"]


class NumberedCalls(Protocol):
    """Calls of one group that are numbered: `GroupCalls`, `TensorCalls`."""

    @property
    def name(self) -> str:
        """Of the group and of what tells these calls from its others."""

    @property
    def members(self) -> tuple[int, ...]:
        """The group's ranks in the job."""

    @property
    def of_all_ranks(self) -> bool:
        """Whether all ranks of the job are members."""

    def position(self) -> Position:
        """Return where the calls are. None may be under way."""

    def go_on_at(self, position: Position) -> None:
        """Go on where another member is: this rank has joined later."""

    def next_rounds(self) -> dict[int, int]:
        """Return the next round of each key that has been granted, by the key's number."""


class CallPositions:
    """The groups of a program, and where their calls are.

    Only those groups that have all ranks of the job are alike at all ranks, so a newcomer gets no others.
    """

    def __init__(self, *, later: bool) -> None:
        """Begin without groups.

        Args:
            later: this rank has joined a job that had begun, so its calls do not begin with the first.
        """
        self._later: Final = later
        self._groups: Final[dict[str, NumberedCalls]] = {}
        self._given: Mapping[str, Position] | None = None

    def add(self, group: NumberedCalls) -> None:
        """Add a group. It goes on where the others are, if that is known already."""
        self._groups[group.name] = group
        if self._given is not None and group.name in self._given:
            group.go_on_at(self._given[group.name])

    def check(self, group: NumberedCalls) -> None:
        """Check that a group's next call is known.

        Raises:
            UsageError: this rank has joined later, and does not know it.
        """
        if not self._later:
            return
        if self._given is None:
            raise UsageError(
                "this rank has joined a job that had begun, and does not have its state yet: call "
                "ElasticState.step() before any collective call"
            )
        if not group.of_all_ranks:
            raise UsageError(
                "this rank has joined a job that had begun, and does not know how many calls the group of "
                f"ranks {list(group.members)} has made: in elastic jobs, ranks that join later can only use "
                "groups of all ranks"
            )

    def now(self) -> dict[str, Position]:
        """Return where each group of all ranks is, by name. No call may be under way."""
        return {name: group.position() for name, group in sorted(self._groups.items()) if group.of_all_ranks}

    def rounds(self) -> dict[int, int]:
        """Return the next round of each key of these groups."""
        found: dict[int, int] = {}
        for group in self._groups.values():
            if group.of_all_ranks:
                found |= group.next_rounds()
        return found

    def go_on_at(self, positions: Mapping[str, Position]) -> None:
        """Go on where the other ranks are. Groups that are added later do so, too."""
        self._given = dict(positions)
        for name, group in self._groups.items():
            if name in positions:
                group.go_on_at(positions[name])
