"""Check the messages of commits: one topic, a subject of at most 72 characters, and the reason in the body."""

from __future__ import annotations

import subprocess
import sys

#: Earlier commits are not checked.
SINCE = "2026-11-27T01:00:00Z"
LONGEST = 72


def problems_of(message: str) -> list[str]:
    """What is wrong with the message of a commit, in the words of the error."""
    subject, _, rest = message.strip().partition("\n")
    problems = []
    if len(subject) > LONGEST:
        problems.append(f"the subject must have at most {LONGEST} characters, but it has {len(subject)}")
    if not subject[:1].isupper() or subject.endswith("."):
        problems.append("the subject must begin with a capital letter and end without a full stop")
    if "; " in subject:
        problems.append("the subject must name one topic: make a commit for each")
    if not rest.startswith("\n") or not rest.strip():
        problems.append("the body must give the reason, after an empty line")
    return problems


def main() -> int:
    """Print the problems of all checked commits, and return 1 if there are any."""
    log = ["git", "log", "--no-merges", f"--since={SINCE}", "--format=%h%x00%B%x01"]
    result = subprocess.run(log, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(f"tests/commits.py: no commits to check: {result.stderr.strip()}")
        return 0
    wrong = 0
    for entry in filter(None, map(str.strip, result.stdout.split("\x01"))):
        commit, _, message = entry.partition("\x00")
        for problem in problems_of(message):
            print(f"commit {commit} '{message.strip().splitlines()[0]}': {problem}", file=sys.stderr)
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
