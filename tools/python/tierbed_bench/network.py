"""What crosses the network when ranks of several hosts train, next to what must.

Hosts are made of namespaces (`scripts/hosts`), and bytes are those of their interfaces, headers and
acknowledgements in them. The kernel counts a burst of frames with one header. Tables are divided by
rows and ids are skewed, so that the ranks of a host ask for the same rows. What must cross between
two hosts is: each id to its holder in 4 bytes, each row once, and a gradient for each bag that has
a row there.

Ids are compared with an exchange that gathers all of them on every rank, 16 bytes for an id and its
bag, counted between hosts only. Where TorchRec is installed, its ranks look up beside ours
(``network_torchrec.py``). Whole steps of a DLRM follow (``network_scaling.py``), and ranks whose
memory holds few of their rows (``network_lookahead.py``).
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierbed as tb
from tierbed import dist as tbd
from tierbed._util.report import print_table, write_json
from tierbed.config.words import Positive
from tierbed.errors import UnsupportedError
from tierbed_bench.hosts import hosts, sent_bytes, why_no_hosts
from tierbed_bench.network_lookahead import LookaheadOptions, run_lookahead
from tierbed_bench.network_scaling import ScalingOptions, run_scaling
from tierbed_bench.network_torchrec import PeerOptions, peer_row, time_both
from tierbed_bench.suite import write_suite

__all__ = ["NetworkOptions", "run_network"]

HOSTS = 2
WARM_STEPS = 2
GATHERED_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """What hosts train.

    Args:
        tables: Tables, one feature each.
        rows: Rows of a table.
        dim: Elements of a row.
        batch: Samples of a rank and step.
        steps: Steps that count.
        local_ranks: Ranks of each host.
        skew: Ids are ``rows * u ** skew`` for a uniform ``u``: more is more skewed.
        rate: Of the links where TorchRec is beside; bytes are counted without a limit.
        rounds: Rounds of each system there.
        quick: Small sizes.
        seed: Of the ids.
    """

    tables: Positive = 26
    rows: Positive = 100_000
    dim: Positive = 64
    batch: Positive = 2048
    steps: Positive = 10
    local_ranks: Positive = 2
    skew: float = 3.0
    rate: str = "1gbit"
    rounds: Positive = 9
    quick: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        ids: Ids of a bag.
        window: Batches that are looked ahead.
    """

    ids: int
    window: int


CASES = (Case(1, 0), Case(1, 4), Case(4, 0))


def run_network(out: Path, options: NetworkOptions, json_path: Path | None = None) -> Path:
    """Runs the suite; writes ``network.json`` to ``out``.

    Raises:
        UnsupportedError: This machine makes no hosts; the error says what is missing.
    """
    if (why := why_no_hosts()) is not None:
        raise UnsupportedError(f"bench network: {why}")
    if options.quick:
        small = {"tables": 4, "rows": 5_000, "batch": 512, "steps": 3, "rounds": 1}
        options = NetworkOptions(**{**asdict(options), **small})
    rows = []
    with hosts(HOSTS) as made, tempfile.TemporaryDirectory() as folder:
        for at, case in enumerate(CASES):
            found = made.run(
                count_bytes,
                options,
                case,
                folder=Path(folder) / str(at),
                local_ranks=options.local_ranks,
                limit_s=600,
            )
            rows.append(_row(case, found, options))
    print_table("bytes between two hosts, a step", rows)
    beside = _beside_torchrec(options)
    ratios = {
        f"{row['ids_per_bag']}_ids_window_{row['window']}_{what}": row[what]
        for row in rows
        for what in ("wire_vs_least", "ids_vs_gathered")
    }
    scaled = run_scaling(_scaling_options(options))
    print_table("whole steps of a DLRM", scaled)
    for row in scaled:
        ratios[f"two_hosts_vs_one_core_{row['dtype']}"] = row["scaling"]
    for row in beside:
        for what in ("time_ratio", "cpu_ratio"):
            ratios[f"{row['ids_per_bag']}_ids_beside_torchrec_{what}"] = row[what]
    ahead = run_lookahead(_lookahead_options(options))
    print_table("two ranks of a host, with few rows in memory", ahead)
    for row in ahead[1:]:
        ratios[f"ranks_{row['way']}_vs_on_demand"] = row["vs_on_demand"]
    told = {**asdict(options), "torchrec": beside, "scaling": scaled, "lookahead": ahead}
    path = write_suite(out, "network", rows, ratios, None, told)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _scaling_options(options: NetworkOptions) -> ScalingOptions:
    if options.quick:
        return ScalingOptions(tables=4, rows=5_000, batch=128, steps=2, rounds=1)
    return ScalingOptions(seed=options.seed)


def _lookahead_options(options: NetworkOptions) -> LookaheadOptions:
    if options.quick:
        small = {"tables": 4, "rows": 20_000, "batch": 64, "steps": 6, "rounds": 1}
        return LookaheadOptions(dram_share=0.3, **small)
    return LookaheadOptions(seed=options.seed)


def _beside_torchrec(options: NetworkOptions) -> list[dict[str, Any]]:
    if importlib.util.find_spec("torchrec") is None:
        print("TorchRec is not installed: make framework-deps")
        return []
    rows = []
    for ids in (1, 4):
        own = PeerOptions(
            tables=options.tables,
            rows=min(options.rows, 50_000),
            dim=options.dim,
            ids=ids,
            rounds=options.rounds,
            seed=options.seed,
        )
        with hosts(HOSTS, rate=options.rate) as made, tempfile.TemporaryDirectory() as folder:
            found = made.run(time_both, own, folder=Path(folder) / "ranks", limit_s=600)
        rows.append(peer_row(own, found, options.rate))
    print_table("a step of two hosts, of one rank each", rows)
    return rows


def _row(case: Case, found: list[dict[str, int]], options: NetworkOptions) -> dict[str, Any]:
    def total(what: str) -> float:
        return sum(of_rank[what] for of_rank in found) / options.steps

    # Of each host one rank looked at the interface.
    wire, least, gathered = total("wire"), total("least"), total("gathered")
    return {
        "ids_per_bag": case.ids,
        "window": case.window,
        "hosts": HOSTS,
        "ranks": HOSTS * options.local_ranks,
        "wire_bytes": wire,
        "least_bytes": least,
        "wire_vs_least": wire / least,
        "ids_bytes": total("ids"),
        "ids_vs_gathered": total("ids") / gathered,
        "vectors_bytes": total("vectors"),
        "gradients_bytes": total("gradients"),
    }


def count_bytes(options: NetworkOptions, case: Case) -> dict[str, int]:
    """Trains as one rank; returns what it sent, what had to be sent, and the host's bytes."""
    rank, count = dist.get_rank(), dist.get_world_size()
    names = [f"t{at}" for at in range(options.tables)]
    tables = [tb.EmbeddingBagConfig(options.rows, options.dim, name) for name in names]
    plan = tbd.ShardingPlan(count, {name: tbd.RowWise() for name in names})
    batches = [_batch(options, case, names, rank, step) for step in range(options.steps)]
    warm = [_batch(options, case, names, rank, -1 - step) for step in range(WARM_STEPS)]
    least = _least(options, [batch.values() for batch in batches])
    with tb.Store.open(backend="memory", dram_budget="4GiB") as store:
        rows = tbd.ShardedEmbeddingBagCollection(tables, store=store, plan=plan, optimizer=tb.SGD())
        with rows:
            _train(rows, warm, case.window)
            before = rows.sent_bytes()
            dist.barrier()
            wire = sent_bytes()
            _train(rows, batches, case.window)
            dist.barrier()
            wire = sent_bytes() - wire
            sent = {kind: bytes_ - before[kind] for kind, bytes_ in rows.sent_bytes().items()}
    is_first = rank % options.local_ranks == 0
    others = count - options.local_ranks
    gathered = sum(batch.values().numel() for batch in batches) * GATHERED_BYTES * others
    return {**sent, "wire": wire if is_first else 0, "least": least, "gathered": gathered}


def _train(rows: tbd.ShardedEmbeddingBagCollection, batches: Any, window: int) -> None:
    for batch in tb.lookahead(batches, rows, window=window):
        torch.autograd.backward(rows(batch).values().sum())


def _batch(
    options: NetworkOptions, case: Case, names: list[str], rank: int, step: int
) -> tb.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(hash((options.seed, rank, step)) & 0xFFFF_FFFF)
    count = options.tables * options.batch * case.ids
    ids = (torch.rand(count, generator=generator) ** options.skew * options.rows).long()
    lengths = torch.full((options.tables * options.batch,), case.ids)
    return tb.KeyedJaggedTensor(names, ids, lengths=lengths)


def _least(options: NetworkOptions, own: list[torch.Tensor]) -> int:
    """Returns what the rail of this rank must send, in all steps.

    It asks the holders on its rail for the rows of all ranks of its host, and answers those that
    ask it.
    """
    rank, count, local = dist.get_rank(), dist.get_world_size(), options.local_ranks
    told: list[list[torch.Tensor]] = [[] for _ in range(count)]
    dist.all_gather_object(told, own)
    bounds = [at * options.rows // count for at in range(count + 1)]
    vector_bytes = 4 * options.dim
    needed = 0
    for host in range(count // local):
        if host == rank // local:
            continue
        peer = host * local + rank % local
        for step in range(len(own)):
            asked = _held(told, step, rank // local, local, options, bounds, peer)
            needed += 4 * asked["ids"] + vector_bytes * asked["bags"]
            needed += vector_bytes * _held(told, step, host, local, options, bounds, rank)["rows"]
    return needed


def _held(
    told: list[list[torch.Tensor]],
    step: int,
    host: int,
    local: int,
    options: NetworkOptions,
    bounds: list[int],
    holder: int,
) -> dict[str, int]:
    """Counts ids, distinct rows and bags of a host that a rank holds."""
    parts = [told[rank][step] for rank in range(host * local, (host + 1) * local)]
    ids = torch.stack([part.view(options.tables, options.batch, -1) for part in parts])
    is_held = (ids >= bounds[holder]) & (ids < bounds[holder + 1])
    rows = 0
    for table in range(options.tables):
        rows += torch.unique(ids[:, table][is_held[:, table]]).numel()
    return {"ids": int(is_held.sum()), "rows": rows, "bags": int(is_held.any(dim=-1).sum())}
