"""Vocabularies: rows of tokens, in bounded memory.

A vocabulary file is built in one pass over the logs, within a budget, and opened within
another. Row 0 of every table is for missing, rare and unknown tokens; the others are numbered
from 1 by first appearance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tierbed import _native
from tierbed.data.dataset import Paths, ProgressCallback, expand_paths

__all__ = ["FeatureReport", "Vocabulary", "VocabularyReport", "build_vocabulary"]

RESIDENT_BUDGET_BYTES = 256 << 20
BUILD_BUDGET_BYTES = 1 << 30
_CHUNK_SAMPLES = 1 << 14
_NO_BOUND = (1 << 63) - 1


@dataclass(frozen=True)
class FeatureReport:
    """One feature of a finished vocabulary.

    Args:
        name: The feature.
        token_count: Tokens with a row of their own; the table has one row more.
        rare_token_count: Distinct tokens seen fewer than ``min_count`` times.
        missing_count: Samples without a token.
    """

    name: str
    token_count: int
    rare_token_count: int
    missing_count: int


@dataclass(frozen=True)
class VocabularyReport:
    """What building a vocabulary found.

    Args:
        features: One report per feature.
        sample_count: Samples read.
        skipped_line_count: Malformed lines left out.
        run_count: Sorted runs spilled because the budget was full.
        file_bytes: Bytes of the file.
    """

    features: list[FeatureReport]
    sample_count: int
    skipped_line_count: int
    run_count: int
    file_bytes: int


class Vocabulary:
    """A vocabulary file, opened read-only; every checksum is checked.

    Args:
        path: The file.
        resident_budget_bytes: Memory for hash tables. Features that do not fit are searched
            in the mapped file.
    """

    def __init__(
        self, path: str | Path, resident_budget_bytes: int = RESIDENT_BUDGET_BYTES
    ) -> None:
        self.path = Path(path)
        self._budget_bytes = resident_budget_bytes
        self.native = _native.Vocabulary(str(path), resident_budget_bytes)
        self.feature_names = self.native.feature_names
        self.row_counts = self.native.row_counts
        self.sample_count = self.native.sample_count
        self.min_count = self.native.min_count
        self.resident_bytes = self.native.resident_bytes

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[str, int]]:
        # Sent to workers by path.
        return Vocabulary, (str(self.path.absolute()), self._budget_bytes)

    def table_sizes(self) -> list[tuple[str, int]]:
        """Returns name and ``num_embeddings`` of the table each feature needs."""
        return list(zip(self.feature_names, self.row_counts, strict=True))

    def look_up(self, feature: str, tokens: Iterable[str | bytes | None]) -> Tensor:
        """Returns the rows ``[E]`` i64 of tokens of a feature; 0 for missing and unknown ones.

        Args:
            feature: Name of the feature.
            tokens: Tokens ``[E]``; None is a missing one.
        """
        raw = [token.encode() if isinstance(token, str) else token or b"" for token in tokens]
        ids = self.native.look_up(self.feature_names.index(feature), raw)
        return (
            torch.frombuffer(ids, dtype=torch.int64) if ids else torch.empty(0, device="cpu").long()
        )

    def identity(self) -> dict[str, Any]:
        """Returns what tells this vocabulary from another (JSON values)."""
        return {"sample_count": self.sample_count, "row_counts": self.row_counts}


def open_vocabulary(vocabulary: Vocabulary | str | Path) -> Vocabulary:
    """Returns the vocabulary, opened if a path was given."""
    return vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)


def new_builder(
    feature_names: list[str], path: Path, memory_budget_bytes: int, min_count: int
) -> _native.VocabularyBuilder:
    """Starts a vocabulary that spills beside the file it will become."""
    scratch_folder = str(path.absolute().parent)
    return _native.VocabularyBuilder(feature_names, memory_budget_bytes, scratch_folder, min_count)


def finish_builder(
    builder: _native.VocabularyBuilder, path: Path, sample_count: int, skipped_line_count: int
) -> VocabularyReport:
    """Writes the file and returns what was found."""
    report = builder.finish(str(path))
    features = [FeatureReport(**feature) for feature in report["features"]]
    return VocabularyReport(
        features, sample_count, skipped_line_count, report["run_count"], report["file_bytes"]
    )


def build_vocabulary(
    paths: Paths,
    path: str | Path,
    *,
    layout: Literal["criteo", "avazu"] = "criteo",
    min_count: int = 1,
    memory_budget_bytes: int = BUILD_BUDGET_BYTES,
    samples: int | None = None,
    bad_lines: Literal["fail", "skip"] = "fail",
    progress: ProgressCallback | None = None,
) -> VocabularyReport:
    """Builds the vocabulary file ``path`` from logs, in one pass.

    Args:
        paths: The logs, oldest first.
        path: The file to write, atomically; scratch files lie beside it meanwhile.
        layout: Layout of the logs' lines.
        min_count: Tokens seen less often share row 0 with the missing ones.
        memory_budget_bytes: Memory the builder may hold; the result does not depend on it.
        samples: Read only so many; None reads all.
        bad_lines: Stop at a malformed line, or leave it out and count it.
        progress: Called with bytes read and bytes in all.

    Raises:
        InvalidError: A malformed line, with file and number; or a bad argument.
    """
    path = Path(path)
    files = [str(file) for file in expand_paths(paths)]
    reader = _native.CriteoReader(files, {"format": layout, "bad_lines": bad_lines})
    builder = new_builder(reader.feature_names(), path, memory_budget_bytes, min_count)
    left = _NO_BOUND if samples is None else samples
    while left > 0:
        taken = reader.count_tokens(builder, min(left, _CHUNK_SAMPLES))
        if taken == 0:
            break
        left -= taken
        if progress is not None:
            progress(*reader.progress())
    position = reader.position()
    return finish_builder(builder, path, position["sample_count"], position["skipped_line_count"])
