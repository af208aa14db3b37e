"""Fixtures of the tests of commands."""

from tests.hub_server import hub  # noqa: F401
