"""Does a store keep what it was given, through every door?"""

from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.testing import check_row_store, random_bags


def table(**fields: Any) -> tb.EmbeddingBagConfig:
    return tb.EmbeddingBagConfig(
        **{"name": "t", "num_embeddings": 1000, "embedding_dim": 8, **fields}
    )


@pytest.mark.parametrize("dim", [1, 7, 36])
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("memory", {}),
        ("file", {"io": tb.IoOptions(engine="auto")}),
        ("file", {"io": tb.IoOptions(engine="pread"), "dram_budget": "2MiB"}),
        ("cold", {"dram_budget": "8MiB"}),
        ("lsm", {"dram_budget": "8MiB"}),
        ("lsm_plain", {"io": tb.IoOptions(engine="pread"), "dram_budget": "8MiB"}),
        ("lsm", {"durability": "step", "dram_budget": "8MiB"}),
    ],
)
def test_every_store_passes_the_conformance_kit(
    tmp_path: Path, backend: str, options: dict[str, Any], dim: int
) -> None:
    def factory() -> tb.Store:
        path = None if backend == "memory" else tmp_path / "store"
        return tb.Store.open(path, backend=backend, **{"dram_budget": "16MiB", **options})

    check_row_store(factory, dim=dim)


def test_a_durability_that_is_unknown_or_not_the_stores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tb.errors.InvalidError, match="checkpoint, step"):
        tb.Store.open(tmp_path, durability="always")
    with pytest.raises(tb.errors.InvalidError, match="backend lsm"):
        tb.Store.open(tmp_path, durability="step")


def test_a_checkpoint_per_step_brings_everything_back(tmp_path: Path) -> None:
    def open_store() -> tb.Store:
        options = {"backend": "lsm", "durability": "step", "dram_budget": "8MiB"}
        return tb.Store.open(tmp_path, **options)

    store = open_store()
    emb = tb.EmbeddingBagCollection([table()], store=store, optimizer=tb.Adam(lr=0.1))
    for step in range(5):
        emb(random_bags({"t": 1000}, 16, seed=step)).values().sum().backward()
        store.checkpoint(f"step-{step}", extra={"step": step})
    rows, state = store.read_rows_and_state("t", 0, 1000)
    store.close()
    store = open_store()
    tb.EmbeddingBagCollection([table()], store=store, optimizer=tb.Adam(lr=0.1))
    assert store.load_extra() == {"step": 4}
    again, state_again = store.read_rows_and_state("t", 0, 1000)
    assert torch.equal(rows, again)
    assert torch.equal(state, state_again)


def test_the_kit_finds_a_store_that_forgets(tmp_path: Path) -> None:
    class Forgetful(tb.Store):
        def write_rows(self, *args: Any, **kwargs: Any) -> None:
            if args[1] % 5:
                super().write_rows(*args, **kwargs)

    with pytest.raises(AssertionError, match="differs"):
        check_row_store(lambda: Forgetful.open(backend="memory", dram_budget="16MiB"))


def test_a_checkpoint_brings_everything_back(open_store: Any) -> None:
    store = open_store("file", seed=3)
    emb = tb.EmbeddingBagCollection([table()], store=store, optimizer=tb.Adam(lr=0.1))
    emb(random_bags({"t": 1000}, 16, seed=1)).values().sum().backward()
    layer = torch.nn.Linear(2, 2)
    torch.manual_seed(11)
    number = store.checkpoint(
        "one", extra={"model": layer.state_dict(), "step": 1}, attachments={"note": b"hello"}
    )
    drawn = torch.rand(3)
    rows, state = store.read_rows_and_state("t", 0, 1000)
    emb(random_bags({"t": 1000}, 16, seed=2)).values().sum().backward()
    store.close()

    again = open_store("file", seed=3)
    assert again.last_checkpoint() == (number, "one")
    assert torch.equal(again.read_rows("t", 0, 1000), rows)
    assert torch.equal(again.read_rows_and_state("t", 0, 1000)[1], state)
    extra = again.load_extra()
    assert extra is not None
    assert extra["step"] == 1
    assert torch.equal(extra["model"]["weight"], layer.weight.detach())
    assert again.attachment("note") == b"hello"
    assert again.attachment("nothing") is None
    assert again.restore_rng()
    assert torch.equal(torch.rand(3), drawn)
    assert again.verify() > 0


def test_learning_rates_change_between_steps(open_store: Any) -> None:
    store = open_store()
    emb = tb.EmbeddingBagCollection(
        [table(), table(name="u")], store=store, optimizer=tb.SGD(lr=1.0)
    )
    batch = tb.KeyedJaggedTensor(["t", "u"], torch.tensor([4, 4]), lengths=torch.tensor([1, 1]))
    before = store.read_rows("t", 4, 1), store.read_rows("u", 4, 1)
    store.set_learning_rate(0.0, tables=["u"])
    emb(batch).values().sum().backward()
    torch.testing.assert_close(store.read_rows("t", 4, 1), before[0] - 1)
    assert torch.equal(store.read_rows("u", 4, 1), before[1])
    store.set_learning_rate(0.0)
    emb(batch).values().sum().backward()
    torch.testing.assert_close(store.read_rows("t", 4, 1), before[0] - 1)


def test_use_counts_count_steps_not_ids(open_store: Any) -> None:
    store = open_store("file")
    emb = tb.EmbeddingBagCollection([table()], store=store, optimizer=tb.SGD())
    batch = tb.KeyedJaggedTensor(["t"], torch.tensor([3, 3, 5]), lengths=torch.tensor([2, 1]))
    for _ in range(2):
        emb(batch).values().sum().backward()
    assert store.use_counts("t", 3, 3).tolist() == [2, 0, 2]


def test_statistics_name_engine_and_memory(open_store: Any) -> None:
    store = open_store("file", io=tb.IoOptions(engine="pread"))
    tb.EmbeddingBagCollection([table()], store=store)
    stats = store.stats()
    assert stats["store"]["io"]["engine"] == "pread_pool"
    assert stats["budget"]["limit_bytes"] == 64 << 20
    assert (
        sum(part["used_bytes"] for part in stats["budget"]["parts"].values())
        == (stats["budget"]["used_bytes"])
    )


def test_publishing_keeps_rows_and_reports_progress(open_store: Any, tmp_path: Path) -> None:
    store = open_store("file")
    emb = tb.EmbeddingBagCollection([table()], store=store, optimizer=tb.SGD(lr=0.5))
    emb(random_bags({"t": 1000}, 64, seed=1)).values().sum().backward()
    told: list[tuple[int, int]] = []
    report = store.publish(
        tmp_path / "snapshot",
        attachments={"note": b"hello"},
        progress=lambda done, total: told.append((done, total)),
    )
    assert report.row_count == int((store.use_counts("t", 0, 1000) > 0).sum())
    assert told[-1] == (1000, 1000)
    for backend in ("direct", "mmap", "memory"):
        with tb.Snapshot.open(
            tmp_path / "snapshot", dram_budget="4MiB", backend=backend
        ) as snapshot:
            assert snapshot.attachment("note") == b"hello"
            assert snapshot.attachment_names() == ["note"]
            assert snapshot.verify() > 0
            batch = random_bags({"t": 1000}, 32, seed=9)
            wanted = tb.EmbeddingBagCollection([table()], store=store)
            with torch.no_grad():
                expected = wanted(batch).values()
                assert torch.equal(snapshot.lookup(batch).values(), expected)
                # A collection over a snapshot looks the same rows up.
                served = tb.EmbeddingBagCollection([table()], store=snapshot)
                assert torch.equal(served(batch).values(), expected)


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_delta_makes_the_same_rows_by_notes_and_by_comparing(
    open_store: Any, tmp_path: Path
) -> None:
    store = open_store("file")
    emb = tb.EmbeddingBagCollection([table()], store=store, optimizer=tb.Adagrad(lr=0.5))

    def train(seed: int) -> None:
        emb(random_bags({"t": 1000}, 64, seed=seed)).values().square().sum().backward()

    train(1)
    base = tmp_path / "base"
    assert len(store.publish(base).identity) == 24
    train(2)
    row_counts = {}
    for changes in ("auto", "tracked", "compared"):
        report = store.publish(tmp_path / changes, base=base, changes=changes)
        row_counts[changes] = report.row_count
        pages_read = store.stats()["changes"]["base_pages_read"]
        assert (pages_read > 0) == (changes == "compared")
    assert 0 < row_counts["compared"] <= row_counts["tracked"] < 1000
    assert _files(tmp_path / "auto") == _files(tmp_path / "tracked")
    counts = store.stats()["changes"]
    assert (counts["deltas_tracked"], counts["deltas_compared"]) == (2, 1)
    answers = []
    for changes in ("tracked", "compared"):
        made = tmp_path / f"made-{changes}"
        tb.Snapshot.apply(base, tmp_path / changes, made)
        with tb.Snapshot.open(made, dram_budget="4MiB") as snapshot:
            every = tb.KeyedJaggedTensor(
                ["t"], torch.arange(1000), lengths=torch.ones(1000, dtype=torch.int64)
            )
            answers.append(snapshot.lookup(every).values())
    assert torch.equal(*answers)
    # What a delta was applied to is known by the delta.
    tb.Snapshot.apply(base, tmp_path / "auto", tmp_path / "next")
    train(3)
    store.publish(tmp_path / "further", base=tmp_path / "next", changes="tracked")
    tb.Snapshot.apply(tmp_path / "next", tmp_path / "further", tmp_path / "last")
    with tb.Snapshot.open(tmp_path / "last", dram_budget="4MiB") as snapshot:
        batch = random_bags({"t": 1000}, 32, seed=9)
        with torch.no_grad():
            assert torch.equal(snapshot.lookup(batch).values(), emb(batch).values())
    with pytest.raises(tb.InvalidError, match="auto, tracked, compared"):
        store.publish(tmp_path / "x", base=base, changes="guessed")


def test_a_collection_over_a_snapshot_never_updates(open_store: Any, tmp_path: Path) -> None:
    store = open_store("file")
    emb = tb.EmbeddingBagCollection([table()], store=store, optimizer=tb.SGD(lr=0.5))
    batch = random_bags({"t": 1000}, 8, seed=1)
    emb(batch).values().sum().backward()
    store.publish(tmp_path / "snapshot")
    with tb.Snapshot.open(tmp_path / "snapshot", dram_budget="4MiB") as snapshot:
        served = tb.EmbeddingBagCollection([table()], store=snapshot)
        layer = torch.nn.Linear(8, 1)
        layer(served(batch).values()).sum().backward()
        assert layer.weight.grad is not None
        with pytest.raises(tb.InvalidError, match="1000 x 8"):
            tb.EmbeddingBagCollection([table(embedding_dim=4)], store=snapshot)
        with pytest.raises(tb.InvalidError, match="no table 'x'"):
            tb.EmbeddingBagCollection([table(name="x")], store=snapshot)


def test_names_of_the_engine_are_not_attached_to_a_snapshot(tmp_path: Path) -> None:
    config = tb.EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4)
    with tb.Store.open(tmp_path / "store", dram_budget="8MiB", seed=1) as store:
        tb.EmbeddingBagCollection([config], store=store, optimizer=tb.Adagrad(lr=0.1))
        with pytest.raises(Exception, match="must not start with '_'"):
            store.publish(tmp_path / "out", attachments={"_applied": b"x"})


def test_the_class_names_the_call_that_opens(tmp_path: Path) -> None:
    with pytest.raises(tb.InvalidError, match=r"tierbed\.Store\.open\('run'\) opens it"):
        tb.Store("run")  # type: ignore[arg-type]
    with pytest.raises(tb.InvalidError, match=r"tierbed\.Snapshot\.open\('run'\) opens it"):
        tb.Snapshot("run")  # type: ignore[arg-type]
    with tb.Store.open(tmp_path / "store", dram_budget="8MiB") as store:
        offered = dir(store)
        tb.EmbeddingBagCollection([table()], store=store)
        store.publish(tmp_path / "snapshot")
    assert {"checkpoint", "publish", "read_rows"} < set(offered)
    assert not {"native", "note_collection", "watch"} & set(offered)
    with tb.Snapshot.open(tmp_path / "snapshot", dram_budget="64MiB") as snapshot:
        assert "lookup" in dir(snapshot)
        assert "native" not in dir(snapshot)


def test_an_extra_is_a_dictionary(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="8MiB") as store:
        with pytest.raises(tb.InvalidError, match=r"dictionary, not int; give .*extra=\{"):
            store.checkpoint("a", extra=3)  # type: ignore[arg-type]
        store.checkpoint("a", extra={"epoch": 3})
        assert store.load_extra() == {"epoch": 3}
