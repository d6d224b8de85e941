#!/usr/bin/env python3
"""Checks the size and the shape of the code base, and prints a table of its folders.

    scripts/house.py [--json] [--call-path]

Errors are a circle of imports, a documentation page that is too long or too wide, and a class name of
netstorm that is defined twice. Generated pages and dated measurements may be of any length.

What needs judgement is only said, for whoever reviews a change: a module is one subject that is tested
through one interface, 200 to 1,200 lines; a class that one class alone constructs lives in its module; a
constructor takes options and values, not its caller's methods. --call-path adds how far a reader of an
operation goes.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import networkx as nx

ROOT: Final = Path(__file__).resolve().parents[1]

LONGEST: Final = 5
"""Functions that are listed."""

DOORS: Final = ("netstorm.frontends.mxnet", "netstorm.frontends.torch")
"""Users of both find the same class under the same name in each: those names may stand twice."""

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
        rooms: files and lines of each folder directly in netstorm, and of netstorm's own modules.
        made_by_one: by module, the public classes of other modules that it alone constructs. Values, which
            have no constructor of their own, are not listed.
        callbacks: by class, the constructors of other modules to which it gives methods of its own.
        call_path: what benchmarks/studies/call_path.py has counted.
        problems: one line each.
    """

    folders: dict[str, Folder] = field(default_factory=dict)
    functions: list[tuple[int, str]] = field(default_factory=list)
    rooms: dict[str, tuple[int, int]] = field(default_factory=dict)
    made_by_one: dict[str, list[str]] = field(default_factory=dict)
    callbacks: dict[str, list[str]] = field(default_factory=dict)
    call_path: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def limit(self, what: str, value: int, most: int, unit: str) -> None:
        """Note a value that is over its limit."""
        if value > most:
            self.problems.append(f"{what}: {value} {unit}, at most {most}")


def main() -> int:
    """Check, print, and return the exit code: 1 if anything is over its limit."""
    parser = argparse.ArgumentParser(description="Check the size and the shape of the code base.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--call-path", action="store_true", help="count the calls of three operations")
    options = parser.parse_args()
    report = Report()
    check_code(report)
    check_imports(report)
    check_classes(report)
    check_pages(report)
    if options.call_path:
        study = [sys.executable, str(ROOT / "benchmarks" / "studies" / "call_path.py")]
        report.call_path = json.loads(subprocess.check_output(study))  # noqa: S603 - our own
    print(json_text(report) if options.json else table(report))
    for problem in report.problems:
        print(problem, file=sys.stderr)
    return 1 if report.problems else 0


@functools.cache
def _parsed(text: str) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(text)


@functools.cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return a tree's nodes: to walk it takes longer than to parse it."""
    return tuple(ast.walk(tree))


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
                _check_functions(report, name, _parsed(text))


def _check_functions(report: Report, name: str, tree: ast.Module) -> None:
    for node in _nodes(tree):
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
        imported = _imported(_parsed(path.read_text()), paths)
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
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in paths)
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = (f"{node.module}.{one.name}" for one in node.names)
            yield from (name if name in paths else node.module for name in named)


def check_classes(report: Report) -> None:
    """Measure rooms; find names that stand twice, and classes that are one with what constructs them."""
    trees: dict[str, ast.Module] = {}
    for name, path in modules().items():
        text = path.read_text()
        trees[name] = _parsed(text)
        room = "/".join(path.relative_to(ROOT).parent.parts[:2])
        files, lines = report.rooms.get(room, (0, 0))
        report.rooms[room] = files + 1, lines + text.count("\n")
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in _nodes(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    homonyms = {name: where for name, where in sorted(homes.items()) if len(where) > 1}
    report.problems += (
        f"class {name} is defined in {_listed(where)}"
        for name, where in homonyms.items()
        if len(where) > len(DOORS) or {".".join(one.split(".")[:3]) for one in where} != set(DOORS)
    )
    home = {name: where[0] for name, where in homes.items() if len(where) == 1}
    _find_makers(report, trees, home)
    _find_callbacks(report, trees, home)


def _find_makers(report: Report, trees: dict[str, ast.Module], home: dict[str, str]) -> None:
    makers: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for made, _ in _constructions(tree, home):
            makers[made].add(name)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name in home:
                others = makers[node.name]
                if len(others) == 1 and name not in others and "__init__" in _methods(node):
                    report.made_by_one.setdefault(min(others), []).append(node.name)


def _find_callbacks(report: Report, trees: dict[str, ast.Module], home: dict[str, str]) -> None:
    for name, tree in trees.items():
        for owner in (node for node in _nodes(tree) if isinstance(node, ast.ClassDef)):
            methods = _methods(owner)
            for made, call in _constructions(owner, home):
                values = (*call.args, *(keyword.value for keyword in call.keywords))
                given = [ast.unparse(value) for value in values]
                own = [text for text in given if text.startswith("self.") and text[5:] in methods]
                if own and home[made] != name:
                    found = report.callbacks.setdefault(f"{name}.{owner.name}", [])
                    found.append(f"{made}({_listed(own)})")


def _constructions(tree: ast.AST, home: dict[str, str]) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of classes, with their names: these are unique, so imports need not be followed."""
    for node in _nodes(tree):
        if isinstance(node, ast.Call):
            function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
            called = ast.unparse(function).rpartition(".")[2]
            if called in home:
                yield called, node


def _methods(owner: ast.ClassDef) -> set[str]:
    return {
        node.name
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts)


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
    """Return the report for people."""
    folders = [
        (name, str(folder.modules), str(folder.lines), f"{folder.longest[1]} ({folder.longest[0]})")
        for name, folder in sorted(report.folders.items())
    ]
    rooms: list[tuple[str, ...]] = [
        (name, str(files), str(lines)) for name, (files, lines) in sorted(report.rooms.items())
    ]
    rooms.append(("all", *(str(sum(one[column] for one in report.rooms.values())) for column in (0, 1))))
    lines = [
        *_columns([("folder", "modules", "lines", "longest module"), *folders]),
        *("", *_columns([("room", "files", "lines"), *rooms])),
        *("", "the longest functions:", *(f"{number:5}  {name}" for number, name in _longest(report))),
        *_section("classes that one other module alone constructs", *_counted(report.made_by_one)),
        *_section("constructors that are given methods of their caller", *_counted(report.callbacks)),
    ]
    if report.call_path:
        counts = [(name, *map(str, one.values())) for name, one in report.call_path.items()]
        lines += ["", *_columns([("operation", "calls", "files", "changes of file"), *counts])]
    return "\n".join(lines)


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield lines of aligned columns: numbers are right, the first and the fourth column left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            f"{cell:>{width}}" if 0 < n < 3 else f"{cell:<{width}}" for n, (cell, width) in enumerate(cells)
        ).rstrip()


def _section(title: str, number: int, found: dict[str, list[str]]) -> Iterator[str]:
    yield from ("", f"{title}: {number}")
    yield from (f"  {name}: {_listed(what)}" for name, what in sorted(found.items()))


def _counted(found: dict[str, list[str]]) -> tuple[int, dict[str, list[str]]]:
    return sum(map(len, found.values())), found


def _longest(report: Report) -> list[tuple[int, str]]:
    return sorted(report.functions, reverse=True)[:LONGEST]


def json_text(report: Report) -> str:
    """Return the report for programs."""
    folders = {
        name: {"modules": one.modules, "lines": one.lines, "longest": one.longest[1]}
        for name, one in sorted(report.folders.items())
    }
    rooms = {name: {"files": files, "lines": lines} for name, (files, lines) in sorted(report.rooms.items())}
    found = {
        "folders": folders,
        "rooms": rooms,
        "longest_functions": {name: lines for lines, name in _longest(report)},
        "made_by_one": report.made_by_one,
        "callbacks": report.callbacks,
        "call_path": report.call_path,
        "problems": report.problems,
    }
    return json.dumps(found, indent=2)


if __name__ == "__main__":
    sys.exit(main())
