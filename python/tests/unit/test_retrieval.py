"""Sampled logits against a loop, and the best rows of a table against torch.topk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tierbed as tb
from tierbed.nn import row_chunks, sampled_logits, top_k

ROWS, DIM = 1000, 8


def whole_numbers(*shape: int) -> Tensor:
    """Numbers whose products and sums are exact in every order."""
    return torch.randint(-99, 100, shape).float()


# ---------------------------------------------------------------- sampled logits


def logits_one_by_one(
    queries: Tensor, positives: Tensor, negatives: Tensor, ids: Tensor, others: Tensor, q: Tensor
) -> list[list[float]]:
    found = []
    for query, positive, item in zip(queries, positives, ids.tolist(), strict=True):
        line = [float(query @ positive) / 0.5 - math.log(q[item])]
        for negative, other in zip(negatives, others.tolist(), strict=True):
            score = float(query @ negative) / 0.5 - math.log(q[other])
            line.append(-math.inf if other == item else score)
        found.append(line)
    return found


def test_logits_are_those_of_a_loop() -> None:
    queries, positives, negatives = torch.randn(4, 3), torch.randn(4, 3), torch.randn(6, 3)
    ids, others = torch.tensor([2, 5, 2, 0]), torch.tensor([5, 1, 2, 2, 3, 4])
    q = torch.tensor([0.1, 0.3, 0.2, 0.1, 0.25, 0.05])
    found = sampled_logits(
        queries,
        positives,
        negatives,
        positive_ids=ids,
        negative_ids=others,
        positive_log_q=q[ids].log(),
        negative_log_q=q[others].log(),
        temperature=0.5,
    )
    expected = logits_one_by_one(queries, positives, negatives, ids, others, q)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_with_corrections_the_loss_is_that_of_all_items_in_the_mean() -> None:
    """What the correction is for: sums over a sample then estimate those over all items."""
    items = torch.randn(5, 3)
    query, at = torch.randn(1, 3), torch.tensor([4])
    q = torch.tensor([0.05, 0.5, 0.2, 0.15, 0.1])
    drawn = torch.multinomial(q, 200_000, replacement=True)
    logits = sampled_logits(
        query,
        items[at],
        items[drawn],
        positive_ids=at,
        negative_ids=drawn,
        positive_log_q=q[at].log(),
        negative_log_q=q[drawn].log(),
    )
    estimated = torch.logsumexp(logits[0, 1:], dim=0) - math.log(len(drawn))
    others = torch.logsumexp((query @ items.T)[0, :4], dim=0)
    assert abs(float(estimated - others)) < 0.02


def test_shapes_that_do_not_fit_are_refused() -> None:
    rows, ids = torch.ones(2, 3), torch.tensor([0, 1])
    for wrong in (
        {"queries": torch.ones(3, 3)},
        {"negatives": torch.ones(2, 4)},
        {"negatives": torch.ones(2)},
        {"positive_ids": torch.tensor([0])},
        {"negative_ids": torch.tensor([0])},
    ):
        given = {"queries": rows, "positives": rows, "negatives": rows}
        given |= {"positive_ids": ids, "negative_ids": ids}
        with pytest.raises(tb.InvalidError, match=r"negatives \[N, D\]"):
            sampled_logits(**{**given, **wrong})


def test_a_correction_alone_is_refused_and_both_are_taken() -> None:
    rows, ids = torch.ones(2, 3), torch.tensor([0, 1])
    ids_of = {"positive_ids": ids, "negative_ids": ids}
    with pytest.raises(tb.InvalidError, match="give positive_log_q and negative_log_q"):
        sampled_logits(rows, rows, rows, **ids_of, positive_log_q=torch.zeros(2))
    none = torch.zeros(2)
    both = sampled_logits(rows, rows, rows, **ids_of, positive_log_q=none, negative_log_q=none)
    assert torch.equal(both, sampled_logits(rows, rows, rows, **ids_of))


# ---------------------------------------------------------------- the best rows


def filled(store: tb.Store, rows: Tensor) -> None:
    tables = [tb.EmbeddingConfig(ROWS, DIM, "item"), tb.EmbeddingConfig(7, DIM, "other")]
    tb.EmbeddingCollection(tables, store=store)
    store.write_rows("item", 0, rows)


@pytest.fixture(params=["memory", "file", "lsm", "coded", "snapshot"])
def source_and_rows(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple]:
    rows = whole_numbers(ROWS, DIM)
    kind = request.param
    if kind == "coded":
        store = tb.CodedStore()
        store.add_table(tb.EmbeddingConfig(ROWS, DIM, "item", data_type="fp16"))
        store.write_rows("item", 0, rows)
        yield store, rows
        return
    backend = "file" if kind == "snapshot" else kind
    path = None if kind == "memory" else tmp_path / "store"
    with tb.Store.open(path, backend=backend, dram_budget="16MiB") as store:
        filled(store, rows)
        if kind != "snapshot":
            yield store, rows
            return
        store.checkpoint("done")
        store.publish(tmp_path / "snapshot")
    with tb.Snapshot.open(tmp_path / "snapshot", dram_budget="16MiB") as snapshot:
        yield snapshot, rows


@pytest.mark.parametrize("chunk_rows", [1, 13, 1000, 65536])
def test_the_best_rows_are_those_of_torch(source_and_rows: tuple, chunk_rows: int) -> None:
    source, rows = source_and_rows
    if chunk_rows == 1 and isinstance(source, tb.Snapshot):
        chunk_rows = 50
    queries = whole_numbers(5, DIM)
    excluded = [torch.randint(0, ROWS, (count,)) for count in (0, 3, 400, 1, 0)]
    scores = queries @ rows.T
    for of_query, ids in zip(scores, excluded, strict=True):
        of_query[ids] = -torch.inf
    expected = scores.topk(20)
    left_out = tb.JaggedTensor(torch.cat(excluded), lengths=torch.tensor([0, 3, 400, 1, 0]))
    found = top_k(queries, source, "item", 20, excluded=left_out, chunk_rows=chunk_rows)
    assert torch.equal(found.scores, expected.values)
    # Equal scores may stand in any order.
    assert torch.equal(scores.gather(1, found.ids), expected.values)
    assert all(len(set(ids)) == 20 for ids in found.ids.tolist())


def test_rows_go_through_a_tower() -> None:
    rows, tower, queries = whole_numbers(ROWS, DIM), whole_numbers(3, DIM), whole_numbers(2, 3)
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        filled(store, rows)
        found = top_k(queries, store, "item", 4, encode=lambda some: some @ tower.T, chunk_rows=99)
    assert torch.equal(found.scores, (queries @ (rows @ tower.T).T).topk(4).values)


def test_in_forward_order_the_same_rows_are_found(tmp_path: Path) -> None:
    table = tb.EmbeddingConfig(ROWS, DIM, "item")
    ids = torch.randint(0, ROWS, (8, 200))
    batches = [tb.KeyedJaggedTensor(["item"], of, lengths=torch.ones(200).long()) for of in ids]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        emb = tb.EmbeddingCollection([table], store=store)
        for batch in tb.lookahead(loader, emb, key=lambda bags: bags):
            emb(batch)["item"].values().square().sum().backward()
        assert store.order()["kind"] == "forward"
        queries = torch.randn(3, DIM)
        found = top_k(queries, store, "item", 5, chunk_rows=300)
        expected = (queries @ store.read_rows("item", 0, ROWS).T).topk(5)
    assert torch.equal(found.ids, expected.indices)


def test_where_all_is_left_out_the_score_says_so() -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        filled(store, whole_numbers(ROWS, DIM))
        seen = tb.JaggedTensor(torch.arange(6), lengths=torch.tensor([6]))
        found = top_k(torch.ones(1, DIM), store, "other", 3, excluded=seen, chunk_rows=4)
    assert found.ids[0, 0] == 6
    assert torch.isinf(found.scores[0, 1:]).all()


def test_an_open_vocabulary_is_found_by_its_ids(tmp_path: Path) -> None:
    ids = torch.tensor([10**12, 3, 10**9, 77])
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        emb = tb.EmbeddingCollection([tb.EmbeddingConfig(None, DIM, "item")], store=store)
        bags = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones(4).long())
        weights = whole_numbers(4, DIM)
        (emb(bags)["item"].values() * weights).sum().backward()
        rows = store.gather_rows("item", store.translate("item", ids))
        query = whole_numbers(1, DIM)
        best = ids[(query @ rows.T)[0].argsort(descending=True)]
        assert top_k(query, store, "item", 4, chunk_rows=3).ids[0].tolist() == best.tolist()
        some = tb.JaggedTensor(best[:1], lengths=torch.tensor([1]))
        found = top_k(query, store, "item", 3, chunk_rows=3, excluded=some)
        assert found.ids[0].tolist() == best[1:].tolist()
        store.checkpoint("done")
        store.publish(tmp_path / "snapshot")
        with (
            tb.Snapshot.open(tmp_path / "snapshot", dram_budget="16MiB") as snapshot,
            pytest.raises(tb.UnsupportedError, match="scan it in the training store"),
        ):
            next(row_chunks(snapshot, "item"))
        assert {int(each) for chunk in row_chunks(store, "item") for each in chunk.ids} == set(
            ids.tolist()
        )


def test_what_is_not_there_is_refused() -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        filled(store, whole_numbers(ROWS, DIM))
        query = torch.ones(1, DIM)
        for k in (0, 8):
            with pytest.raises(tb.InvalidError, match="from 1 to the 7 rows"):
                top_k(query, store, "other", k)
        with pytest.raises(tb.InvalidError, match="no table 'items'"):
            top_k(query, store, "items", 1)
        with pytest.raises(tb.InvalidError, match="chunk_rows must be at least 1"):
            top_k(query, store, "item", 1, chunk_rows=0)
        two = tb.JaggedTensor(torch.tensor([1]), lengths=torch.tensor([1, 0]))
        with pytest.raises(tb.InvalidError, match="a bag per query, 1, not 2"):
            top_k(query, store, "item", 1, excluded=two)
