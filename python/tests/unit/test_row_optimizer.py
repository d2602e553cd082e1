"""A RowOptimizer among what torch has around optimizers, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tierbed as tb
from tierbed.ops import steps

ROWS, DIM = 10, 4


@pytest.fixture(autouse=True)
def _warnings_fail() -> Iterator[None]:
    steps._STEPS.unscaled.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def bags(*ids: int, names: tuple[str, ...] = ("i",)) -> tb.KeyedJaggedTensor:
    lengths = torch.ones(len(ids) * len(names), dtype=torch.int64)
    return tb.KeyedJaggedTensor(list(names), torch.tensor(ids * len(names)), lengths=lengths)


def collection(store: tb.Store, *names: str, **options: Any) -> tb.EmbeddingBagCollection:
    options.setdefault("optimizer", tb.SGD(lr=1.0))
    tables = [
        tb.EmbeddingBagConfig(ROWS, DIM, name, init=tb.Constant(0.0)) for name in names or ("i",)
    ]
    return tb.EmbeddingBagCollection(tables, store=store, **options)


def row(store: tb.Store, at: int = 1, name: str = "i") -> float:
    rows = store.read_rows(name, at, 1)
    assert bool((rows == rows[0, 0]).all())
    return rows[0, 0].item()


def summed(emb: Any, *ids: int) -> torch.Tensor:
    return emb(bags(*ids, names=tuple(emb.feature_names()))).values().sum()


# ---------------------------------------------------------------- steps


def test_nothing_moves_before_the_step_and_nothing_is_stepped_twice(open_store: Any) -> None:
    store = open_store()
    emb = collection(store)
    optimizer = tb.RowOptimizer(emb)
    summed(emb, 1, 1, 2).backward()
    summed(emb, 1).backward()
    assert (row(store), store.steps_done("i")) == (0, 0)
    (stand_in,) = optimizer.parameters()
    assert stand_in.grad is not None
    assert stand_in.grad.tolist() == [[3.0] * DIM, [1.0] * DIM]
    optimizer.step()
    assert (row(store), row(store, 2), store.steps_done("i")) == (-3, -1, 1)
    optimizer.step()
    assert store.steps_done("i") == 1, "there is no gradient any more"


@pytest.mark.parametrize("how", ["zero_grad", "none"])
def test_gradients_are_forgotten(open_store: Any, how: str) -> None:
    store = open_store()
    emb = collection(store)
    optimizer = tb.RowOptimizer(emb)
    summed(emb, 1).backward()
    if how == "zero_grad":
        optimizer.zero_grad()
    else:
        optimizer.parameters()[0].grad = None
    summed(emb, 2).backward()
    optimizer.step()
    assert (row(store, 1), row(store, 2)) == (0, -1)


def test_a_closure_and_a_dense_optimizer_step_together(open_store: Any) -> None:
    store = open_store()
    emb, top = collection(store), nn.Linear(DIM, 1)
    nn.init.ones_(top.weight)
    optimizer = tb.RowOptimizer(emb, torch.optim.SGD(top.parameters(), lr=0.5))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = top(emb(bags(1)).values()).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure).item()
    assert loss == pytest.approx(top.bias.item() + 0.5)
    assert row(store) == -1
    assert optimizer.param_groups[0]["params"] == list(top.parameters())
    assert optimizer.param_groups[1]["table"] == "i"


def test_without_the_optimizer_a_backward_steps_again(open_store: Any) -> None:
    store = open_store()
    emb = collection(store)
    optimizer = tb.RowOptimizer(emb)
    summed(emb, 1).backward()
    optimizer.close()
    summed(emb, 1).backward()
    assert row(store) == -1
    dropped = tb.RowOptimizer(emb)
    del dropped, optimizer
    gc.collect()
    summed(emb, 1).backward()
    assert row(store) == -2


def test_gradients_of_a_compiled_model_are_collected(open_store: Any) -> None:
    store = open_store()
    emb = collection(store)
    optimizer = tb.RowOptimizer(emb)
    compiled = torch.compile(lambda of: emb(of).values().sum(), backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(bags(1)).backward()
        compiled(bags(1)).backward()
    assert row(store) == 0
    optimizer.step()
    assert row(store) == -2


def test_ids_of_open_vocabularies_are_collected_by_row(open_store: Any) -> None:
    store = open_store("file")
    table = tb.EmbeddingBagConfig(None, DIM, "i", init=tb.Constant(0.0))
    emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=1.0))
    optimizer = tb.RowOptimizer(emb)
    for _ in range(2):
        summed(emb, 10**12, 7).backward()
    optimizer.step()
    ids, rows = store.ids("i")
    assert sorted(ids.tolist()) == [7, 10**12]
    assert store.gather_rows("i", rows).tolist() == [[-2.0] * DIM] * 2


# ---------------------------------------------------------------- what torch does to gradients


def test_the_norm_is_that_of_an_embedding_of_torch(open_store: Any) -> None:
    store = open_store()
    emb, top = collection(store), nn.Linear(DIM, 1)
    theirs = nn.Embedding.from_pretrained(store.read_rows("i", 0, ROWS), freeze=False)
    optimizer = tb.RowOptimizer(emb)
    dense = torch.optim.SGD(theirs.parameters(), lr=1.0)
    top(emb(bags(1, 1, 3)).values()).sum().backward()
    ours = nn.utils.clip_grad_norm_([*top.parameters(), *optimizer.parameters()], 0.5)
    optimizer.step()
    top.zero_grad()
    top(theirs(torch.tensor([1, 1, 3]))).sum().backward()
    norm = nn.utils.clip_grad_norm_([*top.parameters(), *theirs.parameters()], 0.5)
    dense.step()
    torch.testing.assert_close(ours, norm)
    torch.testing.assert_close(store.read_rows("i", 0, ROWS), theirs.weight.detach())


def test_values_are_clipped(open_store: Any) -> None:
    store = open_store()
    emb = collection(store)
    optimizer = tb.RowOptimizer(emb)
    (summed(emb, 1) * 100).backward()
    nn.utils.clip_grad_value_(optimizer.parameters(), 0.25)
    optimizer.step()
    assert row(store) == -0.25


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_grad_scaler_unscales_and_skips(open_store: Any, is_joined: bool) -> None:
    store = open_store()
    emb, top = collection(store), nn.Linear(DIM, 1)
    nn.init.ones_(top.weight)
    dense = torch.optim.SGD(top.parameters(), lr=0.0)
    optimizer = tb.RowOptimizer(emb, dense if is_joined else None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor, wanted, scale in ((1.0, -1, 1024), (float("inf"), -1, 512), (1.0, -2, 512)):
        optimizer.zero_grad()
        dense.zero_grad()
        scaler.scale(top(emb(bags(1)).values() * factor).sum()).backward()
        scaler.step(optimizer)
        if not is_joined:
            scaler.step(dense)
        scaler.update()
        assert (row(store), scaler.get_scale()) == (wanted, scale)


def test_a_scaler_that_does_not_step_the_rows_is_an_error(open_store: Any) -> None:
    store = open_store()
    emb, top = collection(store), nn.Linear(DIM, 1)
    dense, optimizer = torch.optim.SGD(top.parameters(), lr=0.1), tb.RowOptimizer(emb)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(top(emb(bags(1)).values()).sum()).backward()
    optimizer.step()
    with pytest.raises(tb.InvalidError, match=r"GradScaler had scaled.*scaler.step with its Row"):
        scaler.step(dense)


@pytest.mark.parametrize("first", ["scaler", "optimizer"])
def test_rows_are_not_unscaled_twice(open_store: Any, first: str) -> None:
    emb, scaler = collection(open_store()), torch.amp.GradScaler("cpu")
    message = r"unscaled by the scaler that steps it; call set_grad_scaler\(None\)"
    if first == "scaler":
        emb.set_grad_scaler(scaler)
        with pytest.raises(tb.InvalidError, match=message):
            tb.RowOptimizer(emb)
    else:
        optimizer = tb.RowOptimizer(emb)
        with pytest.raises(tb.InvalidError, match=message):
            emb.set_grad_scaler(scaler)
        del optimizer
    emb.set_grad_scaler(None)
    optimizer = tb.RowOptimizer(emb)
    (scaler.scale(summed(emb, 1))).backward()
    scaler.step(optimizer)
    assert row(emb.store) == -1  # type: ignore[arg-type]


@pytest.mark.parametrize("on_nonfinite", ["error", "skip"])
def test_a_gradient_that_is_not_finite_changes_no_row(open_store: Any, on_nonfinite: Any) -> None:
    store = open_store()
    emb = collection(store, "i", "j", on_nonfinite=on_nonfinite)
    optimizer = tb.RowOptimizer(emb)
    summed(emb, 1).backward()
    (emb(bags(2, names=("i", "j")))["j"] * float("nan")).sum().backward()
    if on_nonfinite == "error":
        with pytest.raises(tb.InvalidError, match=r"no row was changed; find where the loss"):
            optimizer.step()
        optimizer.zero_grad()
    else:
        optimizer.step()
    assert emb.skipped_steps == (on_nonfinite == "skip")
    assert (row(store), row(store, 1, "j"), store.steps_done("i")) == (0, 0, 0)
    summed(emb, 1).backward()
    optimizer.step()
    assert row(store) == -1


# ---------------------------------------------------------------- numbers of groups


def test_a_scheduler_drives_the_rates_of_rows_and_dense_parameters(open_store: Any) -> None:
    store = open_store()
    emb, top = collection(store, "i", "j"), nn.Linear(DIM, 1)
    dense = torch.optim.SGD(top.parameters(), lr=0.5)
    optimizer = tb.RowOptimizer(emb, dense)
    optimizer.param_groups[2]["lr"] = 0.25
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        summed(emb, 1).backward()
        optimizer.step()
        scheduler.step()
    assert (row(store), row(store, name="j")) == (-1.5, -0.375)
    assert [group["lr"] for group in dense.param_groups] == [0.125]
    assert store.learning_rate("j") == 0.125


def test_rates_are_saved_with_the_state(open_store: Any) -> None:
    def made(store: tb.Store) -> tb.RowOptimizer:
        emb, top = collection(store, optimizer=tb.Adam(lr=1.0)), nn.Linear(DIM, 1)
        optimizer = tb.RowOptimizer(emb, torch.optim.Adam(top.parameters(), lr=1.0))
        optimizer.zero_grad()
        top(emb(bags(1)).values()).sum().backward()
        return optimizer

    first = made(open_store(name="first"))
    first.step()
    for group in first.param_groups:
        group["lr"] = 0.125
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    store = open_store(name="second")
    second = made(store)
    second.load_state_dict(saved)
    assert [group["lr"] for group in second.param_groups] == [0.125, 0.125]
    assert len(second.state) == len(first.state) == 2, "the moments of the dense parameters"
    second.step()
    assert store.learning_rate("i") == 0.125
    assert store.read_rows("i", 1, 1).abs().max() == pytest.approx(0.125)
    wrong = tb.RowOptimizer(collection(open_store(name="third"), "j"))
    with pytest.raises(tb.InvalidError, match=r"state is of the tables \['i'\].*same dense opt"):
        wrong.load_state_dict({**saved, "param_groups": saved["param_groups"][1:]})


def test_a_bad_number_is_refused_at_the_step(open_store: Any) -> None:
    store = open_store()
    emb = collection(store)
    optimizer = tb.RowOptimizer(emb)
    optimizer.param_groups[0]["lr"] = -1.0
    summed(emb, 1).backward()
    with pytest.raises(tb.InvalidError, match="lr must be a finite number"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = torch.tensor(2.0)
    optimizer.step()
    assert row(store) == -2


def test_the_optimizer_of_a_table_keeps_its_class(open_store: Any) -> None:
    store = open_store()
    collection(store)
    emb = collection(store)
    with pytest.raises(tb.InvalidError, match=r"state of SGD, not of Adam; give one of that class"):
        store.set_optimizer("i", tb.Adam())
    store.set_optimizer("i", tb.SGD(lr=0.5))
    summed(emb, 1).backward()
    assert row(store) == -0.5


# ---------------------------------------------------------------- frozen tables


@pytest.mark.parametrize("is_collected", [False, True])
def test_one_table_of_a_collection_may_be_frozen(open_store: Any, is_collected: bool) -> None:
    store = open_store()
    emb = collection(store, "i", "j", optimizer=tb.Adam(lr=1.0))
    optimizer = tb.RowOptimizer(emb) if is_collected else None
    emb.requires_grad_(False, tables=["j"])

    def step() -> None:
        summed(emb, 1).backward()
        if optimizer is not None:
            optimizer.step()

    step()
    assert (store.steps_done("i"), store.steps_done("j"), row(store, name="j")) == (1, 0, 0)
    assert store.use_counts("j", 0, ROWS).sum() == 0
    emb.requires_grad_(False, tables=["i"])
    assert not summed(emb, 1).requires_grad
    emb.requires_grad_(True, tables=["j"])
    step()
    assert (store.steps_done("i"), store.steps_done("j")) == (1, 1)
    emb.requires_grad_(True)
    step()
    assert (store.steps_done("i"), store.steps_done("j")) == (2, 2)
    with pytest.raises(tb.InvalidError, match=r"no tables \['k'\]; it has \['i', 'j'\]"):
        emb.requires_grad_(False, tables=["k"])


def test_frozen_tables_follow_no_plan(open_store: Any) -> None:
    store = open_store(None, order="forward", dram_budget="16MiB")
    emb = collection(store, "i", "j").requires_grad_(False, tables=["j"])
    with pytest.raises(tb.InvalidError, match=r"the tables \['j'\] are frozen"):
        next(tb.lookahead([bags(1, names=("i", "j"))], emb, key=lambda of: of))


# ---------------------------------------------------------------- refusals


def test_only_one_row_optimizer_steps_a_store(open_store: Any) -> None:
    store = open_store()
    emb = collection(store)
    first = tb.RowOptimizer(emb)
    second = tb.RowOptimizer(emb)
    summed(emb, 1).backward()
    with pytest.raises(tb.InvalidError, match=r"another RowOptimizer.*step that one"):
        first.step()
    second.step()
    assert row(store) == -1


def test_collections_that_were_made_later_are_named(open_store: Any) -> None:
    store = open_store()
    optimizer = tb.RowOptimizer(collection(store))
    later = collection(store, "later")
    with pytest.raises(tb.InvalidError, match=r"tables \['later'\].*after all collections"):
        summed(later, 1).backward()
    optimizer = tb.RowOptimizer(store)
    summed(later, 1).backward()
    optimizer.step()
    assert row(store, name="later") == -1


def test_what_has_no_rows_to_step_is_refused(open_store: Any) -> None:
    with pytest.raises(tb.InvalidError, match="make the collections first"):
        tb.RowOptimizer(open_store())
    with pytest.raises(tb.InvalidError, match="make the collections first"):
        tb.RowOptimizer(nn.Linear(1, 1))
    emb, top = collection(open_store()), nn.Linear(1, 1)
    dense = torch.optim.SGD(top.parameters(), lr=0.1)
    optimizer = tb.RowOptimizer(emb, dense)
    with pytest.raises(tb.UnsupportedError, match="add them to the dense optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    dense.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(tb.RowOptimizer(emb, dense).param_groups) == 3
    optimizer = tb.RowOptimizer(emb, dense)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(tb.UnsupportedError, match=r"save its state_dict\(\)"):
            copied(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_tables_of_ranks_are_stepped_within_backward(open_store: Any) -> None:
    (rank,) = tb.dist.local_ranks(1)
    tables = [tb.EmbeddingBagConfig(ROWS, DIM, "d", init=tb.Constant(0.0))]
    divided = tb.dist.ShardedEmbeddingBagCollection(
        tables, store=open_store(name="d"), ranks=rank, optimizer=tb.SGD(lr=1.0)
    )
    store = open_store()
    emb = collection(store)
    with pytest.raises(tb.UnsupportedError, match=r"ShardedEmbeddingBagCol.*leave it out"):
        tb.RowOptimizer(nn.ModuleList([emb, divided]))
    optimizer = tb.RowOptimizer(emb)
    (summed(emb, 1) + divided(bags(1, 2, names=("d",))).values().sum()).backward()
    optimizer.step()
    assert (row(store), divided.store.read_rows("d", 2, 1)[0, 0]) == (-1, -1)
    divided.close()
