"""Do jagged tensors keep TorchRec's layout?"""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

import tierbed as tb
from tierbed.jagged import as_kjt, bags as jagged
from tierbed.testing import random_bags


def bags_of(kjt: tb.KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [bag.tolist() for bag in kjt[key].to_dense()] for key in kjt.keys()}


def small() -> tb.KeyedJaggedTensor:
    #      sample 0   sample 1   sample 2
    # f1   [5, 6]     []         [7]
    # f2   [1]        [2, 2]     []
    return tb.KeyedJaggedTensor(
        ["f1", "f2"],
        torch.tensor([5, 6, 7, 1, 2, 2]),
        torch.tensor([0.5, 0.6, 0.7, 0.1, 0.2, 0.3]),
        lengths=torch.tensor([2, 0, 1, 1, 2, 0]),
    )


def test_layout_is_feature_major() -> None:
    kjt = small()
    assert (kjt.keys(), kjt.stride()) == (["f1", "f2"], 3)
    assert kjt.offsets().tolist() == [0, 2, 2, 3, 4, 6, 6]
    assert bags_of(kjt) == {"f1": [[5, 6], [], [7]], "f2": [[1], [2, 2], []]}
    weights = kjt["f2"].weights_or_none()
    assert weights is not None
    assert weights.tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_offsets_and_lengths_say_the_same() -> None:
    kjt = small()
    again = tb.KeyedJaggedTensor.from_offsets_sync(kjt.keys(), kjt.values(), kjt.offsets())
    assert again.lengths().tolist() == kjt.lengths().tolist()


@settings(max_examples=60, deadline=None)
@given(st.permutations(["a", "b", "c"]), st.integers(0, 5), st.integers(0, 1000))
def test_permuting_keeps_every_bag(order: list[str], batch_size: int, seed: int) -> None:
    kjt = random_bags({"a": 10, "b": 20, "c": 30}, batch_size, seed=seed, is_weighted=True)
    moved = kjt.select(order)
    assert moved.keys() == order
    assert bags_of(moved) == {key: bags_of(kjt)[key] for key in order}
    for key in order:
        assert torch.equal(moved[key].weights_or_none(), kjt[key].weights_or_none())


def test_selecting_drops_and_repeats_features() -> None:
    kjt = small()
    assert bags_of(kjt.select(["f2"])) == {"f2": [[1], [2, 2], []]}
    twice = kjt.permute([1, 0, 1])
    assert twice.keys() == ["f2", "f1", "f2"]
    assert twice.values().tolist() == [1, 2, 2, 5, 6, 7, 1, 2, 2]


def test_a_missing_feature_is_named() -> None:
    with pytest.raises(tb.InvalidError, match=r"\['f3'\].*\['f1', 'f2'\]"):
        small().select(["f1", "f3"])


def test_features_are_joined_and_taken_apart() -> None:
    kjt = small()
    again = tb.KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    assert torch.equal(again.values(), kjt.values())
    assert torch.equal(again.offsets(), kjt.offsets())


def test_unequal_sample_counts_are_refused() -> None:
    with pytest.raises(tb.InvalidError, match="same number of samples"):
        tb.KeyedJaggedTensor(["a", "b"], torch.tensor([1]), lengths=torch.tensor([1, 0, 0]))
    with pytest.raises(tb.InvalidError, match="lengths or offsets"):
        tb.KeyedJaggedTensor(["a"], torch.tensor([1]))


class LooksLikeTorchRec:
    """The methods of another library's class, with offsets only."""

    def keys(self) -> list[str]:
        return ["f1", "f2"]

    def values(self) -> torch.Tensor:
        return small().values()

    def offsets(self) -> torch.Tensor:
        return small().offsets().to(torch.int32)

    def weights_or_none(self) -> None:
        return None

    def stride(self) -> int:
        return 3


def test_other_libraries_are_accepted_by_their_methods() -> None:
    kjt = as_kjt(LooksLikeTorchRec())
    assert bags_of(kjt) == bags_of(small())
    with pytest.raises(tb.InvalidError, match="KeyedJaggedTensor"):
        as_kjt({"f1": torch.tensor([1])})


def test_a_keyed_tensor_gives_columns() -> None:
    values = torch.arange(10.0).view(2, 5)
    kt = tb.KeyedTensor(["a", "b"], [2, 3], values)
    assert torch.equal(kt["b"], values[:, 2:])
    assert {key: part.shape[1] for key, part in kt.to_dict().items()} == {"a": 2, "b": 3}
    assert kt.offset_per_key() == [0, 2, 5]
    with pytest.raises(KeyError):
        kt["c"]


def test_moving_keeps_everything() -> None:
    kjt = small().to("cpu").pin_memory()
    assert bags_of(kjt) == bags_of(small())


def bag_of_ones(count: int, **options: torch.Tensor) -> tb.JaggedTensor:
    return tb.JaggedTensor(torch.arange(count), torch.ones(count, dtype=torch.int64), **options)


def test_features_of_unequal_bag_counts_are_not_joined() -> None:
    with pytest.raises(tb.InvalidError, match=r"same number of bags.*'a': 3, 'b': 1"):
        tb.KeyedJaggedTensor.from_jt_dict({"a": bag_of_ones(3), "b": bag_of_ones(1)})
    joined = tb.KeyedJaggedTensor.from_jt_dict({"a": bag_of_ones(2), "b": bag_of_ones(2)})
    assert bags_of(joined) == {"a": [[0], [1]], "b": [[0], [1]]}


class Foreign:
    """A batch with TorchRec's methods."""

    def __init__(self, kjt: tb.KeyedJaggedTensor, inverse: object) -> None:
        self._kjt, self._inverse = kjt, inverse

    def __getattr__(self, name: str) -> object:
        return getattr(self._kjt, name)

    def inverse_indices_or_none(self) -> object:
        return self._inverse


def test_a_batch_of_another_size_per_feature_is_refused() -> None:
    kjt = small()
    assert bags_of(as_kjt(Foreign(kjt, None))) == bags_of(kjt)
    with pytest.raises(tb.UnsupportedError, match="inverse_indices"):
        as_kjt(Foreign(kjt, (["f1", "f2"], torch.zeros(2, 3, dtype=torch.int64))))


def test_bags_that_samples_share_are_spread_to_them() -> None:
    kjt = small()
    inverse = (["f2", "f1"], torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1]]))
    shared = as_kjt(Foreign(kjt, inverse), takes_variable=True)
    assert bags_of(shared) == bags_of(kjt)
    assert shared.select(["f2"]).to("cpu").variable is shared.variable is not None
    pooled = torch.arange(3.0 * kjt.stride()).view(-1, 3)
    of_samples = shared.variable.of_samples(pooled, ["f1", "f2"], [1, 2])
    expected = torch.cat([pooled[inverse[1][1], :1], pooled[inverse[1][0], 1:]], dim=1)
    assert torch.equal(of_samples, expected)
    outside = (["f1", "f2"], torch.full((2, 4), kjt.stride()))
    with pytest.raises(tb.InvalidError, match="inverse_indices of feature 'f1' must be from 0"):
        as_kjt(Foreign(kjt, outside), takes_variable=True)


def test_a_feature_that_is_there_twice_is_not_picked() -> None:
    ones = torch.ones(3, dtype=torch.int64)
    twice = tb.KeyedJaggedTensor(["a", "b", "a"], torch.arange(3), lengths=ones)
    assert bags_of(twice.select(["b"])) == {"b": [[1]]}
    with pytest.raises(tb.InvalidError, match=r"\['a'\] more than once"):
        twice.select(["b", "a"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"values": torch.arange(2), "lengths": torch.ones(2)}, "lengths.*integers.*float32"),
        ({"values": torch.arange(2), "offsets": torch.arange(3.0)}, "offsets.*integers"),
        ({"values": torch.arange(2).numpy(), "lengths": torch.arange(2)}, "values.*ndarray"),
        ({"values": torch.arange(2), "lengths": [1, 1]}, "lengths.*list.*as_tensor"),
        ({"values": None, "lengths": torch.arange(2)}, "values.*NoneType"),
        ({"values": torch.arange(2)}, "lengths or offsets"),
    ],
)
def test_what_cannot_be_ids_or_bags_is_named(arguments: dict[str, object], told: str) -> None:
    for make in (tb.JaggedTensor, lambda **rest: tb.KeyedJaggedTensor(["a"], **rest)):
        with pytest.raises(tb.InvalidError, match=told):
            make(**arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 60_000])
def test_bounds_are_sums_of_lengths_however_many(count: int, dtype: torch.dtype) -> None:
    lengths = torch.randint(0, 5, (count,)).to(dtype)
    expected = [0, *accumulate(lengths.tolist())]
    apart = torch.stack([lengths, lengths + 1], dim=1)[:, 0]
    for counts in (lengths, apart):
        found = jagged.offsets_of(counts)
        assert found.dtype == torch.int64
        assert found.tolist() == expected
    with FlopCounterMode(display=False):
        assert jagged.offsets_of(lengths).tolist() == expected
    compiled = torch.compile(jagged.offsets_of, backend="eager", fullgraph=True)
    if dtype == torch.int32:
        assert compiled(lengths).tolist() == expected
