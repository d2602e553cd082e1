"""Fixtures of the tests of ranks."""

from __future__ import annotations

from hosts_kit import make_hosts

__all__ = ["make_hosts"]
