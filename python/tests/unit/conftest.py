"""What tests of publishers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from publisher_kit import Clock, Training


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock.of_publishers(monkeypatch)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.store.close()
