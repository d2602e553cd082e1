"""Lookups of rows on a device, in Triton's interpreter: `python hot_cases.py`."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

import tierbed as tb
from tierbed.testing import random_bags

SIZES = {"a": 300, "b": 200, "c": 100}
DIMS = {"a": 8, "b": 8, "c": 5}
FEATURES = {"a": 300, "a2": 300, "b": 200, "c": 100}
OF = ["a", "a", "b", "c"]
BATCH = 7


def published(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(2)
    rows = {n: torch.randn(SIZES[n], DIMS[n], generator=generator) for n in SIZES}
    tb.placement.import_tables(rows, folder / "snapshot")
    return folder / "snapshot"


def counts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randint(0, 100, (rows,), generator=generator) for n, rows in SIZES.items()}


def batch(seed: int, is_weighted: bool = False) -> tb.KeyedJaggedTensor:
    return random_bags(FEATURES, BATCH, seed=seed, is_weighted=is_weighted)


def budget_for(rows: int, misses_max: int) -> int:
    return rows * 8 * 4 + 4 * misses_max * sum(set(DIMS.values()))


def hot(rows: int = 150, misses_max: int = 400, **more: Any) -> tb.HotRows:
    return tb.HotRows(
        counts=more.pop("counts", counts()),
        budget=budget_for(rows, misses_max),
        misses_max=misses_max,
    )


def check_equal(path: Path) -> None:
    """Lookups have the bits of the host, of whatever rows are on the device."""
    with tb.Snapshot.open(path) as host:
        for rows in (1, 150, 10_000):
            with tb.Snapshot.open(path, device="cpu", hot=hot(rows)) as device:
                for pooling in ("sum", "mean"):
                    for is_weighted in (False, True):
                        bags = batch(rows, is_weighted)
                        wanted = host.lookup(bags, pooling, OF).values()
                        assert torch.equal(device.lookup(bags, pooling, OF).values(), wanted)
                found = device.stats()["device"]
                if rows == 10_000:
                    used = sum(int((count > 0).sum()) for count in counts().values())
                    assert found["row_count"] == used
                assert (found["hits"] > 0) == (rows > 1)
                assert (found["misses"] > 0) == (rows < 10_000)
                assert found["host_lookups"] == 0


def check_modules(path: Path) -> None:
    """Collections over the snapshot use the rows on the device, pooled or not."""
    bag_configs = [
        tb.EmbeddingBagConfig(
            name=name,
            num_embeddings=SIZES[name],
            embedding_dim=DIMS[name],
            feature_names=["a", "a2"] if name == "a" else [name],
            pooling="mean" if name == "b" else "sum",
        )
        for name in SIZES
    ]
    configs = [
        tb.EmbeddingConfig(name=name, num_embeddings=SIZES[name], embedding_dim=8)
        for name in ("a", "b")
    ]
    with (
        tb.Snapshot.open(path) as host,
        tb.Snapshot.open(path, device="cpu", hot=hot()) as device,
    ):
        stores = (host, device)
        one, other = (tb.EmbeddingBagCollection(bag_configs, store=at) for at in stores)
        assert torch.equal(one(batch(1)).values(), other(batch(1)).values())
        one, other = (tb.EmbeddingCollection(configs, store=at) for at in stores)
        bags = batch(2).select(["a", "b"])
        for name in ("a", "b"):
            assert torch.equal(one(bags)[name].values(), other(bags)[name].values())
        assert device.stats()["device"]["host_lookups"] == 0


def check_host_lookups(path: Path) -> None:
    """The host answers what has too many missing rows, and refuses wrong ids as always."""
    with (
        tb.Snapshot.open(path) as host,
        tb.Snapshot.open(path, device="cpu", hot=hot(10, misses_max=2)) as device,
    ):
        wanted = host.lookup(batch(4), tables=OF).values()
        assert torch.equal(device.lookup(batch(4), tables=OF).values(), wanted)
        assert device.stats()["device"]["host_lookups"] == 1
        for wrong in (-1, 300):
            bags = tb.KeyedJaggedTensor(["a"], torch.tensor([wrong]), lengths=torch.ones(1).long())
            messages = []
            for snapshot in (host, device):
                try:
                    snapshot.lookup(bags)
                except tb.InvalidError as error:
                    messages.append(str(error))
            assert len(messages) == 2, messages
            assert messages[0] == messages[1]
        empty = tb.KeyedJaggedTensor(["a"], torch.empty(0).long(), lengths=torch.zeros(3).long())
        assert torch.equal(device.lookup(empty).values(), torch.zeros(3, 8))


def check_threads(path: Path) -> None:
    """Lookups at the same time do not read each other's missing rows."""
    with (
        tb.Snapshot.open(path) as host,
        tb.Snapshot.open(path, device="cpu", hot=hot(20)) as device,
    ):
        wanted = [host.lookup(batch(seed), tables=OF).values() for seed in range(4)]
        found: dict[int, torch.Tensor] = {}

        def ask(seed: int) -> None:
            for _ in range(3):
                found[seed] = device.lookup(batch(seed), tables=OF).values()

        threads = [threading.Thread(target=ask, args=[seed]) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[seed], wanted[seed]) for seed in range(4))


def check_choice(path: Path) -> None:
    """The most used rows for their bytes are on the device, within the budget."""
    used = {name: torch.zeros(rows, dtype=torch.int64) for name, rows in SIZES.items()}
    used["a"][[7, 9]] = torch.tensor([80, 8])
    used["c"][3] = 60
    for rows, wanted in ((1, [3]), (2, [3, 7]), (5, [3, 7, 9])):
        given = tb.HotRows(counts=used, budget=rows * 32 + 4 * 5 * 13, misses_max=5)
        with tb.Snapshot.open(path, device="cpu", hot=given) as device:
            kept = device.device_rows
            slots = [kept._slots[device.table_id(name)] for name in ("a", "c")]
            rows_of = torch.cat([(slot >= 0).nonzero().view(-1) for slot in slots]).tolist()
            assert sorted(rows_of) == wanted, (rows, rows_of)
            assert device.stats()["device"]["bytes"] <= rows * 32 + 4 * 5 * 13


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = published(Path(folder))
        for check in (check_equal, check_modules, check_host_lookups, check_threads, check_choice):
            check(path)
            print(check.__name__)


if __name__ == "__main__":
    main()
