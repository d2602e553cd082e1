"""Options that several verbs share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed.report import write_json

DramBudget = Annotated[
    str, typer.Option("--dram-budget", help="Memory for everything the store keeps: 16MiB, 4GiB.")
]
IoEngine = Annotated[
    str, typer.Option("--io-engine", help="auto, io_uring or pread; auto falls back by itself.")
]
JsonOut = Annotated[
    Path | None, typer.Option("--json", help="Write the result as JSON here; - is the screen.")
]
Threads = Annotated[
    int,
    typer.Option("--threads", min=1, help="Threads of torch; results repeat for equal numbers."),
]
Data = Annotated[
    list[Path] | None,
    typer.Option("--data", help="File of samples, plain or compressed; repeat for several."),
]
DataFormat = Annotated[str, typer.Option("--format", help="criteo, avazu, parquet or synthetic.")]


def finish(result: dict[str, Any], json_path: Path | None, title: str) -> None:
    """Prints a result, and writes it as JSON when asked; JSON on the screen replaces the table."""
    from tierbed.report import print_table

    if json_path is None or str(json_path) != "-":
        rows = [
            {"what": name.replace("_", " "), "value": value}
            for name, value in result.items()
            if not isinstance(value, (dict, list))
        ]
        print_table(title, rows)
    if json_path is not None:
        write_json(json_path, result)


def set_threads(threads: int) -> None:
    """Sets torch's threads."""
    import torch

    torch.set_num_threads(threads)
