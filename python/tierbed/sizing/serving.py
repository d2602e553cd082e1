"""Hosts that serve: cores, reads, network, memory and disk, and how fresh their rows are.

Each host has a full copy of the rows, or those of a shard. A full copy asks nobody else, so it
needs fewer cores: shards are for tables that one host cannot hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tierbed.errors import InvalidError
from tierbed.sizing.inputs import Inputs

__all__ = ["Freshness", "ServingPlan", "least_shards", "plan_freshness", "plan_serving"]

#: Nobody has more hosts; a search ends there.
SHARDS_MAX = 10_000
ID_BYTES = 8
#: Resources that more hosts bring; memory and disk of a host are bought per shard.
SHARED = ("cores", "iops", "network")


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """Hosts that serve, and what each resource asks for.

    Args:
        shards: Parts of the rows; 1 is a full copy on each host.
        hosts: How many are needed.
        binds: The resource that needs most hosts, or what does not fit on a host.
        fits: Whether rows fit into memory and disk of a host.
        cores: Cores that are needed, of all hosts.
        iops: Reads a second, of all hosts.
        network_bytes_per_s: Bytes a second each way, of all hosts.
        dram_bytes: Memory of a host for index, cache and deltas.
        ssd_bytes: Disk of a host.
        shards_per_request: Shards that a request asks.
        hosts_by_resource: Hosts that each resource alone would need.
        money_per_month: Of all hosts, drives paid off by then.
    """

    shards: int
    hosts: int
    binds: str
    fits: bool
    cores: float
    iops: float
    network_bytes_per_s: float
    dram_bytes: float
    ssd_bytes: float
    shards_per_request: float
    hosts_by_resource: Mapping[str, int]
    money_per_month: float


def plan_serving(inputs: Inputs, shards: int = 1) -> ServingPlan:
    """Computes the hosts that answer ``requests_per_s`` from a ``table`` of bytes.

    Args:
        inputs: Numbers with their origins.
        shards: Parts of the rows; 1 is a full copy on each host.

    Raises:
        InvalidError: An input is missing or out of range.
    """
    if not 1 <= shards <= SHARDS_MAX:
        raise InvalidError(f"shards are 1 to {SHARDS_MAX}, not {shards}; give other --shards")
    requests, samples, ids = inputs["requests_per_s"], inputs["samples"], inputs["ids"]
    row_bytes = inputs["dim"] * inputs["element_bytes"]
    asked = asked_shards(inputs, shards)
    pages = inputs.pages
    core_us = inputs["request_us"] + samples * (inputs["sample_us"] + pages * inputs["page_us"])
    bytes_each = inputs["request_bytes"] + samples * (ids * ID_BYTES + inputs["answer_bytes"])
    if shards > 1:
        core_us += asked * inputs["rpc_us"]
        bytes_each += samples * ids * row_bytes
    part = inputs["utilization"]
    needs = {
        "cores": requests * core_us / 1e6 / part,
        "iops": requests * samples * pages / part,
        "network": requests * bytes_each / part,
    }
    host = {
        "cores": inputs["host_cores"],
        "iops": inputs["host_iops"],
        "network": inputs["host_gbit"] * 1e9 / 8,
    }
    # A hair more than a whole number is that number: numbers of a computer are no more exact.
    by_resource = {name: max(1, math.ceil(needs[name] / host[name] - 1e-9)) for name in SHARED}
    by_resource["copies"] = shards * int(inputs["copies"])
    hosts = max(by_resource.values())
    dram, ssd = dram_bytes(inputs, shards), ssd_bytes(inputs, shards)
    over = {"memory": dram / inputs["host_dram"], "disk": ssd / inputs["host_ssd"]}
    fits = max(over.values()) <= 1.0
    binds = max(by_resource, key=lambda name: by_resource[name])
    return ServingPlan(
        shards=shards,
        hosts=hosts,
        binds=binds if fits else f"{max(over, key=lambda name: over[name])} of a host",
        fits=fits,
        cores=needs["cores"],
        iops=needs["iops"],
        network_bytes_per_s=needs["network"],
        dram_bytes=dram,
        ssd_bytes=ssd,
        shards_per_request=asked,
        hosts_by_resource=by_resource,
        money_per_month=hosts * money_of_host(inputs),
    )


def asked_shards(inputs: Inputs, shards: int) -> float:
    """Shards that the ids of a request are on, where rows lie by hash; or as was given."""
    if shards == 1:
        return 1.0
    if "shards_per_request" in inputs:
        return min(float(shards), inputs["shards_per_request"])
    ids = inputs["ids"] * inputs["samples"]
    return float(shards * (1.0 - (1.0 - 1.0 / shards) ** ids))


def dram_bytes(inputs: Inputs, shards: int) -> float:
    """Memory of a host: index, cache, and the index of deltas.

    Rows outside the head lie by id and take a bit each; a head of all rows takes none.
    """
    table = inputs["table"] / shards
    rows = table / (inputs["dim"] * inputs["element_bytes"])
    head = inputs["head_share"]
    index = rows * (inputs["index_bits"] * head + (1.0 if head < 1.0 else 0.0)) / 8.0
    changed = inputs["changed_rows_per_s"] * inputs["publish_interval_s"] / shards
    deltas = inputs["overlays"] * inputs["overlay_row_bytes"] * min(changed, rows)
    return index + inputs["dram_share"] * table + deltas


def ssd_bytes(inputs: Inputs, shards: int) -> float:
    """Disk of a host: its rows, their replicas, deltas, and the version that arrives."""
    rows = inputs["table"] / shards
    return rows * (1.0 + inputs["replica_ratio"]) * inputs["disk_ratio"]


def money_of_host(inputs: Inputs) -> float:
    """What a host costs in a month."""
    drives = inputs["host_ssd"] / 1e9 * inputs["ssd_per_gb"] / inputs["ssd_months"]
    return inputs["host_per_month"] + drives


def least_shards(inputs: Inputs) -> int:
    """Returns the fewest shards whose rows fit on a host.

    Raises:
        InvalidError: No number of shards fits.
    """
    for shards in range(1, SHARDS_MAX + 1):
        is_kept = dram_bytes(inputs, shards) <= inputs["host_dram"]
        if is_kept and ssd_bytes(inputs, shards) <= inputs["host_ssd"]:
            return shards
    raise InvalidError(
        f"the rows fit on a host by no number of shards up to {SHARDS_MAX}; give larger "
        "--host-dram or --host-ssd"
    )


@dataclass(frozen=True, kw_only=True)
class Freshness:
    """How long news take.

    Args:
        fresh_s: From a step of training until a server answers with it, at most.
        delta_bytes: Rows that a server brings for each delta.
        first_copy_s: Until a new host has all of its rows.
    """

    fresh_s: float
    delta_bytes: float
    first_copy_s: float


def plan_freshness(inputs: Inputs, shards: int = 1) -> Freshness:
    """Computes how long deltas and the first copy take.

    Args:
        inputs: Numbers with their origins.
        shards: Parts of the rows; 1 is a full copy on each host.
    """
    row_bytes = inputs["dim"] * inputs["element_bytes"]
    table = inputs["table"] / shards
    rate = min(inputs["host_gbit"], inputs["sync_gbit"]) * 1e9 / 8
    changed = inputs["changed_rows_per_s"] * inputs["publish_interval_s"] * row_bytes / shards
    changed = min(changed, table)
    arrives_s = changed / rate + changed / (inputs["verify_gb_per_s"] * 1e9)
    return Freshness(
        fresh_s=inputs["publish_interval_s"] + inputs["poll_s"] + arrives_s,
        delta_bytes=changed,
        first_copy_s=table * (1.0 + inputs["replica_ratio"]) / rate,
    )
