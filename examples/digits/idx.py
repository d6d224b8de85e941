"""Reads the IDX files of MNIST and Fashion-MNIST, packed with gzip or not.

Format: http://yann.lecun.com/exdb/mnist/: two zero bytes, a type (8 is unsigned byte), the number of
dimensions, each dimension as a big-endian 32-bit number, then the values, the last dimension fastest.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from digits.errors import ExampleError

__all__ = ["EXPECTED", "read", "read_file"]

Bytes = NDArray[np.uint8]

EXPECTED = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, "
    "each also with .gz"
)

_UNSIGNED_BYTE = 8


def read(folder: Path) -> tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]]:
    """Return (images, labels) for training and for test; images are (samples, 1, height, width)."""
    return _pair(folder, "train"), _pair(folder, "t10k")


def _pair(folder: Path, part: str) -> tuple[Bytes, Bytes]:
    images = read_file(_find(folder, f"{part}-images-idx3-ubyte"), dimensions=3)
    labels = read_file(_find(folder, f"{part}-labels-idx1-ubyte"), dimensions=1)
    if len(images) != len(labels):
        raise ExampleError(
            f"{folder}: {part} has {len(images)} images but {len(labels)} labels; they belong together"
        )
    if len(labels) and labels.max() > 9:
        raise ExampleError(f"{folder}: {part} has the label {labels.max()}; expected 0 to 9")
    return images[:, np.newaxis], labels


def _find(folder: Path, name: str) -> Path:
    # Some archives unpack to names with a dot before idx.
    names = [spelling + ending for spelling in (name, name.replace("-idx", ".idx")) for ending in ("", ".gz")]
    for candidate in names:
        if (folder / candidate).is_file():
            return folder / candidate
    raise ExampleError(f"{folder} has no {name} (nor {', '.join(names[1:])}); expected there: {EXPECTED}")


def read_file(path: Path, *, dimensions: int) -> Bytes:
    """Return one IDX file of unsigned bytes.

    Raises:
        ExampleError: not such a file, another number of dimensions, or not as long as its header says.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ExampleError(f"{path} cannot be read: {error}") from error
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise ExampleError(
            f"{path} is not an IDX file of bytes in {dimensions} dimensions: it begins with {content[:4]!r}"
        )
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4))
    values = np.frombuffer(content, np.uint8, offset=header)
    if values.size != int(np.prod(shape, dtype=np.int64)):
        raise ExampleError(
            f"{path} should hold {shape} values but has {values.size}: cut short while copied?"
        )
    return values.reshape(shape)
