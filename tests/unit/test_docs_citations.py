"""Code names pages and sections of the documentation, and pages name files of the code: both exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

CODE = ("netstorm", "benchmarks", "examples", "scripts", "tests")

INVENTED = {
    "netstorm/PKG",
    "netstorm/frontends/NAME",
    "tests/integration/NAME",
    "tests/unit/PKG",
}
"""What pages under contributing/ have the reader make."""

INVENTED_PAGES = {"docs/page.md"}
"""What tests make."""


def code_files() -> Iterator[Path]:
    for folder in CODE:
        yield from sorted(path for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))


def prose(path: Path) -> str:
    """Return a module's text in one line, without the marks of comments and the quotes between strings."""
    return re.sub(r"\s+", " ", re.sub(r"\n\s*#\s?", " ", path.read_text(encoding="utf-8")))


def headings(page: Path) -> set[str]:
    return set(re.findall(r"^#+ (.+?)\s*$", page.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_page_and_section_that_the_code_names_exists():
    wrong = []
    for path in code_files():
        for name, title in re.findall(r'\b(docs/[\w/-]+\.md)(?:, "([^"]+)")?', prose(path)):
            page = ROOT / name
            if name in INVENTED_PAGES:
                continue
            if not page.exists():
                wrong.append(f"{path.relative_to(ROOT)}: there is no {name}")
            elif title and title not in headings(page):
                wrong.append(f"{path.relative_to(ROOT)}: {name} has no section {title!r}")
    assert not wrong, "\n".join(wrong)


def test_every_file_that_a_page_names_exists():
    rooms = "|".join(path.name for path in (ROOT / "netstorm").iterdir() if path.is_dir())
    named = re.compile(rf"`((?:netstorm|benchmarks|scripts|tests|{rooms})/[\w/.-]+)`")
    wrong = [
        f"{page.relative_to(ROOT)}: there is no {name}"
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for name in named.findall(page.read_text(encoding="utf-8"))
        if name not in INVENTED and not (ROOT / name).exists() and not (ROOT / "netstorm" / name).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_the_files_that_the_tour_counts_exist():
    page = (ROOT / "docs" / "contributing" / "tour.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \| (`\w+\.py` [\d,]+.*) \|$", page, re.MULTILINE)
    files = [(folder, name) for folder, names in rows for name in re.findall(r"`(\w+\.py)` \d", names)]
    assert len(files) >= 10
    wrong = [
        f"there is no {folder}/{name}"
        for folder, name in files
        if not (ROOT / "netstorm" / folder.removeprefix("netstorm") / name).exists()
    ]
    assert not wrong, "\n".join(wrong)
