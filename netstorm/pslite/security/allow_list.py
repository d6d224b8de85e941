"""The allow list: which nodes are admitted, by the public keys of their own. Pure.

# NAME PUBLICKEY, as `netstorm keys new --node NAME` prints it
tokyo  rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from netstorm.errors import SettingsError
from netstorm.pslite.security.curve import key_of_text
from netstorm.pslite.security.node_key import check_name

__all__ = ["parse_allow_list"]


def parse_allow_list(text: str, path: str) -> Mapping[bytes, str]:
    """Return the names of the nodes that are admitted, by public key.

    Args:
        text: of the file.
        path: for messages.

    Raises:
        SettingsError: a line that says nothing, or two that contradict each other; begins with file and line.
    """
    names: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):  # a key may have this character, but a name has not
            continue
        place = f"{path}, line {number}"
        if len(words) != 2:
            raise SettingsError(
                f"{place}: {len(words)} words: expected NAME PUBLICKEY, as `netstorm keys new --node` prints"
            )
        try:
            name, key = check_name(words[0]), key_of_text(words[1])
        except ValueError as error:
            raise SettingsError(f"{place}: {error}") from None
        if name in names.values() or key in names:
            raise SettingsError(
                f"{place}: {name} or its key is there twice: expected one line for each node, so that "
                "removing the line removes the node"
            )
        names[key] = name
    return MappingProxyType(names)
