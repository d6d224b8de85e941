"""Ends an example with a message and exit code 2 when an option or a data file is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ExampleError", "usage_errors"]


class ExampleError(ValueError):
    """An option or a data file is wrong; the message says which, and what to do."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn an `ExampleError` of the block into its message and exit code 2, without a traceback."""
    try:
        yield
    except ExampleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
