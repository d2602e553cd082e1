"""Do the click models have the shape they were asked for?"""

from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.nn import MODELS, build_model
from tierbed.nn.ctr import pairwise_dots
from tierbed.testing import random_bags

SIZES = {"c1": 30, "c2": 40, "c3": 50}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dense_count", [0, 13])
def test_models_share_an_interface_and_learn(open_store: Any, kind: str, dense_count: int) -> None:
    model = MODELS[kind](
        dense_count, SIZES, store=open_store(), optimizer=tb.RowWiseAdagrad(lr=0.1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = random_bags(SIZES, 64, seed=0, bag_max=1)
    dense = torch.rand(64, dense_count)
    label = (torch.rand(64) < 0.5).float()
    losses = []
    for _ in range(60):
        logits = model(dense, batch)
        assert logits.shape == (64,)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_default_dims_are_those_of_the_paper(open_store: Any) -> None:
    dims = {}
    for kind, cls in MODELS.items():
        store = open_store()
        cls(13, SIZES, store=store)
        dims[kind] = {table["dim"] for table in store.tables()}
    assert dims == {"dlrm": {36}, "deepfm": {9}, "pnn": {18}}


def test_a_model_is_built_again_from_its_config(open_store: Any) -> None:
    store = open_store()
    model = MODELS["deepfm"](3, SIZES, store=store, embedding_dim=5, hidden=(16,))
    again = build_model(model.config(), store)
    again.load_state_dict(model.state_dict())
    dense, batch = torch.rand(4, 3), random_bags(SIZES, 4, seed=1)
    assert torch.equal(model(dense, batch), again(dense, batch))
    with pytest.raises(tb.InvalidError, match="unknown model"):
        build_model({"kind": "oracle"}, store)


def test_pairwise_dots_are_all_pairs_once() -> None:
    vectors = torch.randn(2, 4, 3)
    expected = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    torch.testing.assert_close(pairwise_dots(vectors), torch.stack(expected, dim=1))


def test_deepfm_is_the_sum_of_its_orders(open_store: Any) -> None:
    model = MODELS["deepfm"](2, SIZES, store=open_store(), embedding_dim=4)
    dense, rows = torch.rand(3, 2), torch.randn(3, 3, 4)
    factors = torch.cat([dense[:, :, None] * model.dense_factors, rows[:, :, 1:]], dim=1)
    pairs = pairwise_dots(factors).sum(1)
    first = model.first_order(dense).squeeze(1) + rows[:, :, 0].sum(1)
    deep = model.deep(factors.flatten(1)).squeeze(1)
    torch.testing.assert_close(model.head(dense, rows), first + pairs + deep)
