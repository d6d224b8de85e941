"""Models: how many parameters they have, as published, and what is said about files that are wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from netstorm.errors import UsageError
from netstorm.topology.files import alexnet_shapes, resnet50_shapes, tensors_of


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [("alexnet", 16, 61_100_840), ("resnet50", 161, 25_557_032)],  # as torchvision publishes them
)
def test_a_model_has_as_many_parameters_as_published(model, tensors, parameters):
    sizes = tensors_of(model)
    assert len(sizes) == tensors
    assert sum(sizes) == 4 * parameters


def test_layers_next_to_the_input_come_first():
    assert alexnet_shapes()[0] == (64, 3, 11, 11)
    assert alexnet_shapes()[-1] == resnet50_shapes()[-1] == (1000,)
    assert resnet50_shapes()[0] == (64, 3, 7, 7)


def test_most_of_alexnet_is_in_three_dense_layers():
    dense = [shape for shape in alexnet_shapes() if len(shape) == 2]
    assert sum(map(math.prod, dense)) == 9216 * 4096 + 4096 * 4096 + 4096 * 1000


def test_a_size_is_one_tensor():
    assert tensors_of("244MB") == (244_000_000,)
    assert tensors_of("1MiB") == (1_048_576,)


def test_a_file_lists_shapes_or_bytes(tmp_path: Path):
    path = tmp_path / "model.json"
    tensors = [{"name": "a", "shape": [3, 5]}, {"shape": [7], "dtype": "float16"}, {"shape": []}, 9]
    path.write_text(json.dumps(tensors), encoding="utf-8")
    assert tensors_of(str(path)) == (60, 14, 4, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vgg", "model 'vgg': expected alexnet, resnet50, a size such as 244MB, or the path of a .json file"),
        ("244", "has no unit"),
        ("0MB", "expected a size of at least 1B"),
        ("9999999TB", "at most 1024TiB"),
        ("nowhere/model.json", "nowhere/model.json: the model cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_model_is_named(text, message):
    with pytest.raises(UsageError) as caught:
        tensors_of(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the model is not JSON"),
        ("[" * 100_000, "the model is not JSON"),
        ("[" + "9" * 5000 + "]", "the model is not JSON: Exceeds the limit"),
        ('[{"shape": [' + "999, " * 100_000 + "1]}]", "elements or more: expected at most 1125899906842624"),
        ("{}", "expected a list of tensors"),
        ("[]", "expected a list of tensors"),
        ("[true]", "tensor 0 is True: expected its bytes"),
        ("[4, 0]", "tensor 1 has 0 bytes: expected at least 1"),
        ('[{"shape": [1, 0]}]', "tensor 0 has shape [1, 0]: expected a list of whole numbers from 1"),
        ('[{"shape": [true]}]', "tensor 0 has shape [True]"),
        ('[{"name": "a"}]', "tensor 0 has shape None"),
        ('[{"shape": "12"}]', "tensor 0 has shape '12'"),
        ('[{"shape": [2], "dtype": "float12"}]', "tensor 0 has dtype 'float12': expected one of float64"),
        ('[{"shape": [2], "size": 8}]', "tensor 0 has 'size': expected name, shape and dtype"),
        ('[{"shape": [99999999, 99999999, 99999999]}]', "at most 1125899906842624"),
    ],
)
def test_a_wrong_file_is_named_with_the_tensor_and_the_value(tmp_path: Path, content, message):
    path = tmp_path / "model.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        tensors_of(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
