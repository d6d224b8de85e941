from __future__ import annotations

import pytest

from netstorm.cli.launch.shutdown import SCHEDULER, Member, in_words, outcome


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([2], "rank 2"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7, 8"),
        ([SCHEDULER], "the scheduler"),
        ([SCHEDULER, 3], "rank 3 and the scheduler"),
    ],
)
def test_members_are_named_briefly(members, words):
    assert in_words(map(Member, members)) == words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (139, "killed by SIGSEGV"),
        (130, "killed by SIGINT"),
        (255, "exit code 255"),
    ],
)
def test_an_exit_code_above_128_is_a_signal(code, words):
    assert outcome(code) == words
