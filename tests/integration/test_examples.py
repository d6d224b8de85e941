"""The examples, run as a user runs them, with MXNet's own local store; and what they read and deal out."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.options import run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Bytes = NDArray[np.uint8]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BOTH = pytest.mark.parametrize("example", ["gluon_digits.py", "module_digits.py"])


def run(
    example: str, *arguments: object, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / example, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def trained(example: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    result = run(example, "--kv-store", "local", *arguments)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The examples' helper package, for what needs no MXNet."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for module in ("data", "errors", "results", "shards"):
        importlib.import_module(f"digits.{module}")
    return importlib.import_module("digits")


def write_idx(path: Path, values: Bytes) -> None:
    header = bytes((0, 0, 8, values.ndim)) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    content = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def mnist_folder(folder: Path, *, ending: str = "", images: int = 48) -> dict[str, Bytes]:
    random = np.random.default_rng(7)
    folder.mkdir(exist_ok=True)
    arrays = {}
    for part, count in (("train", images), ("t10k", 10)):
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, count, np.uint8)
    for name, values in arrays.items():
        write_idx(folder / f"{name}{ending}", values)
    return arrays


def cifar_folder(folder: Path, *, records: int = 8) -> dict[str, Bytes]:
    random = np.random.default_rng(8)
    folder.mkdir(parents=True, exist_ok=True)
    batches = {}
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        batch = random.integers(0, 256, (records, 3073), np.uint8)
        batch[:, 0] %= 10
        batch.tofile(folder / f"{name}.bin")
        batches[name] = batch
    return batches


@BOTH
def test_an_epoch_lowers_the_loss_and_the_same_seed_gives_the_same_weights(
    example: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    saved = [tmp_path / f"{run}.npz" for run in range(2)]
    results = [
        trained(
            *(example, "--epochs", 2, "--seed", 5),
            *("--digest", "--save", path, "--json", report.with_name("report5.json")),
        )
        for path in saved
    ]
    if example == "gluon_digits.py":
        results.append(trained(example, "--epochs", 2, "--seed", 6, "--digest"))
    found = json.loads(report.with_name("report5.json").read_text())
    first, second = found["epochs"]
    assert second["loss"] < first["loss"] < 2.5
    assert second["accuracy"] > 0.8
    assert first["samples_per_s"] > 0
    assert (found["rank"], found["ranks"]) == (0, 1)
    *epochs, digest = results[0].stdout.splitlines()
    assert [line.split()[:2] for line in epochs] == [["epoch", "1/2"], ["epoch", "2/2"]]
    assert digest.startswith("rank 0: weights sha256 ")
    again, *others = (result.stdout.splitlines()[-1] for result in results[1:])
    assert again == digest not in others
    with np.load(saved[0]) as one, np.load(saved[1]) as two:
        assert len(one.files) == 8  # four layers with weight and bias
        assert all(one[name].tobytes() == two[name].tobytes() for name in one.files)


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("gluon_digits.py", ("--optimizer", "adam", "--hybridize", "--update-on-kvstore", "no")),
        ("module_digits.py", ("--optimizer", "nag", "--update-on-kvstore", "yes")),
        ("gluon_digits.py", ("--model", "mobilenet", "--image-size", "32", "--batch-size", "64")),
    ],
)
def test_other_optimisers_and_models_train(example: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    trained(example, "--epochs", 1, "--json", report, *arguments)
    [epoch] = json.loads(report.read_text())["epochs"]
    assert 0 < epoch["loss"] < 10


def test_local_copies_of_mnist_and_cifar10_train(tmp_path: Path) -> None:
    mnist_folder(tmp_path / "mnist", ending=".gz")
    cifar_folder(tmp_path / "cifar")
    for example, dataset, folder in (
        ("gluon_digits.py", "mnist", "mnist"),
        ("module_digits.py", "fashion-mnist", "mnist"),
        ("gluon_digits.py", "cifar10", "cifar"),
    ):
        trained(
            example, "--dataset", dataset, "--data-dir", tmp_path / folder, "--epochs", 1, "--batch-size", 8
        )


@pytest.mark.parametrize(
    ("example", "update_on_kvstore"),
    [("gluon_digits.py", "no"), ("module_digits.py", "auto")],
)
def test_all_ranks_of_netstorm_end_with_the_same_weights(
    example: str, update_on_kvstore: str, tmp_path: Path
) -> None:
    nodes = 3
    launch = [sys.executable, "-m", "netstorm", "launch", "-n", str(nodes), "--"]
    script = [sys.executable, str(EXAMPLES / example), "--epochs", "1", "--digest"]
    files = ["--save", str(tmp_path / "{rank}.npz"), "--json", str(tmp_path / "{rank}.json")]
    result = subprocess.run(
        [*launch, *script, *files, "--update-on-kvstore", update_on_kvstore],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(nodes)]
    assert [report["ranks"] for report in reports] == [nodes] * nodes
    assert len({report["digest"] for report in reports}) == 1
    # Each rank has a shard of its own, so that losses differ; who tests is rank 0.
    assert len({report["epochs"][0]["loss"] for report in reports}) == nodes
    assert [report["epochs"][0]["accuracy"] is None for report in reports] == [False, True, True]
    saved = [np.load(tmp_path / f"{rank}.npz") for rank in range(nodes)]
    for name in saved[0].files:
        assert len({weights[name].tobytes() for weights in saved}) == 1
    for weights in saved:
        weights.close()


def test_without_rank_in_its_name_a_file_is_written_by_rank_0_only(digits: Any) -> None:
    assert digits.results.rank_path("w.npz", 0) == Path("w.npz")
    assert digits.results.rank_path("w.npz", 1) is None
    assert digits.results.rank_path("w{rank}.npz", 1) == Path("w1.npz")


WRONG: dict[tuple[str, ...], str] = {
    ("--epochs", "0"): "'0' is not a whole number from 1",
    ("--lr", "nan"): "'nan' is not a number above 0",
    ("--momentum", "1"): "'1' is not a number from 0 to below 1",
    ("--kv-store", "dist_sync_netsorm"): "invalid choice: 'dist_sync_netsorm'",
    ("--optimizer", "sdg"): "MXNet has adadelta,",
    ("--optimizer", "adam", "--momentum", "0.9"): "unexpected keyword argument 'momentum'",
    ("--dataset", "mnist"): "needs --data-dir DIR",
    ("--dataset", "cifar10", "--data-dir", "/nowhere"): "/nowhere is not a folder",
    ("--batch-size", "5000"): "1437 samples do not fill one batch",
    ("--model", "alexnet", "--image-size", "8"): "alexnet needs at least 63 pixels",
    ("--save", "/nowhere/weights.npz"): "/nowhere is not a folder",
    ("--kv-store", "dist_sync"): "DMLC_NUM_WORKER",
}


def test_a_wrong_option_ends_with_a_clear_message() -> None:
    commands = [(EXAMPLES / "gluon_digits.py", "--kv-store", "local", *arguments) for arguments in WRONG]
    for (arguments, said), end in zip(WRONG.items(), run_all(commands, {}), strict=True):
        assert end.code == 2, arguments
        assert said in end.err
        assert "Traceback" not in end.err


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_as_written(digits: Any, tmp_path: Path, ending: str) -> None:
    written = mnist_folder(tmp_path, ending=ending)
    data = digits.data.load("mnist", tmp_path)
    assert data.train.images.shape == (48, 1, 28, 28)
    np.testing.assert_array_equal(data.train.images[:, 0], written["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.train.labels, written["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(data.test.images[:, 0], written["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.test.labels, written["t10k-labels-idx1-ubyte"])


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar_batches_are_read_as_written(digits: Any, tmp_path: Path, inner: str) -> None:
    written = cifar_folder(tmp_path / inner)
    data = digits.data.load("cifar10", tmp_path)
    assert data.train.images.shape == (40, 3, 32, 32)
    third = written["data_batch_3"][1]
    assert data.train.labels[17] == third[0]
    # The format: 1024 bytes of red, then green, then blue, each row by row.
    assert data.train.images[17, 2, 5, 9] == third[1 + 2 * 1024 + 5 * 32 + 9]
    np.testing.assert_array_equal(data.test.labels, written["test_batch"][:, 0])


def break_missing(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte").unlink()


def break_short(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])


def break_kind(folder: Path) -> None:
    (folder / "train-images-idx3-ubyte").write_bytes(b"<!DOCTYPE html>" * 9)


def break_labels(folder: Path) -> None:
    write_idx(folder / "train-labels-idx1-ubyte", np.zeros(47, np.uint8))


def break_packing(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte"
    (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes())[:-9])
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (break_missing, "has no t10k-labels-idx1-ubyte"),
        (break_short, "cut short"),
        (break_kind, "is not an IDX file"),
        (break_labels, "48 images but 47 labels"),
        (break_packing, "cannot be read"),
    ],
)
def test_a_damaged_copy_of_mnist_is_refused_by_file(
    digits: Any, tmp_path: Path, damage: Any, said: str
) -> None:
    mnist_folder(tmp_path)
    damage(tmp_path)
    with pytest.raises(digits.errors.ExampleError, match=said):
        digits.data.load("mnist", tmp_path)


def test_a_damaged_copy_of_cifar10_is_refused_by_file(digits: Any, tmp_path: Path) -> None:
    cifar_folder(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(digits.errors.ExampleError, match=r"data_batch_2\.bin has 24583 bytes"):
        digits.data.load("cifar10", tmp_path)


def test_pickled_cifar10_is_named_as_such_and_not_read(digits: Any, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"a pickle")
    with pytest.raises(digits.errors.ExampleError, match="pickled"):
        digits.data.load("cifar10", tmp_path)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_each_sample_goes_to_one_rank_and_all_ranks_have_as_many_batches(digits: Any, ranks: int) -> None:
    count = 101
    samples = digits.data.Samples(
        images=np.zeros((count, 1, 2, 2), np.uint8), labels=np.arange(count, dtype=np.uint8)
    )
    shards = [
        digits.shards.Shard(samples, rank=rank, ranks=ranks, batch_size=5, seed=3) for rank in range(ranks)
    ]
    epochs = []
    for epoch in range(2):
        dealt = [[labels.tolist() for _, labels in shard.batches(epoch)] for shard in shards]
        assert {len(batches) for batches in dealt} == {count // (5 * ranks)}
        flat = [label for batches in dealt for batch in batches for label in batch]
        assert len(set(flat)) == len(flat) == 5 * ranks * (count // (5 * ranks))
        epochs.append(flat)
    assert epochs[0] != epochs[1]
