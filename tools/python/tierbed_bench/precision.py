"""What do fewer bytes per row cost: in error, in time to decode, in AUC?

Three parts. *Rows*: how far decoded rows are from what they were, for normal rows of two sizes,
and for the tables of the model below. *Decode*: GB/s of f32 that leave each codec when codes and
output stay in the cache, interleaved, next to copying f32 rows. *Scores*: a DLRM is trained on a
log; then its tables are encoded and decoded, and the samples behind are scored with what came
back. Among these, plans that keep all rows in memory and read nothing: the most used rows in more
bytes, all others in a product code or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from json import loads
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tierbed._util.progress import Progress
from tierbed._util.report import print_table, write_json
from tierbed.codec import CODECS, Codec, train_product
from tierbed.data.source import DataOptions, Source, open_source
from tierbed.recipes.run import EVAL_BATCH, Run, TrainOptions, auto_batch_size
from tierbed_bench.common import ratio
from tierbed_bench.suite import write_suite

__all__ = ["DIM", "PrecisionOptions", "open_samples", "run_precision", "use_counts"]

DIM = 32
DECODED_ROWS = 2048
# Bytes that finding a row of a smaller tier costs beside its code: index and score.
METADATA_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """What to run.

    Args:
        log: Criteo file to train and score on; else generated samples.
        eval_share: Share of the samples, the last ones, that are scored.
        quick: Fewer samples and rounds.
        seed: Of generated samples and initial weights.
    """

    log: Path | None = None
    eval_share: float = 0.2
    quick: bool = False
    seed: int = 1


@dataclass(frozen=True)
class Plan:
    """Who is kept how: the most used rows in one codec, the others in a second one.

    Args:
        name: As rows of the result spell it.
        head_share: Share of all rows of the model that count as most used.
        head: Codec of those.
        tail: Codec of the others; ``product4`` trains 4 bytes per row, ``mean`` keeps one mean row
            per table instead of all of them.
    """

    name: str
    head_share: float
    head: str
    tail: str


PLANS = (
    Plan("gauss4_3pct_product2", 0.03, "gauss4", "product2"),
    Plan("int8_3pct_product4", 0.03, "int8", "product4"),
    Plan("int8_10pct_mean", 0.10, "int8", "mean"),
    Plan("gauss4_10pct_mean", 0.10, "gauss4", "mean"),
)


def run_precision(out: Path, options: PrecisionOptions, json: Path | str | None = None) -> Path:
    """Runs the suite; writes ``precision.json`` and ``precision.png`` to ``out``."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    rows = [*_errors(options.seed), *_speeds(options)]
    with TemporaryDirectory(dir=out) as folder:
        rows += _scores(Path(folder), options)
    gbps = {row["codec"]: row["decode_gbps"] for row in rows if row["part"] == "decode"}
    ratios = {f"{name}_vs_copy": ratio(gbps[name], gbps["f32"]) for name in gbps if name != "f32"}
    _print(rows)
    told = {"dim": DIM, "log": str(options.log) if options.log else "generated"}
    path = write_suite(out, "precision", rows, ratios, lambda figure: _draw(figure, rows), told)
    if json is not None:
        write_json(json, loads(path.read_text()))
    return path


def _errors(seed: int) -> Iterator[dict[str, Any]]:
    """Yields one row per codec and kind of rows."""
    generator = torch.Generator().manual_seed(seed)
    kinds = {
        "normal_0.1": torch.randn(20_000, DIM, generator=generator) * 0.1,
        "uniform_3e-4": (torch.rand(20_000, DIM, generator=generator) - 0.5) * 6.2e-4,
    }
    for name in CODECS:
        codec = Codec(name, DIM)
        for kind, values in kinds.items():
            yield {
                "part": "rows",
                "codec": name,
                "values": kind,
                "code_bytes": codec.code_bytes,
                "relative_error": codec.relative_error(values),
            }


def _speeds(options: PrecisionOptions) -> list[dict[str, Any]]:
    """Measures all codecs in turn, round after round; medians."""
    generator = torch.Generator().manual_seed(options.seed)
    values = torch.randn(4 * DECODED_ROWS, DIM, generator=generator) * 0.1
    asked = torch.randint(values.shape[0], (DECODED_ROWS,), generator=generator)
    place = torch.empty(DECODED_ROWS, DIM)
    codecs = [Codec(name, DIM) for name in CODECS]
    codecs += [train_product(values, parts, rounds=2) for parts in (4, 8)]
    codes = [codec.encode(values) for codec in codecs]
    calls = 100 if options.quick else 400
    seconds: list[list[float]] = [[] for _ in codecs]
    for _ in range(5 if options.quick else 15):
        for codec, coded, taken in zip(codecs, codes, seconds, strict=True):
            started_s = time.perf_counter()
            codec.native.decode(coded, asked, place, calls)
            taken.append(time.perf_counter() - started_s)
    out_bytes = 4 * DIM * DECODED_ROWS * calls
    return [
        {
            "part": "decode",
            "codec": f"product{codec.code_bytes}" if codec.name == "product" else codec.name,
            "code_bytes": codec.code_bytes,
            "decode_gbps": out_bytes / median(taken) / 1e9,
            "rows_per_s": DECODED_ROWS * calls / median(taken),
        }
        for codec, taken in zip(codecs, seconds, strict=True)
    ]


# ---------------------------------------------------------------- scores


def _scores(folder: Path, options: PrecisionOptions) -> list[dict[str, Any]]:
    source = open_samples(folder, options)
    train = TrainOptions(
        embedding_dim=DIM,
        batch_size=auto_batch_size(source.train_samples),
        seed=options.seed,
    )
    run = Run(
        folder / "run",
        source,
        train,
        source.train_samples,
        store_options={"backend": "memory", "dram_budget": "8GiB"},
    )
    try:
        run.train()
        return _score_all(run, source)
    finally:
        run.close()


def open_samples(folder: Path, options: PrecisionOptions) -> Source:
    """Opens the samples of the options; their vocabulary goes to ``folder``."""
    if options.log is not None:
        data = DataOptions(
            paths=(str(options.log),),
            eval_share=options.eval_share,
            samples=20_000 if options.quick else None,
        )
    else:
        data = DataOptions(
            format="synthetic",
            samples=20_000 if options.quick else 100_000,
            eval_share=options.eval_share,
            seed=options.seed,
        )
    return open_source(data, folder / "vocabulary")


def _score_all(run: Run, source: Source) -> list[dict[str, Any]]:
    tables = {
        name: run.store.read_rows(name, 0, count) for name, count in source.table_sizes.items()
    }
    counts = use_counts(source, tables)
    f32_bytes = sum(values.numel() * 4 for values in tables.values())
    exact = run.evaluate(source.eval_samples)
    whole = [(name, _whole(name)) for name in CODECS[1:]]
    plans = [(plan.name, _planned(plan, counts, tables)) for plan in PLANS]
    rows = [_score_row("f32", exact, exact, f32_bytes, f32_bytes, 0.0)]
    with Progress("scoring", len(whole) + len(plans), "codecs") as bar:
        for name, change in [*whole, *plans]:
            kept_bytes = 0
            errors = norms = 0.0
            for table, values in tables.items():
                found, table_bytes = change(table, values)
                kept_bytes += table_bytes
                weight = counts[table][:, None]
                errors += float(((values - found).double().pow(2) * weight).sum())
                norms += float((values.double().pow(2) * weight).sum())
                run.store.write_rows(table, 0, found)
            scored = run.evaluate(source.eval_samples)
            rows.append(
                _score_row(name, scored, exact, kept_bytes, f32_bytes, (errors / norms) ** 0.5)
            )
            bar.advance(1)
    return rows


Change = Callable[[str, Tensor], tuple[Tensor, int]]


def use_counts(source: Source, tables: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns how often the training samples used each row, ``[N]`` per table."""
    counts = {name: torch.zeros(values.shape[0]) for name, values in tables.items()}
    for batch in source.batches(0, source.train_samples, EVAL_BATCH):
        for name, jagged in batch.sparse.to_dict().items():
            ids = jagged.values()
            counts[name].index_add_(0, ids, torch.ones(ids.numel()))
    return counts


def _whole(name: str) -> Change:
    def change(_: str, values: Tensor) -> tuple[Tensor, int]:
        codec = Codec(name, values.shape[1])
        return codec.decode(codec.encode(values)), codec.code_bytes * values.shape[0]

    return change


def _planned(plan: Plan, counts: dict[str, Tensor], tables: dict[str, Tensor]) -> Change:
    every = torch.cat(list(counts.values()))
    least = every.topk(max(1, int(plan.head_share * every.numel()))).values[-1]
    # At the threshold itself many rows tie: they stay in the tail, so that the budget holds.
    is_head = {name: used > least for name, used in counts.items()}
    tail = None if plan.tail == "mean" else _tail_codec(plan.tail, counts, tables, is_head)
    # One codebook serves all tables; its bytes are charged to the first.
    first = next(iter(tables))

    def change(table: str, values: Tensor) -> tuple[Tensor, int]:
        kept_bytes = 0
        if tail is None:
            weights = counts[table].masked_fill(is_head[table], 0.0) + 1e-3
            mean = (values * weights[:, None]).sum(0) / weights.sum()
            found = mean.expand_as(values).clone()
            kept_bytes += 4 * values.shape[1]
        else:
            found = tail.decode(tail.encode(values))
            kept_bytes += tail.code_bytes * values.shape[0]
            kept_bytes += 4 * 256 * values.shape[1] if table == first else 0
        head = Codec(plan.head, values.shape[1])
        chosen = is_head[table]
        if bool(chosen.any()):
            found[chosen] = head.decode(head.encode(values[chosen]))
        kept_bytes += int(chosen.sum()) * (head.code_bytes + METADATA_BYTES)
        return found, kept_bytes

    return change


def _tail_codec(
    tail: str, counts: dict[str, Tensor], tables: dict[str, Tensor], is_head: dict[str, Tensor]
) -> Codec:
    rows = torch.cat([values[~is_head[name]] for name, values in tables.items()])
    weights = torch.cat([used[~is_head[name]] for name, used in counts.items()]) + 0.1
    return train_product(rows, int(tail.removeprefix("product")), weights=weights)


def _score_row(
    name: str,
    found: dict[str, float],
    exact: dict[str, float],
    kept_bytes: int,
    f32_bytes: int,
    error: float,
) -> dict[str, Any]:
    return {
        "part": "scores",
        "codec": name,
        "relative_error_by_use": error,
        "dram_bytes": kept_bytes,
        "dram_share": kept_bytes / f32_bytes,
        "reads_per_request": 0,
        "auc": found["auc"],
        "auc_change": found["auc"] - exact["auc"],
        "pr_auc": found["pr_auc"],
        "pr_auc_change": found["pr_auc"] - exact["pr_auc"],
    }


# ---------------------------------------------------------------- results


def _print(rows: list[dict[str, Any]]) -> None:
    columns = {
        "rows": ("codec", "values", "code_bytes", "relative_error"),
        "decode": ("codec", "code_bytes", "decode_gbps", "rows_per_s"),
        "scores": ("codec", "dram_share", "relative_error_by_use", "auc_change", "pr_auc_change"),
    }
    for part, names in columns.items():
        print_table(part, [row for row in rows if row["part"] == part], names)


def _draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2)
    for kind in ("normal_0.1", "uniform_3e-4"):
        chosen = [row for row in rows if row["part"] == "rows" and row["values"] == kind]
        chosen = [row for row in chosen if row["relative_error"] > 0]
        left.scatter(
            [row["code_bytes"] for row in chosen],
            [row["relative_error"] for row in chosen],
            label=kind,
        )
        for row in chosen:
            left.annotate(row["codec"], (row["code_bytes"], row["relative_error"]), fontsize=7)
    left.set(yscale="log", xlabel=f"bytes of a row of {DIM}", ylabel="relative error")
    left.legend()
    scored = [row for row in rows if row["part"] == "scores"]
    right.barh([row["codec"] for row in scored], [row["auc_change"] for row in scored])
    right.set(xlabel="change of AUC")
