"""Finds out how a script ends, which Python does not tell the exit functions that it runs.

An uncaught exception goes through `sys.excepthook`. The SystemExit that `sys.exit` raises does not. So our
`sys.exit` raises a subclass that can be weakly referenced: if it is freed with no Python code left below, it
was not caught, and the process ends with its code. `raise SystemExit(3)` goes unnoticed, and counts as an
orderly end.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final, NoReturn, cast

__all__ = ["ScriptExit"]


class _Exit(SystemExit):
    """What our `sys.exit` raises: unlike SystemExit itself it can be weakly referenced."""


class ScriptExit:
    """Watches for a script's end by an exception, or with a non-zero exit code."""

    def __init__(self) -> None:
        self.failed = False
        """The script has failed by itself; Python will exit with the right code."""
        self._failing: Callable[[str], None] | None = None
        self._exits: Final[set[weakref.ref[_Exit]]] = set()
        self._python_exit: Final = sys.exit
        self._python_hook = sys.excepthook

    def watch(self, failing: Callable[[str], None]) -> None:
        """Call `failing` with a description as soon as the script fails, while its threads still run."""
        self._failing = failing
        self._python_hook = sys.excepthook
        sys.excepthook = self._excepthook
        sys.exit = self._exit

    def check_last_exception(self) -> None:
        """Find an exception that went to another hook, or that ends a process of multiprocessing just now.
        Call it at the end of the process.
        """
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if error is None or self.failed or _is_interactive():
            return
        if not isinstance(error, SystemExit):
            self._fail(_description(error))
        elif code := _code_of(error.code):
            self._fail(f"its script ended with exit code {code}")

    def _fail(self, description: str) -> None:
        self.failed = True
        if self._failing is not None:
            self._failing(description)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not _is_interactive():
            self._fail(_description(error))
        self._python_hook(kind, error, trace)

    def _exit(self, status: object = None, /) -> NoReturn:
        code = _code_of(status)
        if code == 0 or threading.current_thread() is not threading.main_thread():
            self._python_exit(cast("int | str | None", status))  # sys.exit takes any object

        def freed(reference: weakref.ref[_Exit]) -> None:
            self._exits.discard(reference)
            if _is_outermost() and threading.current_thread() is threading.main_thread():
                self._fail(f"its script ended with exit code {code}")

        error = _Exit(status)
        self._exits.add(weakref.ref(error, freed))
        try:
            raise error
        finally:
            del error  # or this frame, which the traceback refers to, would keep it


def _code_of(status: object) -> int:
    if status is None:
        return 0
    return int(status) if isinstance(status, int) else 1


def _description(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_interactive() -> bool:
    """Return whether Python runs interactively: an exception does not end the program."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _is_outermost() -> bool:
    """Return whether no Python code called our caller."""
    try:
        sys._getframe(2)  # noqa: SLF001 -- inspect.currentframe is the same under another name
    except ValueError:
        return True
    return False
