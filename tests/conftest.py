"""Fixtures that tests of several rooms ask for by name."""

from postgres_server import server as server
