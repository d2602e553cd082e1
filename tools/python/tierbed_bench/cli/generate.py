"""The command ``generate``: samples where there is no log of the wanted size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierbed._util.progress import Progress
from tierbed.cli.options import JsonOut, finish
from tierbed_bench.generator import write_criteo_tsv

__all__ = ["register"]


def generate(
    out: Annotated[Path, typer.Option("--out", help="The file: .tsv, .tsv.gz or .tsv.zst.")],
    samples: Annotated[int, typer.Option("--samples", min=1)] = 100_000,
    scale: Annotated[
        float, typer.Option("--scale", help="Share of Criteo's published cardinalities.")
    ] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Another seed, another log.")] = 0,
    json_path: JsonOut = None,
) -> None:
    """Write generated samples in Criteo's layout."""
    with Progress("generating", samples, "samples") as bar:
        write_criteo_tsv(out, samples, scale=scale, seed=seed, progress=bar.set)
    size = out.stat().st_size
    finish({"samples": samples, "file_bytes": size, "file": str(out)}, json_path, "generated")


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    app.command("generate")(generate)
