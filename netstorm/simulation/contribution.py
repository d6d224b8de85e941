"""What a simulated node gives to an all-reduce, and where the result goes; one function a form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from netstorm.compression.sparse import Rows
from netstorm.kvstore.forms import Form, Key, RowParts, Values
from netstorm.protocol.codecs import ROW_SPARSE, row_length
from netstorm.simulation.pending import Array

__all__ = ["Contribution", "contribution_of_rows", "contribution_of_values"]


@dataclass(frozen=True, slots=True)
class Contribution:
    """Source and destination of one all-reduce, as its form has them."""

    source: Values
    destination: Values
    form: Form
    collect: Callable[[], Array]
    """Returns a copy of the result. It then overwrites source and destination, so that a late read shows."""


def contribution_of_values(
    key: Key,
    values: Array,
    *,
    in_place: bool = False,
    form: Form | None = None,
    sent: Values | None = None,
    kept: bool = False,
) -> Contribution:
    """Return the contribution of an array.

    Args:
        key: of the all-reduce.
        values: this rank's array, which is copied.
        in_place: the result overwrites the copy.
        form: the key's own if None.
        sent: `values` as `form` has them; None: the array itself.
        kept: the node changes the array itself, which keeps what was not counted.
    """
    source = values.reshape(-1) if kept else np.array(values, order="C").ravel()
    destination = source if in_place else np.empty_like(source)

    def collect() -> Array:
        result = destination.reshape(values.shape).copy()
        _overwrite(destination if kept else source, destination)
        return result

    return Contribution(source if sent is None else sent, destination, form or key.form, collect)


def contribution_of_rows(key: Key, values: Array) -> Contribution:
    """Return the contribution of those rows of a matrix that are not all zeros."""
    source = np.array(values, order="C").ravel()
    destination = np.zeros_like(source)
    matrix = source.reshape(values.shape[0], row_length(values.shape))
    numbers = np.flatnonzero(matrix.any(axis=1))
    parts: RowParts = []

    def collect() -> Array:
        for first, rows in parts:
            destination.reshape(len(values), -1)[first + rows.numbers] = rows.values
        result = destination.reshape(values.shape).copy()
        _overwrite(source, destination)
        return result

    return Contribution(Rows(numbers, matrix[numbers]), parts, key.forms[ROW_SPARSE], collect)


def _overwrite(source: Array, destination: Array) -> None:
    source.view(np.uint8).fill(0xA5)
    destination.view(np.uint8).fill(0x5A)
