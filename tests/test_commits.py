"""The check of commit messages."""

import pytest
from commits import LONGEST, problems_of

GOOD = "Scan long rows with one counter\n\nEach chunk waited for its predecessor in turn.\n"


def test_a_good_message():
    assert problems_of(GOOD) == []
    assert problems_of("S" * LONGEST + "\n\nThe reason.") == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("S" * (LONGEST + 1) + "\n\nThe reason.", "at most 72 characters, but it has 73"),
        ("scan long rows\n\nThe reason.", "begin with a capital letter"),
        ("Scan long rows.\n\nThe reason.", "without a full stop"),
        ("Scan long rows; rename chunks\n\nThe reason.", "name one topic"),
        ("Scan long rows", "the body must give the reason"),
        ("Scan long rows\nwith one counter", "the body must give the reason"),
    ],
)
def test_bad_messages(message, words):
    (problem,) = problems_of(message)
    assert words in problem
