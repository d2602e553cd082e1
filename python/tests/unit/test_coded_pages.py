"""Snapshots whose pages hold coded rows: smaller, and as near to the rows as a codec promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.codec import Codec
from tierbed.config.words import PageCodec
from tierbed.placement import LogOptions, QueryLog, import_tables, place, rows_per_page_of

ROWS = {"item": 3000, "user": 400}
DIM = 32
#: Of the bytes of f32 pages, and of a row's length how far the row may be off.
PROMISES: dict[PageCodec, tuple[float, float]] = {
    "f16": (0.55, 0.001),
    "bf16": (0.55, 0.004),
    "int8": (0.35, 0.012),
    "int4": (0.22, 0.25),
    "gauss4": (0.22, 0.25),
}


def tables() -> dict[str, torch.Tensor]:
    """Rows from a millionth to thousands: a fixed range would lose some of them."""
    generator = torch.Generator().manual_seed(3)
    sizes = 10.0 ** (torch.arange(max(ROWS.values())) % 10 - 6)
    return {
        name: torch.randn(count, DIM, generator=generator) * sizes[:count, None]
        for name, count in ROWS.items()
    }


def off(found: torch.Tensor, rows: torch.Tensor) -> float:
    """The largest distance of a row, next to its length."""
    return float(((found - rows).norm(dim=1) / rows.norm(dim=1)).max())


def bags(name: str, count: int) -> tb.KeyedJaggedTensor:
    ones = torch.ones(count, dtype=torch.int64)
    return tb.KeyedJaggedTensor([name], torch.arange(count), lengths=ones)


def rows_of(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    with tb.Snapshot.open(path, dram_budget="4MiB", **options) as snapshot:
        snapshot.verify()
        twice = [
            {name: snapshot.lookup(bags(name, count))[name] for name, count in ROWS.items()}
            for _ in range(2)
        ]
    assert all(torch.equal(twice[0][name], twice[1][name]) for name in ROWS), "cached as read"
    return twice[0]


@pytest.mark.parametrize("codec", PROMISES)
def test_a_codec_keeps_what_it_promises_in_fewer_bytes(codec: PageCodec, tmp_path: Path) -> None:
    share, error = PROMISES[codec]
    given = tables()
    plain = import_tables(given, tmp_path / "plain")
    report = import_tables(given, tmp_path / codec, codec=codec)
    assert report.row_count == plain.row_count
    assert report.pages_bytes <= share * plain.pages_bytes
    for backend in ("direct", "mmap", "memory"):
        found = rows_of(tmp_path / codec, backend=backend)
        for name, rows in given.items():
            kept = Codec(codec, DIM)
            assert torch.equal(found[name], kept.decode(kept.encode(rows)))
            if codec == "f16":
                continue
            assert off(found[name], rows) <= error


def test_each_table_has_its_codec_and_a_tier_its_own(tmp_path: Path) -> None:
    given = tables()
    import_tables(given, tmp_path / "out", codec={"user": "int4"})
    found = rows_of(tmp_path / "out")
    assert torch.equal(found["item"], given["item"])
    assert torch.equal(
        found["user"], (kept := Codec("int4", DIM)).decode(kept.encode(given["user"]))
    )
    with tb.Snapshot.open(tmp_path / "out", cache=["int8:lru"], dram_budget="8MiB") as snapshot:
        for _ in range(2):
            cached = snapshot.lookup(bags("item", ROWS["item"]))["item"]
        assert 0 < off(cached, given["item"]) <= PROMISES["int8"][1]


def test_a_placement_for_a_codec_has_more_rows_a_page(tmp_path: Path) -> None:
    assert [rows_per_page_of(64, codec) for codec in ("f32", "f16", "int8", "int4")] == [
        15,
        30,
        56,
        101,
    ]
    with pytest.raises(tb.InvalidError, match="codec must be one of"):
        rows_per_page_of(64, "evstore8")  # type: ignore[arg-type]
    text = tmp_path / "log.txt"
    text.write_text("".join(f"{at} {(at + 1) % 3000} {at * 7 % 3000}\n" for at in range(3000)))
    log = QueryLog.read(text, options=LogOptions(row_count=3000))
    found = {}
    codecs: tuple[PageCodec, ...] = ("f32", "int8")
    for codec in codecs:
        per_page = rows_per_page_of(DIM, codec)
        placed = place(log, rows_per_page=per_page, method="maxembed", ratio=0.1)
        placed.write(tmp_path / f"{codec}.tbp")
        found[codec] = import_tables(
            {"item": tables()["item"]},
            tmp_path / codec,
            placement=tmp_path / f"{codec}.tbp",
            codec=codec,
        )
    assert 3 * found["int8"].page_count < found["f32"].page_count
    with pytest.raises(tb.InvalidError, match="more rows on a page than a page holds"):
        import_tables({"item": tables()["item"]}, tmp_path / "x", placement=tmp_path / "int8.tbp")


def train(store: tb.Store, first: int, last: int) -> None:
    configs = [
        tb.EmbeddingBagConfig(name="item", num_embeddings=3000, embedding_dim=DIM),
        tb.EmbeddingBagConfig(name="open", num_embeddings=None, embedding_dim=8),
    ]
    emb = tb.EmbeddingBagCollection(configs, store=store, optimizer=tb.Adagrad(lr=0.1))
    for step in range(first, last):
        ids = torch.randint(0, 3000, (80,), generator=torch.Generator().manual_seed(step))
        lengths = torch.full((16,), 5)
        (
            emb(tb.KeyedJaggedTensor(["item", "open"], ids, lengths=lengths)).values() ** 2
        ).sum().backward()


def test_a_store_publishes_coded_and_its_deltas_stay_so(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="4MiB") as store:
        train(store, 0, 20)
        plain = store.publish(tmp_path / "plain")
        base = store.publish(tmp_path / "base", codec="int8")
        assert base.pages_bytes < plain.pages_bytes
        train(store, 20, 24)
        full = store.publish(tmp_path / "full", codec="int8")
        delta = store.publish(tmp_path / "delta", base=tmp_path / "base")
        assert delta.row_count < full.row_count
        assert delta.pages_bytes < full.pages_bytes
        wanted = store.read_rows("item", 0, 3000)
        store.checkpoint("end")
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "next")
    answers = []
    for name in ("full", "next"):
        with tb.Snapshot.open(tmp_path / name) as snapshot:
            snapshot.verify()
            answers.append(snapshot.lookup(bags("item", 3000))["item"])
            answers.append(snapshot.lookup(bags("open", 3000))["open"])
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])
    steps = (wanted.amax(1) - wanted.amin(1)) / 255
    assert ((answers[0] - wanted).abs().amax(1) <= 0.6 * steps + 0.005 * wanted.abs().amax(1)).all()


def test_the_command_line_publishes_coded(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="4MiB") as store:
        train(store, 0, 5)
        store.checkpoint("end")
        plain = store.publish(tmp_path / "plain")
    names = {
        "--store": tmp_path / "store",
        "--out": tmp_path / "out",
        "--codec": "int4",
        "--dram-budget": "4MiB",
        "--json": tmp_path / "report.json",
    }
    assert main(["publish", *(str(word) for pair in names.items() for word in pair)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["pages_bytes"] < plain.pages_bytes


def test_a_number_that_a_codec_cannot_keep_is_named(tmp_path: Path) -> None:
    rows = tables()["item"]
    rows[77, 3] = 1e6
    with pytest.raises(tb.InvalidError, match="keep this table as f32") as caught:
        import_tables({"item": rows}, tmp_path / "x", codec="f16")
    assert "row: 77" in str(caught.value)
    import_tables({"item": rows}, tmp_path / "y", codec={"item": "f32"})
    with pytest.raises(tb.InvalidError, match="codec must be one of"):
        import_tables({"item": rows}, tmp_path / "z", codec="evstore8")  # type: ignore[arg-type]
