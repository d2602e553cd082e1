"""What does a training step cost with tables on disk, next to tables in memory?

Systems: the ``file`` store with io_uring and with the pread pool, the ``memory`` store, and
``torch.nn.EmbeddingBag(sparse=True)`` with ``torch.optim`` in memory (one thread). A step is a
lookup, a backward pass of the sum, and the optimizer; no dense model, which would hide it.
Every row is on disk before the first step, and no round repeats the batches of another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierbed.bench.common import Measured, counts, flat_counters, interleave, ratio, zipf_batches
from tierbed.config import EmbeddingBagConfig, Uniform
from tierbed.lookahead import lookahead
from tierbed.nn import EmbeddingBagCollection
from tierbed.optim import Adagrad
from tierbed.plan import TableShape
from tierbed.report import print_table, write_suite
from tierbed.sparse import KeyedJaggedTensor
from tierbed.store import Store

__all__ = ["run_training"]


Rounds = list[list[KeyedJaggedTensor]]


@dataclass(frozen=True)
class _Size:
    features: dict[str, int]
    dim: int
    batch_size: int
    steps: int
    rounds: int
    budget_share: float = 0.1
    window: int = 16


_QUICK = _Size({f"c{at}": 200_000 for at in range(4)}, 16, 512, 40, 5)
_FULL = _Size({f"c{at}": 2_000_000 for at in range(8)}, 36, 2048, 60, 5)


def run_training(out: Path, quick: bool, seed: int = 1) -> Path:
    """Runs the suite and writes ``training.json`` and ``training.png`` to ``out``."""
    size = _QUICK if quick else _FULL
    torch.set_num_threads(1)
    shapes = [TableShape(name, rows, size.dim, "adagrad") for name, rows in size.features.items()]
    table_bytes = sum(shape.row_count * shape.record_bytes for shape in shapes)
    rounds = [
        zipf_batches(size.features, size.batch_size, size.steps, seed=seed + number)
        for number in range(size.rounds + 1)
    ]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=_scratch(out))))
        systems = [
            _stored(stack, "memory_store", size, rounds, backend="memory", budget=2 * table_bytes),
            *(
                _stored(
                    stack,
                    f"file_store_{engine}",
                    size,
                    rounds,
                    path=folder / engine,
                    io_engine=engine,
                    budget=int(size.budget_share * table_bytes),
                )
                for engine in ("io_uring", "pread")
            ),
            *(
                _stored(
                    stack,
                    name,
                    size,
                    rounds,
                    path=folder / name,
                    backend=backend,
                    budget=int(size.budget_share * table_bytes),
                )
                for name, backend in (("recdb", "lsm"), ("plain_lsm", "lsm_plain"))
            ),
            _torch_bags(size, rounds),
        ]
        known = [system for system in systems if system is not None]
        interleave(known, size.rounds)
    rows = [_row(system, size, table_bytes) for system in known]
    return _write(out, rows)


def _scratch(out: Path) -> Path:
    # Beside the results: the system's temporary folder may be memory.
    out.mkdir(parents=True, exist_ok=True)
    return out


def _stored(
    stack: ExitStack,
    name: str,
    size: _Size,
    rounds: Rounds,
    *,
    budget: int,
    path: Path | None = None,
    backend: str = "file",
    io_engine: str = "auto",
) -> Measured | None:
    try:
        store = Store.open(path, dram_budget=budget, backend=backend, io_engine=io_engine, seed=1)
    except (OSError, NotImplementedError) as error:
        print(f"{name} is left out: {error}")
        return None
    stack.callback(store.close)
    emb = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=feature,
                num_embeddings=rows,
                embedding_dim=size.dim,
                init=Uniform(-0.01, 0.01),
            )
            for feature, rows in size.features.items()
        ],
        store=store,
        optimizer=Adagrad(lr=0.01),
    )

    _write_all_rows(store, size)

    def run(number: int) -> None:
        for batch in lookahead(rounds[number], emb, window=size.window, key=lambda bags: bags):
            emb(batch).values().sum().backward()

    return Measured(
        name,
        run,
        {"dram_budget_bytes": budget},
        lambda: flat_counters(store.stats()),
    )


def _write_all_rows(store: Store, size: _Size) -> None:
    step = 65536
    for name, rows in size.features.items():
        for first in range(0, rows, step):
            store.write_rows(name, first, store.read_rows(name, first, min(step, rows - first)))
    store.checkpoint("all rows", capture_rng=False)


def _torch_bags(size: _Size, rounds: Rounds) -> Measured:
    bags = torch.nn.ModuleDict(
        {
            feature: torch.nn.EmbeddingBag(rows, size.dim, mode="sum", sparse=True)
            for feature, rows in size.features.items()
        }
    )
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.01)
    inputs = [
        [
            [(key, batch[key].values(), batch[key].offsets()[:-1]) for key in batch.keys()]
            for batch in batches
        ]
        for batches in rounds
    ]

    def run(number: int) -> None:
        for batch in inputs[number]:
            out = torch.cat([bags[key](ids, offsets) for key, ids, offsets in batch], dim=1)
            optimizer.zero_grad()
            out.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return Measured("torch_embedding_bag", run)


def _row(system: Measured, size: _Size, table_bytes: int) -> dict[str, Any]:
    steps = size.steps
    samples = steps * size.batch_size
    ids = samples * len(size.features)
    growth = system.growth
    return {
        "system": system.name,
        "threads": 1,
        "features": len(size.features),
        "dim": size.dim,
        "batch_size": size.batch_size,
        "steps": steps,
        "rounds": size.rounds,
        "table_bytes": table_bytes,
        **system.parameters,
        **{f"{name}_per_step": value / steps for name, value in counts(growth).items()},
        "ms_per_step": 1e3 * system.median_s / steps,
        "samples_per_s": samples / system.median_s,
        "ids_per_s": ids / system.median_s,
    }


def _write(out: Path, rows: Sequence[dict[str, Any]]) -> Path:
    speed = {row["system"]: row["samples_per_s"] for row in rows}
    ratios = {
        f"{name}_vs_{baseline}": ratio(speed[name], speed[baseline])
        for name in speed
        for baseline in ("memory_store", "torch_embedding_bag", "plain_lsm")
        if name != baseline
    }
    columns = [name for row in rows for name in row]
    shown = [name for name in dict.fromkeys(columns) if _is_shown(name)]
    print_table("training: one step of lookup, backward and optimizer", rows, shown)
    told = [{"ratio": name, "value": value} for name, value in ratios.items()]
    print_table("ratios of samples per second", told)
    return write_suite(out, "training", rows, ratios, _bars(rows))


def _is_shown(name: str) -> bool:
    wanted = ("system", "dram_budget_bytes", "ms_per_step", "samples_per_s")
    return name in wanted or name in (
        "buffer_hit_count_per_step",
        "buffer_miss_count_per_step",
        "store_pages_read_per_step",
        "store_io_read_bytes_per_step",
        "store_io_write_bytes_per_step",
    )


def _bars(rows: Sequence[dict[str, Any]]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        names = [row["system"].replace("_", " ") for row in rows]
        axes.barh(names, [row["samples_per_s"] for row in rows], color="#3b6ea5")
        axes.invert_yaxis()
        axes.set_xlabel("samples per second (one thread, median of rounds)")
        axes.set_title("Training step: lookup + backward + optimizer")

    return draw
