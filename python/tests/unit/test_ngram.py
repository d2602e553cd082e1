"""The n-gram memory: its hashes against plain integers, what it may see, and its steps."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.nn import NgramHash, NgramMemory

WORD = 2**64


def finalized(value: int) -> int:
    """SplitMix64's finalizer on plain integers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WORD
    return value ^ (value >> 31)


def row_of(ngram: list[int], salt: int, rows: int) -> int:
    """The row of an n-gram, -1 for what is before the text."""
    joined = len(ngram)
    for token in ngram:
        joined = (joined * 6364136223846793005 + token + 1) % WORD
    return (finalized(joined ^ (salt % WORD)) >> 1) % rows


def test_rows_are_those_of_plain_integers() -> None:
    ngrams = NgramHash(rows=1013, orders=(3, 1, 2), heads=3, name="of", seed=5)
    tokens = torch.tensor([[5, 2, 2**40, 2, 5], [0, 0, 9, 9, 9]])
    batch = ngrams(tokens)
    assert batch.keys() == ["of_3", "of_1", "of_2"] == ngrams.feature_names()
    assert batch.stride() == 2
    for order, salts in zip(ngrams.orders, ngrams._salts.tolist(), strict=True):
        found = batch[f"of_{order}"]
        assert found.lengths().tolist() == [15, 15]
        expected = []
        for text in tokens.tolist():
            padded = [-1] * (order - 1) + text
            for at in range(len(text)):
                ngram = padded[at : at + order]
                expected += [
                    head * 1013 + row_of(ngram, salt, 1013) for head, salt in enumerate(salts)
                ]
        assert found.values().tolist() == expected


def test_heads_seeds_and_orders_have_hashes_of_their_own() -> None:
    tokens = torch.arange(4000)[None]
    one = NgramHash(rows=50, orders=(1,), heads=2)
    rows = one(tokens).values().view(-1, 2) - torch.tensor([0, 50])
    # As many tokens in each row as chance puts there, within six deviations.
    for head in (0, 1):
        counts = Counter(rows[:, head].tolist())
        assert all(abs(counts[row] - 80) < 6 * 80**0.5 for row in range(50))
    same = int((rows[:, 0] == rows[:, 1]).sum())
    assert abs(same - 80) < 6 * 80**0.5
    other = NgramHash(rows=50, orders=(1,), heads=2, seed=1)(tokens).values().view(-1, 2)
    assert abs(int((other[:, 0] == rows[:, 0]).sum()) - 80) < 6 * 80**0.5


def test_a_worker_has_the_same_hashes() -> None:
    ngrams = NgramHash(rows=1000)
    tokens = torch.randint(0, 100, (2, 9))
    sent = pickle.loads(pickle.dumps(ngrams))
    assert torch.equal(sent(tokens).values(), ngrams(tokens).values())


@pytest.mark.parametrize("wrong", [{"orders": ()}, {"orders": (2, 2)}, {"heads": 0}, {"rows": 0}])
def test_what_is_no_hash_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(tb.InvalidError, match=r"orders=\(2, 3\) is usual"):
        NgramHash(**{"rows": 10, **wrong})


def memory_in(store: tb.Store) -> NgramMemory:
    torch.manual_seed(3)
    ngrams = NgramHash(rows=500, orders=(1, 2), heads=2)
    return NgramMemory(12, ngrams, embedding_dim=4, store=store, optimizer=tb.SGD(lr=0.5))


def test_a_position_does_not_see_later_tokens() -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        memory = memory_in(store)
        tokens = torch.tensor([[4, 8, 15, 16, 23, 42]])
        changed = tokens.clone()
        changed[0, 4] = 7
        hidden = torch.randn(1, 6, 12)
        with torch.no_grad():
            before = memory(hidden, memory.ngrams(tokens))
            after = memory(hidden, memory.ngrams(changed))
        differs = (before != after).any(dim=2)[0].tolist()
        # Orders 1 and 2: the token itself, and the position behind it.
        assert differs == [False, False, False, False, True, True]


def test_the_sum_is_that_of_the_formula_and_backward_steps_the_rows() -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        memory = memory_in(store)
        tokens = torch.tensor([[4, 8, 4], [8, 4, 8]])
        batch = memory.ngrams(tokens)
        hidden = torch.randn(2, 3, 12)
        before = {name: store.read_rows(name, 0, 1000) for name in batch.keys()}
        leaf = {name: rows.clone().requires_grad_() for name, rows in before.items()}
        rows = torch.cat(
            [leaf[name][batch[name].values()].view(2, 3, 8) for name in batch.keys()], dim=2
        )
        key = torch.nn.functional.rms_norm(rows @ memory.key.weight.T, (12,))
        query = torch.nn.functional.rms_norm(hidden, (12,))
        fit = (query * key).sum(dim=2) / 12**0.5
        gate = torch.sigmoid(torch.sign(fit) * torch.sqrt(fit.abs()))
        expected = hidden + gate[..., None] * (rows @ memory.value.weight.T)
        weights = torch.randn(2, 3, 12)
        (expected * weights).sum().backward()
        found = memory(hidden, batch)
        torch.testing.assert_close(found, expected)
        (found * weights).sum().backward()
        for name, rows_before in before.items():
            grad = leaf[name].grad
            assert grad is not None
            assert bool(grad.any())
            stepped = rows_before - 0.5 * grad
            torch.testing.assert_close(store.read_rows(name, 0, 1000), stepped)


def test_rows_of_another_text_are_refused() -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        memory = memory_in(store)
        batch = memory.ngrams(torch.zeros(1, 3, dtype=torch.int64))
        with pytest.raises(tb.InvalidError, match="need 8 rows of each order"):
            memory(torch.zeros(1, 4, 12), batch)
        memory(torch.zeros(1, 3, 12), batch)


def test_a_snapshot_serves_the_memory(tmp_path: Path) -> None:
    tokens = torch.tensor([[4, 8, 15]])
    hidden = torch.randn(1, 3, 12)
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        memory = memory_in(store)
        memory(hidden, memory.ngrams(tokens)).sum().backward()
        with torch.no_grad():
            trained = memory(hidden, memory.ngrams(tokens))
        store.checkpoint("done")
        store.publish(tmp_path / "snapshot")
    with tb.Snapshot.open(tmp_path / "snapshot", dram_budget="16MiB") as snapshot:
        served = NgramMemory(12, memory.ngrams, embedding_dim=4, store=snapshot)
        served.load_state_dict(memory.state_dict())
        with torch.no_grad():
            assert torch.equal(served(hidden, memory.ngrams(tokens)), trained)
