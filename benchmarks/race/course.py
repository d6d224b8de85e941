"""A network as its changes come: its phases, and what part of the possible somebody reaches meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from netstorm.topology.network import Change, Network
from netstorm.topology.resources import optimum

__all__ = ["Course", "end_of_changes", "networks_by_time", "with_course_repeated", "with_times_scaled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The fluid optimum of a round by time. Each phase ends where the next one begins, the last one never."""

    begins: tuple[float, ...]
    """Of the phases, in seconds since the changes began to count; the first is 0."""
    optima: tuple[float, ...]
    """Seconds of a round in each phase."""

    @classmethod
    def of(cls, network: Network, nbytes: float) -> Course:
        """Return the course of a network for rounds of so many bytes."""
        phases = networks_by_time(network)
        return cls(
            begins=tuple(begin for begin, _ in phases),
            optima=tuple(optimum(still, nbytes).seconds for _, still in phases),
        )

    def best(self, start: float, finish: float) -> float:
        """Return how many rounds the optimum does from `start` to `finish`; before 0 it is the first phase.

        A round's speed is 1 / optimum at each moment, so this is the integral of that.
        """
        done, here = 0.0, start
        while here < finish:
            phase = max(0, bisect_right(self.begins, here) - 1)
            following = self.begins[phase + 1] if phase + 1 < len(self.begins) else finish
            until = min(finish, following)
            done += (until - here) / self.optima[phase]
            here = until
        return done

    def of_optimum(self, rounds: Iterable[tuple[float, float]]) -> float | None:
        """Return the rounds done over those that the optimum does in the same time; None if there are none.

        Args:
            rounds: start and duration of each, in seconds. What is between two rounds counts for nobody.
        """
        known = list(rounds)
        best = sum(self.best(start, start + seconds) for start, seconds in known)
        return len(known) / best if best > 0 else None


def networks_by_time(network: Network) -> list[tuple[float, Network]]:
    """Return (begin, network without later changes) of each phase."""
    begins = sorted({0.0, *(change.at for change in network.changes)})
    return [(begin, replace(network.at(begin), changes=())) for begin in begins]


def end_of_changes(network: Network) -> float:
    """Return when the last phase has been as long as the one before it; 0 if nothing changes."""
    begins = [begin for begin, _ in networks_by_time(network)]
    return 0.0 if len(begins) == 1 else 2 * begins[-1] - begins[-2]


def with_times_scaled(network: Network, scale: float) -> Network:
    """Return the same network, whose changes come at other times."""
    changes = tuple(replace(change, at=change.at * scale) for change in network.changes)
    return replace(network, changes=changes)


def with_course_repeated(network: Network, times: int) -> Network:
    """Return the network whose course comes so many times, each from the first rates on."""
    period = end_of_changes(network)
    changing = {(change.source, change.target) for change in network.changes}
    again = (
        Change(
            at=begin + turn * period,
            source=link.source,
            target=link.target,
            rate=link.rate,
            latency=link.latency,
            loss=link.loss,
        )
        for turn in range(1, times)
        for begin, still in networks_by_time(network)
        for link in still.links
        if (link.source, link.target) in changing
    )
    return replace(network, changes=(*network.changes, *again))
