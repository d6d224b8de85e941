"""The elements of a network: nodes, directed links, and changes of links by time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NewType

from netstorm.errors import UsageError

__all__ = [
    "LATENCY",
    "LOSS",
    "RATE",
    "TIME",
    "Bounds",
    "Change",
    "Link",
    "Node",
    "Rank",
    "changed_link",
    "checked_site",
    "shown_ranks",
]

Rank = NewType("Rank", int)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a quantity, and its text in error messages."""

    least: float
    most: float
    words: str

    def allow(self, value: float) -> bool:
        """Return whether `value` is within the bounds (NaN is not)."""
        return self.least <= value <= self.most

    def require(self, value: float | None, what: str) -> None:
        """Raise `UsageError` if a value is given that is out of bounds."""
        if value is not None and not self.allow(value):
            raise UsageError(f"{what} is {value!r}: expected {self.words}")


RATE: Final = Bounds(1.0, 1e15, "more than 0: from 1bit/s to 1000Tbit/s")
LATENCY: Final = Bounds(0.0, 3600.0, "from 0s to 1h")
LOSS: Final = Bounds(0.0, math.nextafter(1.0, 0.0), "at least 0% and less than 100%")
TIME: Final = Bounds(0.0, 1e9, "from 0s to 1e9s")

_SITE: Final = re.compile(r"[^\s,;/]{0,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A general node, and the caps of its access link in bit/s (None: not capped)."""

    rank: Rank
    site: str = ""
    egress: float | None = None
    ingress: float | None = None

    def __post_init__(self) -> None:
        checked_site(self.site)
        RATE.require(self.egress, f"egress of rank {self.rank}")
        RATE.require(self.ingress, f"ingress of rank {self.rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a link: rate in bit/s, latency in s, loss as a fraction of packets."""

    source: Rank
    target: Rank
    rate: float
    latency: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise UsageError(f"link {self}: a link joins two different ranks")
        RATE.require(self.rate, f"rate of link {self}")
        LATENCY.require(self.latency, f"latency of link {self}")
        LOSS.require(self.loss, f"loss of link {self}")

    def __str__(self) -> str:
        """Return the link as error messages name it."""
        return f"{self.source}→{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From `at` seconds after the start on, a link has these values (None: as before)."""

    at: float
    source: Rank
    target: Rank
    rate: float | None = None
    latency: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        TIME.require(self.at, f"time of the change of link {self}")
        RATE.require(self.rate, f"new rate of link {self}")
        LATENCY.require(self.latency, f"new latency of link {self}")
        LOSS.require(self.loss, f"new loss of link {self}")
        if self.rate is None and self.latency is None and self.loss is None:
            raise UsageError(f"a change of link {self} to nothing: expected a new rate, latency or loss")

    def __str__(self) -> str:
        """Return the link that changes, as error messages name it."""
        return f"{self.source}→{self.target}"

    def apply(self, link: Link) -> Link:
        """Return `link` after this change."""
        return replace(
            link,
            rate=link.rate if self.rate is None else self.rate,
            latency=link.latency if self.latency is None else self.latency,
            loss=link.loss if self.loss is None else self.loss,
        )


def changed_link(link: Link, values: Mapping[str, float]) -> Link:
    """Return `link` with new values: any of rate (bit/s), latency (s) and loss (a fraction).

    Raises:
        UsageError: a value that no link may have.
    """
    return replace(
        link,
        rate=values.get("rate", link.rate),
        latency=values.get("latency", link.latency),
        loss=values.get("loss", link.loss),
    )


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text for messages, shortened if it is long."""
    shown = ", ".join(str(rank) for rank in ranks[:12])
    more = f" and {len(ranks) - 12} more" if len(ranks) > 12 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def checked_site(site: str) -> str:
    """Return `site` if it is the name of a site.

    Raises:
        UsageError: it is too long, or has characters that no name has.
    """
    if not _SITE.fullmatch(site) or not site.isprintable():
        shown = repr(site if len(site) <= 64 else site[:61] + "...")
        raise UsageError(
            f"site {shown}: expected a name of at most 64 letters, without spaces, commas, ; and /"
        )
    return site
