"""The examples of NumPy's frontend, and what `netstorm new` writes, as users start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from netstorm.cli.new import Framework
from tests.integration.forking import ROOT
from tests.integration.jobs import Job, run_netstorm

EXAMPLES = ROOT / "examples"


def launched(*command: object, **variables: str) -> str:
    """Return what a job of three ranks, which has ended well, has said."""
    words = [sys.executable, "-m", "netstorm", "launch", "--no-prefix", "-n", "3", "--"]
    result = subprocess.run(
        [*words, sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def accuracies(said: str) -> list[float]:
    return [float(text) for text in re.findall(r"accuracy (\S+)", said)]


def digests(said: str) -> set[str]:
    return set(re.findall(r"rank \d: weights sha256 ([0-9a-f]{64})", said))


def test_numpy_alone_trains_on_digits_and_all_ranks_end_with_the_same_weights():
    pytest.importorskip("sklearn", reason="scikit-learn, which has the digits, is not installed")
    said = launched(EXAMPLES / "numpy_digits.py", NETSTORM_ELASTIC="2:4")
    assert len(digests(said)) == 1, said
    assert accuracies(said)[-1] > 0.9, said  # chance is 0.1


@pytest.mark.parametrize(
    "framework",
    [
        Framework.NUMPY,
        pytest.param(Framework.TORCH, marks=pytest.mark.slow),
        pytest.param(Framework.MXNET, marks=pytest.mark.slow),
    ],
)
def test_what_netstorm_new_writes_trains_at_once(framework, tmp_path):
    for module in (framework.value, "sklearn"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    written = run_netstorm(tmp_path, "new", "train.py", "--framework", framework.value)
    assert (written.code, written.err) == (0, ""), written.text
    command = written.out.splitlines()[-1].removeprefix("run it: ")
    assert command == "netstorm launch -n 3 -- python train.py"
    said = launched(tmp_path / "train.py")
    assert len(accuracies(said)) in (10, 20), said
    assert accuracies(said)[-1] > 0.85, said


def test_a_compiled_function_of_jax_sums_over_all_ranks():
    if find_spec("jax") is None:
        pytest.skip("JAX is not installed: pip install jax")
    said = launched(EXAMPLES / "jax_allreduce.py")
    assert len(set(re.findall(r"rank \d: (y = .*)", said))) == 1, said
    assert "y = 3.000x -1.000" in said


@pytest.mark.parametrize("words", ["netstorm n", "netstorm launch --qu", "netstorm new x.py --framework nu"])
def test_shells_complete_commands_options_and_values(words, tmp_path: Path):
    assert Job.forker is not None
    variables = {"_NETSTORM_COMPLETE": "complete_bash", "COMP_WORDS": words}
    completed = run_netstorm(tmp_path, COMP_CWORD=str(len(words.split()) - 1), **variables)
    wanted = {"n": "new", "--qu": "--quiet", "nu": "numpy"}[words.split()[-1]]
    assert (completed.code, completed.out.split()) == (0, [wanted]), completed.text
