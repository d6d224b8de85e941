"""The examples of PyTorch, started in all ways as users start them, and compared with PyTorch's own Gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.options import run_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed"),
]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

LAUNCH = ("-m", "netstorm", "launch", "--no-prefix", "-n")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
NETSTORM_RUN = ("-m", "netstorm.run")

SMALL = ("--width", "32", "--layers", "1", "--heads", "2", "--batch-size", "4", "--context", "32")


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def ended(result: subprocess.CompletedProcess[str]) -> str:
    """Return what a job that has ended well has said."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def loss_of_an_epoch(report: Path) -> float:
    return float(json.loads(report.read_text())["epochs"][0]["loss"])


def torchrun(ranks: int, example: str, *arguments: object) -> str:
    return ended(run(*TORCHRUN, ranks, EXAMPLES / example, *arguments))


def launched(ranks: int, example: str, *arguments: object, module: tuple[str, ...] = ()) -> str:
    said = ended(run(*LAUNCH, ranks, "--", sys.executable, *module, EXAMPLES / example, *arguments))
    assert re.search(rf"has ended well: {ranks} nodes, [1-9]", said), said
    return said


def digests(said: str, ranks: int) -> set[str]:
    """Return the different digests that ranks have printed."""
    found = dict(re.findall(r"rank (\d+): weights sha256 ([0-9a-f]{64})", said))
    assert set(found) == set(map(str, range(ranks))), said
    return set(found.values())


def losses(said: str) -> list[float]:
    return [float(text) for text in re.findall(r"^step .* loss (\S+)", said, re.MULTILINE)]


@pytest.fixture(scope="module")
def loss_of_gloo(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the loss of an epoch of `torch_digits.py` at three ranks, by PyTorch's own means.

    Once in many times a thread of Gloo's aborts its process after all has been done, so the report counts,
    and not how the processes end.
    """
    report = tmp_path_factory.mktemp("gloo") / "report.json"
    ended = run(
        *TORCHRUN, 3, EXAMPLES / "torch_digits.py", "--backend", "gloo", "--epochs", 1, "--json", report
    )
    assert report.exists(), ended.stdout + ended.stderr
    return loss_of_an_epoch(report)


@pytest.mark.parametrize("way", ["torchrun", "unedited"])
def test_ddp_trains_as_on_gloo_and_all_ranks_end_with_the_same_weights(
    way: str, loss_of_gloo: float, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    arguments = ("--epochs", 1, "--digest", "--json", report)
    if way == "torchrun":
        said = torchrun(3, "torch_digits.py", *arguments)
    else:
        said = launched(3, "torch_digits.py", "--backend", "gloo", *arguments, module=NETSTORM_RUN)
    assert len(digests(said, 3)) == 1
    # Sums are rounded in another order, which once in a hundred runs switches a ReLU on or off.
    assert loss_of_an_epoch(report) == pytest.approx(loss_of_gloo, rel=1e-2)
    [epoch] = json.loads(report.read_text())["epochs"]
    assert epoch["accuracy"] > 0.5


@pytest.mark.parametrize(
    "method",
    [("--codec", "int8"), ("--diloco", 2, "--delay", 1, "--codec", "int8")],
    ids=["ddp", "diloco"],
)
def test_a_gpt_goes_on_from_its_checkpoint_with_the_same_bits(
    method: tuple[object, ...], tmp_path: Path
) -> None:
    arguments = (*SMALL, *method, "--report", 4, "--digest", "--steps", 8)
    arguments += ("--checkpoint", tmp_path, "--checkpoint-every", 5, "--resume")
    whole = launched(2, "torch_gpt.py", *arguments)
    first, last = losses(whole)
    assert last < first < 5
    (tmp_path / "step-00000008-rank-1.pt").unlink()  # as if rank 1 had been stopped before it could write
    resumed = launched(2, "torch_gpt.py", *arguments)
    assert len(losses(resumed)) == 1  # from step 5
    assert len(digests(whole, 2)) == 1
    assert digests(resumed, 2) == digests(whole, 2)


def test_hsdp_shards_inside_sites_and_trains_as_ddp_on_gloo() -> None:
    arguments = (*SMALL, "--steps", 6, "--report", 2)
    sharded = launched(
        4, "torch_hsdp.py", "--sites", 2, "--backend", "gloo", "--digest", *arguments, module=NETSTORM_RUN
    )
    assert "2 sites of 2 ranks: [[0, 1], [2, 3]]" in sharded
    assert len(digests(sharded, 4)) == 1
    plain = torchrun(4, "torch_gpt.py", "--backend", "gloo", *arguments)
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-3)


def test_a_wrong_option_ends_with_a_clear_message() -> None:
    wrong: list[tuple[tuple[str, ...], str]] = [
        (("torch_digits.py",), "RANK is not set: start it with `torchrun"),
        (("torch_hsdp.py",), "RANK is not set: start it with `torchrun"),
        (("torch_digits.py", "--optimizer", "sdg"), "--optimizer sdg: expected one of adagrad, adam,"),
        (("torch_digits.py", "--optimizer", "adam", "--momentum", "0.5"), "--momentum: adam has none"),
        (("torch_gpt.py", "--width", "10"), "--width 10: expected a multiple of --heads 4"),
        (("torch_gpt.py", "--resume"), "--resume needs --checkpoint FOLDER"),
    ]
    ends = run_all([(EXAMPLES / script, *arguments) for (script, *arguments), _ in wrong], {})
    for (command, said), end in zip(wrong, ends, strict=True):
        assert end.code == 2, command
        assert said in end.err
        assert "Traceback" not in end.err


def test_an_unknown_backend_is_answered_with_those_that_there_are() -> None:
    result = run(EXAMPLES / "torch_gpt.py", "--backend", "netsorm", RANK="0")
    assert result.returncode == 2
    assert re.search(r"--backend netsorm: PyTorch has .*gloo.*netstorm", result.stderr)
