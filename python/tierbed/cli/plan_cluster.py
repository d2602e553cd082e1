"""``plan cluster``: hosts for serving and training, computed before they are bought."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed._util.bytes import parse_bytes
from tierbed._util.report import print_table, write_json
from tierbed.cli.fields import Fields
from tierbed.cli.options import JsonOut, shows_tables
from tierbed.cli.settings import Effective, numbers
from tierbed.config.words import NotNegative, Positive, Rate, Share, SizeText, WordsText
from tierbed.errors import InvalidError
from tierbed.sizing.inputs import Inputs, read_measured
from tierbed.sizing.serving import ServingPlan, least_shards, plan_freshness, plan_serving
from tierbed.sizing.training import TrainingPlan, least_hosts, plan_training

__all__ = ["plan_cluster"]

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The rows, and how much of them is in memory.

    Args:
        table: Bytes of all rows, as 10TB.
        dim: Elements of a row.
        element_bytes: Bytes of an element: 4 of f32, 2 of bf16, 1 of int8.
        ids: Ids of a sample.
        dram_share: Share of the rows' bytes in memory.
        index_bits: Bits of a row in the index.
        head_share: Share of the rows in the index, as --head-rows.
        replica_ratio: Replicas per row.
    """

    table: SizeText | None = None
    dim: Positive | None = None
    element_bytes: Rate | None = None
    ids: Positive | None = None
    dram_share: Share | None = None
    index_bits: Rate | None = None
    head_share: Share | None = None
    replica_ratio: Rate | None = None


@dataclass(frozen=True, kw_only=True)
class ServingInputs:
    """What is asked, and what an answer costs.

    Args:
        requests_per_s: Requests a second, at their peak.
        samples: Samples of a request, such as candidates that are ranked.
        request_bytes: Bytes of a request without its samples.
        answer_bytes: Bytes of an answer per sample.
        request_us: Microseconds of a core for a request.
        sample_us: Microseconds of a core for each sample.
        page_us: Microseconds of a core for each page that is read.
        rpc_us: Microseconds of a core for each shard that a request asks.
        pages: Pages that a sample reads; by default from --dram-share.
        utilization: Share of a resource that may be used; the rest is for peaks.
        shards: Parts of the rows, several by comma; auto is the fewest that fit.
        shards_per_request: Shards that a request asks; by default those of rows by hash.
        copies: Hosts that hold a row, at least.
    """

    requests_per_s: Rate | None = None
    samples: Positive | None = None
    request_bytes: Rate | None = None
    answer_bytes: Rate | None = None
    request_us: Rate | None = None
    sample_us: Rate | None = None
    page_us: Rate | None = None
    rpc_us: Rate | None = None
    pages: Rate | None = None
    utilization: Share | None = None
    shards: WordsText = AUTO
    shards_per_request: Rate | None = None
    copies: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class FreshInputs:
    """How rows that changed come to servers.

    Args:
        changed_rows_per_s: Rows that change in a second.
        publish_interval_s: Seconds between two deltas.
        poll_s: Seconds between two looks of a server.
        sync_gbit: Gbit/s that a download takes.
        verify_gb_per_s: GB/s of checksums that are verified.
        overlays: Deltas that a server keeps in front of its rows.
        overlay_row_bytes: Bytes of memory for a changed row of a delta.
        disk_ratio: Bytes on disk per live byte of a server.
    """

    changed_rows_per_s: Rate | None = None
    publish_interval_s: Rate | None = None
    poll_s: Rate | None = None
    sync_gbit: Rate | None = None
    verify_gb_per_s: Rate | None = None
    overlays: NotNegative | None = None
    overlay_row_bytes: Rate | None = None
    disk_ratio: Rate | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """What is trained, and what a step costs.

    Args:
        samples_per_s: Samples a second that are trained; says how many hosts.
        hosts: Hosts that train; says how many samples.
        ranks: Ranks of a host.
        rank_cores: Cores of a rank.
        batch: Samples of a rank and step.
        step_us: Microseconds of a rank for a sample, its dense part with it.
        disk_id_bytes: Bytes read and written for an id.
        disk_bytes: Bytes read and written for a sample; by default by its ids.
        wire_bytes: Bytes that one of two hosts receives for a sample; by default computed.
        unique_share: Share of the ids of a host's step that are distinct.
        train_disk_ratio: Bytes on disk per live byte of training.
        state_bytes: Bytes of optimizer state of a row.
        lookahead: Rows are read and sent while others are computed.
    """

    samples_per_s: Rate | None = None
    hosts: Positive | None = None
    ranks: Positive | None = None
    rank_cores: Rate | None = None
    batch: Positive | None = None
    step_us: Rate | None = None
    disk_id_bytes: Rate | None = None
    disk_bytes: Rate | None = None
    wire_bytes: Rate | None = None
    unique_share: Share | None = None
    train_disk_ratio: Rate | None = None
    state_bytes: Rate | None = None
    lookahead: bool = True


@dataclass(frozen=True, kw_only=True)
class HostInputs:
    """A host, and what it costs.

    Args:
        host_cores: Cores.
        host_dram: Memory for rows and indexes, as 512GB.
        host_ssd: Disk, as 15.36TB.
        host_iops: Reads a second.
        host_ssd_gb_per_s: GB/s that drives read and write.
        host_gbit: Gbit/s of the network, each way.
        host_per_month: Money for a host without drives, in a month.
        ssd_per_gb: Money for a GB of drives.
        ssd_months: Months over which a drive is paid off.
    """

    host_cores: Rate | None = None
    host_dram: SizeText | None = None
    host_ssd: SizeText | None = None
    host_iops: Rate | None = None
    host_ssd_gb_per_s: Rate | None = None
    host_gbit: Rate | None = None
    host_per_month: Rate | None = None
    ssd_per_gb: Rate | None = None
    ssd_months: Rate | None = None


def plan_cluster(
    *,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            "--measured", metavar="FILE", help="JSON of results whose inputs go before defaults."
        ),
    ] = None,
    model: Annotated[ModelInputs, Fields(title="Rows")],
    serving: Annotated[ServingInputs, Fields(title="Serving")],
    fresh: Annotated[FreshInputs, Fields(title="Freshness")],
    training: Annotated[TrainingInputs, Fields(title="Training")],
    host: Annotated[HostInputs, Fields(title="Hosts")],
    effective: Effective,
    json_path: JsonOut = None,
) -> None:
    """Compute hosts, cores, reads, network, memory, disk and money of a cluster.

    --requests-per-s plans servers; --samples-per-s or --hosts plans training. Every input is
    printed with its origin: given, measured by a file of results, or assumed. Nothing is run.
    """
    given = _given([model, serving, fresh, training, host])
    inputs = Inputs(given, read_measured(measured or ()), _origins(effective.text))
    serves, trains = "requests_per_s" in inputs, "samples_per_s" in inputs or "hosts" in inputs
    if not serves and not trains:
        raise InvalidError(
            "say what the cluster is for; give --requests-per-s for serving, or --samples-per-s "
            "or --hosts for training"
        )
    result: dict[str, Any] = {}
    if serves:
        result["serving"] = _servers(inputs, serving.shards)
    if trains:
        result["training"] = asdict(_trainers(inputs, training.lookahead))
    result["inputs"] = [asdict(one) for one in inputs.used]
    if shows_tables(json_path):
        _show(result)
    if json_path is not None:
        write_json(json_path, result)


def _given(groups: list[Any]) -> dict[str, float]:
    given: dict[str, float] = {}
    for group in groups:
        for name, value in vars(group).items():
            if value is None or name in ("shards", "lookahead"):
                continue
            is_size = isinstance(value, str)
            given[name] = (
                float(parse_bytes(value, f"--{name.replace('_', '-')}")) if is_size else value
            )
    return given


def _origins(effective: str) -> dict[str, str]:
    """Where each option comes from: its name, or a line of a file."""
    found = re.findall(r"^([a-z0-9-]+) = .*  # (.+)$", effective, re.MULTILINE)
    return {name.replace("-", "_"): origin for name, origin in found}


def _servers(inputs: Inputs, shards: str) -> dict[str, Any]:
    wanted = [least_shards(inputs)]
    if shards != AUTO:
        wanted = list(numbers("--shards", shards, int))
    plans = [plan_serving(inputs, one) for one in wanted]
    best = min(plans, key=lambda plan: (not plan.fits, plan.money_per_month))
    fresh = plan_freshness(inputs, best.shards)
    return {"plans": [asdict(one) for one in plans], "best": best.shards, **asdict(fresh)}


def _trainers(inputs: Inputs, is_overlapped: bool) -> TrainingPlan:
    if "hosts" in inputs:
        return plan_training(inputs, int(inputs["hosts"]), is_overlapped=is_overlapped)
    hosts = least_hosts(inputs, is_overlapped=is_overlapped)
    return plan_training(inputs, hosts, is_overlapped=is_overlapped)


def _show(result: dict[str, Any]) -> None:
    print_table("inputs", result["inputs"])
    if "serving" in result:
        served = result["serving"]
        print_table("serving", [_server_row(ServingPlan(**plan)) for plan in served["plans"]])
        print(
            f"news are served {served['fresh_s']:,.0f} s after their step, at most; the first copy "
            f"of a host takes {served['first_copy_s'] / 60:,.0f} min (shards: {served['best']})"
        )
    if "training" in result:
        print_table("training", [_trainer_row(TrainingPlan(**result["training"]))])


def _server_row(plan: ServingPlan) -> dict[str, Any]:
    return {
        "shards": plan.shards,
        "fits": "yes" if plan.fits else "no",
        "hosts": plan.hosts,
        "bound_by": plan.binds,
        "cores": plan.cores,
        "reads_per_s": plan.iops,
        "network_gb_per_s": plan.network_bytes_per_s / 1e9,
        "dram_gb_of_host": plan.dram_bytes / 1e9,
        "ssd_gb_of_host": plan.ssd_bytes / 1e9,
        "shards_per_request": plan.shards_per_request,
        "money_per_month": plan.money_per_month,
    }


def _trainer_row(plan: TrainingPlan) -> dict[str, Any]:
    return {
        "hosts": plan.hosts,
        "ranks": plan.ranks,
        "fits": "yes" if plan.fits else "no",
        "bound_by": plan.binds,
        "samples_per_s": plan.samples_per_s,
        "step_ms": plan.step_s * 1e3,
        **{f"{name}_ms": value * 1e3 for name, value in plan.parts_s.items()},
        "dram_gb_of_host": plan.dram_bytes / 1e9,
        "ssd_gb_of_host": plan.ssd_bytes / 1e9,
        "checkpoint_min": plan.checkpoint_s / 60,
        "money_per_month": plan.money_per_month,
    }
