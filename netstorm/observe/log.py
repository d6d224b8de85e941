"""Setting up the package's log: it goes to standard error, from the level in the settings."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.settings import Settings

__all__ = ["configure_logging"]

_FORMAT: Final = "%(asctime)s netstorm %(levelname)s %(message)s"


def configure_logging(settings: Settings) -> None:
    """Send the package's log to standard error, unless the program has set up logging itself.

    Twice does no harm.
    """
    logger = logging.getLogger("netstorm")
    level = logging.getLevelName(settings.log_level.upper())
    if settings.verbose:
        level = min(level, logging.INFO if settings.verbose == 1 else logging.DEBUG)
    logger.setLevel(level)
    if logging.getLogger().handlers or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False
