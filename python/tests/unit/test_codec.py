"""Do codecs bring rows back, and refuse what they cannot keep?"""

from __future__ import annotations

import pytest
import torch

from tierbed.codec import CODECS, Codec, train_product
from tierbed.errors import InvalidError


def rows(count: int, dim: int, scale: float = 0.1) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(3)) * scale


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dim", [1, 9, 36])
def test_rows_come_back_in_any_order(name: str, dim: int) -> None:
    values = rows(50, dim)
    codec = Codec(name, dim)
    codes = codec.encode(values)
    assert codes.shape == (50, codec.code_bytes)
    whole = codec.decode(codes)
    asked = torch.tensor([7, 7, 0, 49])
    assert torch.equal(codec.decode(codes, asked), whole[asked])
    if name == "f32":
        assert torch.equal(whole, values)


def test_a_scale_per_row_keeps_small_rows_that_a_fixed_range_loses() -> None:
    small = rows(500, 32, 3e-4)
    assert Codec("int8", 32).relative_error(small) < 0.006
    assert Codec("int4", 32).relative_error(small) < 0.09
    assert Codec("evstore8", 32).relative_error(small) > 0.5
    assert Codec("evstore4", 32).relative_error(small) > 0.5


def test_product_codes_learn_a_table_and_repeat() -> None:
    centres = rows(40, 16)
    values = centres[torch.arange(4000) % 40] + rows(4000, 16, 1e-3)
    codec = train_product(values, 4, seed=1)
    assert codec.code_bytes == 4
    assert codec.relative_error(values) < 0.05
    again = train_product(values, 4, seed=1)
    assert torch.equal(codec.encode(values), again.encode(values))


def test_rows_that_count_more_are_kept_better() -> None:
    values = rows(4000, 16)
    weights = torch.full((4000,), 1e-3)
    weights[:100] = 1e3
    favoured = train_product(values, 1, weights=weights, seed=1)
    plain = train_product(values, 1, seed=1)
    assert favoured.relative_error(values[:100]) < 0.5 * plain.relative_error(values[:100])


def test_wrong_calls_are_refused() -> None:
    codec = Codec("int8", 4)
    for bad in (torch.zeros(3, 5), torch.zeros(4), torch.tensor([[1.0, 2.0, 3.0, float("nan")]])):
        with pytest.raises(InvalidError):
            codec.encode(bad)
    codes = codec.encode(torch.zeros(3, 4))
    with pytest.raises(InvalidError, match="index out of range"):
        codec.decode(codes, torch.tensor([3]))
    with pytest.raises(InvalidError):
        codec.decode(codes[:, :5])
    with pytest.raises(InvalidError, match="no such codec"):
        Codec("int5", 4)
    with pytest.raises(InvalidError, match="codebooks"):
        Codec("product", 4)
    with pytest.raises(InvalidError, match="multiple"):
        train_product(torch.zeros(10, 6), 4)
