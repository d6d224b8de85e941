from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.security.vans import KeyedVan


@pytest.fixture
def keyed() -> Iterator[Callable[..., KeyedVan]]:
    """Make vans with a key, or without one; close them at the end."""
    made: list[KeyedVan] = []

    def make(credentials: Any = None, **options: Any) -> KeyedVan:
        made.append(KeyedVan(credentials, **options))
        return made[-1]

    yield make
    for one in made:
        one.van.shut(0.0)
