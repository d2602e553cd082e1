"""Archives of fixtures: one folder in one small, reproducible file."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

from .kit import Facts

REPOSITORY = Path(__file__).resolve().parents[3]
FORMATS = REPOSITORY / "testdata" / "formats"


def pack(folder: Path, path: Path) -> None:
    """Writes all files of ``folder`` into a tar file, the same bytes each time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in sorted(folder.rglob("*")):
            member = tarfile.TarInfo(str(file.relative_to(folder)))
            if file.is_dir():
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
            else:
                member.size = file.stat().st_size
                with file.open("rb") as content:
                    tar.addfile(member, content)
    path.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))


def unpack(path: Path, folder: Path) -> None:
    with tarfile.open(path, "r:gz") as tar:
        tar.extractall(folder, filter="data")


def write_facts(path: Path, facts: Facts) -> None:
    path.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


def read_facts(path: Path) -> Facts:
    facts: Facts = json.loads(path.read_text())
    return facts
