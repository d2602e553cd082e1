"""Pictures of results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Figure", "save_figure"]

Figure = Callable[[Any], None]


def save_figure(
    path: str | os.PathLike[str], draw: Figure, size: tuple[float, float] = (9, 4.5)
) -> None:
    """Writes a PNG that ``draw`` fills; needs no display.

    Args:
        path: The file.
        draw: Draws onto a matplotlib figure.
        size: Width and height in inches.
    """
    # Matplotlib takes long to load, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MatplotlibFigure

    figure = MatplotlibFigure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(os.fspath(path), dpi=120)
