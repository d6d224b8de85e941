"""Where the program of a rank begins that has joined later: it has the state of all rounds before. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from netstorm.kvstore.rounds.round import Round
from netstorm.kvstore.rounds.topology_requests import TopologyRequests
from netstorm.kvstore.rounds.views.view_changes import ViewChanges
from netstorm.kvstore.rounds.withheld_sums import Owner
from netstorm.kvstore.values.key import Key
from netstorm.protocol.messages import ANY_RULE, RoundBegun

__all__ = ["LateStart"]


class LateStart:
    """The late start of one node's program; nothing of it concerns a rank that has begun with the job."""

    def __init__(
        self,
        *,
        keys: Mapping[int, Key],
        rounds: Mapping[Owner, Round],
        views: ViewChanges,
        topology_requests: TopologyRequests,
        end_round: Callable[[Round], None],
    ) -> None:
        """Begin without a state.

        Args:
            keys: by number; `Aggregation` adds to them.
            rounds: the open rounds; `Aggregation` changes them.
            views: know where the program begins, and what was lost before.
            topology_requests: ask for bindings.
            end_round: ends a round whose results are all here.
        """
        self._keys: Final = keys
        self._rounds: Final = rounds
        self._views: Final = views
        self._topology_requests: Final = topology_requests
        self._end_round: Final = end_round

    def begin_at(self, rounds: Mapping[int, int]) -> None:
        """Go on with these rounds, by key.

        Of those before, the results still come here: other nodes may need them from this one. Keys that are
        not named keep the results that came meanwhile.
        """
        self._views.begins.update(rounds)
        for key, first in rounds.items():
            if key in self._keys:
                for owner in [owner for owner in self._rounds if owner[0] == key]:
                    self.end_unneeded(self._rounds[owner])
                self._views.give_up_lost(key)
                self.ask_for_binding(self._keys[key], max(0, first - 1))

    def add_key(self, key: int) -> None:
        """Go on with a key that was not known when the state came."""
        if key in self._views.begins:
            self.begin_at({key: self._views.begins[key]})

    def end_unneeded(self, round: Round) -> None:
        """End a round of which all results are here, if the program's state has them already."""
        unneeded = round.round < self._views.begins.get(round.key.identity, 0)
        if round.missing == 0 and round.operation is None and unneeded:
            self._end_round(round)

    def version_of(self, key: int, round: int) -> int | None:
        """Return the policy version of a round of which all results are here; None: some are missing.

        The scheduler does not tell a rank that is behind of what all others have begun long ago.
        """
        found = self._rounds.get((key, round))
        return None if found is None or found.missing or key not in self._views.begins else found.version

    def ask_for_binding(self, key: Key, round: int) -> None:
        """Ask what a silent rank is not told otherwise: under which policy the next round runs."""
        self._topology_requests.record_begin(key, RoundBegun(key.identity, round, ANY_RULE), 0.0)
