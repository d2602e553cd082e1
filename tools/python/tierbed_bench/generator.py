"""Generated samples, where there is no log of the wanted size.

A seeded generator with Criteo's shape: 13 integers, 26 features with the published
cardinalities times ``scale``, skewed popularity, exact dependencies between columns, slow drift,
and clicks with a planted signal. Sample ``n`` depends on the seed and ``n`` alone. The native part
belongs to the laboratory: a build from a checkout has it, a wheel refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tierbed import _native
from tierbed.data.batch import Batch, batch_of
from tierbed.data.dataset import Dataset, ProgressCallback
from tierbed.errors import InvalidError, UnsupportedError

__all__ = ["GeneratedData", "scale_for_rows", "write_criteo_tsv"]

DRIFT = 0.02
"""How often a popular token is replaced by another, per million samples."""

_FEATURE_NAMES = [f"C{number}" for number in range(1, 27)]
_PACKING_OF_SUFFIX: dict[str, Literal["gzip", "zstd"]] = {".gz": "gzip", ".zst": "zstd"}


def _native_class() -> type[_native.Generator]:
    found: type[_native.Generator] | None = getattr(_native, "Generator", None)
    if found is None:
        raise UnsupportedError(
            "this build of tierbed makes no samples; read a log of your own, or build from a"
            " checkout with `make setup`"
        )
    return found


def _generator(scale: float, seed: int, drift: float) -> _native.Generator:
    return _native_class()({"seed": seed, "scale": scale, "drift": drift})


def scale_for_rows(row_count: int) -> float:
    """Returns the scale at which the 26 tables have at most ``row_count`` rows together.

    Args:
        row_count: Rows of all tables together.
    """
    return _native_class().scale_for_rows(row_count)


class GeneratedData(Dataset):
    """Generated samples, made when they are asked for.

    Args:
        scale: Share of the published cardinalities, above 0 and at most 1 (33.8 M rows).
        samples: Number of samples.
        batch_size: Samples of a batch, ``B``.
        seed: Another seed, another log.
        first_sample: Number of the first sample; later parts of one log start later.
        drift: Replacements of a popular token per million samples; 0 for a stationary log.
        progress: Called with samples done and samples in all, after every batch.

    Raises:
        InvalidError: A negative number of samples.
    """

    def __init__(
        self,
        scale: float,
        samples: int,
        batch_size: int,
        seed: int,
        first_sample: int = 0,
        *,
        drift: float = DRIFT,
        progress: ProgressCallback | None = None,
    ) -> None:
        if samples < 0:
            raise InvalidError(f"samples must be 0 or above, got {samples}")
        super().__init__(batch_size, first_sample, first_sample + samples)
        self.progress = progress
        self._options = {"scale": scale, "seed": seed, "drift": drift}
        self._generator = _generator(scale, seed, drift)

    @property
    def feature_names(self) -> list[str]:
        """Names of the ``F`` categorical features."""
        return list(_FEATURE_NAMES)

    @property
    def dense_count(self) -> int:
        """Number of dense features, ``N``."""
        return 13

    def table_sizes(self) -> list[tuple[str, int]]:
        """Returns name and ``num_embeddings`` of the table each feature needs."""
        return list(zip(_FEATURE_NAMES, self._generator.row_counts(), strict=True))

    def identity(self) -> dict[str, Any]:
        """Returns what a state must agree with to be resumed."""
        return dict(self._options)

    def batches(self, first: int, stop: int | None, batch_size: int) -> Iterator[Batch]:
        """Yields batches of the samples ``first..stop`` of the source.

        Args:
            first: First sample.
            stop: Sample after the last; None reads to the end.
            batch_size: Samples of a batch.

        Raises:
            InvalidError: No ``stop``.
        """
        if stop is None:
            raise InvalidError("generated samples have no end; say where to stop")
        for start in range(first, stop, batch_size):
            count = min(batch_size, stop - start)
            batch = batch_of(_FEATURE_NAMES, self._generator.fill(start, count))
            if self.progress is not None:
                self.progress(start + count - first, stop - first)
            yield batch


def write_criteo_tsv(
    path: str | Path,
    samples: int,
    *,
    scale: float,
    seed: int,
    first_sample: int = 0,
    drift: float = DRIFT,
    packing: Literal["plain", "gzip", "zstd"] | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Writes generated samples as a log in the Criteo layout.

    The samples are those of :class:`GeneratedData` with the same options; ids become tokens, one
    to one within a feature.

    Args:
        path: The file to write.
        samples: Number of samples.
        scale: As of :class:`GeneratedData`.
        seed: As of :class:`GeneratedData`.
        first_sample: As of :class:`GeneratedData`.
        drift: As of :class:`GeneratedData`.
        packing: By default told by the name: ``.gz``, ``.zst``, else plain.
        progress: Called with samples written and samples in all.

    Raises:
        InvalidError: A negative number of samples.
    """
    if samples < 0 or first_sample < 0:
        raise InvalidError("samples and first_sample must be 0 or above")
    by_name = _PACKING_OF_SUFFIX.get(Path(path).suffix)
    chosen: str = packing or by_name or "plain"
    samples_range = (first_sample, first_sample + samples)
    _generator(scale, seed, drift).write_criteo(str(path), samples_range, chosen, progress)
