"""Tensor sizes of one iteration: of a known model, a given size, or a file. New models belong here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from netstorm.errors import UsageError
from netstorm.units import parse_bytes

__all__ = ["MODELS", "alexnet_shapes", "resnet50_shapes", "tensors_of"]

Shape: TypeAlias = tuple[int, ...]

_CLASSES: Final = 1000
"""ImageNet's."""
_FLOAT32: Final = 4
_WIDTHS: Final[Mapping[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip
_MAX_FILE_BYTES: Final = 16 * 1024 * 1024
_MAX_TENSOR_BYTES: Final = 2**50
"""A pebibyte: more is a mistake, and its chunks could not be counted in reasonable time."""


def alexnet_shapes() -> tuple[Shape, ...]:
    """Return the shapes of AlexNet's parameters: 61 million, one tower, as all frameworks have it [1]_.

    References:
        .. [1] Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv 1404.5997.
    """
    channels = (3, 64, 192, 384, 256, 256)
    kernels = (11, 5, 3, 3, 3)
    shapes: list[Shape] = []
    for (before, after), kernel in zip(pairwise(channels), kernels, strict=True):
        shapes += [(after, before, kernel, kernel), (after,)]
    widths = (256 * 6 * 6, 4096, 4096, _CLASSES)
    for before, after in pairwise(widths):
        shapes += [(after, before), (after,)]
    return tuple(shapes)


def resnet50_shapes() -> tuple[Shape, ...]:
    """Return the shapes of ResNet-50's parameters: 25.6 million in 161 tensors [1]_.

    Convolutions have no bias; each is followed by a batch normalisation with scale and shift.

    References:
        .. [1] He et al., Deep residual learning for image recognition, arXiv 1512.03385, Table 1.
    """
    return tuple(_resnet50())


def _resnet50() -> Iterator[Shape]:
    def convolution(before: int, after: int, kernel: int) -> Iterator[Shape]:
        yield (after, before, kernel, kernel)
        yield (after,)
        yield (after,)

    yield from convolution(3, 64, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(channels, width, 1)
            yield from convolution(width, width, 3)
            yield from convolution(width, 4 * width, 1)
            if block == 0:  # the shortcut has to change its width too
                yield from convolution(channels, 4 * width, 1)
            channels = 4 * width
    yield (_CLASSES, channels)
    yield (_CLASSES,)


MODELS: Final[Mapping[str, Callable[[], tuple[Shape, ...]]]] = {
    "alexnet": alexnet_shapes,
    "resnet50": resnet50_shapes,
}


def tensors_of(text: str) -> tuple[int, ...]:
    """Return the bytes of each tensor of a model, in order of priority: the layers next to the input first.

    Args:
        text: `alexnet` or `resnet50` (float32, 1000 classes); a size such as 244MB, which is one tensor; or
            the path of a JSON file with a list of tensors, each its bytes or an object with `shape`, and if
            they are not float32 `dtype`.

    Raises:
        UsageError: none of these, or a file that says something else.
    """
    if text in MODELS:
        return tuple(_FLOAT32 * math.prod(shape) for shape in MODELS[text]())
    if text.endswith(".json") or "/" in text or Path(text).is_file():
        return _read(Path(text))
    if not text[:1].isdigit():
        raise UsageError(
            f"model {text!r}: expected {', '.join(MODELS)}, a size such as 244MB, or the path of a .json file"
        )
    size = parse_bytes(text)
    if not 0 < size <= _MAX_TENSOR_BYTES:
        raise UsageError(f"model {text!r}: expected a size of at least 1B and at most 1024TiB")
    return (size,)


def _read(path: Path) -> tuple[int, ...]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise UsageError(f"{path}: the model has more than {_MAX_FILE_BYTES} bytes, which is the limit")
        entries = json.loads(data)
    except OSError as error:
        raise UsageError(f"{path}: the model cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, no JSON, or a number of thousands of digits
        raise UsageError(f"{path}: the model is not JSON: {error}") from None
    if not isinstance(entries, list) or not entries:
        example = '[{"name": "fc_weight", "shape": [10, 64]}] or [2560]'
        raise UsageError(f"{path}: expected a list of tensors, such as {example}")
    return tuple(_bytes_of(entry, f"{path}: tensor {place}") for place, entry in enumerate(entries))


def _bytes_of(entry: object, where: str) -> int:
    if isinstance(entry, Mapping):
        unknown = sorted(set(entry) - {"name", "shape", "dtype"})
        if unknown:
            raise UsageError(f"{where} has {unknown[0]!r}: expected name, shape and dtype")
        size = _width(entry.get("dtype", "float32"), where) * _elements(entry.get("shape"), where)
    elif isinstance(entry, int) and not isinstance(entry, bool):
        size = entry
    else:
        raise UsageError(f"{where} is {entry!r}: expected its bytes, or an object with its shape")
    if not 0 < size <= _MAX_TENSOR_BYTES:
        raise UsageError(f"{where} has {size} bytes: expected at least 1, and at most {_MAX_TENSOR_BYTES}")
    return size


def _width(dtype: object, where: str) -> int:
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        raise UsageError(f"{where} has dtype {dtype!r}: expected one of {', '.join(_WIDTHS)}")
    return _WIDTHS[dtype]


def _elements(shape: object, where: str) -> int:
    lengths: list[Any] = shape if isinstance(shape, list) else [None]
    if not all(type(length) is int and length > 0 for length in lengths):
        raise UsageError(f"{where} has shape {shape!r}: expected a list of whole numbers from 1")
    elements = 1
    for length in lengths:
        elements *= length
        if elements > _MAX_TENSOR_BYTES:  # the product of millions of lengths would take minutes
            raise UsageError(f"{where} has {elements} elements or more: expected at most {_MAX_TENSOR_BYTES}")
    return elements
