"""Marks some of a test's parameters slow: the gate runs the others, `make test-all` every one."""

import pytest


def slow(*values: object) -> list:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
