"""Memory of a checkpoint that is sent: within 64 MiB, whatever the size of its tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURED = """
import sys
import torch
import tierbed as tb
from tierbed import dist as tbd

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

def grown(work):
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    work()
    return peak() - before

def rows(name, count):
    (rank,) = tbd.local_ranks(1)
    store = tb.Store.open(f"{sys.argv[1]}/{name}", backend="file", dram_budget="16MiB")
    tables = [tb.EmbeddingBagConfig(count, 128, "a")]
    return tbd.ShardedEmbeddingBagCollection(
        tables, store=store, ranks=rank, optimizer=tb.Adagrad(lr=0.1)
    )

for name, count in (("warm", 100), ("measured", 240_000)):
    place = f"file://{sys.argv[1]}/{name}-there"
    with rows(f"{name}-saved", count) as one:
        for first in range(0, count, 10_000):
            size = min(10_000, count - first)
            weights = torch.randn(size, 128)
            one.store.write_rows("a", first, weights, weights.abs(), torch.ones(size).long())
        saving = grown(lambda: one.save(place))
        last = one.store.read_rows("a", count - 50, 50)
    with rows(f"{name}-loaded", count) as other:
        loading = grown(lambda: other.load(place))
        assert torch.equal(last, other.store.read_rows("a", count - 50, 50))
print(saving, loading)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_checkpoint_takes_64_mib_whatever_its_size(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=380,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    saving, loading = map(int, found.stdout.split())
    assert 240_000 * 128 * 8 > 3 * (64 << 20)
    # The store takes its budget as rows are read and written.
    limit = (64 << 20) + (16 << 20)
    assert saving < limit, f"{saving >> 20} MiB"
    assert loading < limit, f"{loading >> 20} MiB"
