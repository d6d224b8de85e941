"""Acts when a script imports a framework, so that `netstorm.run` need not import it beforehand.

Importing a framework takes seconds, and a script may use any of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

__all__ = ["on_import"]


def on_import(imports: Mapping[str, Callable[[], None]]) -> None:
    """Let each of these functions do the first import of the package that it is named after.

    What a function raises, the script's `import` raises. A package that is not installed is not found.

    Args:
        imports: by the name of a top-level package; each function imports that package.
    """
    sys.meta_path.insert(0, _Finder(imports))


class _Finder(MetaPathFinder):
    def __init__(self, imports: Mapping[str, Callable[[], None]]) -> None:
        self._imports: Final = dict(imports)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the package's own spec with a loader that calls the function; None: not ours."""
        if fullname not in self._imports:
            return None
        for finder in sys.meta_path:
            found = finder.find_spec(fullname, path, target) if finder is not self else None
            if found is not None:
                found.loader = _FunctionLoader(self._imports)
                return found
        return None


class _FunctionLoader(Loader):
    def __init__(self, imports: dict[str, Callable[[], None]]) -> None:
        self._imports: Final = imports

    def exec_module(self, module: ModuleType) -> None:
        """Let the function import the package; the empty `module` makes room for it.

        The import system returns what is in `sys.modules` afterwards.
        """
        name = module.__name__
        function = self._imports.pop(name)  # its own import of the package finds it in the usual way
        del sys.modules[name]
        try:
            function()
        except BaseException:
            self._imports[name] = function  # the script may try once more
            sys.modules.setdefault(name, module)  # which the import system removes
            raise
