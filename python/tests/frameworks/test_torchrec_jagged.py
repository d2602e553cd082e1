"""Our jagged tensors beside TorchRec's: every method of theirs, or a reason why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierbed as tb

torchrec: Any = pytest.importorskip("torchrec")

# Of TorchRec's own exchange between ranks, of buffers that are filled again, or of 2-D lengths.
_NOT_OURS = {
    "KeyedJaggedTensor": {
        "copy_",
        "dist_init",
        "dist_labels",
        "dist_splits",
        "dist_tensors",
        "empty_like",
        "flatten_lengths",
        "inverse_indices",
    },
    "JaggedTensor": {"copy_", "empty_like"},
    "KeyedTensor": set(),
}


def keyed(module: Any, is_weighted: bool = True) -> Any:
    values = torch.arange(10, 18)
    weights = torch.rand(8, generator=torch.Generator().manual_seed(0)) if is_weighted else None
    lengths = torch.tensor([2, 0, 1, 1, 1, 3])
    return module.KeyedJaggedTensor(["a", "b"], values, weights, lengths=lengths)


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        same(list(found.values()), list(expected.values()))
    elif hasattr(expected, "weights_or_none"):
        assert getattr(found, "keys", list)() == getattr(expected, "keys", list)()
        same(found.values(), expected.values())
        same(found.weights_or_none(), expected.weights_or_none())
        same(found.lengths().tolist(), expected.lengths().tolist())
        same(found.offsets().tolist(), expected.offsets().tolist())
    else:
        assert found == expected


@pytest.mark.parametrize("name", _NOT_OURS)
def test_every_method_of_theirs_is_ours_or_named(name: str) -> None:
    theirs, ours = getattr(torchrec, name), getattr(tb, name)
    missing = {
        method
        for method in dir(theirs)
        if not method.startswith("_") and callable(getattr(theirs, method))
        if not hasattr(ours, method) and not hasattr(torch.nn.Module, method)
    }
    assert missing == _NOT_OURS[name]


@pytest.mark.parametrize(
    "call",
    [
        lambda kjt: kjt.weights(),
        lambda kjt: kjt.device(),
        lambda kjt: kjt.lengths_or_none(),
        lambda kjt: kjt.offsets_or_none(),
        lambda kjt: kjt.stride_per_key(),
        lambda kjt: kjt.stride_per_key_per_rank(),
        lambda kjt: kjt.variable_stride_per_key(),
        lambda kjt: kjt.inverse_indices_or_none(),
        lambda kjt: kjt.length_per_key_or_none(),
        lambda kjt: kjt.length_per_key(),
        lambda kjt: kjt.sync().length_per_key_or_none(),
        lambda kjt: kjt.offset_per_key(),
        lambda kjt: kjt.sync().offset_per_key_or_none(),
        lambda kjt: kjt.sync().unsync().offset_per_key_or_none(),
        lambda kjt: kjt.lengths_offset_per_key(),
        lambda kjt: kjt.index_per_key(),
        lambda kjt: kjt.split([1, 1]),
        lambda kjt: kjt.split([2]),
        lambda kjt: type(kjt).concat([kjt, *kjt.split([1, 1])]),
        lambda kjt: type(kjt).empty(is_weighted=True, values_dtype=torch.int64).values(),
        lambda kjt: kjt.to_dict(),
        lambda kjt: kjt["b"].to_dense_weights(),
        lambda kjt: kjt["b"].to_padded_dense(),
        lambda kjt: kjt["b"].to_padded_dense(2, -1.0),
        lambda kjt: kjt["b"].to_padded_dense(5, 3),
        lambda kjt: kjt["a"].to_padded_dense_weights(1, 0.5),
        lambda kjt: kjt["b"].weights(),
        lambda kjt: kjt["b"].to("cpu"),
        lambda kjt: type(kjt["a"]).from_dense(kjt["a"].to_dense(), kjt["a"].to_dense_weights()),
        lambda kjt: type(kjt["a"]).from_dense_lengths(
            torch.arange(6).view(2, 3), torch.tensor([3, 1]), torch.rand(2, 3).fill_(0.5)
        ),
        lambda kjt: type(kjt["a"]).empty(values_dtype=torch.int64).values(),
    ],
)
def test_bags_answer_as_theirs(call: Any) -> None:
    same(call(keyed(tb)), call(keyed(torchrec)))


def test_padded_rows_have_the_gradients_of_theirs() -> None:
    grads = []
    for module in (tb, torchrec):
        rows = torch.arange(8.0).view(4, 2).requires_grad_(True)
        jagged = module.JaggedTensor(rows, lengths=torch.tensor([3, 0, 1]))
        padded = jagged.to_padded_dense(2)
        (padded * torch.arange(12.0).view(3, 2, 2)).sum().backward()
        grads.append((padded.detach(), rows.grad))
    same(grads[0], grads[1])
    empty = tb.JaggedTensor(torch.empty(0, 2), lengths=torch.tensor([0, 0]))
    assert empty.to_padded_dense(3, 1.5).tolist() == [[[1.5, 1.5]] * 3] * 2
    assert empty.to_padded_dense().shape == (2, 0, 2)


def test_pooled_vectors_are_regrouped_as_theirs() -> None:
    answers = []
    for module in (tb, torchrec):
        kind = module.KeyedTensor
        one = kind(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
        other = kind.from_tensor_list(["c"], [torch.ones(2, 2)])
        groups = [["c", "a"], ["b"]]
        answers.append(
            [
                kind.regroup([one, other], groups),
                kind.regroup([one, other], [["a", "b"], ["a"]]),
                kind.regroup_as_dict([one, other], groups, ["x", "y"]),
                other.length_per_key(),
                one.device(),
                one.to("cpu").values(),
                one.size_in_bytes(),
            ]
        )
    same(answers[0], answers[1])
    pooled = tb.KeyedTensor(["a"], [1], torch.ones(2, 1))
    with pytest.raises(tb.InvalidError, match=r"no tensor has the features \['z'\]"):
        tb.KeyedTensor.regroup([pooled], [["z"]])
    with pytest.raises(tb.InvalidError, match="several of the tensors have the feature 'a'"):
        tb.KeyedTensor.regroup([pooled, pooled], [["a"]])


def test_their_modules_take_our_batches() -> None:
    config = torchrec.EmbeddingBagConfig(
        name="t", num_embeddings=20, embedding_dim=4, feature_names=["a", "b"]
    )
    bags = torchrec.EmbeddingBagCollection([config])
    expected = bags(keyed(torchrec)).values()
    assert torch.equal(bags(keyed(tb)).values(), expected)


def test_what_cannot_be_joined_or_split_is_refused() -> None:
    kjt = keyed(tb)
    with pytest.raises(tb.InvalidError, match="the same number of samples, and all weights"):
        tb.KeyedJaggedTensor.concat([kjt, keyed(tb, is_weighted=False)])
    with pytest.raises(tb.InvalidError, match=r"of all 2 features; select"):
        kjt.split([1])
    assert kjt.select(["b"]).values().tolist() == kjt["b"].values().tolist()
    with pytest.raises(tb.InvalidError, match="has no weights; give it weights="):
        keyed(tb, is_weighted=False).weights()
    assert len(keyed(tb).weights()) == 8
