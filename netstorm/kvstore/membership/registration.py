"""Keys on their way to being known: what is asked of the scheduler, and what waits for its answer."""

from __future__ import annotations

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.values.key import Key
from netstorm.protocol.messages import KeyGrant, KeySpec, RegisterKeys

__all__ = ["Registration"]


class Registration:
    """All keys of this process."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, str], Key] = {}
        self._to_ask: list[Key] = []
        self._held: dict[tuple[int, str], list[Operation]] = {}

    def add(self, key: Key) -> None:
        """Ask for a key with the next request."""
        self._keys[key.spec.namespace, key.name] = key
        self._to_ask.append(key)

    def has_request(self) -> bool:
        """Return whether there is something to ask."""
        return bool(self._to_ask)

    def take_request(self) -> RegisterKeys:
        """Return one request for all keys that have gathered: 160 keys must not pay 160 round trips."""
        request = RegisterKeys(keys=tuple(key.spec for key in self._to_ask))
        self._to_ask = []
        return request

    def ask_again(self) -> tuple[KeySpec, ...]:
        """Return all keys that have not been granted; the next request is without them."""
        self._to_ask = []
        return tuple(key.spec for key in self._keys.values() if key.identity < 0)

    def hold(self, operation: Operation) -> None:
        """Keep an operation until its key is granted."""
        spec = operation.key.spec
        self._held.setdefault((spec.namespace, spec.name), []).append(operation)

    def granted(self, grant: KeyGrant) -> tuple[Key, list[Operation]]:
        """Take the scheduler's answer; return the key and what waited for it.

        Raises:
            ProtocolViolation: a key that was not asked for.
        """
        key = self._keys.get((grant.namespace, grant.name))
        if key is None or key.identity >= 0:
            raise ProtocolViolation(f"the scheduler grants key {grant.name!r}, which was not asked for")
        key.granted(grant)
        return key, self._held.pop((grant.namespace, grant.name), [])

    def waiting(self) -> list[Operation]:
        """Return the operations whose key has not been granted."""
        return [operation for operations in self._held.values() for operation in operations]

    def granted_keys(self) -> list[Key]:
        """Return the keys that the scheduler has granted."""
        return [key for key in self._keys.values() if key.identity >= 0]

    def last_rounds(self) -> dict[int, int]:
        """Return the last round that was begun of each granted key."""
        return {key.identity: key.last_taken for key in self.granted_keys()}

    def clear(self) -> None:
        """Forget requests and waiting operations: the job has failed."""
        self._to_ask = []
        self._held = {}
