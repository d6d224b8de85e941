"""The networks, all as Gluon blocks: a small CNN, and those of MXNet's model zoo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from digits.data import Dataset
from digits.errors import ExampleError
from digits.framework import mx

__all__ = ["InputShape", "build", "input_shape", "prepare"]

_ZOO = {
    "alexnet": "alexnet",
    "resnet18": "resnet18_v1",
    "resnet50": "resnet50_v1",
    "mobilenet": "mobilenet1.0",
}

# AlexNet's first dense layer has 9216 inputs at 224 pixels, as published; the others end in global pooling
# and take any size that survives five halvings.
_DEFAULT_SIZE = {"alexnet": 224, "resnet18": 64, "resnet50": 64, "mobilenet": 64}
_SMALLEST = {"cnn": 4, "alexnet": 63, "resnet18": 32, "resnet50": 32, "mobilenet": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """What a network takes."""

    channels: int
    size: int
    """Height and width in pixels."""


def input_shape(model: str, data: Dataset, image_size: int | None) -> InputShape:
    """Return the input of `model` for `data`.

    Raises:
        ExampleError: `image_size` is smaller than the network's poolings leave something of.
    """
    _, channels, height, _ = data.train.images.shape
    size = image_size or _DEFAULT_SIZE.get(model, height)
    if size < _SMALLEST[model]:
        raise ExampleError(f"--image-size {size}: {model} needs at least {_SMALLEST[model]} pixels")
    return InputShape(channels=channels if model == "cnn" else 3, size=size)


def build(model: str, classes: int) -> Any:
    """Return the network, a `HybridBlock` without initial weights."""
    if model == "cnn":
        return _cnn(classes)
    return mx.gluon.model_zoo.vision.get_model(_ZOO[model], classes=classes)


def _cnn(classes: int) -> Any:
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(16, kernel_size=3, padding=1, activation="relu"),
        nn.MaxPool2D(),
        nn.Conv2D(32, kernel_size=3, padding=1, activation="relu"),
        nn.MaxPool2D(),
        nn.Dense(64, activation="relu"),
        nn.Dense(classes),
    )
    return net


def prepare(images: Any, shape: InputShape, white: int) -> Any:
    """Return byte images as the network takes them: float32 from 0 to 1, resized, grey as three channels."""
    batch = mx.nd.array(images, dtype="float32") / white
    if batch.shape[2:] != (shape.size, shape.size):
        batch = mx.nd.contrib.BilinearResize2D(batch, height=shape.size, width=shape.size)
    if batch.shape[1] != shape.channels:
        batch = mx.nd.repeat(batch, repeats=shape.channels, axis=1)
    return batch
