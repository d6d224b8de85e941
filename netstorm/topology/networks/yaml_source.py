"""YAML with the line of each value, for error messages that name it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import yaml

from netstorm.errors import NetworkFileError, UsageError

__all__ = ["Item", "Source", "read_text", "shortened"]

T = TypeVar("T")

MAX_BYTES: Final = 32 * 1024 * 1024
"""A full mesh of 512 nodes has 12 MB."""

_DEEPEST: Final = 32
"""Nested `[` and `{`; the files that are read here have four."""


def read_text(path: str | PathLike[str], what: str, error_type: type[UsageError] = NetworkFileError) -> str:
    """Return the text of a file, called `what` in messages.

    Raises:
        UsageError: of `error_type`: the file cannot be read, is too large, or is not UTF-8.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise error_type(f"{path}: {what} cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise error_type(f"{path}: {what} has more than {MAX_BYTES} bytes, which is the limit")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise error_type(
            f"{path}:{line}: byte {data[error.start]:#04x} is not UTF-8: expected a text file in UTF-8"
        ) from None


class _Loader(yaml.SafeLoader):
    """Reads YAML that is not nested deeply: for each `[` the parser looks at every one that is still open."""

    def fetch_flow_collection_start(self, kind: type[yaml.Token]) -> None:
        """See the base class.

        Raises:
            RecursionError: nested too deeply.
        """
        if self.flow_level >= _DEEPEST:
            raise RecursionError
        super().fetch_flow_collection_start(kind)


class Source:
    """The name of a text, and where in it something is wrong."""

    def __init__(self, name: str, error_type: type[UsageError] = NetworkFileError) -> None:
        self.name: Final = name
        self._error_type: Final = error_type

    def fail(self, line: int, message: str) -> NoReturn:
        """Raise the error for a line, counted from 1."""
        raise self._error_type(f"{self.name}:{line}: {message}")

    def parse(self, text: str, expected: str) -> Item:
        """Return the top value of a YAML document. Nothing is constructed: no tag can call anything.

        The parser is PyYAML's own: libyaml's crashes on deep nesting.

        Raises:
            UsageError: the text is not YAML, or empty; `expected` says what it should have been.
        """
        try:
            node = yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.fail(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}")
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self.fail(line, f"not YAML: character {error.character!r}: {error.reason}")
        except (ValueError, OverflowError):  # the parser's own, with no line: \UFFFFFFFF, %YAML 1.999…
            self.fail(1, "not YAML: an escaped character, or a number, that is out of range")
        except RecursionError:
            self.fail(1, "not YAML that can be read: nested too deeply")
        if node is None:
            self.fail(1, f"empty: expected {expected}")
        return Item(self, node, "the file")


class Item:
    """A value in the text, and what it is called in messages."""

    __slots__ = ("_node", "_source", "line", "what")

    def __init__(self, source: Source, node: yaml.Node, what: str) -> None:
        self._source: Final = source
        self._node: Final = node
        self.what: Final = what
        self.line: Final[int] = node.start_mark.line + 1

    def fail(self, message: str) -> NoReturn:
        """Raise the error of this kind of file for this value's line."""
        self._source.fail(self.line, message)

    @property
    def is_null(self) -> bool:
        """Whether nothing, or null, is written here."""
        return isinstance(self._node, yaml.ScalarNode) and str(self._node.tag) == "tag:yaml.org,2002:null"

    def pairs(self, expected: str, each: Callable[[str], str]) -> list[tuple[Item, Item]]:
        """Return keys and values of a mapping, the value of key k called `each(k)`; no key is there twice."""
        if not isinstance(self._node, yaml.MappingNode):
            self.fail(f"{self.what} is {self._shown()}: expected {expected}")
        found: dict[str, Item] = {}
        pairs = []
        for key_node, value_node in self._node.value:
            key = Item(self._source, key_node, f"a key of {self.what}")
            text = key.text("a word or a number")
            if text in found:
                key.fail(f"{shortened(text)} is given twice in {self.what}; first in line {found[text].line}")
            found[text] = key
            pairs.append((key, Item(self._source, value_node, each(text))))
        return pairs

    def fields(self, known: Sequence[str], *, top: bool = False) -> dict[str, Item]:
        """Return the values of a mapping whose keys are all among `known`."""
        allowed = ", ".join(known)
        fields = {}
        for key, value in self.pairs(
            f"a mapping with {allowed}", lambda name: name if top else f"{name} of {self.what}"
        ):
            name = key.text("a word")
            if name not in known:
                close = difflib.get_close_matches(name[:60], known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                key.fail(f"unknown key {shortened(name)} in {self.what}: expected {allowed}{hint}")
            fields[name] = value
        return fields

    def items(self, expected: str, each: str) -> list[Item]:
        """Return the values of a list; the n-th is called `each` n."""
        if not isinstance(self._node, yaml.SequenceNode):
            self.fail(f"{self.what} is {self._shown()}: expected {expected}")
        return [Item(self._source, node, f"{each} {n}") for n, node in enumerate(self._node.value, start=1)]

    def text(self, expected: str) -> str:
        """Return a single value as it is written, without quotes."""
        if not isinstance(self._node, yaml.ScalarNode) or self.is_null:
            self.fail(f"{self.what} is {self._shown()}: expected {expected}")
        return str(self._node.value)

    def read(self, read: Callable[[str], T], expected: str) -> T:
        """Return `read` of the text; its `UsageError` becomes one for this line."""
        text = self.text(expected)
        try:
            return read(text)
        except UsageError as error:
            self.fail(f"{self.what}: {error}")

    def _shown(self) -> str:
        if isinstance(self._node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self._node, yaml.SequenceNode):
            return "a list"
        return "empty" if self.is_null else shortened(self._node.value)


def shortened(text: str) -> str:
    """Return a text in quotes, as messages show it: no message is longer than a person reads."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
