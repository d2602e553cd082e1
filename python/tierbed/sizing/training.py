"""Hosts that train: the time of a step by compute, disk and network, and what hosts hold.

Ranks of a host share memory, so a row crosses the network once per host. With look-ahead rows are
read and sent while others are computed, so the slowest of the three is the time of a step; without
it is their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierbed.errors import InvalidError
from tierbed.sizing.inputs import Inputs
from tierbed.sizing.serving import ID_BYTES, money_of_host

__all__ = ["TrainingPlan", "least_hosts", "plan_training", "wire_bytes"]

HOSTS_MAX = 10_000


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Hosts that train, and what bounds them.

    Args:
        hosts: How many.
        ranks: Of all hosts.
        samples_per_s: Of all ranks.
        step_s: Seconds of a step.
        parts_s: Of a step: what compute, disk and network take.
        binds: The part that takes longest, or what does not fit on a host.
        fits: Whether rows fit into memory and disk of a host, and ranks on its cores.
        network_bytes_per_s: That a host receives.
        dram_bytes: Memory of a host for rows.
        ssd_bytes: Disk of a host.
        checkpoint_s: Until a checkpoint of all rows is in a bucket.
        money_per_month: Of all hosts, drives paid off by then.
    """

    hosts: int
    ranks: int
    samples_per_s: float
    step_s: float
    parts_s: Mapping[str, float]
    binds: str
    fits: bool
    network_bytes_per_s: float
    dram_bytes: float
    ssd_bytes: float
    checkpoint_s: float
    money_per_month: float


def wire_bytes(inputs: Inputs, hosts: int) -> float:
    """Bytes that a host receives for each of its samples: vectors, gradients, and ids.

    Args:
        inputs: Numbers with their origins; ``wire_bytes`` is what was measured on two hosts.
        hosts: Hosts that train.
    """
    away = (hosts - 1) / hosts
    if "wire_bytes" in inputs:
        # Of two hosts half of the rows are away.
        return inputs["wire_bytes"] * away / 0.5
    # Its vectors, gradients of the rows it holds for others, and ids of both ways.
    each = 2.0 * inputs["dim"] * inputs["element_bytes"] + ID_BYTES
    return inputs["ids"] * inputs["unique_share"] * each * away


def plan_training(inputs: Inputs, hosts: int, *, is_overlapped: bool = True) -> TrainingPlan:
    """Computes how fast ``hosts`` train, and what they need.

    Args:
        inputs: Numbers with their origins.
        hosts: Hosts that train.
        is_overlapped: Whether ranks look ahead.

    Raises:
        InvalidError: An input is missing or out of range.
    """
    if not 1 <= hosts <= HOSTS_MAX:
        raise InvalidError(f"hosts are 1 to {HOSTS_MAX}, not {hosts}; give other --hosts")
    ranks, samples = int(inputs["ranks"]), inputs["ranks"] * inputs["batch"]
    row_bytes = inputs["dim"] * inputs["element_bytes"]
    received = samples * wire_bytes(inputs, hosts)
    rate = inputs["host_gbit"] * 1e9 / 8
    moved = 0.0
    if inputs["dram_share"] < 1.0:
        is_known = "disk_bytes" in inputs
        each = inputs["disk_bytes"] if is_known else inputs["ids"] * inputs["disk_id_bytes"]
        moved = samples * each
    parts = {
        "compute": inputs["batch"] * inputs["step_us"] / 1e6,
        "disk": moved / (inputs["host_ssd_gb_per_s"] * 1e9),
        "network": received / rate,
    }
    step_s = max(parts.values()) if is_overlapped else sum(parts.values())
    table = inputs["table"] / hosts
    kept = table * (1.0 + inputs["state_bytes"] / row_bytes)
    over = {
        "cores": ranks * inputs["rank_cores"] / inputs["host_cores"],
        "memory": kept * inputs["dram_share"] / inputs["host_dram"],
        "disk": kept * inputs["train_disk_ratio"] / inputs["host_ssd"],
    }
    fits = max(over.values()) <= 1.0
    worst = max(over, key=lambda name: over[name])
    return TrainingPlan(
        hosts=hosts,
        ranks=hosts * ranks,
        samples_per_s=hosts * samples / step_s,
        step_s=step_s,
        parts_s=parts,
        binds=max(parts, key=lambda name: parts[name]) if fits else f"{worst} of a host",
        fits=fits,
        network_bytes_per_s=received / step_s,
        dram_bytes=kept * inputs["dram_share"],
        ssd_bytes=kept * inputs["train_disk_ratio"],
        checkpoint_s=kept / (min(inputs["host_gbit"], inputs["sync_gbit"]) * 1e9 / 8),
        money_per_month=hosts * money_of_host(inputs),
    )


def least_hosts(inputs: Inputs, *, is_overlapped: bool = True) -> int:
    """Returns the fewest hosts that train ``samples_per_s`` and hold the rows.

    Args:
        inputs: Numbers with their origins.
        is_overlapped: Whether ranks look ahead.

    Raises:
        InvalidError: No number of hosts does.
    """
    wanted = inputs["samples_per_s"]
    for hosts in range(1, HOSTS_MAX + 1):
        found = plan_training(inputs, hosts, is_overlapped=is_overlapped)
        if found.fits and found.samples_per_s >= wanted * (1.0 - 1e-12):
            return hosts
    raise InvalidError(
        f"no number of hosts up to {HOSTS_MAX} trains {wanted:,.0f} samples a second; give other "
        "--ranks, --batch, --host-gbit or --host-ssd"
    )
