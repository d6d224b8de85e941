from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "scripts" / "docs_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["docs/reference/settings.md", "docs/reference/commands.md"])
def test_a_generated_page_is_what_the_script_writes(script, name):
    page = (ROOT / name).read_text(encoding="utf-8")
    assert page == script.pages()[name], "stale: run scripts/docs_reference.py"


def test_generated_pages_say_so_in_their_first_line(script):
    for text in script.pages().values():
        assert text.startswith(script.MARK + "\n")


def test_a_stale_page_is_named_and_only_then_the_check_fails(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "docs" / "reference").mkdir(parents=True)
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
