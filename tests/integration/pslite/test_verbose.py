"""PS_VERBOSE: what a node logs of its connections and messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.failures.scripts import PLAIN_JOIN, PLAIN_PROLOGUE
from tests.integration.jobs import run_job

CONNECTIONS = (
    "connected to the scheduler",
    "connected to rank",
    "has connected",
    "ending the session with rank",
)
MEMBERSHIP = ("to the scheduler: Join(", "from the scheduler: Joined(", "from the scheduler: AllFinished(")
MESSAGES = ("to the scheduler: RegisterKeys(", "Part(key=0, round=1, chunk=0", " bytes")


@pytest.mark.parametrize(
    ("verbose", "said", "unsaid"),
    [
        (0, (), CONNECTIONS + MEMBERSHIP + MESSAGES),
        (1, CONNECTIONS + MEMBERSHIP, MESSAGES),
        (2, CONNECTIONS + MEMBERSHIP + MESSAGES, ()),
    ],
)
def test_connections_and_membership_and_then_every_message(
    tmp_path: Path, verbose: int, said: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    ended = run_job(tmp_path, 2, PLAIN_PROLOGUE + PLAIN_JOIN, PS_VERBOSE=verbose)
    for end in ended:
        assert end.code == 0
        assert [text for text in said if text not in end.err] == [], end.err
        assert [text for text in unsaid if text in end.err] == [], end.err
