"""Tables in and out of a store, in the formats of torch and of other tools.

:func:`find_tables` tells what a file or folder holds, :func:`import_tables` reads it into a store,
and :func:`export_tables` writes it. Rows move some at a time, so that a table larger than memory
moves in bounded memory; ids and optimizer state go along.
"""

from __future__ import annotations

from tierbed.tables.exporting import ExportedTable, export_tables
from tierbed.tables.found import FoundTable, TableFile
from tierbed.tables.importing import ImportedTable, import_tables
from tierbed.tables.rows import Rows
from tierbed.tables.sources import find_tables

__all__ = [
    "ExportedTable",
    "FoundTable",
    "ImportedTable",
    "Rows",
    "TableFile",
    "export_tables",
    "find_tables",
    "import_tables",
]
