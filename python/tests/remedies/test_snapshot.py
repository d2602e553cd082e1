"""Remedies of snapshots: opening, damage, deltas, tiers, neighbours and budgets of several."""

# ruff: noqa: SIM117 - what is open stands apart from what is refused.

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.placement import QueryLog, import_tables, place
from tierbed.serve import Limits, ServeOptions, Server

from .kit import bags, collection, flip, opened, refused, snapshot_of, step, trained

ROWS = 500


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def folder(rows: torch.Tensor, tmp_path: Path) -> Path:
    import_tables({"item": rows}, tmp_path / "snapshot")
    return tmp_path / "snapshot"


def answers(snapshot: tb.Snapshot, count: int = ROWS) -> torch.Tensor:
    return snapshot.lookup(bags(*range(count)))["item"]


def check(folder: Path, rows: torch.Tensor, **options: Any) -> None:
    with snapshot_of(folder, **options) as snapshot:
        assert torch.equal(answers(snapshot), rows)


def _whole(folder: Path) -> None:
    """Reads all of a snapshot, so that damage anywhere is met."""
    with snapshot_of(folder) as snapshot:
        snapshot.verify()
        snapshot.attachment("note")
        answers(snapshot)


@pytest.mark.parametrize("way", ["flip", "cut"])
def test_a_damaged_snapshot_is_published_again(tmp_path: Path, way: str) -> None:
    told = set()
    with opened(tmp_path / "store") as store:
        step(collection(store), 0, ROWS)
        wanted = store.read_rows("item", 0, ROWS)
        store.publish(tmp_path / "out", attachments={"note": b"hello" * 100})
        for name in sorted(file.name for file in (tmp_path / "out").iterdir()):
            file = tmp_path / "out" / name
            if way == "flip":
                flip(file)
            else:
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            if name == "LOCK":
                continue
            with pytest.raises(tb.CorruptionError) as caught:
                _whole(tmp_path / "out")
            told.add((name, caught.value.context.get("remedy")))
            shutil.rmtree(tmp_path / "out")
            store.publish(tmp_path / "out", attachments={"note": b"hello" * 100})
            check(tmp_path / "out", wanted)
    assert {remedy for _, remedy in told} == {"publish the snapshot again"}, told


def test_a_page_that_is_damaged_is_met_by_a_lookup(folder: Path, rows: torch.Tensor) -> None:
    with (folder / "rows.pages").open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    with snapshot_of(folder) as snapshot:
        with refused(tb.CorruptionError, "publish the snapshot again"):
            answers(snapshot)
    shutil.rmtree(folder)
    import_tables({"item": rows}, folder)
    check(folder, rows)


def test_a_snapshot_that_was_not_finished_is_published_again(
    folder: Path, rows: torch.Tensor, tmp_path: Path
) -> None:
    (folder / "snapshot.json").unlink()
    with refused(tb.InvalidError, "publish again, into a new or empty folder"):
        snapshot_of(folder)
    import_tables({"item": rows}, tmp_path / "new")
    for file in folder.iterdir():
        file.unlink()
    import_tables({"item": rows}, folder)
    for again in (folder, tmp_path / "new"):
        check(again, rows)


def test_a_snapshot_of_a_later_version_is_published_again(folder: Path, rows: torch.Tensor) -> None:
    manifest = folder / "snapshot.json"
    first, *rest = manifest.read_bytes().split(b"\n")
    words = first.split(b" ")
    words[1] = b"99"
    manifest.write_bytes(b"\n".join([b" ".join(words), *rest]))
    remedy = "publish it again with this version, or read it with that one"
    with refused(tb.InvalidError, remedy):
        snapshot_of(folder)
    shutil.rmtree(folder)
    import_tables({"item": rows}, folder)
    check(folder, rows)


def test_too_small_a_budget_names_the_least(folder: Path, rows: torch.Tensor) -> None:
    for backend in ("direct", "mmap", "memory"):
        with pytest.raises(tb.InvalidError) as caught:
            snapshot_of(folder, dram_budget=1000, backend=backend)
        least = int(re.findall(r"raise dram_budget to at least (\d+) bytes", str(caught.value))[0])
        check(folder, rows, dram_budget=least, backend=backend)


def test_a_closed_snapshot_is_opened_again(folder: Path, rows: torch.Tensor) -> None:
    snapshot = snapshot_of(folder)
    snapshot.close()
    with refused(tb.ClosedError, "open it again"):
        answers(snapshot)
    check(folder, rows)


# ---------------------------------------------------------------- deltas


def test_deltas_are_of_one_store_and_go_to_the_snapshot_they_name(tmp_path: Path) -> None:
    import_tables({"strange": torch.rand(9, 4)}, tmp_path / "strange")
    with opened(tmp_path / "store", order="window") as store:
        emb = collection(store)
        step(emb)
        store.publish(tmp_path / "base")
        step(emb)
        with refused(tb.InvalidError, "publish in full, or name a snapshot of this store"):
            store.publish(tmp_path / "x", base=tmp_path / "strange")
        store.publish(tmp_path / "full")
        store.publish(tmp_path / "delta", base=tmp_path / "base")
        wanted = store.read_rows("item", 0, ROWS)
    with refused(tb.InvalidError, "apply it to that snapshot, and open the result"):
        snapshot_of(tmp_path / "delta")
    with refused(tb.InvalidError, "apply it to the snapshot it names"):
        tb.Snapshot.apply(tmp_path / "full", tmp_path / "delta", tmp_path / "y")
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "next")
    for out in ("full", "next"):
        check(tmp_path / out, wanted)


def test_the_folder_of_deltas_is_made(folder: Path, tmp_path: Path) -> None:
    options = ServeOptions(deltas=tmp_path / "deltas", log_level="off")
    with snapshot_of(folder) as snapshot:
        with refused(tb.InvalidError, "make it, or name the folder that deltas are published into"):
            Server(snapshot, "127.0.0.1:0", options=options)
        (tmp_path / "deltas").mkdir()
        Server(snapshot, "127.0.0.1:0", options=options).stop()


def test_changes_that_are_not_known_are_compared(tmp_path: Path) -> None:
    trained(tmp_path / "store", order="window")
    with opened(tmp_path / "store") as store:
        emb = collection(store)
        step(emb)
        store.publish(tmp_path / "base")
    # Steps after the last checkpoint are lost, and what is known of the snapshot with them.
    with opened(tmp_path / "store") as store:
        emb = collection(store)
        step(emb, first=5)
        remedy = 'publish with changes="auto", which compares all rows'
        with refused(tb.InvalidError, remedy):
            store.publish(tmp_path / "x", base=tmp_path / "base", changes="tracked")
        store.publish(tmp_path / "delta", base=tmp_path / "base", changes="auto")
        assert store.stats()["changes"]["deltas_compared"] == 1
        wanted = store.read_rows("item", 0, ROWS)
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "next")
    check(tmp_path / "next", wanted)


def test_a_delta_keeps_the_codecs_of_its_base(tmp_path: Path) -> None:
    with opened(tmp_path / "store", order="window") as store:
        emb = collection(store)
        step(emb)
        store.publish(tmp_path / "base", codec="f16")
        step(emb)
        with refused(tb.UnsupportedError, "leave the codec out, or publish in full"):
            store.publish(tmp_path / "x", base=tmp_path / "base", codec="f16")
        store.publish(tmp_path / "full", codec="f16")
        store.publish(tmp_path / "delta", base=tmp_path / "base")
        rows = store.read_rows("item", 0, ROWS)
    with snapshot_of(tmp_path / "full") as snapshot:
        wanted = answers(snapshot)
    # Rows never written are exact.
    assert ((wanted == rows) | (wanted == rows.half().float())).all()
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "next")
    check(tmp_path / "next", wanted)


def test_a_delta_has_no_head(tmp_path: Path) -> None:
    remedy = "leave head_rows out, or publish in full"
    with opened(tmp_path / "store", order="window") as store:
        emb = collection(store)
        step(emb)
        store.publish(tmp_path / "base", head_rows=10)
        step(emb)
        with refused(tb.UnsupportedError, remedy):
            store.publish(tmp_path / "x", base=tmp_path / "base", head_rows=10)
        store.publish(tmp_path / "full", head_rows=10)
        store.publish(tmp_path / "delta", base=tmp_path / "base")
        wanted = store.read_rows("item", 0, ROWS)
    check(tmp_path / "full", wanted)
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "next")
    check(tmp_path / "next", wanted)


def test_a_head_is_some_rows_of_a_table_with_its_own_pages(
    rows: torch.Tensor, tmp_path: Path
) -> None:
    for wrong in (-1, "101%", "many"):
        with refused(tb.InvalidError, "give a number from 0 on, or 0% to 100%"):
            import_tables({"item": rows}, tmp_path / f"wrong-{wrong}", head_rows=wrong)
    import_tables({"item": rows}, tmp_path / "right", head_rows="100%")
    check(tmp_path / "right", rows)
    placement = {"item": _placed(tmp_path, ROWS)}
    given: dict[str, dict[str, Any]] = {
        "out of the placement": {"head_rows": {"item": 10}},
        "out of head_rows": {"placement": placement},
    }
    remedy = "leave it out of the placement, or out of head_rows"
    with refused(tb.InvalidError, remedy):
        both = {"head_rows": {"item": 10}, "placement": placement}
        import_tables({"item": rows}, tmp_path / "both", **both)
    for name, options in given.items():
        import_tables({"item": rows}, tmp_path / name, **options)
        check(tmp_path / name, rows)


def test_placed_snapshots_are_published_in_full(tmp_path: Path) -> None:
    placement = _placed(tmp_path, 1000)
    remedy = "publish in full, with the placement"
    with opened(tmp_path / "store", order="window") as store:
        step(collection(store))
        store.publish(tmp_path / "plain")
        with refused(tb.UnsupportedError, remedy):
            store.publish(tmp_path / "a", base=tmp_path / "plain", placement=placement)
        store.publish(tmp_path / "placed", placement=placement)
        with refused(tb.UnsupportedError, remedy):
            store.publish(tmp_path / "b", base=tmp_path / "placed")
        store.publish(tmp_path / "c", placement=placement)
        check(tmp_path / "c", store.read_rows("item", 0, ROWS))


# ---------------------------------------------------------------- placements


def _log(count: int) -> QueryLog:
    values = torch.arange(3 * count) * 7 % count
    return QueryLog.from_batches(count, [(values, torch.arange(0, 3 * count + 1, 3))])


def _placed(folder: Path, count: int, rows_per_page: int = 16) -> Path:
    out = folder / f"placed{count}-{rows_per_page}.tbp"
    place(_log(count), rows_per_page=rows_per_page, method="maxembed", ratio=0.1).write(out)
    return out


def test_a_placement_is_of_the_tables_it_lays_out(tmp_path: Path) -> None:
    tables = {"item": torch.rand(50, 8), "wide": torch.rand(3, 2500)}
    calls = [
        ({"item": _placed(tmp_path, 80)}, "place the log of these tables, in this order"),
        (
            {"item": _placed(tmp_path, 50, 2000)},
            "place again with at most that many rows per page",
        ),
        ({"wide": _placed(tmp_path, 3)}, "leave the table out of the placement"),
    ]
    for at, (wrong, remedy) in enumerate(calls):
        many = {"item": torch.rand(5000, 8)} if "2000" in str(wrong) else tables
        given = {"item": _placed(tmp_path, 5000, 2000)} if "2000" in str(wrong) else wrong
        with refused(tb.InvalidError, remedy) as caught:
            import_tables(many, tmp_path / f"wrong{at}", placement=given)
        size = len(many["item"])
        limit = int(caught.value.context.get("rows_per_page", 16))
        right = {"item": _placed(tmp_path, size, limit)}
        import_tables(many, tmp_path / f"right{at}", placement=right)
        with snapshot_of(tmp_path / f"right{at}") as snapshot:
            assert torch.equal(answers(snapshot, size), many["item"])


# ---------------------------------------------------------------- tiers


def test_tiers_that_need_approximate_answers(folder: Path, rows: torch.Tensor) -> None:
    near = tb.find_neighbours({"item": rows}, {"item": torch.ones(ROWS)})
    beside = "lru,neighbours:second_chance:4"
    with refused(tb.TierbedError, "write the neighbours of the snapshot first"):
        snapshot_of(folder, cache=beside, misses="surrogate")
    with snapshot_of(folder) as snapshot:
        path = near.write(snapshot)
    snapshot_of(folder, cache=beside, misses="surrogate").close()
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        (
            {"refresh": True},
            "let misses be answered by a surrogate or default row",
            {"refresh": True, "misses": "default"},
        ),
        (
            {"cache": beside, "misses": "default"},
            "let misses be answered by a surrogate",
            {"cache": beside, "misses": "surrogate"},
        ),
        (
            {"cache": "neighbours:second_chance:4", "misses": "surrogate"},
            "name a cache tier, and give the snapshot no shared budget",
            {"cache": beside, "misses": "surrogate"},
        ),
        (
            {"cache": "lru", "neighbours": path, "misses": "surrogate"},
            "add neighbours:second_chance:4 to the tiers",
            {"cache": beside, "neighbours": path, "misses": "surrogate"},
        ),
        ({"cache": "least_recent"}, "use one of ", {}),
    ]
    for wrong, remedy, right in cases:
        with refused(tb.InvalidError, remedy) as caught:
            snapshot_of(folder, **wrong)
        if remedy == "use one of ":
            for policy in caught.value.context["remedy"].removeprefix(remedy).split(", "):
                check(folder, rows, cache=policy)
        snapshot_of(folder, **right).close()


def test_a_file_of_neighbours_is_that_of_its_snapshot(
    folder: Path, rows: torch.Tensor, tmp_path: Path
) -> None:
    import_tables({"item": rows[:100]}, tmp_path / "other")

    def written(at: Path, count: int) -> Path:
        near = tb.find_neighbours({"item": rows[:count]}, {"item": torch.ones(count)})
        with snapshot_of(at) as snapshot:
            return Path(near.write(snapshot))

    path = written(tmp_path / "other", 100)
    options = {"cache": "lru,neighbours", "misses": "surrogate"}
    remedy = "write the neighbours of this snapshot, or open it without them"
    with refused(tb.InvalidError, remedy):
        snapshot_of(folder, neighbours=path, **options)
    check(folder, rows)
    path = written(folder, ROWS)
    snapshot_of(folder, neighbours=path, **options).close()
    path.write_bytes(path.read_bytes()[:-4096])
    with refused(tb.CorruptionError, "write the neighbours again"):
        snapshot_of(folder, **options)
    path.unlink()
    written(folder, ROWS)
    snapshot_of(folder, **options).close()


def test_models_of_one_budget_have_room(folder: Path, rows: torch.Tensor) -> None:
    with refused(tb.InvalidError, "raise the floor, or the budget"):
        snapshot_of(folder, tier_budget=tb.TierBudget(4096))
    with refused(tb.InvalidError, "raise the floor, or the budget") as caught:
        snapshot_of(folder, tier_budget=tb.TierBudget("1MiB"), tier_floor=10)
    least = int(caught.value.context["minimum_bytes"])
    check(folder, rows, tier_budget=tb.TierBudget("1MiB"), tier_floor=least)
    check(folder, rows, tier_budget=tb.TierBudget(64 << 20))
    remedy = "raise the budget, lower the floors, or close a model"
    budget = tb.TierBudget("1MiB")
    first = snapshot_of(folder, tier_budget=budget, tier_floor="900KiB")
    with refused(tb.InvalidError, remedy):
        snapshot_of(folder, tier_budget=budget, tier_floor="900KiB")
    check(folder, rows, tier_budget=budget, tier_floor="100KiB")
    first.close()
    check(folder, rows, tier_budget=budget, tier_floor="900KiB")
    larger = tb.TierBudget("2MiB")
    with snapshot_of(folder, tier_budget=larger, tier_floor="900KiB"):
        check(folder, rows, tier_budget=larger, tier_floor="900KiB")


# ---------------------------------------------------------------- servers


def ask(server: Server, request: dict[str, Any]) -> Any:
    from tierbed.cli.serving import ask as asked

    return asked(f"http://{server.address}", "/v1/lookup", request)


def lookup(*ids: int, **more: Any) -> dict[str, Any]:
    column = {"values": list(ids), "offsets": list(range(len(ids) + 1)), **more}
    return {"features": {"item": column}}


@pytest.mark.parametrize(
    "limits",
    [{"indices_max": 4}, {"bags_max": 4}, {"answer_bytes_max": 700}, {"body_bytes_max": 60}],
)
def test_a_request_over_a_limit_is_sent_as_several(
    folder: Path, rows: torch.Tensor, limits: dict[str, int]
) -> None:
    options = ServeOptions(limits=Limits(**limits), log_level="off")
    with snapshot_of(folder) as snapshot:
        with Server(snapshot, "127.0.0.1:0", options=options) as server:
            with refused(tb.InvalidError, "send several smaller requests"):
                ask(server, lookup(*range(10)))
            for at in range(10):
                found = ask(server, lookup(at))["features"]["item"]
                assert torch.equal(torch.tensor(found), rows[at : at + 1])


def test_weights_of_a_request_are_finite(folder: Path, rows: torch.Tensor) -> None:
    with snapshot_of(folder) as snapshot:
        with Server(snapshot, "127.0.0.1:0", options=ServeOptions(log_level="off")) as server:
            with refused(tb.InvalidError, "send weights between -3.4e38 and 3.4e38"):
                ask(server, lookup(3, weights=[1e39]))
            for weight in (-3.4e38, 3.4e38, 2.0):
                found = ask(server, lookup(3, weights=[weight]))["features"]["item"]
            assert torch.equal(torch.tensor(found), 2 * rows[3:4])


def test_an_address_in_use_gives_way_to_a_free_port(folder: Path) -> None:
    remedy = "choose a free port (0 picks one) of an address of this machine"
    with snapshot_of(folder) as snapshot, Server(snapshot, "127.0.0.1:0") as first:
        with refused(tb.InvalidError, remedy):
            Server(snapshot, first.address)
        with refused(tb.InvalidError, remedy):
            Server(snapshot, "192.0.2.1:0")
        with Server(snapshot, "127.0.0.1:0") as second:
            assert second.address != first.address
            ask(second, lookup(1))


def test_a_build_without_traces_names_no_collector(tmp_path: Path) -> None:
    import_tables({"a": torch.rand(40, 4)}, tmp_path / "snapshot")
    options = ServeOptions(otlp_endpoint="http://127.0.0.1:4317", log_level="off")
    with tb.Snapshot.open(tmp_path / "snapshot") as snapshot:
        with refused(tb.UnsupportedError, "or leave out otlp_endpoint"):
            Server(snapshot, "127.0.0.1:0", options=options)
        Server(snapshot, "127.0.0.1:0", options=replace(options, otlp_endpoint=None)).stop()


def test_a_file_of_tokens_has_a_line_for_each_client(tmp_path: Path) -> None:
    import_tables({"a": torch.rand(40, 4)}, tmp_path / "snapshot")
    tokens = tmp_path / "tokens"
    tokens.write_text("ranker secret\n")
    options = ServeOptions(tokens=tokens, log_level="off")
    with tb.Snapshot.open(tmp_path / "snapshot") as snapshot:
        with refused(tb.InvalidError, "write a line for each client: name, SHA-256 of its token"):
            Server(snapshot, "127.0.0.1:0", options=options)
        tokens.write_text(f"ranker {hashlib.sha256(b'secret').hexdigest()} infer\n")
        Server(snapshot, "127.0.0.1:0", options=options).stop()
