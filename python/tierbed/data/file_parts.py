"""Files of columns, on disks and in stores of objects, read by ``pyarrow.dataset``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from tierbed._util.arrow import arrow_modules
from tierbed.data.arrow_parts import READ_AHEAD, Parts, check_columns
from tierbed.data.dataset import expand_paths
from tierbed.errors import InvalidError

__all__ = ["FileParts", "open_files", "store_of"]

_FORMATS = {
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "ipc", ".ipc": "ipc", ".feather": "ipc",
    ".csv": "csv", ".json": "json", ".jsonl": "json", ".orc": "orc",
}  # fmt: skip


_IPC = ("arrow", "feather", "ipc")

# pyarrow reads up to 32 blocks of text ahead of who takes its batches. A line is shorter than one.
_CSV_BLOCK_BYTES = 1 << 18
_PYARROW_BLOCK_BYTES = 1 << 20


def _format_of(path: str) -> str:
    plain = path.lower()
    for packed in (".gz", ".zst", ".bz2", ".lz4"):
        plain = plain.removesuffix(packed)
    return next((word for ending, word in _FORMATS.items() if plain.endswith(ending)), "parquet")


_QUERY = re.compile(r"\?\w+=.*$")


def open_files(source: Any, filesystem: Any, file_format: str | None) -> Any:
    """Opens paths, patterns or addresses as a dataset of pyarrow.

    Args:
        source: A path, a pattern, an address such as ``s3://bucket/folder``, or a list of them.
        filesystem: Where paths lie, of pyarrow or fsspec; None is this machine.
        file_format: By default told by the name of the first file.

    Raises:
        InvalidError: No file, or a file of another format.
    """
    arrow, _, _ = arrow_modules()
    import pyarrow.dataset
    import pyarrow.fs

    given: list[Any] = [source] if isinstance(source, str | Path) else list(source)
    if not given:
        raise InvalidError("no data file given; name at least one file or pattern")
    if filesystem is None and all("://" in str(path) for path in given):
        filesystem, given = store_of([str(path) for path in given])
    if filesystem is None:
        paths = [str(path) for path in expand_paths(given)]
    else:
        if not isinstance(filesystem, pyarrow.fs.FileSystem):
            filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem))
        paths = [found for path in given for found in _matches(filesystem, str(path))]
    word = file_format or _format_of(paths[0])
    try:
        return pyarrow.dataset.dataset(
            paths[0] if len(paths) == 1 else paths,
            filesystem=filesystem,
            format=word,
            partitioning="hive",
        )
    except arrow.ArrowInvalid as error:
        kind = {"parquet": "a Parquet", "ipc": "an Arrow"}.get(word, f"a {word}")
        raise InvalidError(f"{paths[0]} is not {kind} file: {error}") from error


def store_of(addresses: list[str]) -> tuple[Any, list[Any]]:
    """Returns the store of objects of the first address, and the paths of all.

    Args:
        addresses: Such as ``s3://bucket/folder``, of one store.
    """
    import pyarrow.fs

    query = _QUERY.search(addresses[0])
    plain = [_QUERY.sub("", address) for address in addresses]
    begin = _begin_of(plain[0]) + (query.group() if query else "")
    filesystem, _ = pyarrow.fs.FileSystem.from_uri(begin)
    return filesystem, [address.split("://", 1)[1] for address in plain]


def _has_magic(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _begin_of(path: str) -> str:
    """Returns the folders of a pattern in front of its first sign."""
    folders = path.split("/")
    kept = next((at for at, folder in enumerate(folders) if _has_magic(folder)), len(folders))
    return "/".join(folders[:kept])


def _matches(filesystem: Any, path: str) -> list[str]:
    import pyarrow.fs

    if not _has_magic(path):
        return [path]
    selector = pyarrow.fs.FileSelector(_begin_of(path), recursive=True)
    depth = path.count("/")
    found = [
        info.path
        for info in filesystem.get_file_info(selector)
        if info.is_file and info.path.count("/") == depth and fnmatchcase(info.path, path)
    ]
    if not found:
        raise InvalidError(f"no file matches the pattern {path}", {"path": path})
    return sorted(found)


class FileParts(Parts):
    """Files: row groups of Parquet, whole files of Arrow, a stream of others."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.schema = dataset.schema
        self.fragments: list[Any] = []
        self.part_rows = None
        self._kind = dataset.format.default_extname
        files = list(dataset.get_fragments())
        if not files:
            raise InvalidError("no data file given; name at least one file or pattern")
        if self._kind == "parquet":
            for file in files:
                self.fragments += file.split_by_row_group()
            self.part_rows = [one.metadata.row_group(one.row_groups[0].id).num_rows
                              for one in self.fragments]  # fmt: skip
        else:
            self.fragments = files
            if self._kind in _IPC:
                self.part_rows = [one.count_rows() for one in files]

    def check(self, columns: Sequence[str]) -> None:
        """Refuses columns that a file has not; pyarrow would read them as nulls.

        Raises:
            InvalidError: A column is missing.
        """
        super().check(columns)
        import pyarrow.dataset

        for path, same in groupby(self.fragments, key=lambda fragment: fragment.path):
            fragment = next(same)
            keys = pyarrow.dataset.get_partition_keys(fragment.partition_expression)
            check_columns(path, [*fragment.physical_schema.names, *keys], columns)

    def read(self, parts: Sequence[int], columns: list[str], step: int) -> Iterator[Any]:
        """Yields record batches; the coming row group is read meanwhile.

        Args:
            parts: Numbers of parts.
            columns: The columns that are read.
            step: About how many rows a record batch has at most.
        """
        if self._kind == "parquet":
            yield from self._row_groups(parts, columns, step)
            return
        files = self.fragments if self.part_rows is None else [self.fragments[at] for at in parts]
        for file in files:
            if self._kind in ("csv", *_IPC):
                yield from self._file(file, columns)
            else:
                options = {"schema": self.schema, "batch_size": step, **READ_AHEAD}
                yield from file.to_batches(columns=columns, **options)

    def _row_groups(self, parts: Sequence[int], columns: list[str], step: int) -> Iterator[Any]:
        options = {"schema": self.schema, "batch_size": step, **READ_AHEAD}

        def begun(at: int) -> Iterator[Any]:
            batches = self.fragments[at].to_batches(columns=columns, **options)
            return chain(list(islice(batches, 1)), batches)

        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(begun, parts[0]) if parts else None
            for number in range(1, len(parts) + 1):
                assert coming is not None
                batches = coming.result()
                if number < len(parts):
                    coming = ahead.submit(begun, parts[number])
                yield from batches

    def _file(self, fragment: Any, columns: list[str]) -> Iterator[Any]:
        """Yields the record batches of a file one by one; a scan would read on without bounds."""
        arrow, _, _ = arrow_modules()
        import pyarrow.csv
        import pyarrow.dataset

        keys = pyarrow.dataset.get_partition_keys(fragment.partition_expression)
        held = [name for name in columns if name not in keys]
        if self._kind == "csv":
            batches = self._lines(fragment, held)
        else:
            batches = _record_batches(fragment, held)
        for batch in batches:
            found = {
                name: arrow.repeat(
                    arrow.scalar(keys[name], self.schema.field(name).type), len(batch)
                )
                if name in keys
                else batch.column(name).cast(self.schema.field(name).type)
                for name in columns
            }
            yield arrow.RecordBatch.from_pydict(found)

    def _lines(self, fragment: Any, columns: list[str]) -> Iterator[Any]:
        import pyarrow.csv

        form = fragment.format
        convert = form.default_fragment_scan_options.convert_options
        convert.include_columns = columns
        convert.column_types = {name: self.schema.field(name).type for name in columns}
        read = form.default_fragment_scan_options.read_options
        read.use_threads = False
        if read.block_size == _PYARROW_BLOCK_BYTES:  # else the dataset was given its own
            read.block_size = _CSV_BLOCK_BYTES
        with fragment.filesystem.open_input_stream(fragment.path) as file:
            yield from pyarrow.csv.open_csv(file, read, form.parse_options, convert)

    def identity(self) -> dict[str, Any]:
        """Returns names and sizes of the files."""
        paths = list(dict.fromkeys(fragment.path for fragment in self.fragments))
        infos = self.dataset.filesystem.get_file_info(paths)
        return {"files": [[info.base_name, info.size] for info in infos]}

    def count(self) -> int | None:
        """Returns the number of rows."""
        return int(self.dataset.count_rows()) if self.part_rows is None else sum(self.part_rows)


def _record_batches(fragment: Any, columns: list[str]) -> Iterator[Any]:
    """Yields the record batches of a file of Arrow."""
    arrow, _, _ = arrow_modules()
    names = fragment.physical_schema.names
    kept = arrow.ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
    with (
        fragment.filesystem.open_input_file(fragment.path) as file,
        arrow.ipc.open_file(file, options=kept) as reader,
    ):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
