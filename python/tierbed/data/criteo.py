"""The Criteo click logs.

One line a sample: label, 13 integers (empty or negative allowed), 26 hexadecimal tokens (empty
allowed), tab-separated. Integers become ``log1p(max(x, 0))``, missing ones 0. Any log in this
layout will do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tierbed.data.dataset import Paths, ProgressCallback
from tierbed.data.logs import LogData
from tierbed.data.vocabulary import Vocabulary

__all__ = ["CriteoData"]


class CriteoData(LogData):
    """Samples of logs in the Criteo layout; see :class:`LogData`.

    Batches have ``dense`` ``[B, 13]`` and one id per sample of each of the 26 features
    ``C1`` to ``C26``.
    """

    def __init__(
        self,
        paths: Paths,
        vocabulary: Vocabulary | str | Path,
        batch_size: int,
        *,
        first: int = 0,
        stop: int | None = None,
        bad_lines: Literal["fail", "skip"] = "fail",
        progress: ProgressCallback | None = None,
    ) -> None:
        super().__init__(
            paths,
            vocabulary,
            batch_size,
            layout="criteo",
            first=first,
            stop=stop,
            bad_lines=bad_lines,
            progress=progress,
        )
