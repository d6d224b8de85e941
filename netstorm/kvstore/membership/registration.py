"""The registration of keys: requests to the scheduler, and operations that wait for its answer. Pure."""

from __future__ import annotations

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.values.key import Key
from netstorm.protocol.messages import KeyGrant, KeySpec, RegisterKeys

__all__ = ["Registration"]


class Registration:
    """The registration of all keys of this process."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, str], Key] = {}
        self._unsent: list[Key] = []
        self._operations: dict[tuple[int, str], list[Operation]] = {}

    def add(self, key: Key) -> None:
        """Register a key with the next request."""
        self._keys[key.spec.namespace, key.name] = key
        self._unsent.append(key)

    def has_request(self) -> bool:
        """Return whether there is a request to send."""
        return bool(self._unsent)

    def take_request(self) -> RegisterKeys:
        """Return one request for all keys that have gathered: 160 keys must not pay 160 round trips."""
        request = RegisterKeys(keys=tuple(key.spec for key in self._unsent))
        self._unsent = []
        return request

    def unanswered(self) -> tuple[KeySpec, ...]:
        """Return all keys that have not been granted, to be requested once more; the next request is without
        them.
        """
        self._unsent = []
        return tuple(key.spec for key in self._keys.values() if key.identity < 0)

    def enqueue(self, operation: Operation) -> None:
        """Keep an operation until its key is granted."""
        spec = operation.key.spec
        self._operations.setdefault((spec.namespace, spec.name), []).append(operation)

    def grant(self, answer: KeyGrant) -> tuple[Key, list[Operation]]:
        """Record the scheduler's answer; return the key, and the operations that waited for it.

        Raises:
            ProtocolViolation: the key was not requested.
        """
        key = self._keys.get((answer.namespace, answer.name))
        if key is None or key.identity >= 0:
            raise ProtocolViolation(f"the scheduler grants key {answer.name!r}, which was not requested")
        key.set_grant(answer)
        return key, self._operations.pop((answer.namespace, answer.name), [])

    def waiting_operations(self) -> list[Operation]:
        """Return the operations whose key has not been granted."""
        return [operation for operations in self._operations.values() for operation in operations]

    def granted_keys(self) -> list[Key]:
        """Return the keys that the scheduler has granted."""
        return [key for key in self._keys.values() if key.identity >= 0]

    def last_rounds(self) -> dict[int, int]:
        """Return the last round of each granted key that this rank has begun."""
        return {key.identity: key.last_taken for key in self.granted_keys()}

    def clear(self) -> None:
        """Forget requests and waiting operations: the job has failed."""
        self._unsent = []
        self._operations = {}
