"""Host files: which node runs on which host. A new option of a host belongs here.

# host      options, in any order
alice@tokyo-1   site=tokyo
tokyo-2         site=tokyo slots=2
paris-1         site=paris rank=0 address=203.0.113.7
2001:db8::5     site=oslo
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from netstorm.addresses import without_brackets
from netstorm.errors import UsageError
from netstorm.topology.files import MAX_NODES

__all__ = ["Placement", "as_ssh_takes_it", "check_host", "place", "read_hostfile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one node runs."""

    rank: int
    host: str
    """As ssh expects it: a name, an address or an alias, perhaps with `user@`."""
    site: str | None = None
    address: str | None = None
    """Address that the node advertises, and the scheduler if it is on this host; None: the one they find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    number: int
    host: str
    slots: int = 1
    site: str | None = None
    rank: int | None = None
    address: str | None = None


_HOST: Final = re.compile(r"([^\s@=-][^\s@=]*@)?[^\s@=-][^\s@=]*")
"""No leading dash: ssh would read it as an option."""


def read_hostfile(path: Path) -> tuple[Placement, ...]:
    """Return the placement of every rank, in the order of the file.

    Raises:
        UsageError: begins with file and line, and says what is allowed there.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{path}: cannot read the host file: {error}") from None
    return place(text, str(path))


def check_host(host: str, place: str) -> None:
    """Check that ssh can read this as a host.

    Raises:
        UsageError: begins with `place`.
    """
    if not _HOST.fullmatch(host):
        raise UsageError(
            f"{place}: {host!r} is no host: expected a name or address, perhaps with USER@ before it"
        )


def as_ssh_takes_it(host: str) -> str:
    """Return a host whose IPv6 address has no brackets."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{without_brackets(name)}"


def place(text: str, name: str) -> tuple[Placement, ...]:
    """Return the placement of every rank, in the order of the file, from its text.

    A line with `slots=N` stands for N nodes, whose ranks are consecutive if it has `rank=R`. Nodes without a
    rank get the remaining ranks, in the order of the file.

    Args:
        name: of the file, for messages.

    Raises:
        UsageError: begins with `name` and line, and says what is allowed there.
    """
    lines = []
    for number, written in enumerate(text.splitlines(), start=1):
        words = written.partition("#")[0].split()
        if words:
            lines.append(_read_line(words, number, name))
    total = sum(line.slots for line in lines)
    if total > MAX_NODES:
        raise UsageError(f"{name}: {total} nodes: expected at most {MAX_NODES}; check slots=")
    if not total:
        raise UsageError(f"{name}: no hosts in it; expected one a line: HOST [slots=N] [site=NAME] [rank=R]")
    owner: dict[int, _Line] = {}
    for line in lines:
        for rank in _ranks_of(line):
            if rank >= total:
                raise UsageError(
                    f"{name}, line {line.number}: rank={rank}: expected a rank from 0 to {total - 1}, since "
                    f"the file has {total} nodes"
                )
            if rank in owner:
                raise UsageError(
                    f"{name}, line {line.number}: rank {rank} is taken by line {owner[rank].number} "
                    f"({owner[rank].host}); give each rank to one node"
                )
            owner[rank] = line
    free = iter([rank for rank in range(total) if rank not in owner])
    return tuple(
        Placement(rank=rank, host=line.host, site=line.site, address=line.address)
        for line in lines
        for rank in _ranks_of(line) or [next(free) for _ in range(line.slots)]
    )


def _ranks_of(line: _Line) -> Sequence[int]:
    return range(line.rank, line.rank + line.slots) if line.rank is not None else ()


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        raise ValueError(f"expected a whole number, at least {least}")
    return int(text)


def _name(text: str) -> str:
    if not text:
        raise ValueError("expected a name")
    return text


def _address(text: str) -> str:
    return without_brackets(_name(text))


_OPTIONS: Final[dict[str, Callable[[_Line, str], _Line]]] = {
    "slots": lambda line, text: replace(line, slots=_whole(text, 1)),
    "rank": lambda line, text: replace(line, rank=_whole(text, 0)),
    "site": lambda line, text: replace(line, site=_name(text)),
    "address": lambda line, text: replace(line, address=_address(text)),
}
"""How each option of a host changes its line; a `ValueError` if its value is not allowed."""


def _read_line(words: list[str], number: int, name: str) -> _Line:
    place = f"{name}, line {number}"
    host, *options = words
    check_host(host, place)
    line = _Line(number=number, host=as_ssh_takes_it(host))
    seen = set()
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in _OPTIONS:
            known = ", ".join(f"{option}=" for option in _OPTIONS)
            raise UsageError(f"{place}: {option!r}: expected one of {known}; one host a line")
        if key in seen:
            raise UsageError(f"{place}: {key}= is there twice")
        try:
            line = _OPTIONS[key](line, value)
        except ValueError as error:
            raise UsageError(f"{place}: {option!r}: {error}") from None
        seen.add(key)
    return line
