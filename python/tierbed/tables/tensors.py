"""Files of named tensors: npy, safetensors and torch's, read and written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tierbed.errors import CorruptionError, InvalidError
from tierbed.tables.found import FoundTable, TableFile, tables_of
from tierbed.tables.rows import Rows, of_array, of_file, of_mapped, of_tensor
from tierbed.tables.state import STATE_NAMES
from tierbed.tables.writing import Report, bytes_of

__all__ = [
    "named_tensors",
    "npy_rows",
    "read_npy",
    "read_safetensors",
    "read_torch",
    "write_npy",
    "write_safetensors",
    "write_torch",
]

# Kinds of numbers of safetensors that torch has, too.
_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# As numpy spells them.
_NUMPY = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "<i1",
    torch.uint8: "<u1",
    torch.bool: "|b1",
}


def named_tensors(table: FoundTable) -> dict[str, Rows]:
    """Returns what is written of a table, by name; what takes 8 bytes a number comes first."""
    base = table.base
    found = {f"{base}.ids": table.ids, f"{base}.shared": table.shared}
    if table.steps is not None and table.state:
        found[f"{base}.step"] = of_tensor(torch.tensor(table.steps, device="cpu"))
    found |= {f"{base}.{part}": rows for part, rows in table.state.items()}
    found |= {f"{base}.shared.{part}": rows for part, rows in table.shared_state.items()}
    found[f"{base}.weight"] = table.weight
    there = {name: rows for name, rows in found.items() if rows is not None}
    return dict(sorted(there.items(), key=lambda item: item[1].dtype != torch.int64))


# ---------------------------------------------------------------- npy


def read_npy(path: Path) -> TableFile:
    """Opens ``T.npy``, with ids and state in ``T.ids.npy`` and ``T.sum.npy``, where they are."""
    start = path.name.removesuffix(path.suffix)
    tensors = {f"{start}.weight": npy_rows(path)}
    if len(tensors[f"{start}.weight"].shape) != 2:
        shape = list(tensors[f"{start}.weight"].shape)
        raise InvalidError(f"{path} holds shape {shape}, not [N, D]", {"path": str(path)})
    for leaf in ("ids", "shared", *STATE_NAMES, *(f"shared.{name}" for name in STATE_NAMES)):
        beside = path.with_name(f"{start}.{leaf}.npy")
        if beside.is_file():
            tensors[f"{start}.{leaf}"] = npy_rows(beside)
    return TableFile(path, tables_of(tensors), tensors)


def npy_rows(path: Path) -> Rows:
    """Returns the array of an npy file as rows."""
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        shape = mapped.shape or (1,)
        if mapped.flags.c_contiguous:
            # Read, not through the map: its pages would count as memory of the process.
            return of_file(path, shape, mapped.dtype.str, mapped.offset)
        return of_array(mapped.reshape(shape))
    except (ValueError, EOFError, TypeError) as error:
        raise CorruptionError(f"{path} is not a whole npy file: {error}") from error


def write_npy(tables: list[FoundTable], path: Path, report: Report) -> None:
    """Writes the tensors of one table into files beside each other."""
    for name, rows in named_tensors(tables[0]).items():
        leaf = name.removeprefix(f"{tables[0].base}.").removesuffix("weight")
        target = path.with_name(f"{path.stem}.{leaf}.npy") if leaf else path
        kind = "<i8" if rows.dtype == torch.int64 else "<f4"
        header = {"descr": kind, "fortran_order": False, "shape": rows.shape}
        with target.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
            for chunk in report.chunks(rows):
                file.write(bytes_of(chunk))


# ---------------------------------------------------------------- safetensors


def read_safetensors(path: Path) -> TableFile:
    """Opens a safetensors file, or those that an index names."""
    if path.suffix != ".json":
        tensors = _safetensors(path)
        return TableFile(path, tables_of(tensors), tensors)
    try:
        shards = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"{path} is no index of safetensors: {error!r}") from error
    opened = {shard: _safetensors(path.with_name(shard)) for shard in sorted(set(shards.values()))}
    tensors = {}
    for name, shard in shards.items():
        if name not in opened[shard]:
            raise CorruptionError(
                f"{path} says that {name} is in {shard}, which lacks it; bring all its files again "
                "from where they were written",
                {"path": str(path)},
            )
        tensors[name] = opened[shard][name]
    return TableFile(path, tables_of(tensors), tensors)


def _safetensors(path: Path) -> dict[str, Rows]:
    try:
        file: Any = safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise CorruptionError(
            f"{path} is missing; bring all its files again from where they were written",
            {"path": str(path)},
        ) from None
    except SafetensorError as error:
        raise CorruptionError(f"{path} is not a whole safetensors file: {error}") from error
    starts = _data_starts(path)
    found = {}
    for name in file.keys():
        part = file.get_slice(name)
        kind = _KINDS.get(part.get_dtype())
        if kind is not None:
            shape = tuple(part.get_shape()) or (1,)
            found[name] = _stored(path, shape, kind, starts[name])
    return found


def _data_starts(path: Path) -> dict[str, int]:
    """Returns where the data of each tensor begins in a file that was checked."""
    with path.open("rb") as file:
        head_bytes = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(head_bytes))
    return {
        name: 8 + head_bytes + told["data_offsets"][0]
        for name, told in head.items()
        if "data_offsets" in told
    }


def _stored(path: Path, shape: tuple[int, ...], kind: torch.dtype, offset: int) -> Rows:
    """Returns numbers of any kind that lie in a file; those that numpy lacks come as bits."""
    if kind != torch.bfloat16:
        return of_file(path, shape, _NUMPY[kind], offset)
    bits = of_file(path, shape, "<i2", offset)
    return Rows(shape, kind, lambda first, count: bits.read(first, count).view(kind))


def write_safetensors(tables: list[FoundTable], path: Path, report: Report) -> None:
    """Writes all tensors of ``tables`` into one file."""
    tensors = {name: rows for table in tables for name, rows in named_tensors(table).items()}
    # What takes 8 bytes comes first: the format wants numbers aligned.
    ordered = sorted(tensors.items(), key=lambda item: item[1].dtype != torch.int64)
    header, end = {}, 0
    for name, rows in ordered:
        is_wide = rows.dtype == torch.int64
        size = rows.count * rows.width * (8 if is_wide else 4)
        offsets = [end, end + size]
        kind = "I64" if is_wide else "F32"
        header[name] = {"dtype": kind, "shape": list(rows.shape), "data_offsets": offsets}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, rows in ordered:
            for chunk in report.chunks(rows):
                file.write(bytes_of(chunk))


# ---------------------------------------------------------------- torch


def read_torch(path: Path) -> TableFile:
    """Opens what ``torch.save`` wrote: a tensor, or tensors in dictionaries and lists."""
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptionError(f"{path} is not a checkpoint of tensors: {reason}") from error
    named = {path.stem: loaded} if isinstance(loaded, Tensor) else dict(_tensors_in(loaded))
    tensors = {name: of_mapped(tensor, path) for name, tensor in named.items()}
    if isinstance(loaded, Tensor) and loaded.dim() != 2:
        raise InvalidError(
            f"{path} holds shape {list(loaded.shape)}, not [N, D]", {"path": str(path)}
        )
    return TableFile(path, tables_of(tensors), tensors)


def _tensors_in(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in dictionaries and lists, such as ``model.item.weight``."""
    if isinstance(tree, Tensor):
        yield prefix[:-1], tree
    elif isinstance(tree, int) and prefix[:-1].rpartition(".")[2] in STATE_NAMES:
        yield prefix[:-1], torch.tensor(tree, device="cpu")  # SparseAdam counts its steps so.
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _tensors_in(value, f"{prefix}{name}.")
    elif isinstance(tree, (list, tuple)):
        for at, value in enumerate(tree):
            yield from _tensors_in(value, f"{prefix}{at}.")


def write_torch(tables: list[FoundTable], path: Path, report: Report) -> None:
    """Writes a dictionary of all tensors of ``tables``, as ``torch.save`` does."""
    # A tensor is a file of its own, mapped: torch.save then copies it piece by piece.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        saved: dict[str, Tensor] = {}
        for table in tables:
            for name, rows in named_tensors(table).items():
                raw = Path(folder) / str(len(saved))
                with raw.open("wb") as file:
                    for chunk in report.chunks(rows):
                        file.write(bytes_of(chunk))
                size = rows.count * rows.width
                kind = torch.int64 if rows.dtype == torch.int64 else torch.float32
                flat = torch.empty(0, dtype=kind, device="cpu")
                if size:
                    flat = torch.from_file(str(raw), shared=True, size=size, dtype=kind)
                saved[name] = flat.view(rows.shape)
        torch.save(saved, path)
