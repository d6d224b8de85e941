"""The scripts of GeoMX's techniques, run as a user runs them; and programs of the shape of GeoMX's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "geomx"
SHAPE = ROOT / "tests" / "integration" / "geomx_shape.py"
LAUNCH = (sys.executable, "-m", "netstorm", "launch", "-n")
ONCE = ("-ep", "1")
"""Of scripts that ask for what is without effect here: they train as the first one does."""
HFA = {"MXNET_KVSTORE_USE_HFA": "1", "MXNET_KVSTORE_HFA_K1": "5", "MXNET_KVSTORE_HFA_K2": "2"}


def output_of(*command: object, **variables: str) -> str:
    result = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
        | variables,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def accuracies(said: str) -> list[float]:
    return [float(found) for found in re.findall(r"\[Epoch \d+\]\[Iteration \d+\] Test Acc (\d\.\d+)", said)]


@pytest.mark.parametrize(
    ("script", "arguments", "least", "says"),
    [
        ("vanilla_hips", (), 0.8, "all nodes are here"),
        ("bisparse_compression", ("--threshold", "0.1"), 0.6, "bsc ratio=0.1 momentum=0.9"),
        ("fp16", (), 0.8, "compression: fp16"),
        ("mixed_precision", ("--threshold", "0.1"), 0.6, "mpq ratio=0.1 momentum=0.9"),
        ("dgt", ONCE, 0.3, ""),
        ("tsengine", ONCE, 0.3, "ENABLE_INTER_TS, ENABLE_INTRA_TS: without effect here; trees follow"),
        ("p3", ONCE, 0.3, "ENABLE_P3: without effect here; keys are cut into chunks"),
        ("mixed_sync", (), 0.5, ""),
        ("mixed_sync", ("--dcasgd",), 0.4, ""),
        ("hfa", (), 0.8, "13 averages, 6 of all"),
        ("multi_gps", ONCE, 0.3, "DMLC_NUM_GLOBAL_SERVER: without effect here; each node's data centre"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.islower() else "",
)
def test_each_of_geomxs_scripts_starts_what_it_does_there_and_learns(
    script: str, arguments: tuple[str, ...], least: float, says: str
) -> None:
    """Four nodes of two data centres; a tenth of the test samples would be chance."""
    epochs = ("-ep", "5" if script != "hfa" else "3")
    periods = {name: value for name, value in HFA.items() if "_K" in name}
    said = output_of(EXAMPLES / f"run_{script}.sh", *epochs, *arguments, **periods)
    assert max(accuracies(said)) > least
    assert says in said
    assert script != "dgt" or "without effect" not in said


def test_there_is_a_script_for_each_of_geomxs() -> None:
    names = "vanilla_hips bisparse_compression fp16 mixed_precision dgt tsengine p3 mixed_sync hfa multi_gps"
    assert {path.stem.removeprefix("run_") for path in EXAMPLES.glob("run_*.sh")} == set(names.split())


@pytest.mark.parametrize(
    ("shape", "variables", "kind"),
    [
        (("cnn",), {}, "dist_sync_netstorm"),
        (("cnn", "--mixed-sync"), {"NETSTORM_MIXED_SYNC": "1"}, "dist_async_netstorm"),
        (("cnn_bsc",), {"MXNET_KVSTORE_SIZE_LOWER_BOUND": "1000"}, "dist_sync_netstorm"),
        (("cnn_fp16",), {}, "dist_sync_netstorm"),
        (("cnn_mpq",), {"MXNET_KVSTORE_SIZE_LOWER_BOUND": "1000"}, "dist_sync_netstorm"),
        (("cnn_hfa",), HFA, "dist_sync_netstorm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_program_of_the_shape_of_geomxs_trains_unedited(
    shape: tuple[str, ...], variables: dict[str, str], kind: str
) -> None:
    rank = 'exec "$0" -m netstorm.run "$@" --data-slice-idx "$NETSTORM_RANK"'
    said = output_of(
        *LAUNCH, 4, "--site", "A,A,B,B", "--", "sh", "-c", rank, sys.executable, SHAPE, *shape, **variables
    )
    ends = re.findall(r"(\d+) steps, Test Acc (\d\.\d+), weights (\S+), (\S+)", said)
    assert [(steps, store) for steps, _, _, store in ends] == [("40", kind)] * 4
    assert all(float(right) > 0.6 for _, right, _, _ in ends)
    if kind == "dist_sync_netstorm":
        assert len({weights for _, _, weights, _ in ends}) == 1


@pytest.mark.parametrize(
    ("launch", "script"),
    [
        ((), ("esync.py", "--slow", "3")),
        pytest.param(
            ("--site", "a,a,b"),
            ("mixed_sync_torch.py", "--slow", "2"),
            marks=pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed"),
        ),
        ((), ("dcasgd.py", "-lr", "0.05", "-ep", "6")),  # how fast it learns depends on who is how late
    ],
    ids=lambda words: words[0].removesuffix(".py") if words else "",
)
def test_further_programs_learn_on_three_nodes(launch: tuple[str, ...], script: tuple[str, ...]) -> None:
    name, *arguments = script
    cpu = [] if name.endswith("_torch.py") else ["--cpu"]
    said = output_of(*LAUNCH, 3, *launch, "--", sys.executable, EXAMPLES / name, *cpu, "-ep", 3, *arguments)
    assert max(accuracies(said)) > 0.5
