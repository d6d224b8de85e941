"""The datagram lane: sums that may be late travel as packets that need no order, beside the session's TCP."""

from __future__ import annotations
