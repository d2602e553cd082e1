"""What would the exchange take on GPUs that nobody has here? Bytes over bandwidths: a model.

Every number of this module is labelled ``model``; none was measured. A GPU that holds ``T/P``
tables reads the rows of all samples, and writes vectors of which ``(P-1)/P`` go over the links:

    R = T/P * B * (L * (D * 4 + 8) + 8)     bytes of rows, ids and offsets
    O = T/P * B * D * 4                     bytes of vectors
    X = O * (P-1) / P                       bytes sent, and as many received
    fused    = max((R + O) / h, X / k) + launch
    baseline = (R + O) / h + slow * (X / k + 2 O / h + collective) + launch

``h`` is what memory gives to random rows, ``k`` what the links of a GPU give to its ``P-1`` peers
together. ``slow`` is what the published baseline takes beyond its bytes (launches, waits, copies).
It is fitted to the paper's ratio on two GPUs; those on three and four are predicted, and the error
is told. Source: PGAS §IV, Figures 5, 7, 8 and 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["PAPER", "Link", "Load", "hold_out", "model_report", "predict", "volume"]

LAUNCH_S = 5e-6
INDEX_BYTES = 8
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Link:
    """A machine.

    Args:
        name: What it is called.
        memory: Bytes per second of random rows (``h``).
        pair: Bytes per second from one GPU to one peer.
        out: Most bytes per second out of one GPU, to all peers together.
        collective_s: Seconds that a collective call takes without bytes.
    """

    name: str
    memory: float
    pair: float
    out: float
    collective_s: float = 25e-6

    def bandwidth(self, ranks: int) -> float:
        """Returns ``k`` of one GPU among ``ranks``."""
        return min(self.pair * max(1, ranks - 1), self.out)


@dataclass(frozen=True)
class Load:
    """A batch of all ranks.

    Args:
        tables: Tables of all ranks.
        batch: Samples of all ranks.
        pooling: Mean ids of a bag.
        dim: Elements of a row.
        ranks: GPUs.
    """

    tables: int
    batch: int
    pooling: float
    dim: int = 64
    ranks: int = 2

    @property
    def read_bytes(self) -> float:
        """What a GPU reads, ``R``."""
        of_bag = self.pooling * (self.dim * ELEMENT_BYTES + INDEX_BYTES) + INDEX_BYTES
        return self.tables / self.ranks * self.batch * of_bag

    @property
    def written_bytes(self) -> float:
        """What a GPU writes, ``O``."""
        return self.tables / self.ranks * self.batch * self.dim * ELEMENT_BYTES

    @property
    def sent_bytes(self) -> float:
        """What a GPU sends, ``X``."""
        return self.written_bytes * (self.ranks - 1) / self.ranks


# 80 % of 900 GB/s, two NVLinks of 25 GB/s a pair; four fifths of 4.3 TB/s, NVSwitch.
V100 = Link("V100, NVLink pairs", memory=0.8 * 900e9, pair=50e9, out=150e9)
H200 = Link("H200, NVSwitch", memory=0.75 * 4.3e12, pair=380e9, out=380e9)

# Figures 5 and 8: how many times faster, by GPUs.
PAPER = {
    "weak": (Load(64, 16384, 64.0, ranks=1), {2: 2.10, 3: 1.95, 4: 1.87}),
    "strong": (Load(96, 16384, 16.0, ranks=1), {2: 2.95, 3: 2.55, 4: 2.44}),
}


def predict(load: Load, link: Link, slow: float = 1.0) -> dict[str, float]:
    """Returns seconds of ``compute``, ``fused``, ``baseline``, and its part beyond computing."""
    compute = (load.read_bytes + load.written_bytes) / link.memory
    wire = load.sent_bytes / link.bandwidth(load.ranks)
    unpack = 2 * load.written_bytes / link.memory
    exposed = 0.0 if load.ranks == 1 else slow * (wire + unpack + link.collective_s)
    return {
        "compute": compute + LAUNCH_S,
        "fused": max(compute, wire) + LAUNCH_S,
        "baseline": compute + exposed + LAUNCH_S,
        "exposed": exposed,
    }


def grown(scaling: str, load: Load, ranks: int) -> Load:
    """Returns ``load`` on ``ranks``: with ``weak`` scaling each of them adds its tables."""
    factor = ranks if scaling == "weak" else 1
    return replace(load, tables=load.tables * factor, ranks=ranks)


def hold_out(scaling: str) -> dict[str, Any]:
    """Fits ``slow`` to the paper's two GPUs and predicts three and four.

    Returns:
        ``slow`` and, per number of ranks, ``paper``, ``model``, ``bytes_only`` (``slow`` = 1)
        and ``error``, the model's share above or below the paper.
    """
    load, ratios = PAPER[scaling]
    at_two = grown(scaling, load, 2)
    plain = predict(at_two, V100)
    slow = (ratios[2] * plain["fused"] - plain["compute"]) / plain["exposed"]
    rows = []
    for ranks, paper in ratios.items():
        times = predict(grown(scaling, load, ranks), V100, slow)
        bare = predict(grown(scaling, load, ranks), V100)
        ratio = times["baseline"] / times["fused"]
        rows.append(
            {
                "scaling": scaling,
                "ranks": ranks,
                "use": "fitted" if ranks == 2 else "predicted",
                "paper": paper,
                "model": ratio,
                "bytes_only": bare["baseline"] / bare["fused"],
                "error": ratio / paper - 1,
            }
        )
    return {"slow": slow, "rows": rows}


def volume(load: Load, link: Link, points: int = 10) -> list[dict[str, float]]:
    """Returns the share of bytes sent by each tenth (``points``) of the baseline's time.

    A fused kernel hands vectors to the link as it makes them; the link takes no more than its
    bandwidth. The baseline sends when all are made. Source: PGAS Figures 7 and 10.
    """
    times = predict(load, link)
    wire = load.sent_bytes / link.bandwidth(load.ranks)
    found = []
    for point in range(1, points + 1):
        now = times["baseline"] * point / points
        made = min(1.0, now / times["compute"])
        carried = now / wire if wire > 0 else 1.0
        late = (now - times["compute"]) / wire if wire > 0 else 1.0
        found.append(
            {
                "ms": 1e3 * now,
                "fused": min(made, carried, 1.0),
                "baseline": min(max(late, 0.0), 1.0),
            }
        )
    return found


def model_report(links: Sequence[Link] = (V100, H200)) -> dict[str, Any]:
    """Returns the hold-out, predictions for ``links`` with ``slow`` = 1, and a volume curve."""
    fits = {scaling: hold_out(scaling) for scaling in PAPER}
    loads = [
        (scaling, grown(scaling, PAPER[scaling][0], ranks))
        for scaling in PAPER
        for ranks in (2, 4, 8)
    ] + [("one-hot", Load(96, 16384, 1.0, ranks=ranks)) for ranks in (2, 4, 8)]
    rows = []
    for link in links:
        for name, load in loads:
            if link is V100 and load.ranks > 4:
                continue
            times = predict(load, link)
            rows.append(
                {
                    "machine": link.name,
                    "load": name,
                    "ranks": load.ranks,
                    **{f"{part}_ms": 1e3 * times[part] for part in ("compute", "fused")},
                    "baseline_ms": 1e3 * times["baseline"],
                    "baseline_vs_fused": times["baseline"] / times["fused"],
                    "fused_vs_compute": times["fused"] / times["compute"],
                }
            )
    return {
        "measured": "model",
        "fits": {scaling: fit["slow"] for scaling, fit in fits.items()},
        "hold_out": [row for fit in fits.values() for row in fit["rows"]],
        "rows": rows,
        "volume": volume(grown("weak", PAPER["weak"][0], 4), V100),
    }
