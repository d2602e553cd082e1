"""tb.Embedding beside torch.nn.Embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tierbed as tb


def both(store: Any, padding_idx: int | None = None) -> tuple[tb.Embedding, nn.Embedding]:
    theirs = nn.Embedding(20, 4, padding_idx=padding_idx)
    ours = tb.Embedding(20, 4, padding_idx, store=store, name="i", optimizer=tb.SGD(lr=0.5))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_outputs_and_steps_are_those_of_torch(open_store: Any, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    ours, theirs = both(open_store(), padding_idx)
    for shape in ((), (3,), (2, 5), (2, 3, 4), (0,)):
        ids = torch.randint(0, 20, shape)
        found, expected = ours(ids), theirs(ids)
        assert torch.equal(found, expected), shape
        scale = torch.randn_like(expected)
        (found * scale).sum().backward()
        theirs.zero_grad()
        (expected * scale).sum().backward()
        with torch.no_grad():
            theirs.weight -= 0.5 * theirs.weight.grad
    found = ours.full_state_dict()["weight"]
    assert torch.allclose(found, theirs.weight, atol=1e-6)


def test_a_look_ahead_takes_ids_of_any_shape(tmp_path: Path) -> None:
    ids = torch.randint(0, 20, (10, 3), generator=torch.Generator().manual_seed(0))
    batches: Any = DataLoader(ids, 2)
    rows = []
    for order, window in (("forward", 4), ("window", 4), ("window", 0)):
        path = tmp_path / f"{order}{window}"
        with tb.Store.open(path, dram_budget="16MiB", order=order) as store:
            item = tb.Embedding(20, 4, 0, store=store, name="i", optimizer=tb.Adam(lr=0.1))
            for ids in tb.lookahead(batches, item, window=window, key=lambda ids: ids):
                item(ids).square().sum().backward()
            assert store.order()["kind"] == order
            rows.append(item.full_state_dict()["weight"])
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_a_look_ahead_takes_the_arguments_of_a_bag(open_store: Any) -> None:
    store = open_store()
    bag = tb.EmbeddingBag(20, 4, store=store, name="i", padding_idx=0)
    batches = [(torch.tensor([3, 0, 9]), torch.tensor([0, 2]))] * 3
    for batch in tb.lookahead(batches, bag, window=2, key=lambda batch: batch):
        bag(*batch).sum().backward()
    assert store.steps_done("i") == 3


def test_pretrained_rows_are_written_and_frozen(open_store: Any) -> None:
    store, rows = open_store(), torch.randn(20, 4).half()
    for kind, name in ((tb.Embedding, "i"), (tb.EmbeddingBag, "b")):
        module: Any = kind.from_pretrained(rows, store=store, name=name)
        assert torch.equal(store.read_rows(name, 0, 20), rows.float())
        assert not module(torch.tensor([[1]])).requires_grad
    tuned = tb.Embedding.from_pretrained(rows, store=open_store(), name="i", freeze=False)
    assert tuned(torch.tensor([1])).requires_grad
    with pytest.raises(tb.InvalidError, match=r"not floats \[N, D\]"):
        tb.Embedding.from_pretrained(rows[0], store=store, name="c")


def test_an_open_vocabulary_takes_any_id(open_store: Any) -> None:
    item = tb.Embedding(None, 4, store=open_store(), name="i", optimizer=tb.SGD(lr=1.0))
    ids = torch.tensor([[10**15, -7]])
    before = item(ids).detach()
    item(ids).sum().backward()
    assert torch.allclose(item(ids).detach(), before - 1)
    assert sorted(item.full_state_dict()["ids"].tolist()) == [-7, 10**15]


def test_it_compiles_without_a_graph_break(open_store: Any) -> None:
    ours, theirs = both(open_store())
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    ids = torch.tensor([[1, 2], [3, 1]])
    assert torch.equal(compiled(ids), theirs(ids))


def test_a_graph_of_fx_has_it_as_one_call(open_store: Any) -> None:
    store = open_store()
    ours, theirs = both(store, padding_idx=0)
    ids = torch.tensor([[1, 0], [3, 1]])
    traced = torch.fx.symbolic_trace(nn.Sequential(ours))
    assert torch.equal(traced(ids), theirs(ids))
    bag = tb.EmbeddingBag(20, 4, store=store, name="b")
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(bag))(ids), bag(ids))
    with pytest.raises(tb.UnsupportedError, match="trace the model that holds it"):
        torch.fx.symbolic_trace(bag)
