"""Do the idioms of a training loop do what they mean, or say that they do not?"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tierbed as tb
from tierbed.ops import steps


def bags(*ids: int) -> tb.KeyedJaggedTensor:
    return tb.KeyedJaggedTensor(
        ["i"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64)
    )


def table(name: str = "i") -> tb.EmbeddingBagConfig:
    return tb.EmbeddingBagConfig(
        name=name, num_embeddings=10, embedding_dim=4, init=tb.Constant(0.0), feature_names=["i"]
    )


def collection(store: tb.Store, **options: Any) -> tb.EmbeddingBagCollection:
    options.setdefault("optimizer", tb.SGD(lr=1.0))
    return tb.EmbeddingBagCollection([table()], store=store, **options)


def row(store: tb.Store, at: int = 1) -> float:
    rows = store.read_rows("i", at, 1)
    assert bool((rows == rows[0, 0]).all())
    return rows[0, 0].item()


@pytest.fixture(autouse=True)
def _warnings_fail() -> Any:
    # Rows that other tests stepped, and that no scaler of this file scales.
    steps._STEPS.unscaled.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---------------------------------------------------------------- names and numbers of tables


def test_two_embedding_bags_without_a_name_do_not_share_a_table(open_store: Any) -> None:
    store = open_store()
    first = tb.EmbeddingBag(10, 4, store=store)
    with pytest.raises(tb.InvalidError, match=r"EmbeddingBag without a name already.*name="):
        tb.EmbeddingBag(10, 4, store=store)
    other = tb.EmbeddingBag(10, 4, store=store, name="other")
    shared = tb.EmbeddingBag(10, 4, store=store, name="embedding_bag")
    first(torch.tensor([[1]])).sum().backward()
    assert torch.equal(first(torch.tensor([[1]])), shared(torch.tensor([[1]])))
    assert not torch.equal(first(torch.tensor([[1]])), other(torch.tensor([[1]])))
    tb.EmbeddingBag(10, 4, store=open_store())


def test_a_second_collection_does_not_change_the_first_ones_optimizer(open_store: Any) -> None:
    store = open_store()
    emb = collection(store, optimizer=tb.SGD(lr=1.0))
    with pytest.raises(tb.InvalidError, match=r"uses table 'i' with SGD\(lr=1.0.*lr=0.5.*set_lear"):
        collection(store, optimizer=tb.SGD(lr=0.5))
    store.set_learning_rate(0.25)
    evaluated = collection(store, optimizer=None).eval()
    same = collection(store, optimizer=tb.SGD(lr=1.0))
    assert store.learning_rate("i") == 0.25, "a rate that was set stays"
    emb(bags(1)).values().sum().backward()
    assert row(store) == -0.25
    assert torch.equal(evaluated(bags(1)).values(), same(bags(1)).values())


def test_a_collection_that_is_gone_leaves_the_numbers_free(open_store: Any) -> None:
    store = open_store()
    emb = collection(store, optimizer=tb.SGD(lr=1.0))
    del emb
    emb = collection(store, optimizer=tb.SGD(lr=0.5))
    emb(bags(1)).values().sum().backward()
    assert (row(store), store.learning_rate("i")) == (-0.5, 0.5)


def test_a_learning_rate_of_nobody_is_an_error(open_store: Any) -> None:
    with pytest.raises(tb.InvalidError, match="no table 'i'"):
        open_store().learning_rate("i")


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("backend", ["memory", "file"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_no_row(
    open_store: Any, backend: str, bad: float
) -> None:
    store = open_store(backend)
    emb = collection(store)
    output = emb(bags(1, 2)).values()
    with pytest.raises(tb.InvalidError, match=r"nan or inf; no row was changed.*on_nonfinite"):
        output.backward(torch.tensor([1.0, 1, 1, 1, 1, bad, 1, 1]).view(2, 4))
    assert (row(store, 1), row(store, 2), store.steps_done("i")) == (0, 0, 0)
    emb(bags(1)).values().sum().backward()
    assert row(store) == -1, "the store goes on"


def test_steps_that_are_not_finite_may_be_skipped_and_are_counted(open_store: Any) -> None:
    store = open_store()
    emb = collection(store, on_nonfinite="skip")
    (emb(bags(1)).values() * float("inf")).sum().backward()
    assert (row(store), store.steps_done("i"), emb.skipped_steps) == (0, 0, 1)
    emb(bags(1)).values().sum().backward()
    assert (row(store), emb.skipped_steps) == (-1, 1)
    with pytest.raises(tb.InvalidError, match="on_nonfinite must be one of error, skip"):
        collection(open_store(), on_nonfinite="ignore")


@pytest.mark.parametrize("kind", ["collection", "bag"])
def test_a_grad_scaler_scales_no_row(open_store: Any, kind: str) -> None:
    store = open_store()
    emb: Any = (
        collection(store)
        if kind == "collection"
        else tb.EmbeddingBag(
            10,
            4,
            store=store,
            name="i",
            mode="sum",
            optimizer=tb.SGD(lr=1.0),
            config={"init": tb.Constant(0.0)},
        )
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    emb.set_grad_scaler(scaler)
    linear = nn.Linear(4, 1)
    nn.init.ones_(linear.weight)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    def step(factor: float) -> None:
        ids = bags(1) if kind == "collection" else torch.tensor([[1]])
        output = emb(ids)
        output = output.values() if kind == "collection" else output
        optimizer.zero_grad()
        scaler.scale(linear(output * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    assert row(store) == -1
    step(float("inf"))
    assert (row(store), emb.skipped_steps) == (-1, 1)
    assert scaler.get_scale() == 512, "the dense part overflowed as well"
    with pytest.raises(tb.InvalidError, match="GradScaler or None, not float"):
        emb.set_grad_scaler(1024.0)


def test_the_gradient_of_weights_stays_scaled(open_store: Any) -> None:
    store = open_store()
    emb = collection(store, is_weighted=True)
    store.write_rows("i", 0, torch.ones(10, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    emb.set_grad_scaler(scaler)
    weights = torch.tensor([0.5], requires_grad=True)
    kjt = tb.KeyedJaggedTensor(["i"], torch.tensor([1]), weights, lengths=torch.tensor([1]))
    scaler.scale(emb(kjt).values().sum()).backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [8.0 * 4]
    assert row(store) == 1 - 0.5
    (emb(kjt).values() * float("inf")).sum().backward()
    assert not bool(torch.isfinite(weights.grad).any()), "so that the scaler sees it"


def test_a_scaler_that_the_collection_does_not_know_is_an_error(open_store: Any) -> None:
    emb, linear = collection(open_store()), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        scaler.scale(linear(emb(bags(1)).values()).sum()).backward()
        if enabled:
            with pytest.raises(tb.InvalidError, match=r"\['i'\].*set_grad_scaler"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
    emb.set_grad_scaler(None)  # the loss of these rows is not scaled
    emb(bags(1)).values().sum().backward()
    scaler.scale(linear(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)


# ---------------------------------------------------------------- one step per lookup


def test_two_lookups_in_one_backward_are_told_once(open_store: Any) -> None:
    emb = collection(open_store())
    with pytest.warns(UserWarning, match=r"\['i'\] more than once"):
        (emb(bags(1)).values() + emb(bags(2)).values()).sum().backward()
    (emb(bags(1)).values() + emb(bags(2)).values()).sum().backward()


def test_two_collections_over_one_table_are_told(open_store: Any) -> None:
    store = open_store()
    first, second = collection(store), collection(store)
    with pytest.warns(UserWarning, match="more than once"):
        (first(bags(1)).values() + second(bags(2)).values()).sum().backward()


def test_accumulated_gradients_are_told(open_store: Any) -> None:
    emb, linear = collection(open_store()), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for _ in range(3):
        linear(emb(bags(1)).values()).sum().backward()
        optimizer.step()
    linear(emb(bags(1)).values()).sum().backward()
    with pytest.warns(UserWarning, match="not accumulated"):
        linear(emb(bags(1)).values()).sum().backward()
    linear(emb(bags(1)).values()).sum().backward()


def test_loops_that_mean_what_they_do_are_told_nothing(open_store: Any) -> None:
    store = open_store()
    emb, linear = collection(store), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    # Rows alone, evaluations between steps, and a graph that is dropped.
    for _ in range(3):
        emb(bags(1)).values().sum().backward()
    for _ in range(3):
        emb(bags(2))
        with torch.no_grad():
            emb(bags(1))
        linear(emb(bags(1)).values()).sum().backward()
        optimizer.step()


def test_ranks_of_torch_that_share_nothing_are_told(
    open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emb = collection(open_store())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.warns(UserWarning, match=r"2 ranks.*ShardedEmbeddingBagCollection"):
        emb(bags(1)).values().sum().backward()
    emb(bags(1)).values().sum().backward()


# ---------------------------------------------------------------- modules


@pytest.mark.parametrize("kind", ["collection", "bag"])
def test_frozen_rows_do_not_train_until_they_are_thawed(open_store: Any, kind: str) -> None:
    store = open_store()
    if kind == "collection":
        emb: Any = collection(store)
        look = lambda: emb(bags(1)).values()  # noqa: E731
    else:
        init = {"init": tb.Constant(0.0)}
        emb = tb.EmbeddingBag(10, 4, store=store, name="i", optimizer=tb.SGD(lr=1.0), config=init)
        look = lambda: emb(torch.tensor([[1]]))  # noqa: E731
    assert emb.requires_grad_(False) is emb
    assert not look().requires_grad
    emb.requires_grad_(True)
    look().sum().backward()
    assert row(store) == -1


def test_full_states_have_the_names_of_torchrec(open_store: Any) -> None:
    store = open_store()
    pooled = collection(store)
    config = tb.EmbeddingConfig(name="s", num_embeddings=3, embedding_dim=4)
    assert list(pooled.full_state_dict()) == ["embedding_bags.i.weight"]
    sequences = tb.EmbeddingCollection([config], store=store)
    assert list(sequences.full_state_dict()) == ["embeddings.s.weight"]


def test_collections_answer_as_those_of_torchrec(open_store: Any) -> None:
    store = open_store()
    pooled = collection(store)
    assert [config.name for config in pooled.embedding_bag_configs()] == ["i"]
    assert not pooled.is_weighted()
    assert pooled.device == torch.device("cpu")
    config = tb.EmbeddingConfig(
        name="s", num_embeddings=3, embedding_dim=4, feature_names=["a", "b"]
    )
    sequences = tb.EmbeddingCollection([config], store=store)
    assert sequences.embedding_configs() == [config]
    assert sequences.embedding_dim() == 4
    assert sequences.embedding_names_by_table() == [["a", "b"]]


def test_wrong_stores_and_tables_are_named(open_store: Any) -> None:
    with pytest.raises(tb.InvalidError, match=r"must be a tierbed.Store.*not str"):
        collection("folder")
    sequence = tb.EmbeddingConfig(name="s", num_embeddings=3, embedding_dim=4)
    with pytest.raises(
        tb.InvalidError, match=r"EmbeddingBagConfig, not tierbed.config.tables.EmbeddingC"
    ):
        tb.EmbeddingBagCollection([sequence], store=open_store())
    with pytest.raises(tb.InvalidError, match=r"must be tierbed.*not builtins.dict"):
        tb.EmbeddingCollection([{}], store=open_store())
    emb, ones = collection(open_store()), torch.ones(1, dtype=torch.int64)
    with pytest.raises(tb.InvalidError, match=r"int64 or int32, not torch.int16.*long"):
        emb(tb.KeyedJaggedTensor(["i"], ones.short(), lengths=ones))
