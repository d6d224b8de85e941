"""Each Python block of the documentation runs, to its end, as a script of its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

from netstorm.topology import schemes
from tests.integration.docs.pages import Block, blocks
from tests.integration.forking import ForkedProcess, Forker
from tests.integration.jobs import Ended, Job

_PYTHON: Final = blocks("python")
_PROGRAM: Final = "tests.integration.docs.block_program"
_FRAMEWORK: Final = {
    "mxnet": r"\b(mx|kv|mxnet)\b",
    "torch": r"\b(torch|dist|nn|elastic|accelerate|lightning)\b",
}


def framework_of(block: Block) -> str:
    """Return what a block trains with: mxnet, torch or plain."""
    text = block.before + block.text
    return next((name for name, words in _FRAMEWORK.items() if re.search(words, text)), "plain")


_NUMBERS: Final = itertools.count(1)
"""Of the processes of a job."""


def run(block: Block, folder: Path, job: Job, forker: Forker) -> Ended:
    """Run a block in a folder, as the only node of a job of its own; the pages' `/shared` is in it, too."""
    framework = framework_of(block)
    arguments: dict[str, Any] = {
        "framework": framework,
        "page": block.page,
        "line": block.line,
        "before": block.before.replace("/shared/", f"{folder}/"),
        "text": block.text.replace("/shared/", f"{folder}/"),
        "folder": str(folder),
    }
    variables: dict[str, Any] = {
        "NETSTORM_JOB": f"{Path(block.page).stem}-{block.line}",
        "DMLC_NUM_WORKER": "1",
    }
    if re.search(r"\belastic\.init|kv\.attach_", arguments["before"] + arguments["text"]):
        variables["NETSTORM_ELASTIC"] = "1:2"
    if framework == "mxnet":
        script = f"from {_PROGRAM} import run_block\nrun_block(**{arguments!r})\n"
        number = next(_NUMBERS)
        job.start(number, script, **variables, NETSTORM_RANK=0)
        return job.end(number)
    host, _, port = job.address.rpartition(":")
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    files = {name: str(folder.with_name(f"{folder.name}-{name}")) for name in ("out", "err", "answer")}
    process = ForkedProcess(
        forker,
        program=f"{_PROGRAM}:run_block",
        arguments=arguments,
        environment={**variables, **rank, "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port},
        **files,
    )
    return Ended(process.wait(), *(Path(files[name]).read_text() for name in ("out", "err")))


@pytest.fixture(scope="module")
def job(mxnet_forker: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One scheduler for all blocks: also for jobs that have ended without a word, until it notices."""
    with Job(tmp_path_factory.mktemp("blocks"), 1, NETSTORM_JOBS=0, NETSTORM_MOST_JOBS=1000) as job:
        yield job


@pytest.mark.parametrize(
    "block", [block for block in _PYTHON if not block.not_run], ids=lambda block: block.name
)
def test_a_block_runs(block, job, torch_forker, tmp_path):
    framework = framework_of(block)
    if framework == "mxnet" and find_spec("mxnet") is None:
        pytest.skip("MXNet is not installed")
    for _ in range(1 + ("missing_ok" in block.text)):  # a script that goes on where it was is run twice
        ended = run(block, tmp_path, job, torch_forker)
        assert (ended.code, "ran to its end" in ended.out) == (0, True), ended.text


def test_the_scheme_of_a_page_passes_the_page_s_own_test(monkeypatch):
    scheme, _, its_test = [block for block in _PYTHON if block.page == "docs/contributing/adding-a-scheme.md"]
    written: dict[str, Any] = {}
    exec(compile(scheme.text, scheme.name, "exec"), written)
    monkeypatch.setattr(schemes, "chain", written["chain"], raising=False)
    names: dict[str, Any] = {}
    exec(compile(its_test.text, its_test.name, "exec"), names)
    names["test_each_rank_sends_to_the_one_before_it"]()


def test_what_a_block_imports_that_is_not_run_is_there():
    missing = []
    for block in _PYTHON:
        imports = re.findall(r"^from (netstorm\.[\w.]+) import (\w+)$", block.text, re.MULTILINE)
        for module, name in imports if block.not_run else ():
            if name != "chain" and not hasattr(import_module(module), name):  # which the reader writes
                missing.append(f"{block.name}: {module}.{name}")
    assert not missing
