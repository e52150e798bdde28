"""What the README shows is what the commands print."""

import re

import pytest

_VARYING = re.compile(r"doc_[0-9a-f…]+|\d+\.\d+ s\b|\d+(?= prompt tokens)")


def settled(output: str) -> list[str]:
    """Lines of an output without ids, times, and the length of a prompt with its random fence."""
    return [_VARYING.sub("*", line.rstrip()) for line in output.strip().splitlines()]


@pytest.mark.timeout(1800)
def test_the_session_in_the_readme_is_real(session):
    assert len(session.shown) >= 3
    for (command, shown), (_, printed) in zip(session.shown, session.printed, strict=True):
        assert settled(printed) == settled(shown), command
