"""Commands in the documentation: each is one that the program knows, and samples show what it prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer
import yaml
from typer.core import TyperGroup

from netstorm.cli.launch.hosts import place
from netstorm.cli.main import COMMANDS, app
from netstorm.settings import Settings, declarations
from netstorm.topology.files import load_network, parse_network, parse_topology
from tests.integration.docs.pages import ROOT, Block, blocks
from tests.integration.jobs import run_netstorm

_OTHERS: Final = frozenset((
    "apt-get", "bash", "cd", "chmod", "cp", "curl", "cut", "exec", "git", "helm", "hostname", "jupyter",
    "kubectl", "mkdir", "openssl", "ping", "pip", "printf", "rm", "salloc", "sbatch", "scp", "ssh", "srun",
    "systemctl", "tc", "torchrun", "umask", "wait",
))  # fmt: skip
"""Programs that are not ours: nothing is checked of them but where they run ours."""

_ASSIGNED: Final = re.compile(r"(\w+)=(.*)", re.DOTALL)
_READERS_FILES: Final = r"(train|cnn)\w*\.py|\$\w+|.*NAME.*"
"""What pages have the reader write."""


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a block: without prompts, output and comments."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if word and set(word) <= set("();<>|&"):
                yield words
                words = ["<"] if set(word) <= set("<>") else []  # a file's name follows
            else:
                words.append(word)
        yield words


_ALL: Final = [
    (f"{block.name}: {' '.join(words[:4])}", words)
    for block in blocks("sh", "bash", "console", "")
    if block.page != "docs/reference/commands.md" or "[OPTIONS]" not in block.text
    for words in commands(block)
    if words and words[0] != "<"
]


def test_every_command_of_the_documentation_is_one_that_there_is():
    wrong = []
    for name, words in _ALL:
        try:
            check(list(words))
        except Exception as error:  # noqa: BLE001 -- each parser has errors of its own
            wrong.append(f"{name}: {getattr(error, 'format_message', error.__str__)()}".splitlines()[0])
    assert not wrong, "\n".join(wrong)


def check(words: list[str]) -> None:
    """Check a command: its variables, program and options."""
    variables = {}
    while words and (found := _ASSIGNED.fullmatch(words[0])):
        variables[found[1]] = found[2]
        words.pop(0)
    if words[:1] == ["export"]:
        variables |= dict(word.partition("=")[::2] for word in words[1:])
        words = []
    check_variables(variables)
    if not words:
        return
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if (
        program in ("sudo", "nsenter", "salloc", "ssh", "srun", "mpirun")
        and (ours := _begin_of_ours(rest)) is not None
    ):
        check(rest[ours:])
    elif program == "netstorm":
        check_netstorm(rest)
    elif program in ("python", "python3"):
        check_python(rest)
    elif program == "torchrun":
        check_script(next(iter(script_of(rest)), []))
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests/")), "no such tests"
    elif program.startswith(("scripts/", "benchmarks/", "examples/")):
        check_script(words)
    else:
        assert program in _OTHERS | {"."}, f"an unknown program: {program}"
        if program == "pip" and rest[0] == "install":
            check_extras(rest)


def _begin_of_ours(words: list[str]) -> int | None:
    """Return where a program that is checked begins in the arguments of one that runs it; None: nowhere."""
    checked = ("netstorm", "python", "torchrun")
    return next((place for place, word in enumerate(words) if word.startswith(checked)), None)


def check_variables(variables: dict[str, str]) -> None:
    """Check that our variables exist and have values that are allowed."""
    known = {declaration.variable for declaration in declarations().values()}
    ours = {
        name: value
        for name, value in variables.items()
        if name.startswith(("NETSTORM_", "DMLC_", "PS_", "ENABLE_"))
        and name != "DMLC_NUM_ALL_WORKER"  # GeoMX's
    }
    assert ours.keys() <= known, f"no such settings: {ours.keys() - known}"
    most = ours.get("NETSTORM_ELASTIC", ":1").partition(":")[2]  # -n says how many there are, between the two
    Settings.from_environment(
        {"DMLC_NUM_WORKER": most, **{name: value for name, value in ours.items() if "$" not in value}}
    )


def check_netstorm(words: list[str]) -> None:
    """Check a netstorm command: subcommands and options."""
    if words == ["--version"]:
        return
    assert set(words[:1]) & set(COMMANDS), f"no such command: {words[:1]}"
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="netstorm")
    name, command, rest = group.resolve_command(context, words)
    if name == "bench":
        check_benchmark(rest)
        return
    while isinstance(command, TyperGroup):
        context = command.context_class(command, info_name=name, parent=context)
        assert rest, f"{name} needs a subcommand"
        name, command, rest = command.resolve_command(context, rest)
    after = rest.index("--") if "--" in rest else len(rest)
    command.make_parser(command.context_class(command, info_name=name, parent=context)).parse_args(
        ["x" if word == "..." else word for word in rest[:after]]
    )
    for word in rest[:after]:
        assert not word.startswith("examples/") or (ROOT / word).exists(), f"no such file: {word}"
    if "--env" in rest[:after]:
        check_variables(dict([rest[rest.index("--env") + 1].partition("=")[::2]]))
    if rest[after + 1 :]:
        check(rest[after + 1 :])


def check_benchmark(words: list[str]) -> None:
    """Check that `netstorm bench` has a benchmark of that name, and that it knows the options."""
    if words[:1] in (["--help"], ["NAME"]):
        return
    script = ROOT / "benchmarks" / f"{words[0]}.py"
    assert script.exists(), f"no such benchmark: {words[0]}"
    assert script.read_bytes().startswith(b"#!"), f"netstorm bench does not list {words[0]}"
    check_script([f"benchmarks/{words[0]}.py", *words[1:]])


def check_python(words: list[str]) -> None:
    """Check what Python runs."""
    if words[:1] == ["-m"]:
        module = words[1]
        assert (
            module in ("netstorm", "netstorm.run", "pytest", "venv")
            or (ROOT / (module.replace(".", "/") + ".py")).exists()
        ), f"no such module: {module}"
        words = words[2:] if module == "netstorm.run" else []
    if words:
        check_script(words)


def script_of(words: list[str]) -> Iterator[list[str]]:
    """Yield the command behind torchrun's own options."""
    for place_of_script, word in enumerate(words):
        if word.endswith(".py"):
            yield words[place_of_script:]


def check_script(words: list[str]) -> None:
    """Check that a script exists, and that its options are somewhere in its sources."""
    script, *rest = words
    if re.fullmatch(_READERS_FILES, script):
        return
    path = next(
        (path for path in (ROOT / script, ROOT / "examples/unedited" / script) if path.exists()), None
    )
    assert path is not None, f"no such script: {script}"
    if path.suffix != ".py":
        return
    top = ROOT / path.relative_to(ROOT).parts[0]
    sources = "".join(source.read_text(encoding="utf-8") for source in top.rglob("*.py"))
    for word in rest:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in ("--", "--help"):
            assert f'"{option}"' in sources or f'"--no-{option[2:]}"' in sources, f"{script} has no {option}"
        assert not word.startswith("examples/") or (ROOT / word).exists(), f"no such file: {word}"


def check_extras(words: list[str]) -> None:
    """Check extras; NetStorm itself is on no index, so it is installed from a checkout or a file."""
    for word in words:
        assert not re.match(r"netstorm(\[|$)", word), (
            f"{word} is on no package index: install from a checkout"
        )
        for extra in re.findall(r"\[(.*)\]", word):
            assert set(extra.split(",")) <= extras(), f"no such extra: {extra}"


def extras() -> set[str]:
    """Return the extras of the package."""
    text = (
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[project.optional-dependencies]")[2]
        .partition("\n[")[0]
    )
    return set(re.findall(r"^([\w-]+) = \[", text, re.MULTILINE))


def test_each_extra_is_in_the_page_of_installing():
    page = (ROOT / "docs/getting-started/install.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == extras()


_FILES: Final = blocks("yaml", "text", "toml", "json")


def test_network_files_trees_and_host_files_of_the_pages_are_read():
    read = 0
    for block in _FILES:
        if block.language == "yaml" and "links:" in block.text:
            parse_network(block.text, block.name)
        elif block.language == "yaml" and "trees:" in block.text:
            parse_topology(block.text, load_network(ROOT / "examples/networks/four_sites.yaml"), block.name)
        elif block.language == "yaml" and "resources:" in block.text:
            assert all((ROOT / folder).is_dir() for folder in yaml.safe_load(block.text)["resources"])
        elif re.search(r"^\S+ +(site|slots|rank|address)=", block.text, re.MULTILINE):
            place(block.text, block.name)
        elif block.language != "text" and not block.not_run:
            pytest.fail(f"{block.name}: nothing reads this {block.language} here: mark it, with a reason")
        else:
            continue
        read += 1
    assert read >= 4


_SAMPLES: Final = {
    "netstorm plan bad.yaml": True,
    "netstorm doctor logs": True,
    "netstorm plan examples/networks/mesh.yaml --model alexnet": True,
    "netstorm plan examples/networks/aws_regions.yaml": True,
    "netstorm simulate --nodes 9 --family mesh --seeds 2": True,
    "netstorm simulate --nodes 9 --family mesh --seeds 5": False,
}
"""Beginnings of commands whose output does not depend on the machine, and whether they take at most 4 s."""

_BAD: Final = "nodes: {0: {}, 1: {}}\nlinks:\n  - {between: [0, 1], rate: fast, latency: 1ms}\n"

_LOGS: Final = {
    "scheduler.log": "16:47:21 netstorm ERROR the job ends: rank 1 (10.0.0.2:39367) failed: MemoryError\n",
    "rank-0.log": "[rank0]: netstorm.errors.NodeFailed: rank 1 (10.0.0.2:39367) failed: MemoryError: ...\n",
    "rank-1.log": "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "/home/me/train.py", line 8, in <module>\n'
    "[rank1]: MemoryError: cannot allocate 8 GB\n",
}


def samples() -> Iterator[object]:
    """Yield each command whose output is compared, with its sample."""
    for block in blocks("console"):
        for entry in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)+)", block.text, re.MULTILINE):
            command = entry[1].partition(" #")[0].strip()
            quick = [fast for beginning, fast in _SAMPLES.items() if command.startswith(beginning)]
            if quick:
                marks = [] if quick[0] else [pytest.mark.slow]
                yield pytest.param(command, entry[2], marks=marks, id=f"{block.page} {command}")


def without_times(text: str) -> list[str]:
    """Return the lines without the column that says how long forming the trees took on this machine."""
    lines, column, width = [], -1, 0
    for line in text.splitlines():
        cells = re.split(r" {2,}", line.strip())
        if "formed in" in cells:
            column, width = cells.index("formed in"), len(cells)
        if len(cells) == width:
            cells.pop(column)
        lines.append(" ".join(" ".join(cells).split()))
    return lines


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("command", "sample"), list(samples()))
def test_a_sample_is_what_the_command_prints(command, sample, tmp_path):
    (tmp_path / "bad.yaml").write_text(_BAD)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "logs").mkdir()
    for name, text in _LOGS.items():
        (tmp_path / "logs" / name).write_text(text)
    _, *words = shlex.split(command)
    printed = without_times(run_netstorm(tmp_path, *words, COLUMNS="200").text)
    expected = [line for line in without_times(sample) if line and line != "..."]
    missing = [line for line in expected if line not in printed]
    assert not missing, "\n".join(printed)


def test_the_samples_are_still_in_the_pages():
    assert len(list(samples())) >= len(_SAMPLES)


def test_keys_are_made_as_the_pages_say(tmp_path):
    made: list[str] = []
    for block in blocks("sh"):
        for words in commands(block):
            if words[:3] == ["netstorm", "keys", "new"] and block.page.startswith("docs/guides"):
                made += [word for word in words if word.endswith(".key")]
                is_new = not (tmp_path / words[-1]).exists()
                assert (run_netstorm(tmp_path, *words[1:]).code == 0) == is_new
    assert made
    assert all(Path(tmp_path, name).stat().st_mode & 0o777 == 0o600 for name in made)
