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

from netstorm.addresses import is_address, is_loopback
from netstorm.errors import SettingsError
from netstorm.observe.private_files import is_readable_by_others
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

_REFUSED: Final = (
    b"this page needs the job's token: netstorm top --token-file FILE, or a header "
    b'"Authorization: Bearer TOKEN"\n'
)


_PORT: Final = re.compile(r":\d*$")

_OTHER_HOST: Final = (
    b"this is another host: ask for this page by its address, by localhost, or by the name in "
    b"NETSTORM_HTTP_BIND, DMLC_PS_ROOT_URI or DMLC_NODE_HOST; or give it a token "
    b"(NETSTORM_WEB_TOKEN_FILE)\n"
)


@dataclass(frozen=True, slots=True)
class WebAccess:
    """Who may see the pages of one web server. Its text does not show the token."""

    token: str | None = field(default=None, repr=False)
    """What every request must bear; None: nothing."""
    tls: ssl.SSLContext | None = None
    """Encrypts connections; None: they are plain."""
    names: frozenset[str] = frozenset()
    """Under which pages without a token may be asked for, besides addresses and localhost."""

    @property
    def scheme(self) -> str:
        """How an address begins: http or https."""
        return "http" if self.tls is None else "https"

    def guard(self, application: Application, refusals: WebRefusals) -> Application:
        """Return the application for those who may see it; others are counted."""
        if self.token is None:
            return with_known_host(application, self.names, refusals)
        return with_token(application, self.token, refusals)


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
    names = (settings.http_bind, settings.scheduler_host, settings.node_host, os.uname().nodename)
    return WebAccess(token, tls, frozenset(name.lower() for name in names if name))


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
            state = os.fstat(file.fileno())
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise SettingsError(f"{source}={str(path)!r}: cannot read the token: {error.strerror}") from None
    if is_readable_by_others(state):
        raise SettingsError(
            f"{source}={str(path)!r}: mode {stat.S_IMODE(state.st_mode):04o} lets others read the token: "
            f"expected 0600 (or 0440, of root, with a group of this process): `chmod 600 {path}`, and make a "
            "new token if others may have read this one"
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


def with_known_host(application: Application, names: frozenset[str], refusals: WebRefusals) -> Application:
    """Return an application that answers 421 to requests for a name that is not this process's.

    A browser asks for the name that a page elsewhere gives it, even if that name leads here (DNS rebinding),
    and lets that page read the answer. An address, or localhost, is nobody else's name.
    """

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        given = environ.get("HTTP_HOST", "localhost").strip().lower()
        host = _PORT.sub("", given)
        if host == "localhost" or host in names or is_address(host.strip("[]")):
            return application(environ, start_response)
        refusals.note("wrong_host", environ.get("REMOTE_ADDR", ""))
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(_OTHER_HOST))),
            ("Cache-Control", "no-store"),
        ]
        start_response("421 Misdirected Request", headers)
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [_OTHER_HOST]

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
