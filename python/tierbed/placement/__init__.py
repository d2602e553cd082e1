"""Placement of rows on pages: query logs, page placements, and files of them.

A :class:`QueryLog` says which rows were asked for together, :func:`place` makes a
:class:`Placement` of it, and a snapshot is published by it.
"""

from typing import TYPE_CHECKING

from tierbed._util.lazy import lazy_names
from tierbed.placement.build import (
    LogOptions,
    MissStream,
    PageReads,
    Placement,
    PlacementInfo,
    PlaceOptions,
    QueryLog,
    place,
    place_each,
    rows_per_page_of,
)
from tierbed.placement.files import PlacementFiles, TableCodecs, import_tables, read_tables
from tierbed.placement.shards import RowShards, ShardOptions, ShardReads, divide_rows

if TYPE_CHECKING:
    from tierbed.placement.drift import Drift, measure_drift
    from tierbed.placement.log_columns import log_of_columns
    from tierbed.placement.log_files import LOG_FORMATS, read_columns, read_log
    from tierbed.placement.ray_cluster import place_on_ray, ray_cluster
    from tierbed.placement.ray_log import RayQueryLog
    from tierbed.placement.table_files import import_files
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "drift": "Drift measure_drift",
            "log_columns": "log_of_columns",
            "log_files": "LOG_FORMATS read_columns read_log",
            "ray_cluster": "place_on_ray ray_cluster",
            "ray_log": "RayQueryLog",
            "table_files": "import_files",
        },
    )

__all__ = [
    "LOG_FORMATS",
    "Drift",
    "LogOptions",
    "MissStream",
    "PageReads",
    "PlaceOptions",
    "Placement",
    "PlacementFiles",
    "PlacementInfo",
    "QueryLog",
    "RayQueryLog",
    "RowShards",
    "ShardOptions",
    "ShardReads",
    "TableCodecs",
    "divide_rows",
    "import_files",
    "import_tables",
    "log_of_columns",
    "measure_drift",
    "place",
    "place_each",
    "place_on_ray",
    "ray_cluster",
    "read_columns",
    "read_log",
    "read_tables",
    "rows_per_page_of",
]
