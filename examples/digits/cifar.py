"""Reads the binary version of CIFAR-10; the Python version is pickled, and loading a pickle runs it.

Format: https://www.cs.toronto.edu/~kriz/cifar.html: records of one label byte and 3 x 32 x 32 pixel bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from digits.errors import ExampleError

__all__ = ["EXPECTED", "read"]

Bytes = NDArray[np.uint8]

EXPECTED = "data_batch_1.bin to data_batch_5.bin and test_batch.bin (cifar-10-binary.tar.gz, unpacked)"

_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32


def read(folder: Path) -> tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]]:
    """Return (images, labels) for training and for test; images are (samples, 3, 32, 32)."""
    inner = folder / "cifar-10-batches-bin"
    if inner.is_dir():
        folder = inner
    batches = [_read_file(folder / f"data_batch_{number}.bin") for number in range(1, 6)]
    images = np.concatenate([batch[0] for batch in batches])
    labels = np.concatenate([batch[1] for batch in batches])
    return (images, labels), _read_file(folder / "test_batch.bin")


def _read_file(path: Path) -> tuple[Bytes, Bytes]:
    if not path.is_file():
        raise ExampleError(
            f"{path.parent} has no {path.name}; expected there: {EXPECTED}{_python_version(path)}"
        )
    content = np.fromfile(path, np.uint8)
    if content.size == 0 or content.size % _RECORD:
        raise ExampleError(
            f"{path} has {content.size} bytes, not a multiple of {_RECORD}: not CIFAR-10, or cut short"
        )
    records = content.reshape(-1, _RECORD)
    labels = records[:, 0]
    if labels.max() > 9:
        raise ExampleError(f"{path} has the label {labels.max()}; expected 0 to 9")
    return records[:, 1:].reshape(-1, *_SHAPE), labels.copy()


def _python_version(path: Path) -> str:
    pickled = (path.with_suffix(""), path.parent / "cifar-10-batches-py" / path.stem)
    if any(candidate.is_file() for candidate in pickled):
        return "; what is there is the Python version, which is pickled and therefore not read"
    return ""
