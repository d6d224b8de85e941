"""`netstorm checkpoint`. What it converts was written by NetStorm 0.2, in jobs of two ranks."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from netstorm.checkpoint.files import find_checkpoint, read_files
from netstorm.checkpoint.format import NumpyTensors, decode_files, restore
from netstorm.cli.main import app

FORMER = Path(__file__).parents[2] / "data" / "checkpoints-1"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_a_converted_checkpoint_of_mxnet_has_all_values_states_and_what_ranks_kept(tmp_path):
    result = run("convert", FORMER / "mxnet", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert f"{FORMER}/mxnet/step-000003 -> {tmp_path}/new/step-000003" in result.stdout
    found = find_checkpoint(tmp_path / "new")
    assert found is not None
    index = found.index
    assert (index.framework, index.job, index.step, index.world_size) == ("MXNet", "default", 3, 2)
    assert index.rounds == {"dense": 1, "rows": 1}
    slots = decode_files(read_files(found))
    state: Any = restore(index.state, slots, NumpyTensors())
    rows, dense = state["keys"]["rows"], state["keys"]["dense"]
    assert state["extra"] == {"next_epoch": 4}
    assert state["optimizer"]["class"] == "Adam"
    assert (rows["stype"], rows["shape"]) == ("row_sparse", (9, 4))
    assert dense.tolist() == [[1, 1]] * 3
    assert np.allclose(rows["data"][[0, 1, 7]], 0.9)
    assert (rows["data"][2:7] == 1).all()
    own: Any = [restore(tree, slots, NumpyTensors()) for tree in index.own]
    assert [list(one["residuals"]) for one in own] == [["dense"]] * 2
    assert "dense" in own[1]["residuals"]


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_converted_checkpoint_of_pytorch_is_loaded_by_pytorch(tmp_path):
    import torch

    from netstorm.frontends.torch import checkpoint

    assert run("convert", FORMER / "pytorch", tmp_path / "new").exit_code == 0
    loaded = checkpoint.load(tmp_path / "new")
    assert loaded is not None
    state = loaded.state
    assert (loaded.step, loaded.world_size, loaded.own) == (7, 2, None)
    assert state["next_step"] == 7
    assert state["values"] == (1, [2.5, None, b"x", 2**70], {3: "three"})
    assert torch.equal(state["a.b"], torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert torch.equal(state["a"]["b"], torch.tensor([[1 + 2j]], dtype=torch.complex128))
    assert isinstance(state["array"], np.ndarray)
    assert state["array"].tolist() == [0, 1, 2]
    assert state["empty"].shape == (0, 2)
    assert state["scalar"].item() is True
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    loaded.restore({"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert torch.allclose(model[0].bias, torch.arange(4.0) + 1 - 0.01)
    found = find_checkpoint(tmp_path / "new")
    assert found is not None
    slots = decode_files(read_files(found))
    assert [bytes(slots[f"own.{rank}.noise"].data) for rank in range(2)] == [b"\0\0\0\0", b"\1\0\1\0"]


def test_what_cannot_be_converted_is_named_and_nothing_is_made(tmp_path):
    old = shutil.copytree(FORMER / "mxnet", tmp_path / "old")
    for path in [path for path in old.rglob("*") if path.is_file()]:
        intact = path.read_bytes()
        path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
        result = run("convert", old, tmp_path / "new")
        assert (result.exit_code, path.name in result.stderr) == (2, True), result.output
        assert not (tmp_path / "new").exists()
        path.write_bytes(intact)
    next(old.rglob("shard-00001*")).unlink()
    assert "is missing" in run("convert", old, tmp_path / "new").stderr
    assert "no complete checkpoint" in run("convert", tmp_path, tmp_path / "new").stderr
    assert "is there already" in run("convert", FORMER / "mxnet", old).stderr


def test_what_checkpoints_hold_is_shown(tmp_path):
    run("convert", FORMER / "mxnet", tmp_path / "new")
    (tmp_path / "new" / "step-000005").mkdir()
    lines = run("show", tmp_path / "new").stdout.splitlines()
    assert lines[1] == "step 5: only written in part"
    assert lines[0].startswith("step 3: MXNet, job default, 2 ranks, 9 tensors, ")
    (shown,) = json.loads(run("show", "--json", tmp_path / "new").stdout)
    assert shown["values"]["extra"] == {"next_epoch": 4}
    assert shown["values"]["keys"]["dense"] == "tensor keys.dense"
    kind_and_type, file = shown["tensors"]["keys.dense"]
    assert kind_and_type == "numpy.float32"
    assert safetensors.numpy.load_file(tmp_path / "new" / "step-000003" / file)["keys.dense"].shape == (3, 2)
    assert run("show", tmp_path / "missing").exit_code == 2
    assert "step-000003 has the format" in run("show", FORMER / "mxnet").stderr
