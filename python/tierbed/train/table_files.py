"""Import and export of tables as files.

Every format is read and written in chunks of rows, so that a table larger than memory moves in
bounded memory. The format is taken from the file's name: ``.npy``, ``.safetensors``, ``.pt``
(also ``.pth``, ``.bin``, ``.ckpt``), ``.parquet``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tierbed._util.arrow import arrow_modules
from tierbed.errors import CorruptionError, InvalidError
from tierbed.train.store import Store

__all__ = ["FORMATS", "export_table", "import_table", "open_table", "shape_of"]

CHUNK_ROWS = 65536
Progress = Callable[[int, int], None]
Chunks = Iterator[Tensor]
Shape = tuple[int, int]
# Further tensors of a file, by name, in memory.
Beside = dict[str, Tensor]
Opened = tuple[Shape, Chunks]
Reader = Callable[[Path, str | None, int], Opened]
Writer = Callable[[Path, str, Shape, Chunks, Beside], None]


def export_table(
    store: Store,
    table: str,
    path: str | os.PathLike[str],
    *,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress | None = None,
) -> int:
    """Writes all rows of a table to a file, ``[row_count, D]`` f32.

    Of a table of open vocabulary: the rows that ids have, with the ids ``<table>.ids`` ``[N]`` i64
    beside them and ``<table>.shared`` ``[1, D]``, the row of all other ids; in Parquet a column
    ``id``, null for the shared row, which comes last.

    Args:
        store: The training store.
        table: Name of the table; it also names the tensor, ``<table>.weight``.
        path: A new file; its suffix says the format.
        chunk_rows: Rows in memory at a time.
        progress: Called with (rows done, rows in all).

    Returns:
        Rows written, without the shared one.

    Raises:
        InvalidError: An open vocabulary, and a format that holds one tensor.
    """
    target = Path(path)
    _, write = _format(target)
    schema = store.table(table)
    rows, dim = int(schema["row_count"]), int(schema["dim"])
    beside: dict[str, Tensor] = {}
    numbers = None
    if table in store.vocabularies():
        if write is _write_npy:
            raise InvalidError(
                f"table {table!r} has an open vocabulary, whose rows need their ids beside them; "
                "npy holds one tensor, use .safetensors, .pt or .parquet",
                {"table": table, "path": str(target)},
            )
        ids, numbers = store.ids(table)
        beside = {f"{table}.ids": ids, f"{table}.shared": store.read_rows(table, 0, 1)}
        rows = len(numbers)

    def chunks() -> Chunks:
        for first in range(0, rows, chunk_rows):
            count = min(chunk_rows, rows - first)
            if numbers is None:
                yield store.read_rows(table, first, count)
            else:
                yield store.gather_rows(table, numbers[first : first + count].contiguous())
            if progress is not None:
                progress(first + count, rows)

    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        write(temporary, f"{table}.weight", (rows, dim), chunks(), beside)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def import_table(
    store: Store,
    table: str,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    chunk_rows: int = CHUNK_ROWS,
    progress: Progress | None = None,
) -> int:
    """Overwrites the first rows of a table with those of a file; their optimizer state restarts.

    Args:
        store: The training store; the table exists.
        table: Name of the table.
        path: The file, ``[N, D]`` with ``N`` at most the table's rows.
        key: Which tensor or column of a file that holds several; with dots where dictionaries
            are nested.
        chunk_rows: Rows in memory at a time.
        progress: Called with (rows done, rows in all).

    Returns:
        Rows read.

    Raises:
        InvalidError: Another shape, several tensors and no ``key``, or a table of open vocabulary.
    """
    source = Path(path)
    if table in store.vocabularies():
        raise InvalidError(
            f"table {table!r} has an open vocabulary: its rows belong to ids, not to positions of "
            "a file; look the ids up in training mode, then write rows store.translate(table, ids)",
            {"table": table},
        )
    schema = store.table(table)
    (rows, dim), chunks = open_table(source, key, chunk_rows)
    if dim != schema["dim"] or rows > schema["row_count"]:
        raise InvalidError(
            f"{source} holds {rows} rows of {dim} elements; table {table!r} has "
            f"{schema['row_count']} rows of {schema['dim']}",
            {"table": table, "path": str(source)},
        )
    done = 0
    for chunk in chunks:
        store.write_rows(table, done, chunk.to(torch.float32).contiguous())
        done += chunk.shape[0]
        if progress is not None:
            progress(done, rows)
    return done


def open_table(path: Path, key: str | None = None, chunk_rows: int = CHUNK_ROWS) -> Opened:
    """Opens the table in a file: its shape, and its rows in chunks ``[<= chunk_rows, D]``.

    Raises:
        InvalidError: An unknown format, or several tensors and no ``key``.
        CorruptionError: The file is not whole.
    """
    _check_file(path)
    return _format(path)[0](path, key, chunk_rows)


def shape_of(path: Path, key: str | None = None) -> Shape:
    """Returns rows and elements per row of the table in a file."""
    return open_table(path, key)[0]


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise InvalidError(
            f"{path} is a folder, not a file; a distributed checkpoint of torch becomes one with "
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt",
            {"path": str(path)},
        )
    if not path.is_file():
        raise InvalidError(f"no such file: {path}", {"path": str(path)})


def _format(path: Path) -> tuple[Reader, Writer]:
    """Returns what reads and what writes files with this suffix."""
    known = FORMATS.get(path.suffix.lower())
    if known is None:
        raise InvalidError(
            f"cannot tell the format of {path}; use one of {sorted(FORMATS)}", {"path": str(path)}
        )
    return known


def _bytes_of(chunk: Tensor) -> bytes:
    return chunk.contiguous().numpy().astype("<f4", copy=False).tobytes()


# ---------------------------------------------------------------- writers


def _write_npy(path: Path, name: str, shape: Shape, chunks: Chunks, beside: Beside) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
        for chunk in chunks:
            file.write(_bytes_of(chunk))


def _write_safetensors(path: Path, name: str, shape: Shape, chunks: Chunks, beside: Beside) -> None:
    # What takes 8 bytes comes first: the format wants numbers aligned.
    others = sorted(beside.items(), key=lambda item: -item[1].element_size())
    header, end = {}, 0
    for key, tensor in others:
        size = tensor.numel() * tensor.element_size()
        dtype = "I64" if tensor.dtype == torch.int64 else "F32"
        offsets = [end, end + size]
        header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        end += size
    last = end + 4 * shape[0] * shape[1]
    header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, last]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in others:
            file.write(tensor.contiguous().numpy().tobytes())
        for chunk in chunks:
            file.write(_bytes_of(chunk))


def _write_torch(path: Path, name: str, shape: Shape, chunks: Chunks, beside: Beside) -> None:
    # The tensor is a file of its own, mapped: torch.save then copies it piece by piece.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        raw = Path(folder) / "rows"
        with raw.open("wb") as file:
            for chunk in chunks:
                file.write(_bytes_of(chunk))
        count = shape[0] * shape[1]
        mapped = torch.empty(0)
        if count:
            mapped = torch.from_file(str(raw), shared=True, size=count, dtype=torch.float32)
        torch.save({name: mapped.view(shape), **beside}, path)


def _write_parquet(path: Path, name: str, shape: Shape, chunks: Chunks, beside: Beside) -> None:
    arrow, _, parquet = arrow_modules()
    kind = arrow.list_(arrow.float32(), shape[1])
    ids = next((tensor for tensor in beside.values() if tensor.dtype == torch.int64), None)
    schema = arrow.schema([("row" if ids is None else "id", arrow.int64()), ("weight", kind)])
    first = 0

    with parquet.ParquetWriter(path, schema) as writer:

        def write(numbers: Any, chunk: Tensor) -> None:
            values = arrow.array(chunk.contiguous().numpy().reshape(-1))
            rows = arrow.FixedSizeListArray.from_arrays(values, shape[1])
            writer.write_table(arrow.table([numbers, rows], schema=schema))

        for chunk in chunks:
            end = first + chunk.shape[0]
            numbers = np.arange(first, end) if ids is None else ids[first:end].numpy()
            write(arrow.array(numbers), chunk)
            first = end
        if ids is not None:
            shared = next(tensor for tensor in beside.values() if tensor is not ids)
            write(arrow.array([None], arrow.int64()), shared)


# ---------------------------------------------------------------- readers


def _slices(tensor: Any, shape: Shape, chunk_rows: int) -> Chunks:
    for first in range(0, shape[0], chunk_rows):
        part = tensor[first : first + chunk_rows]
        # A copy, in the byte order of this machine.
        yield part if isinstance(part, Tensor) else torch.from_numpy(_native_order(part))


def _native_order(array: Any) -> Any:
    return np.array(array, dtype=array.dtype.newbyteorder("="))


def _shape(shape: Any, path: Path) -> Shape:
    if len(shape) != 2:
        raise InvalidError(f"{path} holds shape {list(shape)}, not [N, D]", {"path": str(path)})
    return int(shape[0]), int(shape[1])


def _pick(names: list[str], key: str | None, path: Path) -> str:
    if key is None and len(names) == 1:
        return names[0]
    if key in names:
        return key
    told = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    if not names:
        told = "no tensor; a table is a tensor [N, D], alone or in dictionaries"
    elif key is None:
        told += "; name one of them with key= (--key on the command line)"
    else:
        told += f"; none of them is {key!r}"
    raise InvalidError(f"{path} holds {told}", {"path": str(path)})


def _read_npy(path: Path, key: str | None, chunk_rows: int) -> Opened:
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise CorruptionError(f"{path} is not a whole npy file: {error}") from error
    shape = _shape(mapped.shape, path)
    return shape, _slices(mapped, shape, chunk_rows)


def _read_safetensors(path: Path, key: str | None, chunk_rows: int) -> Opened:
    def opened() -> Any:
        try:
            return safe_open(str(path), framework="pt")
        except SafetensorError as error:
            raise CorruptionError(f"{path} is not a whole safetensors file: {error}") from error

    with opened() as file:
        name = _pick(list(file.keys()), key, path)
        shape = _shape(file.get_slice(name).get_shape(), path)

    def chunks() -> Chunks:
        with opened() as file:
            yield from _slices(file.get_slice(name), shape, chunk_rows)

    return shape, chunks()


def _read_torch(path: Path, key: str | None, chunk_rows: int) -> Opened:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptionError(f"{path} is not a checkpoint of tensors: {reason}") from error
    if not isinstance(loaded, Tensor):
        tensors = dict(_tensors_in(loaded))
        loaded = tensors[_pick(list(tensors), key, path)]
    shape = _shape(loaded.shape, path)
    return shape, _slices(loaded, shape, chunk_rows)


def _tensors_in(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in nested dictionaries, such as ``model.item.weight``."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            path = f"{prefix}{name}"
            if isinstance(value, Tensor):
                yield path, value
            else:
                yield from _tensors_in(value, f"{path}.")


def _read_parquet(path: Path, key: str | None, chunk_rows: int) -> Opened:
    arrow, _, parquet = arrow_modules()
    file = parquet.ParquetFile(path)
    lists = [f.name for f in file.schema_arrow if arrow.types.is_fixed_size_list(f.type)]
    name = _pick(lists, key, path)
    dim = file.schema_arrow.field(name).type.list_size

    def chunks() -> Chunks:
        for batch in file.iter_batches(batch_size=chunk_rows, columns=[name]):
            flat = batch.column(0).flatten().to_numpy(zero_copy_only=False)
            yield torch.from_numpy(np.array(flat, dtype=np.float32)).view(-1, dim)

    return (file.metadata.num_rows, dim), chunks()


# What reads and writes a file, by its suffix.
FORMATS: dict[str, tuple[Reader, Writer]] = {
    ".npy": (_read_npy, _write_npy),
    ".safetensors": (_read_safetensors, _write_safetensors),
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), (_read_torch, _write_torch)),
    ".parquet": (_read_parquet, _write_parquet),
}
