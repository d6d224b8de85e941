"""AlexNet in PyTorch, as MXNet's model zoo has it."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.nn import functional

from digits.errors import ExampleError

__all__ = ["AlexNet"]

_SIZE: Final = 224
_SMALLEST: Final = 63
"""Of a smaller image the poolings leave nothing."""


class AlexNet(nn.Module):
    """Krizhevsky's "one weird trick" network (arXiv 1404.5997), for grey or coloured images of any size."""

    def __init__(self, classes: int, image_size: int | None) -> None:
        """Images are resized to `image_size`, by default 224: the first dense layer then has 9216 inputs.

        Raises:
            ExampleError: `image_size` is too small.
        """
        super().__init__()
        self._size = size = image_size or _SIZE
        if size < _SMALLEST:
            raise ExampleError(f"--image-size {size}: alexnet needs at least {_SMALLEST} pixels")
        features = nn.Sequential(
            *(nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, kernel_size=3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 256, kernel_size=3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
            nn.Flatten(),
        )
        with torch.no_grad():
            inputs = features(torch.zeros(1, 3, size, size)).shape[1]
        self._layers = nn.Sequential(
            features,
            *(nn.Linear(inputs, 4096), nn.ReLU(), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()),
            nn.Linear(4096, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the classes' scores; a grey image is three equal channels."""
        if images.shape[-1] != self._size:
            images = functional.interpolate(images, self._size, mode="bilinear")
        scores: torch.Tensor = self._layers(images.expand(-1, 3, -1, -1))
        return scores
