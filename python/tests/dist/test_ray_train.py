"""What Ray Train is told of a checkpoint, without a cluster; ``test_elastic.py`` has one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_checkpoints import alone
from test_ranks import TABLES, all_rows, draw, train

import tierbed as tb
from tierbed import dist as tbd


class FakeRay:
    """A run of Ray Train, as a worker sees it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: list[dict[str, Any]] = []
        self.last: Any = None
        self.kind, self.rank = "local", 0
        self.folder = folder
        self.train = ModuleType("ray.train")
        names: dict[str, Any] = {
            "Checkpoint": lambda path, filesystem: SimpleNamespace(
                path=path, filesystem=filesystem
            ),
            "CheckpointUploadMode": SimpleNamespace(NO_UPLOAD="not moved"),
            "get_checkpoint": lambda: self.last,
            "get_context": self._context,
            "report": self._report,
        }
        for name, value in names.items():
            setattr(self.train, name, value)
        ray = ModuleType("ray")
        ray.train, ray.__version__ = self.train, "2.40.0"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.train", self.train)

    def _context(self) -> Any:
        storage = SimpleNamespace(
            storage_filesystem=SimpleNamespace(type_name=self.kind),
            build_checkpoint_path_from_name=lambda name: f"{self.folder}/run/{name}",
        )
        return SimpleNamespace(get_storage=lambda: storage, get_world_rank=lambda: self.rank)

    def _report(self, metrics: Any, **given: Any) -> None:
        self.reports.append({"metrics": metrics, **given})
        self.last = given["checkpoint"] or self.last


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(tmp_path, monkeypatch)


def test_rows_are_saved_where_the_run_is_and_found_by_ray(ray: FakeRay, tmp_path: Path) -> None:
    with alone() as rows:
        assert tbd.ray_load(rows) is None
        train(rows, [draw(1, 9, False)])
        place = tbd.ray_checkpoint(rows, "step-1", {"step": 1}, metrics={"loss": 0.5})
        expected = all_rows(rows.store, TABLES[0])[0]
    assert place == f"{tmp_path}/run/step-1"
    (report,) = ray.reports
    assert report["metrics"] == {"loss": 0.5}
    assert report["checkpoint"].path == place
    assert report["checkpoint_upload_mode"] == "not moved"
    with alone() as rows:
        assert tbd.ray_load(rows) == {"step": 1}
        assert torch.equal(all_rows(rows.store, TABLES[0])[0], expected)
        ray.rank = 1
        tbd.ray_checkpoint(rows, "step-2")
    assert ray.reports[1]["checkpoint"] is None, "rank 0 alone tells where it is"


def test_what_ray_never_heard_of_is_replaced_and_what_it_knows_is_not(ray: FakeRay) -> None:
    with alone() as rows:
        train(rows, [draw(1, 9, False)])
        rows.save(f"{ray.folder}/run/step-1", {"step": "of a life before"})
        tbd.ray_checkpoint(rows, "step-1", {"step": 1})
        with pytest.raises(tb.InvalidError, match="give each a name of its own"):
            tbd.ray_checkpoint(rows, "step-1", {"step": 1})
        tbd.ray_checkpoint(rows, "step-2", {"step": 2})
    with alone() as rows:
        assert tbd.ray_load(rows) == {"step": 2}
    with alone() as rows:
        assert rows.load(f"{ray.folder}/run/step-1") == {"step": 1}


def test_names_and_storages_that_lead_elsewhere_are_refused(ray: FakeRay) -> None:
    with alone() as rows:
        for name in ("", "a/b", ".hidden"):
            with pytest.raises(tb.InvalidError, match="use letters, digits and '-'"):
                tbd.ray_checkpoint(rows, name)
        ray.kind = "gcs"
        with pytest.raises(tb.UnsupportedError, match="use a storage_path in a folder"):
            tbd.ray_checkpoint(rows, "step-1")
        ray.kind = "local"
        tbd.ray_checkpoint(rows, "step-1")
        del ray.train.CheckpointUploadMode
        with pytest.raises(tb.UnsupportedError, match=r"install ray>=2\.52"):
            tbd.ray_checkpoint(rows, "step-2")
        rows.save(f"{ray.folder}/run/step-2")
