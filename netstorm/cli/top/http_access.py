"""How `netstorm top` reaches a scheduler's pages: plain or encrypted, with a token or without."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from netstorm.errors import UsageError
from netstorm.observe.web import read_token
from netstorm.settings import Settings

__all__ = ["HttpAccess"]

_ANSWER_TIMEOUT_S: Final = 5.0
"""Longest wait for an answer: the scheduler's machine may be busy."""


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """What every request of one `netstorm top` has in common. Its text does not show the token."""

    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    @classmethod
    def load(cls, settings: Settings, token_file: Path | None, ca: Path | None, *, https: bool) -> HttpAccess:
        """Return the access that options and settings describe.

        Args:
            settings: name the token's file if there is no option.
            token_file: the option --token-file.
            ca: the option --ca: the certificates that are trusted instead of the system's; it means HTTPS.
            https: whether the address says HTTPS.

        Raises:
            UsageError: a file cannot be used.
        """
        token = None
        if token_file is not None:
            token = read_token(token_file, "--token-file")
        elif settings.web_token_file:
            token = read_token(Path(settings.web_token_file), "NETSTORM_WEB_TOKEN_FILE")
        return cls(token, _tls(ca) if https or ca is not None else None)

    def connect(self, host: str, port: int) -> http.client.HTTPConnection:
        """Return a connection, which is opened with the first request."""
        if self.tls is None:
            return http.client.HTTPConnection(host, port, timeout=_ANSWER_TIMEOUT_S)
        return http.client.HTTPSConnection(host, port, timeout=_ANSWER_TIMEOUT_S, context=self.tls)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


def _tls(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        problem = error.reason or str(error)
    except OSError as error:
        problem = error.strerror or str(error)
    raise UsageError(f"--ca {str(ca)!r}: {problem}; expected a file with certificates in PEM form")
