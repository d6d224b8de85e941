"""The data sets: scikit-learn's digits, and local copies of MNIST, Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from digits import cifar, idx
from digits.errors import ExampleError

__all__ = ["Dataset", "Samples", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Images and their classes."""

    images: NDArray[np.uint8]
    """(samples, channels, height, width); as bytes, since CIFAR-10 in float32 would be 600 MB a rank."""
    labels: NDArray[np.uint8]
    """(samples,)"""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training and test samples of ten classes."""

    name: str
    train: Samples
    test: Samples
    white: int
    """The largest value of a pixel."""
    classes: int = 10


def load(name: str, folder: Path | None) -> Dataset:
    """Read the data set `name`, from `folder` unless it is `digits`.

    Raises:
        ExampleError: a file is missing, cut short or of another kind; says what is expected where.
    """
    if name == "digits":
        return _digits()
    if folder is None:
        raise ExampleError(
            f"--dataset {name} needs --data-dir DIR, the folder of a local copy: {_expected(name)}"
        )
    if not folder.is_dir():
        raise ExampleError(
            f"--data-dir {folder} is not a folder; for --dataset {name} it has {_expected(name)}"
        )
    if name == "cifar10":
        train, test = cifar.read(folder)
    else:
        train, test = idx.read(folder)
    return Dataset(
        name=name,
        train=Samples(images=train[0], labels=train[1]),
        test=Samples(images=test[0], labels=test[1]),
        white=255,
    )


def _expected(name: str) -> str:
    return cifar.EXPECTED if name == "cifar10" else idx.EXPECTED


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - the other data sets do without
    except ModuleNotFoundError as missing:
        raise ExampleError("--dataset digits comes with scikit-learn: pip install scikit-learn") from missing
    images, labels = load_digits(return_X_y=True)
    pixels = images.astype(np.uint8).reshape(-1, 1, 8, 8)
    classes = labels.astype(np.uint8)
    # The samples are in the order of their writers: taking every fifth for the test leaves no writer out.
    test = np.arange(len(classes)) % 5 == 0
    return Dataset(
        name="digits",
        train=Samples(images=pixels[~test], labels=classes[~test]),
        test=Samples(images=pixels[test], labels=classes[test]),
        white=16,
    )
