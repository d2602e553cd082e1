"""Hosts for tests: made of namespaces by `scripts/hosts`, ended with the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tierbed_bench.hosts import Hosts, hosts, why_no_hosts

MakeHosts = Callable[..., Hosts]


@pytest.fixture
def make_hosts() -> Iterator[MakeHosts]:
    """Makes hosts, as `tierbed_bench.hosts.hosts` does; skips where this machine cannot."""
    why = why_no_hosts()
    if why is not None:
        pytest.skip(why)
    with contextlib.ExitStack() as made:

        def make(count: int, **options: object) -> Hosts:
            return made.enter_context(hosts(count, **options))  # type: ignore[arg-type]

        yield make
