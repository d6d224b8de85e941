"""A node's own key: it has a name, and an allow list can admit it or not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from netstorm.errors import SettingsError, UsageError
from netstorm.pslite.security.curve import CurveKeys, key_of_text, key_text
from netstorm.pslite.security.key_files import read_secret_file, write_secret_file

__all__ = ["NodeKey", "check_name"]

_NODE_KIND: Final = "node key"

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    """Return the name of a node's key, if it can be one.

    Raises:
        ValueError: it cannot; the message shows what was expected.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r}: expected a name of 1 to 64 letters, digits, dots, dashes or underscores")
    return name


@dataclass(frozen=True, slots=True)
class NodeKey:
    """The key of one node. Its text does not show the secret."""

    name: str
    keys: CurveKeys = field(repr=False)

    @property
    def line(self) -> str:
        """The line of an allow list that admits this key."""
        return f"{self.name} {key_text(self.keys.public)}"

    @classmethod
    def create(cls, path: Path, name: str) -> NodeKey:
        """Make a fresh key, and its file, which only its owner can read.

        Raises:
            UsageError: `name` cannot be a name.
            SettingsError: there is such a file, or it cannot be written.
        """
        try:
            key = cls(check_name(name), CurveKeys.fresh())
        except ValueError as error:
            raise UsageError(f"--node {error}") from None
        write_secret_file(path, _NODE_KIND, {"name": name, "secret": key_text(key.keys.secret)})
        return key

    @classmethod
    def load(cls, path: Path) -> NodeKey:
        """Return the key of a file.

        Raises:
            SettingsError: it cannot be read, others can read it, or it is no node key.
        """
        fields = read_secret_file(path, _NODE_KIND, ("name", "secret"))
        try:
            return cls(check_name(fields["name"]), CurveKeys.from_secret(key_of_text(fields["secret"])))
        except ValueError as error:
            raise SettingsError(f"{path}: the {_NODE_KIND} has {error}; make a new key") from None
