"""The decoders that are fuzzed are listed in `benchmarks/decoders`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from netstorm.lab.testing.decoders import FuzzTarget

CORPUS: Final = Path(__file__).parent / "corpus"


@pytest.fixture(scope="session")
def targets() -> Iterator[dict[str, FuzzTarget]]:
    """Every decoder, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        found: tuple[FuzzTarget, ...] = importlib.import_module("decoders.registry").TARGETS
        yield {target.name: target for target in found}


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Decoders log what they drop, which would be most of the time."""
    before = logging.root.manager.disable
    logging.disable()
    yield
    logging.disable(before)
