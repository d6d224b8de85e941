from __future__ import annotations

import pytest

from netstorm.errors import SettingsError
from netstorm.pslite.admission import parse_allow_list
from netstorm.pslite.keys import CurveKeys, key_text

TEXTS = [key_text(CurveKeys.fresh().public) for _ in range(2)]


def test_comments_and_empty_lines_are_left_out():
    text = f"# nodes\n\n  tokyo {TEXTS[0]}\nparis\t{TEXTS[1]}\n"
    assert sorted(parse_allow_list(text, "allow").values()) == ["paris", "tokyo"]
    assert not parse_allow_list("", "allow")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tokyo", "1 words: expected NAME PUBLICKEY"),
        (f"tokyo {TEXTS[0]} # mine", "4 words"),
        ("tokyo abc", "3 characters that are no key"),
        (f"to/kyo {TEXTS[0]}", "'to/kyo': expected a name"),
        (f"rome {TEXTS[1]}", "rome or its key is there twice"),
        (f"paris {TEXTS[0]}", "paris or its key is there twice"),
    ],
    ids=range(6),  # not the keys, which are other ones in each process
)
def test_a_wrong_line_is_named_with_its_number(line, message):
    with pytest.raises(SettingsError) as caught:
        parse_allow_list(f"\nparis {TEXTS[1]}\n{line}\n", "allow")
    assert str(caught.value).startswith(f"allow, line 3: {message}")
