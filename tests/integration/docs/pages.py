"""The code blocks of the documentation, for tests that run them.

A comment in front of a block says what a test must know of it, with a reason that readers of the page's
source can check:

    <!-- test: after the block above -->      it goes on where the block before it ends
    <!-- test: not run: REASON -->            it is only compiled
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]

PAGES: Final = tuple(
    sorted([*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")])
)

_FENCE: Final = re.compile(
    r"(?: *<!-- test: (?P<mark>[^\n]+?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_INDENTED: Final = re.compile(r"(?<=\n\n)(?:    \S[^\n]*\n(?:    [^\n]*\n)*)", re.MULTILINE)
_BOX: Final = re.compile(r"^!!! [^\n]*\n(?:\n|    [^\n]*\n)+", re.MULTILINE)
"""An admonition: prose, though it is indented."""
_AFTER: Final = "after the block above"
_NOT_RUN: Final = "not run: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block."""

    page: str
    """From the root."""
    line: int
    """Of its first line in the page."""
    language: str
    """As after the fence; "" if it is indented instead."""
    text: str
    before: str = ""
    """The text of the blocks that it goes on from."""
    not_run: str = ""
    """Why no test runs it."""

    @property
    def name(self) -> str:
        """Return page and line."""
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return all blocks in these languages."""
    return [block for page in PAGES for block in _blocks_of(page) if block.language in languages]


def _blocks_of(path: Path) -> Iterator[Block]:
    page, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    above = ""
    for found in _FENCE.finditer(text):
        mark = found["mark"] or ""
        assert not mark or mark == _AFTER or mark.startswith(_NOT_RUN), f"{page}: no such mark: {mark!r}"
        own = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        before = above if mark == _AFTER else ""
        yield Block(
            page=page,
            line=text[: found.start("text")].count("\n") + 1,
            language=found["language"],
            text=own,
            before=before,
            not_run=mark.removeprefix(_NOT_RUN) if mark.startswith(_NOT_RUN) else "",
        )
        if found["language"] == "python":
            above = before + own
    prose = text
    for pattern in (_FENCE, _BOX):
        prose = pattern.sub(lambda found: "\n" * found[0].count("\n"), prose)
    for found in _INDENTED.finditer(prose):
        if not re.match(r"    [-*\d]", found[0]):  # a list in a list
            line = prose[: found.start()].count("\n") + 1
            yield Block(
                page=page, line=line, language="", text=re.sub(r"^    ", "", found[0], flags=re.MULTILINE)
            )
