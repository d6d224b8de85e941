"""PyTorch's store: where it listens in a job of `netstorm launch`, and what ranks tell each other in it.

A store is open to whoever reaches its port: it has no key and no encryption. So it listens on the address
that ranks are given alone, not on all of the host, and what NetStorm puts into it carries a code under the
job's key. PyTorch's own entries do not: counters, and the addresses of Gloo's and NCCL's groups.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import inspect
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from netstorm.addresses import is_loopback
from netstorm.errors import NotAuthorised, SettingsError
from netstorm.frontends.torch.internals import Store, TCPStore, replace_create_store
from netstorm.pslite.host_addresses import resolve
from netstorm.pslite.keys import JobKey

__all__ = ["address_of", "limit_the_store_to_its_address", "sealed", "unsealed"]

_log = logging.getLogger(__name__)

_PERSON: Final = b"netstorm store"

_MARK: Final = " code="

_BACKLOG: Final = 16384
"""As PyTorch's own: all ranks connect at once."""


def sealed(text: str, name: str, key: JobKey | None) -> str:
    """Return an entry of the store: `text`, and with a key a code that only who has it can make.

    Args:
        text: the entry's.
        name: under which it is kept; an entry under another name has another code.
        key: the job's.
    """
    return text if key is None else f"{text}{_MARK}{_code(text, name, key)}"


def unsealed(content: str, name: str, key: JobKey | None) -> str:
    """Return the text of an entry.

    Raises:
        SettingsError: it has a code, and this process has no key.
        NotAuthorised: this process has a key, and the entry has no code or another one.
    """
    text, mark, code = content.rpartition(_MARK)
    if not mark:
        text, code = content, ""
    if key is None and code:
        raise SettingsError(
            "another rank has a job key, and this process has none: set NETSTORM_KEY_FILE to a copy of "
            "the same file"
        )
    if key is not None and not hmac.compare_digest(code, _code(text, name, key)):
        what = "another code" if code else "no code"
        raise NotAuthorised(
            f"{name!r} in PyTorch's store is {text[:200]!r}, with {what}: expected one made with the key of "
            "NETSTORM_KEY_FILE; give all ranks the same file. If they have it, somebody else writes to the "
            "store: close its port (MASTER_PORT, or that of torchrun's rendezvous) to all but the job's hosts"
        )
    return text


def _code(text: str, name: str, key: JobKey) -> str:
    return hashlib.blake2b(
        f"{name}\n{text}".encode(), key=key.derive("store"), digest_size=32, person=_PERSON
    ).hexdigest()


def limit_the_store_to_its_address() -> None:
    """Have the store of `init_process_group` listen at MASTER_ADDR alone. PyTorch's listens on all addresses.

    Twice does no harm. Where MASTER_ADDR is no address of this host, PyTorch goes its own way.
    """
    replace_create_store(_limited)


def _limited(original: Callable[..., Any]) -> Callable[..., Any] | None:
    if hasattr(original, "of_netstorm"):
        return None
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def create(*arguments: Any, **named: Any) -> Any:
        given = parameters.bind(*arguments, **named)
        given.apply_defaults()
        asked = given.arguments
        is_master = asked["rank"] == 0 and not _is_another_ones()
        listening = _listening(asked["hostname"], asked["port"]) if is_master else None
        if listening is None:
            return original(*arguments, **named)
        return TCPStore(
            host_name=asked["hostname"],
            port=asked["port"],
            world_size=asked["world_size"],
            is_master=True,
            timeout=asked["timeout"],
            multi_tenant=True,
            master_listen_fd=listening.detach(),
            use_libuv=asked["use_libuv"],
        )

    create.of_netstorm = True  # type: ignore[attr-defined]
    return create


def _is_another_ones() -> bool:
    """Return whether torchrun has a store already."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # noqa: TID251 -- as PyTorch asks it


def _listening(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at an address; None: it cannot, or others might look for it elsewhere.

    A name of several addresses, or one that means loopback here, may be another address at other hosts.
    """
    if host == "localhost":
        host = "127.0.0.1"
    try:
        addresses = {each[4]: each[:2] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        address, (family, kind) = addresses.popitem()
        if addresses or (is_loopback(str(address[0])) and host != address[0]):
            return None
        made = socket.socket(family, kind)
    except OSError:
        return None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        _log.debug("PyTorch's store listens on all addresses: %s:%d: %s", host, port, error)
        return None
    return made


def address_of(store: Store) -> tuple[str, ...]:
    """Return the address of PyTorch's store, if it has one: the user has given it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = str(getattr(store, "host", ""))
    with contextlib.suppress(SettingsError):
        return (resolve(host, "MASTER_ADDR"),) if host else ()
    return ()
