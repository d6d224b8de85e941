"""A key whose blocks ranks own."""

from __future__ import annotations

from netstorm.kvstore.forms import Key
from netstorm.protocol.messages import KeyGrant


def granted_key() -> Key:
    """Return one of 10 elements, in blocks of 4, 4 and 2."""
    key = Key(0, "k", (10,), "float32")
    key.set_grant(KeyGrant(namespace=0, name="k", key=0, first_slot=0, offset=0, chunk_size=4))
    return key
