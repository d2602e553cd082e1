"""The demo of online learning: its stream, its report, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed_bench.online import OnlineOptions, run_online
from tierbed_bench.online_report import Answer, Asked, Published, report
from tierbed_bench.online_stream import BLOCK, Stream
from tierbed_bench.online_trainer import batch_request

STREAM = Stream(users=5_000, items=1_000_000, item_life=10_000, seed=3)


def test_a_sample_depends_on_its_number_alone() -> None:
    whole, part = STREAM.batch(BLOCK, 4 * BLOCK), STREAM.batch(2 * BLOCK, BLOCK)
    inside = slice(BLOCK, 2 * BLOCK)
    assert torch.equal(whole.dense[inside], part.dense)
    assert torch.equal(whole.label[inside], part.label)
    ids = [batch.sparse.values().view(3, -1) for batch in (whole, part)]
    assert torch.equal(ids[0][:, inside], ids[1])


def test_items_are_replaced_one_after_the_other() -> None:
    def shown(block: int) -> torch.Tensor:
        return STREAM.batch(block * BLOCK, 8 * BLOCK).sparse["item"].values()

    now = shown(0)
    assert torch.isin(shown(8), now).float().mean() > 0.5
    assert torch.isin(shown(160), now).float().mean() < 0.05


def test_clicks_follow_from_the_item() -> None:
    batch = STREAM.batch(0, 64 * BLOCK)
    items = batch.sparse["item"].values()
    rates = torch.stack(
        [batch.label[items == item].mean() for item in items.unique() if (items == item).sum() > 50]
    )
    assert 0.05 < batch.label.mean() < 0.6
    assert rates.std() > 0.1


def test_a_request_has_the_ids_of_each_sample() -> None:
    batch = STREAM.batch(0, BLOCK)
    dense, ids = batch_request(batch)["inputs"]
    assert dense["shape"] == [BLOCK, 2]
    assert ids["shape"] == [BLOCK, 3]
    assert ids["data"][3:6] == [int(batch.sparse[name].values()[1]) for name in STREAM.table_sizes]


def test_a_server_that_goes_back_is_reported(tmp_path: Path) -> None:
    published = {
        key: Published(
            published=name,
            identity=key,
            sample=sample,
            committed_at_s=0.0,
            seconds=0.1,
            rows=1,
            bytes=1,
        )
        for key, name, sample in (("a", "base", 1), ("b", "delta-1", 2))
    }

    def asked(*identities: str) -> dict[str, Asked]:
        one = Asked()
        for at, identity in enumerate(identities):
            answer = Answer(at_s=at + 1.0, seconds=0.01, identity=identity, logit=[0.1, 0.2])
            one.add([0.0, 1.0], answer)
        return {"fresh_1": one}

    facts = report(tmp_path, asked("a", "b", "b"), published, 0.0)
    assert facts["servers"][0]["first_answer_s_max"] == 2.0
    assert facts["servers"][0]["generations"] == 2
    with pytest.raises(tb.TierbedError, match="went back"):
        report(tmp_path, asked("b", "a"), published, 0.0)
    with pytest.raises(tb.TierbedError, match="never published"):
        report(tmp_path, asked("a", "c"), published, 0.0)


@pytest.mark.timeout(300)
def test_servers_that_follow_know_the_newest_items(tmp_path: Path) -> None:
    options = OnlineOptions(
        out=tmp_path / "online",
        seconds=10,
        publish_s=1,
        first_samples=20_000,
        item_life=8_000,
        users=5_000,
        items=200_000,
    )
    facts = run_online(options)
    told = json.loads((options.out / "report.json").read_text())
    assert told == facts
    servers = {one["server"]: one for one in facts["servers"]}
    assert all(one["failed"] == 0 for one in servers.values())
    stale = servers["first_snapshot"]
    assert stale["generations"] == 1
    for name in ("fresh_1", "fresh_2"):
        assert servers[name]["generations"] > 2
    assert facts["logit_error_max"] <= 1e-5
    assert (options.out / "report.png").read_bytes().startswith(b"\x89PNG")
    # A trainer that falls behind its stream has not seen the newest items, however it is followed.
    if facts["samples_behind_max"] > options.samples_per_s:
        pytest.skip(f"the trainer fell {facts['samples_behind_max']:,} samples behind its stream")
    for name in ("fresh_1", "fresh_2"):
        assert servers[name]["auc_second_half"] > stale["auc_second_half"] + 0.03
