"""Messages that a test looks at, in place of those that go over links."""

from __future__ import annotations

from netstorm.kvstore.paths.routes import RoutedOutbox
from netstorm.protocol.messages import StateMessage


class Sent(RoutedOutbox[StateMessage]):
    """Gives what is sent to `take`: target, message, payload."""

    def __init__(self, take):
        self.take = take

    def send(self, target, message, payload=None):
        self.take(target, message, payload)
