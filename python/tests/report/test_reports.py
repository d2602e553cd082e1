"""Do reports show what was counted, on a page that needs nothing else?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from report_kit import ROWS, Reader, batches, store_in, train

import tierbed as tb
from tierbed.cli import main
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.report import Report
from tierbed.report.budgets import read_queries
from tierbed.report.parts import Bar, Column, Figure, Lines, Note, Table, count_text
from tierbed.report.style import DARK, LIGHT

LIVE_PAGE = (
    Path(__file__).resolve().parents[3] / "crates" / "tierbed-serve" / "src" / "admin" / "page.html"
)


def check_page(report: Report) -> str:
    """Checks that the page is whole and needs nothing else; returns its text."""
    page = report.to_html()
    reader = Reader(page)
    assert set(reader.links) <= {"data:,"}
    assert "script" not in reader.names
    assert not re.search(r"https?:|@import|url\(", page)
    fragment = Reader(report._repr_html_())
    assert "body" not in fragment.names, "a notebook has one already"
    return reader.text


def test_a_report_of_a_store_shows_its_stats(tmp_path: Path) -> None:
    data = batches(60)
    with store_in(tmp_path / "store") as (store, emb):
        store.record()
        train(emb, data)
        store.checkpoint("one")
        report, stats = store.report(), store.stats()
    numbers, rows = report.numbers, stats["store"]
    assert numbers["memory"] == stats["budget"]
    ids = 60 * 64
    counts = numbers["counts"]
    assert (counts["steps"], counts["ids"]) == (60, ids)
    read = rows["rows_read"] - rows["rows_absent"]
    assert read > 0, "the budget is tight"
    assert counts["tiers"] == {
        "memory": ids - rows["rows_read"],
        "storage": read,
        "initial values": rows["rows_absent"],
    }
    assert counts["read_bytes"] == rows["io"]["read_bytes"]
    text = check_page(report)
    for shown in ("item", "4,000", "row buffer", "batch scratch", "storage", "sgd"):
        assert shown in text
        assert shown in report.to_text()
    assert f"{100 * counts['tiers']['memory'] / ids:.1f} %" in text


def test_an_estimate_is_of_the_lookups_that_were_recorded(tmp_path: Path) -> None:
    data = batches(120)
    with store_in(tmp_path / "store") as (store, emb):
        train(emb, data[:20])
        assert store.report().numbers["another_budget"] is None
        assert "store.record()" in check_page(store.report())
        before = store.stats()["store"]
        store.record()
        train(emb, data[20:])
        report, stats = store.report(), store.stats()
    found: Any = report.numbers["another_budget"]
    assert found["use_count"] == 100 * 64
    brought = stats["store"]["rows_read"] - before["rows_read"]
    assert found["measured_ratio"] == pytest.approx(1 - brought / 6400)
    by_scale = {one["scale"]: one for one in found["budgets"]}
    assert by_scale[1.0]["row_capacity"] == stats["buffer"]["row_capacity"]
    assert by_scale[1.0]["budget_bytes"] == 224 << 10
    ratios = [one["hit_ratio"] for one in found["budgets"]]
    assert ratios == sorted(ratios)
    # The store keeps rows by use as well; it does not do worse than the least recently used.
    assert by_scale[1.0]["hit_ratio"] == pytest.approx(found["measured_ratio"], abs=0.08)
    # With room for all rows, only first uses miss.
    assert by_scale[8.0]["row_capacity"] > sum(ROWS.values())
    assert by_scale[8.0]["hit_ratio"] == pytest.approx(1 - found["first_use_ratio"])
    assert "Another budget" in check_page(report)


def test_twice_the_budget_brings_what_was_foretold(tmp_path: Path) -> None:
    data = batches(150)
    found = {}
    for budget in ("224KiB", "448KiB"):
        with store_in(tmp_path / budget, budget) as (store, emb):
            store.record()
            train(emb, data)
            found[budget] = store.report().numbers["another_budget"]
    (foretold,) = [one for one in found["224KiB"]["budgets"] if one["scale"] == 2.0]
    assert foretold["budget_bytes"] == 448 << 10
    assert foretold["hit_ratio"] == pytest.approx(found["448KiB"]["measured_ratio"], abs=0.06)
    now = next(one for one in found["224KiB"]["budgets"] if one["scale"] == 1.0)
    assert foretold["hit_ratio"] > now["hit_ratio"] + 0.03


def test_an_empty_lookup_is_recorded(tmp_path: Path) -> None:
    empty = tb.KeyedJaggedTensor(
        list(ROWS), torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64)
    )
    with store_in(tmp_path / "store") as (store, emb):
        store.record()
        emb(empty)
        train(emb, batches(1))
        assert store.report().numbers["another_budget"]["use_count"] == 64


def test_a_plan_is_said_to_need_a_rehearsal(tmp_path: Path) -> None:
    table = tb.EmbeddingBagConfig(name="item", num_embeddings=500, embedding_dim=8)
    data = [(torch.arange(8) + at) % 500 for at in range(20)]
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    ones = torch.ones(8, dtype=torch.int64)
    with tb.Store.open(tmp_path / "store", dram_budget="8MiB") as store:
        emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.1))
        key = lambda ids: tb.KeyedJaggedTensor(["item"], ids, lengths=ones)  # noqa: E731
        for ids in tb.lookahead(loader, emb, key=key):
            emb(key(ids)).values().sum().backward()
        report = store.report()
        assert store.order()["kind"] == "forward"
    assert report.numbers["counts"]["tiers"]["initial values"] == 27
    assert "tierbed plan" in check_page(report)


def test_a_report_of_a_snapshot_shows_its_stats(tmp_path: Path) -> None:
    tables = {name: torch.rand(rows, 16) for name, rows in ROWS.items()}
    tb.placement.import_tables(tables, tmp_path / "snapshot")
    data = batches(200)
    with tb.Snapshot.open(tmp_path / "snapshot", dram_budget="2560KiB", readers=1) as snapshot:
        assert "snapshot.record(" in check_page(snapshot.report())
        snapshot.record(tmp_path / "queries", file_bytes="1KiB")
        for batch in data:
            snapshot.lookup(batch)
        stats, report = snapshot.stats(), snapshot.report()
    assert report.numbers["memory"] == stats["budget"]
    lookups, counts = stats["snapshot"]["lookups"], report.numbers["counts"]
    assert counts["tiers"]["storage"] == lookups["rows_read"] > 0
    assert counts["tiers"]["cache f32, lru"] == stats["snapshot"]["cache_hits"] > 0
    assert sum(counts["tiers"].values()) == lookups["row_count"]
    with tb.Snapshot.open(tmp_path / "snapshot", dram_budget="2560KiB", readers=1) as snapshot:
        report = snapshot.report(queries=tmp_path / "queries")
        log = read_queries(snapshot.tables(), tmp_path / "queries")
    assert log is not None
    first = data[0].values().view(2, -1)[:, 0].tolist()
    assert sorted(log[0]) == [first[0], ROWS["item"] + first[1]]
    found: Any = report.numbers["another_budget"]
    ratios = [one["hit_ratio"] for one in found["budgets"]]
    assert ratios == sorted(ratios)
    assert ratios[3] > 0
    assert "recorded queries replayed" in check_page(report)


def test_queries_of_others_are_refused(tmp_path: Path) -> None:
    tb.placement.import_tables({"item": torch.zeros(100, 8)}, tmp_path / "snapshot")
    (tmp_path / "queries" / "other").mkdir(parents=True)
    with (
        tb.Snapshot.open(tmp_path / "snapshot", dram_budget="4MiB") as snapshot,
        pytest.raises(InvalidError, match="name the folder that was given to record"),
    ):
        snapshot.report(queries=tmp_path / "queries")


def test_a_folder_is_reported_by_what_its_training_told(tmp_path: Path, capsys: Any) -> None:
    with store_in(tmp_path / "run" / "tables", "640KiB") as (store, emb):
        store.record()
        train(emb, batches(10))
        store.checkpoint("one")
        store.publish(tmp_path / "snapshot")
        steps = store.stats()["steps"]
    page = tmp_path / "report.html"
    assert main(["inspect", str(tmp_path / "run"), "--html", str(page)]) == 0
    text = Reader(page.read_text()).text
    assert f"Counted in its last training: {steps} steps" in text
    assert "640 ids looked up" in text
    with tb.Store.open(tmp_path / "run" / "tables", dram_budget="1MiB", read_only=True) as store:
        numbers: Any = store.report().numbers
    assert numbers["memory"]["limit_bytes"] == 640 << 10, "the budget of the training"
    assert numbers["another_budget"]["use_count"] == 640
    assert len(numbers["another_budget"]["budgets"]) == 7
    assert main(["inspect", str(tmp_path / "snapshot"), "--html", str(page)]) == 0
    assert "Tierbed snapshot" in Reader(page.read_text()).text
    queries = ["--html", str(page), "--queries", str(tmp_path)]
    assert main(["inspect", str(tmp_path / "run"), *queries]) == 2
    assert main(["inspect", str(tmp_path / "run"), "--queries", str(tmp_path)]) == 2
    assert "add --html FILE" in capsys.readouterr().err


def test_a_store_that_is_looked_at_records_nothing(tmp_path: Path) -> None:
    with store_in(tmp_path / "store") as (store, _):
        store.checkpoint("one")
    with tb.Store.open(tmp_path / "store", dram_budget="1MiB", read_only=True) as store:
        with pytest.raises(UnsupportedError, match="in the program that trains"):
            store.record()
        assert "No row was looked up yet" in check_page(store.report())


def test_texts_of_others_are_text() -> None:
    evil = '<script>alert("x")</script>&amp;'
    parts = [
        Figure(name=evil, value=evil, note=evil),
        Table(
            title=evil,
            columns=[Column(name=evil), Column(name="share")],
            rows=[[evil, Bar(ratio=2.0, text=evil)]],
            note=evil,
        ),
        Lines(title=evil, points=[(0, 1), (1, 2)], highest=evil, scale=[evil], note=evil),
        Note(title=evil, text=evil, code=evil),
    ]
    report = Report(title=evil, about=evil, parts=parts, numbers={})
    reader = Reader(report.to_html())
    assert "script" not in reader.names
    assert reader.text.count(evil) == 18
    assert "width: 100.00%" in report.to_html()


def test_a_saved_report_is_the_page(tmp_path: Path) -> None:
    report = Report(title="of a run", about="", parts=[], numbers={})
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == report.to_html()
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_colours_are_those_of_the_live_page() -> None:
    rules = [" ".join(line.split()) for line in LIVE_PAGE.read_text().splitlines()]
    for line in (LIGHT + DARK).split("\n"):
        assert " ".join(line.split()) in rules


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (7.25, "7.25"), (99, "99"), (12_345, "12,345"), (12_345_678, "12.3 M")],
)
def test_counts_are_for_people(count: float, text: str) -> None:
    assert count_text(count) == text


def test_a_run_writes_its_report(tmp_path: Path) -> None:
    log = tmp_path / "clicks.tsv"
    lines = [
        "\t".join(map(str, [at % 2, *range(13), *(f"{at * k % 97:x}" for k in range(1, 27))]))
        for at in range(600)
    ]
    log.write_text("\n".join(lines) + "\n")
    page = tmp_path / "report.html"
    run = ["train", "--store", str(tmp_path / "run"), "--data", str(log), "--order", "window"]
    options = ["--dim", "8", "--batch-size", "64", "--dram-budget", "4MiB", "--eval-last", "0"]
    assert main([*run, *options, "--report", str(page)]) == 0
    text = Reader(page.read_text()).text
    assert f"{600 * 26:,} lookups of ids" in text
    assert "C26" in text


def test_several_shards_begin_with_the_first_batch(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="64MiB", shards=2, order="window") as store:
        tables = [tb.EmbeddingBagConfig(100, 8, name) for name in ("user", "item")]
        emb = tb.EmbeddingBagCollection(tables, store=store)
        store.record()
        with pytest.raises(tb.UnsupportedError, match="look up a batch first"):
            store.report()
        ids, lengths = torch.arange(8), torch.ones(8, dtype=torch.int64)
        batch = tb.KeyedJaggedTensor(["user", "item"], ids, lengths=lengths)
        for _ in range(3):
            emb(batch).values().sum().backward()
        numbers = store.report().numbers
        assert numbers["counts"]["ids"] == 24
        assert numbers["counts"]["tiers"] == {"memory": 16, "storage": 0, "initial values": 8}
        assert numbers["another_budget"] is not None
