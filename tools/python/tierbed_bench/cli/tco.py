"""The command ``tco``: the cost of serving with and without replicas."""

from __future__ import annotations

from typing import Annotated

import typer

from tierbed.cli.options import JsonOut, shows_tables
from tierbed.errors import InvalidError

__all__ = ["register"]


def tco(
    table_gb: Annotated[float, typer.Option("--table-gb", help="Size without replicas.")] = 225.0,
    ratio: Annotated[float, typer.Option("--ratio", help="Replicas per row.")] = 0.8,
    replicated_gb: Annotated[
        float | None,
        typer.Option("--replicated-gb", help="Size with replicas, instead of by the ratio."),
    ] = None,
    speedup: Annotated[
        float, typer.Option("--speedup", help="Queries per second with replicas over without.")
    ] = 1.16,
    server: Annotated[
        float, typer.Option("--server-per-month", help="Price of the server for a month.")
    ] = 1588.0,
    drives: Annotated[
        list[str] | None,
        typer.Option("--drive", help="NAME=price per gigabyte; repeat for several."),
    ] = None,
    months: Annotated[
        float, typer.Option("--months", help="Months over which a drive is paid off.")
    ] = 1.0,
    json_path: JsonOut = None,
) -> None:
    """Compare the cost of serving without and with replicas, at your prices.

    The defaults are those of MaxEmbed's Table 2; it rounds the replicated size to 400 GB.
    """
    from tierbed._util.report import print_table, write_json
    from tierbed_bench.sim.cost import PAPER_DRIVES, Prices, Space, total_cost

    per_gb = dict(PAPER_DRIVES) if not drives else dict(_drive(text) for text in drives)
    space = Space(table_gb=table_gb, ratio=ratio, replicated_gb=replicated_gb)
    prices = Prices(server_per_month=server, drives_per_gb=per_gb, months=months)
    rows = total_cost(space, prices, speedup)
    if shows_tables(json_path):
        sizes = f"{space.table_gb:g} GB alone, {space.with_replicas_gb:g} GB with replicas"
        print_table(f"total cost of a month: {sizes}", rows)
    if json_path is not None:
        sizes_gb = {"table_gb": space.table_gb, "with_replicas_gb": space.with_replicas_gb}
        write_json(json_path, {**sizes_gb, "rows": rows})


def _drive(text: str) -> tuple[str, float]:
    name, _, price = text.partition("=")
    try:
        return name.strip(), float(price)
    except ValueError as error:
        raise InvalidError(
            f"--drive must be a name and a price per gigabyte, such as nvme=0.1, not {text!r}"
        ) from error


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    app.command("tco", short_help="Compare the cost of serving with replicas.")(tco)
