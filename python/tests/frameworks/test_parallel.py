"""Dense parts over ranks by torch's own means, beside a collection divided over the same ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import tierbed as tb

# Two processes that import torch, on a machine that may be busy.
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

ROWS, DIM, SAMPLES, BATCH, EPOCHS, RANKS = 60, 4, 48, 4, 2, 2
KINDS = ["ddp", "fsdp", "compiled"]
# Float32 sums over ranks in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def collate(samples: list[int]) -> tuple[tb.KeyedJaggedTensor, Tensor]:
    ids = torch.tensor(samples).repeat(2) * 7 % ROWS
    lengths = torch.full((2 * len(samples),), 1, dtype=torch.int64)
    bags = tb.KeyedJaggedTensor(["user", "item"], ids, lengths=lengths)
    return bags, (torch.tensor(samples) % 3 == 0).float()


def loader(rank: int, epoch: int, workers: int = 0) -> DataLoader[int]:
    samples: Any = list(range(SAMPLES))
    sampler: Any = DistributedSampler(samples, RANKS, rank, shuffle=True, seed=3)
    sampler.set_epoch(epoch)
    return DataLoader(samples, BATCH, sampler=sampler, collate_fn=collate, num_workers=workers)


def tables() -> list[tb.EmbeddingBagConfig]:
    return [
        tb.EmbeddingBagConfig(ROWS, DIM, name, init=tb.Normal(std=0.5)) for name in ("user", "item")
    ]


def dense() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2 * DIM, 8), nn.ReLU(), nn.Linear(8, 1))


def loss_of(top: nn.Module, pooled: Tensor, label: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(top(pooled).squeeze(1), label)


class Whole(nn.Module):
    """A model with its collection, as DistributedDataParallel wraps one."""

    def __init__(self, emb: nn.Module, top: nn.Module) -> None:
        super().__init__()
        self.emb, self.top = emb, top

    def forward(self, bags: Any, label: Tensor) -> Tensor:
        pooled = self.emb(bags).values()
        # As DistributedDataParallel does with dense gradients: the mean over ranks.
        pooled.register_hook(lambda grad: grad / RANKS)
        return loss_of(self.top, pooled, label)


def wrapped(kind: str, model: Whole) -> nn.Module:
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model.top:  # type: ignore[union-attr]
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model.top, mesh=mesh)
        return model
    if kind == "compiled":
        model.top = torch.compile(model.top, backend="aot_eager")  # type: ignore[assignment]
    return nn.parallel.DistributedDataParallel(model)


def train_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS
    )
    for kind in KINDS:
        train_kind(kind, rank, folder / kind)
    torch.distributed.destroy_process_group()


def train_kind(kind: str, rank: int, folder: Path) -> None:
    with tb.Store.open(folder / f"store{rank}", backend="file", dram_budget="16MiB") as store:
        emb = tb.dist.ShardedEmbeddingBagCollection(
            tables(), store=store, optimizer=tb.Adagrad(lr=0.1)
        )
        top = dense()
        model = wrapped(kind, Whole(emb, top))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(EPOCHS):
            for bags, label in loader(rank, epoch, workers=1 if kind == "ddp" else 0):
                optimizer.zero_grad()
                model(bags, label).backward()
                optimizer.step()
        found = [getattr(one, "full_tensor", lambda one=one: one)() for one in top.parameters()]
        emb.save(folder / "saved")
        if rank == 0:
            torch.save([one.detach() for one in found], folder / "dense.pt")
        emb.close()


def in_one_process() -> tuple[list[Tensor], list[Tensor]]:
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        emb = tb.EmbeddingBagCollection(tables(), store=store, optimizer=tb.Adagrad(lr=0.1))
        top = dense()
        optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
        for epoch in range(EPOCHS):
            parts = [list(loader(rank, epoch).batch_sampler) for rank in range(RANKS)]  # type: ignore[arg-type]
            for samples in zip(*parts, strict=True):
                bags, label = collate([at for part in samples for at in part])
                optimizer.zero_grad()
                loss_of(top, emb(bags).values(), label).backward()
                optimizer.step()
        rows = [store.read_rows(name, 0, ROWS) for name in ("user", "item")]
        return rows, [one.detach() for one in top.parameters()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two ranks trained, by kind."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        told = [rank.communicate(timeout=500)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(told)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_part_and_the_rows_follow_one_process(kind: str, trained: Path) -> None:
    rows, parameters = in_one_process()
    for ours, theirs in zip(torch.load(trained / kind / "dense.pt"), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    (rank,) = tb.dist.local_ranks(1)
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        emb = tb.dist.ShardedEmbeddingBagCollection(
            tables(), store=store, ranks=rank, optimizer=tb.Adagrad(lr=0.1)
        )
        emb.load(trained / kind / "saved")
        for name, theirs in zip(("user", "item"), rows, strict=True):
            torch.testing.assert_close(store.read_rows(name, 0, ROWS), theirs, **TOLERANCE)
        emb.close()


if __name__ == "__main__":
    train_rank(int(sys.argv[1]), Path(sys.argv[2]))
