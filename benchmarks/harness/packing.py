"""Which groups may be alive at the same time, so that the machine's memory holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["pack", "split_rounds"]


def pack(needs: Mapping[str, int], limit: int) -> tuple[list[list[str]], list[str]]:
    """Return sets of systems that fit into `limit` bytes together, and those that do not fit even alone.

    One set, if all fit: then rounds of all systems alternate one by one. First fit, largest first; a handful
    of systems needs nothing better.
    """
    fitting = sorted((name for name in needs if needs[name] <= limit), key=lambda name: -needs[name])
    sets: list[list[str]] = []
    for name in fitting:
        for together in sets:
            if sum(needs[other] for other in together) + needs[name] <= limit:
                together.append(name)
                break
        else:
            sets.append([name])
    order = list(needs)
    return [sorted(together, key=order.index) for together in sets], [
        name for name in order if needs[name] > limit
    ]


def split_rounds(rounds: int, passes: int) -> Sequence[int]:
    """Return how many of `rounds` each pass has; they differ by at most one."""
    return [rounds * (done + 1) // passes - rounds * done // passes for done in range(passes)]
