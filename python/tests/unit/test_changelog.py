"""The notes of changes become the changelog and the notes of a release."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[3]
HEAD = "# Changelog\n\nWhat changed.\n\n"


@pytest.fixture(scope="module")
def changelog() -> ModuleType:
    path = REPOSITORY / "scripts" / "release" / "changelog.py"
    spec = importlib.util.spec_from_file_location("changelog", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "CHANGELOG.md").write_text(HEAD + "## 0.1.0 (2026-01-01)\n\nFirst version.\n")
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("How to write one.\n")
    (tmp_path / "changes" / "b.md").write_text(
        "[fix] Two\nlines.\n[feature] See [x](../docs/x.md).\n"
    )
    (tmp_path / "changes" / "a.md").write_text("[feature] Rows " + "word " * 40 + "end.\n")
    return tmp_path


def test_notes_move_into_a_new_version(changelog: ModuleType, repository: Path) -> None:
    changelog.join(repository, "0.2.0", "2026-02-02")
    written = (repository / "CHANGELOG.md").read_text()
    new, old = written.index("## 0.2.0 (2026-02-02)"), written.index("## 0.1.0")
    assert written[:new] == HEAD
    assert new < old
    assert "**New**\n\n- Rows word" in written
    assert "- See [x](docs/x.md).\n" in written
    assert written.index("**New**") < written.index("**Mended**\n\n- Two lines.\n") < old
    assert max(map(len, written.splitlines())) <= 100
    assert [note.name for note in (repository / "changes").iterdir()] == ["README.md"]
    said = changelog.notes(repository, "0.2.0")
    assert said.startswith("# Tierbed 0.2.0 (2026-02-02)\n\n**New**")
    assert "First version" not in said


def test_an_unreleased_section_keeps_its_text(changelog: ModuleType, repository: Path) -> None:
    path = repository / "CHANGELOG.md"
    path.write_text(HEAD + "## 0.1.0 (unreleased)\n\nFirst version.\n")
    before = changelog.notes(repository, "0.1.0")
    assert "First version." in before
    assert "- Two lines." in before
    changelog.join(repository, "0.1.0", "2026-02-02")
    assert changelog.notes(repository, "0.1.0") == before.replace("unreleased", "2026-02-02")


def test_what_cannot_be_released_is_refused(changelog: ModuleType, repository: Path) -> None:
    with pytest.raises(changelog.ReleaseError, match=r"came after version 0\.1\.0"):
        changelog.notes(repository, "0.1.0")
    with pytest.raises(changelog.ReleaseError, match=r"no section 0\.2\.0"):
        changelog.notes(repository, "0.2.0")
    with pytest.raises(changelog.ReleaseError, match="was released"):
        changelog.join(repository, "0.1.0", "2026-02-02")
    (repository / "changes" / "c.md").write_text("[added] New.\n")
    with pytest.raises(changelog.ReleaseError, match=r"c\.md has the tag \[added\]"):
        changelog.join(repository, "0.2.0", "2026-02-02")
    (repository / "changes" / "c.md").write_text("Without a tag.\n")
    with pytest.raises(changelog.ReleaseError, match="does not begin with a tag"):
        changelog.join(repository, "0.2.0", "2026-02-02")


def test_our_own_notes_can_be_joined(changelog: ModuleType) -> None:
    found = changelog.entries(REPOSITORY / "changes")
    assert all(text.endswith((".", ")", "`")) for texts in found.values() for text in texts)
