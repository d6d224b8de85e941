"""What pages say: no words that go stale, one spelling, numbers with a source, and links to every page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USER_PAGES = tuple(
    ROOT / name
    for name in (
        "README.md", "SECURITY.md", "CONTRIBUTING.md",
        *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
    )
    if not name.startswith(("docs/measurements/", "docs/adr/", "docs/reference/wire-protocol"))
)  # fmt: skip
"""What users read: neither the changelog nor dated history."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


# --------------------------------------------------------------------------------------- words that go stale

STALE = re.compile(
    r"[^.|]*\b(not yet|yet to be|today|for now|currently|at present|at the moment|so far"
    r"|in a (?:later|future) (?:release|version)|will be (?:supported|added)|does not survive)\b[^.|]*",
    re.IGNORECASE,
)
"""A feature lands, and the pages that had said "not yet" stay: pages say what is, and limits as limits."""

ALLOWED_STALE = {
    "What it does not survive is an error": "of the failures that a job survives and those that it does not",
    "done so far": "of a command that Ctrl-C ends",
    "results so far": "of a command that Ctrl-C ends",
    "drops and losses so far": "of counters",
}
"""Words that may stand, and what they are said of."""


def stale(page: Path) -> Iterator[str]:
    for found in STALE.finditer(flat(page.read_text(encoding="utf-8"))):
        if not any(words in found[0] for words in ALLOWED_STALE):
            yield f"{relative(page)}: {found[0].strip()[:160]}"


def test_no_page_says_what_is_not_yet():
    wrong = [line for page in USER_PAGES for line in stale(page)]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_said_to_be_not_yet_in_the_changelog():
    assert not re.search(r"not yet", (ROOT / "CHANGELOG.md").read_text(), re.IGNORECASE)


# ---------------------------------------------------------------------------------------------- one spelling

SPELLINGS = {r"\boptimiser": "optimizer", r"\bback[ -]ends?\b": "backend"}

SPELLED = ("netstorm", "examples", "benchmarks", "scripts", "docs")


def test_optimizer_and_backend_have_one_spelling_in_pages_help_and_messages():
    wrong = []
    for path in (*ROOT.glob("*.md"), *(path for top in SPELLED for path in (ROOT / top).rglob("*"))):
        if path.suffix in (".md", ".py", ".sh", ".yaml") and not path.is_symlink():
            text = flat(path.read_text(encoding="utf-8"))
            wrong += [
                f"{relative(path)}: write {right}"
                for pattern, right in SPELLINGS.items()
                if re.search(pattern, text, re.IGNORECASE)
            ]
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------------------------- the headline claim

HEADLINE = ROOT / "docs/data/internet2-quarter.json"
CONDITIONS = "16 MB among nine emulated data centres", "links of 5.5 to 38 Mbit/s, 30 ms, 0.02 % loss"


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/benchmarks/index.md", "docs/benchmarks/wan.md"]
)
def test_the_headline_is_one_number_with_its_conditions(page):
    measured = json.loads(HEADLINE.read_text())
    seconds = {row["system"]: row["median_s"] for row in measured["results"]}
    links = measured["network"]["links"]
    rates = [link["rate"] / 1e6 for link in links]
    assert (f"{min(rates):.1f}", f"{max(rates):.0f}") == ("5.5", "38")
    assert {(link["latency"], link["loss"]) for link in links} == {(0.03, 0.0002)}
    mxnet, gloo = (seconds[name] / seconds["netstorm-packing"] for name in ("mxnet-star-best", "gloo"))
    claim = (
        f"is {mxnet:.1f} times as fast as with MXNet's server at its best site, and {gloo:.1f} times as fast "
        "as with Gloo"
    )
    text = flat((ROOT / page).read_text())
    assert claim in text
    start = text.index(claim)
    for words in CONDITIONS:
        assert words in text[start - 200 : start + 300], f"{page}: the claim lacks {words!r}"


# -------------------------------------------------------------------------- claims, and where they come from

CLAIM = re.compile(
    r"within (?:half )?(?:a )?(?:fraction of a )?seconds?\b|within \d+(?:\.\d+)? m?s\b|exit code"
    r"|\d(?:\.\d)? times as (?:fast|long)|\d+(?:\.\d+)? times (?:MXNet|Gloo)|survives? the loss",
    re.IGNORECASE,
)
SOURCE = re.compile(r"`tests/[\w/.]+`|\bdata/[\w.-]+\.json|measurements/|benchmarks/[\w/.-]+|netstorm bench")


def sections(page: Path) -> Iterator[str]:
    """Yield the parts of a page between headings, but for code."""
    yield from re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_a_claim_with_a_number_names_its_test_or_its_measurement():
    wrong = []
    for page in USER_PAGES:
        if page.parent.name == "reference":  # drawn from the program itself
            continue
        intro, *_ = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if re.search(r"`tests/[\w/.]+`", intro):  # tests hold the whole page
            continue
        for section in sections(page):
            found = CLAIM.search(flat(section))
            if found and not SOURCE.search(section):
                wrong.append(
                    f"{relative(page)}, {section.splitlines()[0]}: {found[0]!r} names no test and no data"
                )
    assert not wrong, "\n".join(wrong)


# ----------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("front", ["README.md", "docs/index.md"])
def test_the_front_pages_link_every_guide(front):
    text = (ROOT / front).read_text()
    base = (ROOT / front).parent
    linked = {(base / target).resolve() for target in re.findall(r"\]\(([\w/.-]+\.md)(?:#[\w-]+)?\)", text)}
    pages = {
        path for folder in ("guides", "getting-started") for path in (ROOT / "docs" / folder).glob("*.md")
    }
    missing = sorted(relative(path) for path in pages - linked)
    assert not missing, f"{front} does not link {missing}"


def test_every_link_of_the_repository_s_own_pages_leads_somewhere():
    wrong = []
    for page in (*ROOT.glob("*.md"), ROOT / "benchmarks/README.md"):  # scripts/docs.sh checks the others
        targets = re.findall(r"\]\(((?!https?:)[^)#]+)", page.read_text())
        wrong += [f"{relative(page)}: {target}" for target in targets if not (page.parent / target).exists()]
    assert not wrong


def test_every_page_is_in_the_site_s_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if page not in menu]
