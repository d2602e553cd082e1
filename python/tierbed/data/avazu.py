"""The Avazu click logs.

Comma-separated with the header ``id,click,hour,C1,banner_pos,...``: ``click`` is the label, ``id``
is dropped, ``hour`` (YYMMDDHH) becomes the hour of the day, the others are tokens. There are no
dense features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tierbed.data.dataset import Paths, ProgressCallback
from tierbed.data.logs import LogData
from tierbed.data.vocabulary import Vocabulary

__all__ = ["AvazuData"]


class AvazuData(LogData):
    """Samples of logs in the Avazu layout; see :class:`LogData`.

    Batches have ``dense`` ``[B, 0]`` and one id per sample of ``hour_of_day`` and each other
    column of the header.
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
            layout="avazu",
            first=first,
            stop=stop,
            bad_lines=bad_lines,
            progress=progress,
        )
