"""Ranks compare their settings once: with different ones, sums would mix what does not belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from netstorm.errors import Disagreement

__all__ = ["Settings", "check_agreement", "differences"]

Settings: TypeAlias = Mapping[str, object]
"""What ranks must agree on, by the name that the script knows it by."""


def check_agreement(what: str, settings: Sequence[Settings]) -> None:
    """Raise `Disagreement`, at all ranks alike, if ranks differ from the first one.

    Args:
        what: the class, for the message.
        settings: of each rank, in order of ranks.
    """
    for rank, others in enumerate(settings):
        differing = differences(settings[0], others)
        if differing:
            raise Disagreement(
                f"{what}: "
                + "; ".join(
                    f"{name} is {first} at rank 0 and {other} at rank {rank}"
                    for name, first, other in differing
                )
                + ": all ranks must be given the same"
            )


def differences(first: Settings, second: Settings) -> list[tuple[str, object, object]]:
    """Return name and both values of what differs; what one side lacks is None there."""
    names = dict.fromkeys([*first, *second])
    return [
        (name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)
    ]
