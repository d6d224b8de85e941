"""Who may see the web pages of a process: addresses, the bearer token, and TLS.

Pages that only this machine can reach need nothing. All others need a token, so that whoever reaches a port
sees nothing of a job. The token is in a file, because command lines and variables can be read by others.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import ssl
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from netstorm.addresses import is_loopback
from netstorm.errors import SettingsError
from netstorm.observe.web_refusals import WebRefusals
from netstorm.settings import Settings

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from netstorm.observe.pages import Application

__all__ = ["WebAccess", "read_token", "web_access", "with_token"]

_log = logging.getLogger(__name__)

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]{16,512}=*")
"""The characters of a bearer token (RFC 6750, section 2.1). 16 random ones are beyond guessing."""

_MOST_BYTES: Final = 1024
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

_REFUSED: Final = (
    b"this page needs the job's token: netstorm top --token-file FILE, or a header "
    b'"Authorization: Bearer TOKEN"\n'
)


@dataclass(frozen=True, slots=True)
class WebAccess:
    """Who may see the pages of one web server. Its text does not show the token."""

    token: str | None = field(default=None, repr=False)
    """What every request must bear; None: nothing."""
    tls: ssl.SSLContext | None = None
    """Encrypts connections; None: they are plain."""

    @property
    def scheme(self) -> str:
        """How an address begins: http or https."""
        return "http" if self.tls is None else "https"

    def guard(self, application: Application, refusals: WebRefusals) -> Application:
        """Return the application for those who bear the token; others are counted."""
        return application if self.token is None else with_token(application, self.token, refusals)


def web_access(settings: Settings) -> WebAccess:
    """Return who may see the web pages of a process, and load the files for that.

    Raises:
        SettingsError: everybody could see them, a file cannot be used, or a certificate is missing.
    """
    token = None
    if settings.web_token_file:
        token = read_token(Path(settings.web_token_file), "NETSTORM_WEB_TOKEN_FILE")
    if settings.web_key and not settings.web_cert:
        raise SettingsError(
            f"NETSTORM_WEB_KEY={settings.web_key} without NETSTORM_WEB_CERT: expected the certificate, too"
        )
    tls = _tls(settings.web_cert, settings.web_key or None) if settings.web_cert else None
    if not is_loopback(settings.http_bind):
        if token is None and settings.security != "off":
            raise SettingsError(
                f"NETSTORM_HTTP_BIND={settings.http_bind} would show the job to whoever reaches the port: "
                "give NETSTORM_WEB_TOKEN_FILE a file with a token, or set NETSTORM_SECURITY=off behind a VPN"
            )
        if token is not None and tls is None:
            _log.warning(
                "NETSTORM_HTTP_BIND=%s without NETSTORM_WEB_CERT: the token travels in plain text, and "
                "whoever is on its way can read it",
                settings.http_bind,
            )
    return WebAccess(token, tls)


def read_token(path: Path, source: str) -> str:
    """Return the token of a file: its only line. It may be a pipe.

    Args:
        path: of the file.
        source: the option or variable that names it, for messages.

    Raises:
        SettingsError: it cannot be read, others can read it, or it has no token. The text shows none of the
            contents.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise SettingsError(f"{source}={str(path)!r}: cannot read the token: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & _OTHERS:
        raise SettingsError(
            f"{source}={str(path)!r}: mode {stat.S_IMODE(mode):04o} lets others read the token: expected "
            f"0600; `chmod 600 {path}`, and make a new token if others may have read this one"
        )
    text = content.decode("ascii", errors="replace").strip()
    if _TOKEN.fullmatch(text) is None:
        raise SettingsError(
            f"{source}={str(path)!r}: expected one line with a token of 16 to 512 letters, digits and "
            f".~+/_-; `(umask 077; openssl rand -hex 32 > {path})` makes one"
        )
    return text


def with_token(application: Application, token: str, refusals: WebRefusals) -> Application:
    """Return an application that answers 401 to requests that do not bear the token (RFC 6750)."""
    wanted = token.encode()

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        # The time of a comparison must not tell how many characters were right.
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), wanted)
        if is_right and scheme.lower() == "bearer":
            return application(environ, start_response)
        refusals.note("wrong_token" if given else "no_token", environ.get("REMOTE_ADDR", ""))
        headers = [
            ("WWW-Authenticate", 'Bearer realm="NetStorm"'),
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(_REFUSED))),
            ("Cache-Control", "no-store"),
        ]
        start_response("401 Unauthorized", headers)
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [_REFUSED]

    return guarded


def _tls(certificate: str, key: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    names = f"NETSTORM_WEB_CERT={certificate!r}" + (f", NETSTORM_WEB_KEY={key!r}" if key else "")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        raise SettingsError(
            f"{names}: {error.reason or error}; expected a certificate and its private key, which is not "
            "encrypted, in PEM form"
        ) from None
    except OSError as error:
        raise SettingsError(f"{names}: {error.strerror}") from None
    return context


def _no_password() -> str:
    """Stand for the question that OpenSSL would ask on the terminal about an encrypted key."""
    return ""
