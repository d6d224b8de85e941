from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from netstorm.protocol import messages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "scripts" / "docs_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(script: ModuleType) -> dict[str, str]:
    found: dict[str, str] = script.pages()
    return found


def test_generated_pages_are_what_the_script_writes_and_say_so_in_their_first_line(script, pages):
    assert "docs/reference/settings.md" in pages
    for name, text in pages.items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, "stale: run scripts/docs_reference.py"
        assert text.startswith(script.MARK + "\n") or name == "docs/guides/pytorch.md"


def test_a_stale_page_is_named_and_only_then_the_check_fails(script, pages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "pages", lambda: pages)
    for folder in ("reference", "guides"):
        (tmp_path / "docs" / folder).mkdir(parents=True)
    assert script.main(["--check"]) == 1
    assert "docs/reference/commands.md: stale" in capsys.readouterr().out
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0


def test_the_page_of_commands_has_every_command_and_option(script):
    page = script.commands_page()
    for words in ("## netstorm launch", "### netstorm wan check", "## netstorm top"):
        assert f"\n{words}\n" in page
    for option in ("| `-n`, `--nodes` `N` |", "| `--between` `RANK RANK` |", "`auto` |"):
        assert option in page
    assert "no-scheduler" not in page, "hidden options are nobody's"


def test_the_page_of_messages_has_every_message_with_its_tag_and_fields(script):
    page = script.protocol_page()
    for name in messages.__all__:
        if isinstance(getattr(messages, name), type) and name not in (
            "DataMessage",
            "Datagram",
            "SessionMessage",
        ):
            assert name == "Message" or f"\n### {name}\n" in page, name
    part = page[page.index("### Part\n") :]
    assert part.startswith("### Part\n\n*Tag 40. Sequenced, with a payload.*\n")
    assert "| 1 | `key` | `int` |" in part
    assert "| 2 | `round` | `int` | Number of the push of this key, from 0" in part


RECORD = {
    "pytorch": "2.9.1+cpu",
    "python": "3.12.1",
    "date": "2026-11-28",
    "ran": "all tests",
    "passed": 7,
    "failed": ["a", "b"],
    "skipped": 1,
}


def test_the_table_of_releases_is_in_their_order_and_tells_what_failed(script, tmp_path):
    own = {"passed": 191, "of": 192, "failed": ["c"]}
    (tmp_path / "one.json").write_text(json.dumps({**RECORD, "pytorch": "2.14.1", "conformance": own}))
    (tmp_path / "other.json").write_text(json.dumps(RECORD))
    assert script.releases_table(tmp_path)[2:] == [
        "| 2.9.1+cpu | 3.12.1 | all tests | 7 | 2 | 1 | two | 2026-11-28 |",
        "| 2.14.1 | 3.12.1 | all tests | 7 | 2 | 1 | 191 of 192 | 2026-11-28 |",
    ]


def test_only_what_stands_between_the_marks_is_replaced(script):
    page = f"above\n{script.MARK}\n\nold\n\n{script.END_MARK}\nbelow\n"
    assert script.with_generated(page, ["new"]) == page.replace("old", "new")
    with pytest.raises(ValueError, match="expected a line"):
        script.with_generated("above\n", ["new"])


def test_the_newest_release_that_is_tested_has_a_record():
    text = (ROOT / "netstorm/frontends/torch/startup.py").read_text()
    newest = re.search(r"_NEWEST_TESTED: Final = \((\d+), (\d+)\)", text)
    assert newest is not None
    assert list((ROOT / "docs/data/torch").glob(f"{'.'.join(newest.groups())}.*.json"))
