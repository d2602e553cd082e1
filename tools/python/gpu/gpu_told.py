"""Results of the GPU benchmarks, told and written as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Told:
    """Results, told as they come: a run that is cut off has told what it measured.

    Args:
        lines: A file for a JSON object per line, or None.
    """

    def __init__(self, lines: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._lines = lines
        if lines is not None:
            lines.write_text("")

    def add(self, *rows: dict[str, Any]) -> None:
        """Prints one line per row, and writes it."""
        self.rows += rows
        for row in rows:
            parts = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            print("  ".join(parts), flush=True)
            if self._lines is not None:
                with self._lines.open("a") as file:
                    file.write(json.dumps(row) + "\n")
