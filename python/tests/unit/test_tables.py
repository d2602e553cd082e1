"""Do tables come and go whole, in every file format?"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed.train.table_files import export_table, import_table, shape_of

SUFFIXES = [".npy", ".safetensors", ".pt", ".parquet"]
ROWS, DIM = 333, 5


def new_table(store: tb.Store, rows: int = ROWS, dim: int = DIM) -> None:
    config = tb.EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim)
    store.add_table(config, tb.Adagrad(initial_accumulator_value=0.5))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("chunk_rows", [1, 100, 1000])
def test_a_table_goes_out_and_comes_back(
    open_store: Any, tmp_path: Path, suffix: str, chunk_rows: int
) -> None:
    store = open_store("file", seed=1)
    new_table(store)
    store.write_rows("t", 10, torch.randn(20, DIM))
    rows = store.read_rows("t", 0, ROWS)
    file = tmp_path / f"table{suffix}"
    told: list[tuple[int, int]] = []
    assert (
        export_table(store, "t", file, chunk_rows=chunk_rows, progress=lambda *p: told.append(p))
        == ROWS
    )
    assert told[-1] == (ROWS, ROWS)
    assert shape_of(file) == (ROWS, DIM)

    other = open_store("memory", seed=2)
    new_table(other)
    assert import_table(other, "t", file, chunk_rows=chunk_rows) == ROWS
    weights, state = other.read_rows_and_state("t", 0, ROWS)
    assert torch.equal(weights, rows)
    assert bool((state == 0.5).all()), "imported rows start with fresh state"
    assert list(tmp_path.glob(".*")) == [], "no temporary file is left"


def test_the_files_are_what_others_read(open_store: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    store = open_store()
    new_table(store)
    rows = store.read_rows("t", 0, ROWS)
    for suffix in SUFFIXES:
        export_table(store, "t", tmp_path / f"table{suffix}", chunk_rows=100)
    assert np.array_equal(np.load(tmp_path / "table.npy"), rows.numpy())
    assert torch.equal(load_file(tmp_path / "table.safetensors")["t.weight"], rows)
    assert torch.equal(torch.load(tmp_path / "table.pt", weights_only=True)["t.weight"], rows)


def test_one_tensor_of_a_checkpoint_is_chosen_by_key(open_store: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4, DIM), "b": torch.zeros(3, DIM)}, tmp_path / "model.pt")
    store = open_store()
    new_table(store)
    with pytest.raises(tb.InvalidError, match=r"holds a, b; name one of them with key=.*--key"):
        import_table(store, "t", tmp_path / "model.pt")
    with pytest.raises(tb.InvalidError, match=r"holds a, b; none of them is 'c'"):
        import_table(store, "t", tmp_path / "model.pt", key="c")
    assert import_table(store, "t", tmp_path / "model.pt", key="a") == 4
    assert torch.equal(store.read_rows("t", 0, 4), torch.ones(4, DIM))


@pytest.mark.parametrize("suffix", [".pt", ".ckpt"])
def test_a_tensor_in_nested_dictionaries_is_named_with_dots(
    open_store: Any, tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"model{suffix}"
    state = {"item.weight": torch.ones(4, DIM), "user.weight": torch.zeros(3, DIM)}
    torch.save({"state_dict": state, "epoch": 3, "rest": [torch.zeros(1)]}, file)
    store = open_store()
    new_table(store)
    with pytest.raises(tb.InvalidError, match=r"state_dict.item.weight, state_dict.user.weight"):
        import_table(store, "t", file)
    assert import_table(store, "t", file, key="state_dict.item.weight") == 4
    torch.save({"epoch": 3}, file)
    with pytest.raises(tb.InvalidError, match="holds no tensor"):
        import_table(store, "t", file)
    with pytest.raises(tb.InvalidError, match=r"is a folder.*dcp_to_torch"):
        import_table(store, "t", tmp_path)


def test_other_shapes_and_formats_are_refused(open_store: Any, tmp_path: Path) -> None:
    store = open_store()
    new_table(store)
    np.save(tmp_path / "wide.npy", np.zeros((4, DIM + 1), dtype=np.float32))
    np.save(tmp_path / "long.npy", np.zeros((ROWS + 1, DIM), dtype=np.float32))
    np.save(tmp_path / "flat.npy", np.zeros(4, dtype=np.float32))
    for name in ("wide", "long", "flat"):
        with pytest.raises(tb.InvalidError, match=name):
            import_table(store, "t", tmp_path / f"{name}.npy")
    with pytest.raises(tb.InvalidError, match="format"):
        export_table(store, "t", tmp_path / "table.xls")
    with pytest.raises(tb.InvalidError, match="no such file"):
        import_table(store, "t", tmp_path / "nothing.npy")


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt"])
def test_truncated_files_are_found(open_store: Any, tmp_path: Path, suffix: str) -> None:
    store = open_store()
    new_table(store)
    file = tmp_path / f"table{suffix}"
    export_table(store, "t", file)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(tb.CorruptionError):
        import_table(store, "t", file)
