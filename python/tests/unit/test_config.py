"""Do table descriptions refuse what cannot be, and translate the rest?"""

import enum
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.config.optim import as_optimizer, state_words


def test_a_table_is_translated_once() -> None:
    config = tb.EmbeddingBagConfig(
        name="item", num_embeddings=100, embedding_dim=8, init=tb.Normal(0.0, 0.1)
    )
    table = config.schema(tb.Adagrad(initial_accumulator_value=0.5), store_seed=7)
    assert table.pop("seed") >= 0
    assert table == {
        "name": "item",
        "row_count": 100,
        "dim": 8,
        "optimizer": "adagrad",
        "state_init": 0.5,
        "init": {"kind": "normal", "mean": 0.0, "std": 0.1},
    }
    assert config.feature_names == ("item",)


def test_seeds_differ_by_store_and_by_table() -> None:
    def seed(name: str, store_seed: int) -> int:
        config = tb.EmbeddingBagConfig(name=name, num_embeddings=2, embedding_dim=2)
        return config.schema(tb.SGD(), store_seed)["seed"]

    assert len({seed("a", 0), seed("b", 0), seed("a", 1), seed("b", 1)}) == 4
    assert seed("a", 0) == seed("a", 0)


def test_default_bounds_are_those_of_torchrec() -> None:
    config = tb.EmbeddingBagConfig(name="a", num_embeddings=16, embedding_dim=2)
    assert config.initial() == tb.Uniform(-0.25, 0.25)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_embeddings": 0}, "num_embeddings"),
        ({"embedding_dim": 1.5}, "embedding_dim"),
        ({"feature_names": "item"}, "feature_names"),
        ({"pooling": tb.PoolingType.NONE}, "EmbeddingConfig"),
        ({"init": tb.Constant(0.0), "weight_init_min": 0.0}, "either init"),
    ],
)
def test_bad_tables_are_refused_by_name(fields: dict[str, object], named: str) -> None:
    good = {"name": "item", "num_embeddings": 10, "embedding_dim": 4}
    with pytest.raises(tb.InvalidError, match=named):
        tb.EmbeddingBagConfig(**{**good, **fields})


def test_torch_optimizers_have_fused_counterparts() -> None:
    assert as_optimizer(torch.optim.SGD, {"lr": 0.5}) == tb.SGD(lr=0.5)
    assert as_optimizer(torch.optim.Adagrad, {"lr": 0.5}) == tb.Adagrad(lr=0.5)
    assert as_optimizer(torch.optim.SparseAdam, {"betas": (0.8, 0.9)}) == tb.Adam(betas=(0.8, 0.9))
    assert as_optimizer(tb.RowWiseAdagrad, {"lr": 0.1}) == tb.RowWiseAdagrad(lr=0.1)
    assert as_optimizer(torch.optim.SGD, {"lr": 0.5, "momentum": 0}) == tb.SGD(lr=0.5)


def test_optimizers_without_counterpart_are_refused() -> None:
    with pytest.raises(tb.UnsupportedError, match="Adam"):
        as_optimizer(torch.optim.AdamW)
    with pytest.raises(tb.UnsupportedError, match="momentum"):
        as_optimizer(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    with pytest.raises(tb.InvalidError, match="lr"):
        tb.SGD(lr=-1.0)
    with pytest.raises(tb.InvalidError, match="optimizer must be"):
        as_optimizer("adagrad")  # type: ignore[arg-type]


def test_state_sizes() -> None:
    kinds = ["sgd", "adagrad", "row_wise_adagrad", "adam", "partial_row_wise_adam"]
    assert [state_words(kind, 36) for kind in kinds] == [0, 36, 1, 72, 37]


@pytest.mark.parametrize("pooling", ["max", 3, None])
def test_an_unknown_pooling_is_named_with_the_known_ones(pooling: object) -> None:
    with pytest.raises(tb.InvalidError, match=r"pooling of table 'a' must be one of sum, mean"):
        tb.EmbeddingBagConfig(name="a", num_embeddings=2, embedding_dim=2, pooling=pooling)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: tb.SGD(lr=float("nan")), "lr.*finite.*nan"),
        (lambda: tb.SGD(lr=float("inf")), "lr.*finite.*inf"),
        (lambda: tb.SGD(lr=-0.1), "lr.*at least 0"),
        (lambda: tb.SGD(lr="0.1"), "lr.*finite number.*'0.1'"),
        (lambda: tb.SGD(lr=torch.tensor(0.1)), "lr.*finite number.*tensor"),
        (lambda: tb.Adagrad(eps=True), "eps.*finite number"),
        (lambda: tb.Adam(betas=(0.9, 1.0)), "betas.*below 1"),
        (lambda: tb.Adam(betas=(1.5, 2.0)), "betas.*below 1"),
        (lambda: tb.Adam(betas=(0.9,)), "betas.*two numbers"),
        (lambda: tb.Adam(betas=0.9), "betas.*two numbers"),
        (lambda: tb.PartialRowWiseAdam(betas=(float("nan"), 0.9)), "betas.*two numbers"),
    ],
)
def test_numbers_of_an_optimizer_are_checked(make: object, told: str) -> None:
    with pytest.raises(tb.InvalidError, match=told):
        make()


def test_betas_may_be_a_list_as_in_torch() -> None:
    assert tb.Adam(betas=[0.8, 0.9]) == tb.Adam(betas=(0.8, 0.9))


def test_words_of_torchrec_are_taken_by_name() -> None:
    class PoolingType(enum.Enum):
        MEAN = "MEAN"
        NONE = "NONE"

    class DataType(enum.Enum):
        FP32 = "FP32"
        FP64 = "FP64"

    table: Any = tb.EmbeddingBagConfig(10, 4, "t", pooling=PoolingType.MEAN)  # type: ignore[arg-type]
    assert table.pooling is tb.PoolingType.MEAN
    table = tb.EmbeddingConfig(10, 4, "t", data_type=DataType.FP32)  # type: ignore[arg-type]
    assert table.data_type is tb.DataType.FP32
    with pytest.raises(tb.InvalidError, match="must be one of fp32, fp16, bf16, int8, not 'fp64'"):
        tb.EmbeddingConfig(10, 4, "t", data_type=DataType.FP64)  # type: ignore[arg-type]
    with pytest.raises(tb.InvalidError, match="a bag is pooled by sum or mean"):
        tb.EmbeddingBagConfig(10, 4, "t", pooling=PoolingType.NONE)  # type: ignore[arg-type]
    with pytest.raises(tb.InvalidError, match=r"must be texts, not \(1,\)"):
        tb.EmbeddingBagConfig(10, 4, "t", feature_names=[1])  # type: ignore[list-item]
