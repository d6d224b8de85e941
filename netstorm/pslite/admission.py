"""The decision about the key of a process that connects: without an allow list it is admitted.

ZeroMQ has verified that the process holds the secret part of the key (CURVE's INITIATE command). That it also
holds the job's key, its first message proves (`process_proof`). The list is read again and again: it is
short, and so neither its file's times nor a read that has failed once can hide that a node was removed. While
the file cannot be read, or is wrong, the last list that could be read stays in force: an editor's
half-written file must not end a job.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from netstorm.errors import SettingsError
from netstorm.pslite.security.allow_list import parse_allow_list
from netstorm.pslite.security.credentials import Credentials
from netstorm.pslite.security.curve import key_text

__all__ = ["Admission", "Answer"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a key is admitted."""

    user: str
    """Text of the key; empty: it is not admitted."""
    reason: str = ""
    """Why it is not admitted, for a person."""


class Admission:
    """Whom one process admits. Users are known by the text of their public key."""

    def __init__(self, credentials: Credentials) -> None:
        """Read the allow list, if there is one.

        Raises:
            SettingsError: it cannot be read, or is wrong.
        """
        self._path: Final = credentials.allow_file
        self._problem = ""
        self._text = ""
        """What `_names` was read from."""
        self._names: Mapping[str, str] = {}
        if self._path is not None:
            self._text = _read(self._path)
            self._names = _parse(self._text, self._path)

    @property
    def can_change(self) -> bool:
        """Whether there is an allow list."""
        return self._path is not None

    def decide(self, key: bytes) -> Answer:
        """Return whether a public key is admitted, by the list as it is now."""
        user = key_text(key)
        if self.admits(user):
            return Answer(user)
        return Answer("", f"its key is not in {self._path} (NETSTORM_ALLOW), or it has none of its own")

    def admits(self, user: str) -> bool:
        """Return whether a user is still admitted."""
        return self._path is None or user in self._names

    def refresh(self) -> Mapping[str, str]:
        """Read the allow list again; return the names of users that were removed."""
        path = self._path
        if path is None:
            return {}
        try:
            text = _read(path)
            if text == self._text:
                self._problem = ""
                return {}
            names = _parse(text, path)
        except SettingsError as error:
            self._complain(str(error))
            return {}
        self._problem, self._text = "", text
        before, self._names = self._names, names
        removed = {user: name for user, name in before.items() if user not in names}
        added = [name for user, name in names.items() if user not in before]
        if removed or added:
            _log.warning(
                "%s (NETSTORM_ALLOW) has changed: %d nodes are admitted; added: %s; removed: %s",
                path,
                len(names),
                ", ".join(sorted(added)) or "none",
                ", ".join(sorted(removed.values())) or "none",
            )
        return removed

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.error("%s; the list that was read before stays in force", problem)


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, UnicodeError) as error:
        raise _unreadable(path, error) from None
    if mode & stat.S_IWOTH:
        raise SettingsError(
            f"NETSTORM_ALLOW={path}: mode {stat.S_IMODE(mode):04o} lets everybody add keys: expected 0644"
        )
    return text


def _parse(text: str, path: Path) -> Mapping[str, str]:
    return {key_text(key): name for key, name in parse_allow_list(text, str(path)).items()}


def _unreadable(path: Path, error: Exception) -> SettingsError:
    return SettingsError(f"NETSTORM_ALLOW={path}: cannot read the allow list: {error}")
