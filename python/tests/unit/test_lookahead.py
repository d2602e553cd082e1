"""Does the look-ahead yield every batch, in order, and announce it once?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import tierbed as tb


class Buffer:
    """A collection whose buffer holds ``room`` batches that were announced and not yet used.

    It is the control of its look-ahead, too.
    """

    may_follow = False

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: list[int] = []
        self.groups: list[list[int]] = []
        self.ended = 0

    def _step_session(self) -> "Buffer":
        return self

    def tell_why_not(self) -> None:
        pass

    def note_used(self) -> None:
        pass

    def prefetch(self, batches: list[int]) -> int:
        fit = batches[: max(0, self.room - len(self.held))]
        self.held += fit
        self.groups.append(fit)
        return len(fit)

    def use(self, batch: int) -> bool:
        if batch in self.held:
            self.held.remove(batch)
            return True
        return False

    def end_lookahead(self) -> None:
        self.held.clear()
        self.ended += 1


def itself(batch: int) -> int:
    return batch


@pytest.mark.parametrize("window", [1, 2, 5, 16, 1000])
@pytest.mark.parametrize("count", [0, 1, 4, 33])
def test_all_batches_come_in_order_and_prefetched(window: int, count: int) -> None:
    buffer = Buffer(room=10**6)
    seen = []
    for batch in tb.lookahead(range(count), buffer, window=window, key=itself):
        assert buffer.use(batch), "a batch came before its rows"
        seen.append(batch)
    assert seen == list(range(count))
    assert buffer.ended == 1


def test_rows_are_fetched_in_groups() -> None:
    buffer = Buffer(room=10**6)
    for batch in tb.lookahead(range(100), buffer, window=20, key=itself):
        buffer.use(batch)
    sizes = [len(group) for group in buffer.groups if group]
    assert sizes[0] == 20
    assert len(sizes) <= 11, "one sweep per half window"


def test_the_window_shortens_to_what_fits() -> None:
    buffer = Buffer(room=3)
    hits = 0
    seen = []
    for batch in tb.lookahead(range(50), buffer, window=16, key=itself):
        hits += buffer.use(batch)
        seen.append(batch)
    assert seen == list(range(50))
    assert hits >= 45


def test_nothing_fits_and_all_still_comes() -> None:
    buffer = Buffer(room=0)
    assert list(tb.lookahead(range(9), buffer, window=4, key=itself)) == list(range(9))


def test_window_zero_reads_nothing_ahead() -> None:
    buffer = Buffer(room=10)
    read = []

    def loader() -> Iterator[int]:
        for batch in range(5):
            read.append(batch)
            yield batch

    for batch in tb.lookahead(loader(), buffer, window=0, key=itself):
        assert read[-1] == batch
    assert buffer.groups == []


def test_leaving_early_or_failing_ends_the_lookahead() -> None:
    buffer = Buffer(room=100)
    for _ in tb.lookahead(range(50), buffer, window=8, key=itself):
        break
    stream = tb.lookahead(range(50), buffer, window=8, key=itself)
    next(iter(stream))
    stream.close()

    def failing() -> Iterator[int]:
        yield 0
        raise RuntimeError("the disk of the loader")

    with pytest.raises(RuntimeError, match="loader"):
        list(tb.lookahead(failing(), buffer, window=8, key=itself))
    assert buffer.ended == 3


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(tb.InvalidError, match="window"):
        tb.lookahead([], Buffer(1), window=-1)


class Epochs:
    """A loader of ``count`` batches that counts its epochs."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.begun = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(self.count))


@pytest.mark.parametrize("window", [0, 4])
def test_it_is_iterated_once_per_epoch_and_has_the_loaders_length(window: int) -> None:
    loader, buffer = Epochs(9), Buffer(room=100)
    ahead = tb.lookahead(loader, buffer, window=window, key=itself)
    iter(ahead)
    assert (len(ahead), loader.begun) == (9, 0), "an epoch begins with its first batch"
    for _ in range(3):
        assert list(ahead) == list(range(9))
    assert loader.begun == 3
    with pytest.raises(TypeError, match="len"):
        len(tb.lookahead(iter([1]), buffer, key=itself))


def test_start_passes_over_batches_of_the_first_epoch_alone() -> None:
    ahead = tb.lookahead(Epochs(9), Buffer(room=100), window=4, key=itself, start=7)
    assert len(ahead) == 2
    assert list(ahead) == [7, 8]
    assert len(ahead) == 9
    assert list(ahead) == list(range(9))


def test_next_begins_an_epoch_that_a_loop_goes_on_with() -> None:
    buffer = Buffer(room=100)
    ahead = tb.lookahead(Epochs(5), buffer, window=4, key=itself)
    assert next(ahead) == 0
    assert list(ahead) == [1, 2, 3, 4]
    assert list(ahead) == [0, 1, 2, 3, 4]
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)
    assert list(ahead) == [0, 1, 2, 3, 4]
    assert next(ahead) == 0
    ahead.close()
    with pytest.raises(StopIteration):
        next(ahead)
    assert buffer.ended == 5


def test_a_second_epoch_of_a_generator_is_refused_and_not_empty() -> None:
    ahead = tb.lookahead(iter(range(3)), Buffer(room=100), window=2, key=itself)
    assert list(ahead) == [0, 1, 2]
    with pytest.raises(tb.InvalidError, match="once; for several epochs"):
        list(ahead)


def bags() -> tb.KeyedJaggedTensor:
    return tb.KeyedJaggedTensor(["t"], torch.tensor([3, 5]), lengths=torch.tensor([2]))


def collection(store: tb.Store) -> tb.EmbeddingBagCollection:
    table = tb.EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4)
    return tb.EmbeddingBagCollection([table], store=store)


@pytest.mark.parametrize("batch", [{"sparse": bags()}, [bags()], torch.ones(2)])
@pytest.mark.parametrize("window", [0, 4])
def test_batches_without_sparse_are_told_to_give_a_key(batch: Any, window: int) -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        emb = collection(store)
        ahead = tb.lookahead([batch, batch], emb, window=window)
        if window:
            with pytest.raises(tb.InvalidError, match=f"{type(batch).__name__} has no .sparse"):
                next(ahead)
        else:
            assert all(found is batch for found in ahead), "nothing is looked at"


def test_batches_of_torchrec_and_bare_bags_need_no_key() -> None:
    class Batch(NamedTuple):
        sparse_features: tb.KeyedJaggedTensor

    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        emb = collection(store)
        for loader in ([Batch(bags())] * 2, [bags()] * 2):
            for batch in tb.lookahead(loader, emb, window=2):
                emb(getattr(batch, "sparse_features", batch)).values().sum().backward()
        assert store.steps_done("t") == 4


def batches_of_two(count: int) -> list[tb.KeyedJaggedTensor]:
    ids = torch.randint(0, 3000, (count, 90), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([1] * 30 + [2] * 30)
    return [tb.KeyedJaggedTensor(["u", "h"], of_batch, lengths=lengths) for of_batch in ids]


@pytest.mark.parametrize("stores", [1, 2])
@pytest.mark.parametrize("window", [0, 8])
def test_several_collections_are_looked_ahead_together(
    stores: int, window: int, tmp_path: Path
) -> None:
    """The rows of both are in memory when they are looked up, and numbers are the same."""

    def train(opened: list[tb.Store], is_ahead: bool) -> list[torch.Tensor]:
        pooled = tb.EmbeddingBagCollection([tb.EmbeddingBagConfig(3000, 8, "u")], store=opened[0])
        table = tb.EmbeddingConfig(3000, 8, "h")
        sequences = tb.EmbeddingCollection([table], store=opened[-1])
        loader = batches_of_two(40)
        ahead: Any = tb.lookahead(loader, [pooled, sequences], window=window)
        for batch in ahead if is_ahead else loader:
            before = [store.stats()["buffer"]["miss_count"] for store in opened]
            (pooled(batch).values().sum() + sequences(batch)["h"].values().sum()).backward()
            after = [store.stats()["buffer"]["miss_count"] for store in opened]
            assert before == after or not (is_ahead and window), "rows were brought before"
        return [opened[0].read_rows("u", 0, 3000), opened[-1].read_rows("h", 0, 3000)]

    expected = train([tb.Store.open(backend="memory", dram_budget="16MiB")], is_ahead=False)
    opened = [
        tb.Store.open(tmp_path / str(at), dram_budget="1MiB", order="window")
        for at in range(stores)
    ]
    found = train(opened, is_ahead=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_modules_of_one_table_are_looked_ahead_together() -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        user = tb.Embedding(100, 4, store=store, name="user")
        item = tb.Embedding(100, 4, 0, store=store, name="item")
        batches = [(torch.tensor([1, 2]), torch.tensor([[3, 0], [4, 5]]))] * 3
        for users, items in tb.lookahead(batches, [user, item], window=2, key=list):
            (user(users).sum() + item(items).sum()).backward()
        assert (store.steps_done("user"), store.steps_done("item")) == (3, 3)
        with pytest.raises(tb.InvalidError, match="returned 1 parts for 2 modules; return one"):
            next(tb.lookahead(batches, [user, item], key=lambda batch: batch[:1]))


def test_a_key_takes_the_ids_out_of_any_batch() -> None:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        emb = collection(store)
        for batch in tb.lookahead([{"ids": bags()}] * 3, emb, key=lambda batch: batch["ids"]):
            emb(batch["ids"]).values().sum().backward()
        assert store.steps_done("t") == 3


def test_what_is_no_collection_is_refused() -> None:
    for emb in (torch.nn.Linear(2, 2), None, [1]):
        with pytest.raises(tb.InvalidError, match="needs the collection"):
            tb.lookahead([], emb)


# ---------------------------------------------------------------- the place in an epoch


def drawn(is_seeded: bool) -> "DataLoader[int]":
    generator = torch.Generator().manual_seed(5) if is_seeded else None
    samples: Any = list(range(12))
    return DataLoader(samples, 2, shuffle=True, generator=generator)


@pytest.mark.parametrize("is_seeded", [False, True])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("done", [0, 1, 5, 6, 7, 12])
def test_an_epoch_goes_on_behind_the_batch_that_was_saved(
    is_seeded: bool, window: int, done: int
) -> None:
    def ahead() -> Any:
        return tb.lookahead(drawn(is_seeded), Buffer(100), window=window, key=itself)

    def epochs(over: Any, count: int) -> Iterator[list[float]]:
        for _ in range(count):
            for batch in over:
                yield [*batch.tolist(), torch.rand(1).item()]

    torch.manual_seed(1)
    whole = list(epochs(ahead(), 4))
    torch.manual_seed(1)
    first = ahead()
    begun = epochs(first, 4)
    seen = [next(begun) for _ in range(done)]
    saved = first.state_dict()
    torch.manual_seed(2)
    second = ahead()
    second.load_state_dict(saved)
    assert len(second) == 6, "frameworks count all batches of the epoch"
    assert second.state_dict() == saved, "saved again before it goes on"
    seen += epochs(second, 4 - done // 6)
    assert seen == whole


def test_the_last_batch_is_known_where_the_length_is() -> None:
    ahead = tb.lookahead(range(3), Buffer(100), window=2, key=itself)
    assert [ahead.is_last for _ in ahead] == [False, False, True]
    endless = tb.lookahead(iter(range(3)), Buffer(100), window=2, key=itself)
    assert not any(endless.is_last for _ in endless)
