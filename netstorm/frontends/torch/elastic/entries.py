"""What an `ElasticState` holds: objects with state dictionaries, and plain values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from netstorm.errors import UsageError

__all__ = ["Entries"]


class Entries:
    """The parts of a program's state, by name."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        """Hold some.

        Raises:
            UsageError: there are none, or one saves a state and does not load it.
        """
        if not entries:
            raise UsageError("ElasticState(): name what it holds, such as model=model, optimizer=optimizer")
        for name, entry in entries.items():
            if _has_state(entry) and not callable(getattr(entry, "load_state_dict", None)):
                raise UsageError(
                    f"{name}: a {type(entry).__name__} has state_dict(), and no load_state_dict()"
                )
        self._entries: Final = dict(entries)

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._entries or _has_state(self._entries[name]):
            plain = [known for known, entry in self._entries.items() if not _has_state(entry)]
            raise UsageError(f"{name!r} is no plain value of this state: it has {plain or 'none'}")
        self._entries[name] = value

    def whole(self) -> dict[str, Any]:
        """Return everything, as a tree of tensors and plain values."""
        return {
            name: entry.state_dict() if _has_state(entry) else entry for name, entry in self._entries.items()
        }

    def compared(self) -> dict[str, Any]:
        """Return what must be equal at all ranks: everything but the buffers of modules."""
        found = self.whole()
        for name, entry in self._entries.items():
            if isinstance(entry, nn.Module):
                buffers = {path for path, _ in entry.named_buffers()}
                found[name] = {path: value for path, value in found[name].items() if path not in buffers}
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what another rank's `whole` has returned.

        Raises:
            UsageError: that rank's program holds something else.
        """
        if set(state) != set(self._entries):
            raise UsageError(
                f"another rank's ElasticState holds {sorted(state)}, and this one's {sorted(self._entries)}: "
                "all ranks must run the same program"
            )
        for name, value in state.items():
            entry = self._entries[name]
            if isinstance(entry, nn.Module):
                entry.load_state_dict(value)  # copies
            elif _has_state(entry):
                entry.load_state_dict(copy.deepcopy(value))  # optimizers keep the tensors that they get
            else:
                self._entries[name] = copy.deepcopy(value)

    def set_ranks(self, rank: int, ranks: tuple[int, ...], *, counts: bool) -> None:
        """Tell those who share samples among ranks who shares the next ones, and whether this rank counts."""
        for entry in self._entries.values():
            tell = getattr(entry, "set_ranks", None)
            if callable(tell):
                tell(rank, ranks, counts=counts)


def _has_state(entry: object) -> bool:
    return callable(getattr(entry, "state_dict", None))
