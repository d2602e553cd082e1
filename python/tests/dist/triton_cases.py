"""What the tests of Triton kernels run in processes of their own.

``interpret`` compares with the CPU kernels under ``TRITON_INTERPRET=1``; ``compile`` looks at what
the compiler makes of the same source for sm_90, without a GPU.
"""

from __future__ import annotations

import re
import sys

import torch

import tierbed as tb


def draw_case(seed: int, dim: int, counts: list[int], is_weighted: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, sizes = sum(counts), [40, 7, 100]
    lengths = torch.randint(0, 6, (len(sizes), batch), generator=generator)
    ids = [
        torch.randint(0, rows, (int(of_table.sum()),), generator=generator)
        for rows, of_table in zip(sizes, lengths, strict=True)
    ]
    return {
        "rows": torch.randn(sum(sizes), dim, generator=generator),
        "first_rows": torch.tensor([0, 40, 47]),
        "ids": torch.cat(ids),
        "lengths": lengths.view(-1),
        "weights": torch.rand(len(torch.cat(ids)), generator=generator)
        if is_weighted
        else torch.empty(0),
        "first_samples": torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]),
    }


def on_cpu(case: dict[str, torch.Tensor], is_mean: bool, is_weighted: bool) -> torch.Tensor:
    """Pools by the engine, in one process."""
    dim = case["rows"].shape[1]
    pooling = "mean" if is_mean else "sum"
    bounds = [*case["first_rows"].tolist(), case["rows"].shape[0]]
    names = "abc"
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        tables = [
            tb.EmbeddingBagConfig(bounds[at + 1] - bounds[at], dim, name, pooling=pooling)
            for at, name in enumerate(names)
        ]
        rows = tb.EmbeddingBagCollection(tables, store=store, is_weighted=is_weighted)
        for at, name in enumerate(names):
            store.write_rows(name, 0, case["rows"][bounds[at] : bounds[at + 1]].contiguous())
        weights = case["weights"] if is_weighted else None
        bags = tb.KeyedJaggedTensor(list(names), case["ids"], weights, lengths=case["lengths"])
        return rows(bags).values().detach().clone()


def interpret() -> None:
    from tierbed.kernels import pool_to_ranks as kernels

    for seed, (dim, counts) in enumerate([(64, [3, 0, 9, 2]), (8, [11, 6]), (16, [5])]):
        for is_mean, is_weighted in [(False, False), (True, False), (False, True), (True, True)]:
            case = draw_case(seed, dim, counts, is_weighted)
            stride = 3 * dim + 4
            outputs = [torch.full((count, stride), float("nan")) for count in counts]
            lengths = case["lengths"]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            kernels.pool_to_ranks(
                case["rows"],
                case["first_rows"],
                (case["ids"], offsets, case["weights"] if is_weighted else None),
                torch.tensor([output.data_ptr() for output in outputs]),
                case["first_samples"],
                torch.tensor([0, dim, 2 * dim]),
                stride,
                is_mean=is_mean,
            )
            found = torch.cat(outputs)
            assert found[:, 3 * dim :].isnan().all(), "wrote beside its columns"
            expected = on_cpu(case, is_mean, is_weighted)
            assert torch.equal(found[:, : 3 * dim], expected), (dim, is_mean, is_weighted)

    pads = [torch.zeros(2, 32, dtype=torch.int32) for _ in range(2)]
    kernels.signal_ranks(torch.tensor([pads[0][1].data_ptr(), pads[1][1].data_ptr()]), 7)
    assert [int(pad[1, 0]) for pad in pads] == [7, 7]
    assert kernels.wait_for_ranks(pads[0], 7, spins=3).tolist() == [1, 0]
    assert kernels.wait_for_ranks(pads[0], 8, spins=3).tolist() == [1, 1]


def compile_for_sm_90() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tierbed.kernels import pool_to_ranks as kernels

    pointers = {"rows": "*fp32", "weights": "*fp32"} | {
        name: "*i64"
        for name in ["first_rows", "indices", "offsets", "outputs", "first_samples"]
        + ["output_columns"]
    }
    numbers = {"batch": "i32", "stride": "i32"}
    constants = {
        "dim": 64,
        "rank_count": 4,
        "bags_per_program": kernels.BAGS_PER_PROGRAM,
        "is_weighted": False,
        "is_mean": False,
    }
    names = kernels.pool_to_ranks_kernel.arg_names
    types = pointers | numbers | dict.fromkeys(constants, "constexpr")
    aligned = [names.index(name) for name in [*pointers, "stride"]]
    built = triton.compile(
        ASTSource(
            fn=kernels.pool_to_ranks_kernel,
            signature={name: types[name] for name in names},
            constexprs=constants,
            attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
        ),
        target=GPUTarget("cuda", 90, 32),
        options=kernels.OPTIONS,
    )
    ptx = built.asm["ptx"]
    stores = re.findall(r"st\.global[.\w]*", ptx)
    assert stores, "the kernel stores nothing"
    assert all(".v4.b32" in store for store in stores), stores
    assert any(".v4.b32" in load for load in re.findall(r"ld\.global[.\w]*", ptx)), "row loads"
    assert "fma." not in ptx, "a product was not rounded before it was added"
    registers = registers_of(built)
    assert 0 < registers <= 128, registers
    print(f"registers {registers}, stores {sorted(set(stores))}")


def registers_of(built: object) -> int:
    """Reads the registers of a thread from the cubin, by the disassembler in Triton's wheel."""
    import subprocess
    import tempfile
    from pathlib import Path

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])  # type: ignore[attr-defined]
        file.flush()
        told = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+)", told.stdout + told.stderr)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_sm_90}[sys.argv[1]]()
