#!/usr/bin/env python3
"""Checks the size and the shape of the code base, and prints a table of its folders.

    scripts/house.py [--json]

Errors are a circle of imports, and a documentation page that is too long or too wide. Generated pages and
dated measurements may be of any length. How many modules a folder has, how long a module is, and which
functions are the longest, is only said, for whoever reviews a change: a module is one subject, however long.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import networkx as nx

ROOT: Final = Path(__file__).resolve().parents[1]

LONGEST: Final = 5
"""Functions that are listed."""

CODE: Final = ("netstorm", "benchmarks", "examples", "scripts")
"""Folders whose modules are measured; tests are measured by folder alone."""

PAGE_LINES: Final = {"README.md": 150, "docs/design.md": 300}
USER_PAGE_LINES: Final = 250
PAGE_WIDTH: Final = 100
"""Tables, code and lines that are one long link apart."""
HISTORY: Final = ("docs/measurements/", "docs/adr/")
GENERATED: Final = "<!-- generated"
"""How a page begins that a script writes."""


@dataclass
class Folder:
    """What the table says of one folder."""

    modules: int = 0
    lines: int = 0
    longest: tuple[int, str] = (0, "")


@dataclass
class Report:
    """What was found.

    Attributes:
        folders: by path from the root.
        functions: lines and name of each.
        problems: one line each.
    """

    folders: dict[str, Folder] = field(default_factory=dict)
    functions: list[tuple[int, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def limit(self, what: str, value: int, most: int, unit: str) -> None:
        """Note a value that is over its limit."""
        if value > most:
            self.problems.append(f"{what}: {value} {unit}, at most {most}")


def main() -> int:
    """Check, print, and return the exit code: 1 if anything is over its limit."""
    parser = argparse.ArgumentParser(description="Check the size and the shape of the code base.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    as_json = parser.parse_args().json
    report = Report()
    check_code(report)
    check_imports(report)
    check_pages(report)
    print(json_text(report) if as_json else table(report))
    for problem in report.problems:
        print(problem, file=sys.stderr)
    return 1 if report.problems else 0


def check_code(report: Report) -> None:
    """Measure folders, modules and functions; those of commands have a parameter for each option."""
    for top in (*CODE, "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.name == "__init__.py" or path.is_symlink():
                continue
            name = path.relative_to(ROOT).as_posix()
            text = path.read_text()
            lines = text.count("\n")
            folder = report.folders.setdefault(path.parent.relative_to(ROOT).as_posix(), Folder())
            folder.modules += 1
            folder.lines += lines
            folder.longest = max(folder.longest, (lines, path.name))
            if top != "tests":
                _check_functions(report, name, ast.parse(text))


def _check_functions(report: Report, name: str, tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _declares_a_command(node):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            report.functions.append((lines, f"{name}: {node.name}()"))


def _declares_a_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return any(one.annotation is not None and "typer." in ast.unparse(one.annotation) for one in arguments)


def check_imports(report: Report) -> None:
    """Find circles: also those of imports that only type checkers see, or that wait for a call."""
    for circle in nx.strongly_connected_components(import_graph()):
        if len(circle) > 1:
            report.problems.append("import circle: " + ", ".join(sorted(circle)))


def import_graph() -> nx.DiGraph[str]:
    """Return an edge from each module of netstorm to each that it imports, wherever the import stands."""
    paths = modules()
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in paths.items():
        imported = _imported(ast.parse(path.read_text()), paths)
        graph.add_edges_from((name, other) for other in imported if other in paths and other != name)
    return graph


def modules() -> dict[str, Path]:
    """Return the files of netstorm's modules and packages by name."""
    found = {}
    for path in sorted((ROOT / "netstorm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(tree: ast.Module, paths: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in paths)
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = (f"{node.module}.{one.name}" for one in node.names)
            yield from (name if name in paths else node.module for name in named)


def check_pages(report: Report) -> None:
    """Measure the documentation."""
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if text.startswith(GENERATED) or name == "CHANGELOG.md":
            continue
        if not name.startswith(HISTORY):
            report.limit(name, text.count("\n"), PAGE_LINES.get(name, USER_PAGE_LINES), "lines")
        wide = list(_wide_lines(text))
        if wide:
            number, width = wide[0]
            report.problems.append(
                f"{name}:{number}: {width} characters, at most {PAGE_WIDTH}"
                + (f"; {len(wide) - 1} more lines of this page are too wide" if len(wide) > 1 else "")
            )


def _wide_lines(text: str) -> Iterator[tuple[int, int]]:
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            in_code = not in_code
        elif len(line) > PAGE_WIDTH and not in_code and not line.startswith(("|", "    ", "[")):
            yield number, len(line)


def table(report: Report) -> str:
    """Return the folders as a table for people."""
    rows = [("folder", "modules", "lines", "longest module")]
    rows += [
        (name, str(folder.modules), str(folder.lines), f"{folder.longest[1]} ({folder.longest[0]})")
        for name, folder in sorted(report.folders.items())
    ]
    width = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0]:<{width[0]}}  {row[1]:>{width[1]}}  {row[2]:>{width[2]}}  {row[3]}".rstrip() for row in rows
    ]
    longest = sorted(report.functions, reverse=True)[:LONGEST]
    lines += ["", "the longest functions:", *(f"{number:5}  {name}" for number, name in longest)]
    return "\n".join(lines)


def json_text(report: Report) -> str:
    """Return the folders and what is wrong with them, for programs."""
    folders = {
        name: {"modules": one.modules, "lines": one.lines, "longest": one.longest[1]}
        for name, one in sorted(report.folders.items())
    }
    return json.dumps({"folders": folders, "problems": report.problems}, indent=2)


if __name__ == "__main__":
    sys.exit(main())
