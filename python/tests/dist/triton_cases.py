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
    from tierbed.dist.kernels import pool_to_ranks as kernels, signals

    shapes = [(64, [3, 0, 9, 2]), (8, [11, 6]), (16, [5]), (12, [4, 3]), (3, [2, 2])]
    for seed, (dim, counts) in enumerate(shapes):
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
                is_aligned=dim % 4 == 0,
            )
            found = torch.cat(outputs)
            assert found[:, 3 * dim :].isnan().all(), "wrote beside its columns"
            expected = on_cpu(case, is_mean, is_weighted)
            assert torch.equal(found[:, : 3 * dim], expected), (dim, is_mean, is_weighted)

    pads = [torch.zeros(2, 32, dtype=torch.int32) for _ in range(2)]
    signals.signal_ranks(torch.tensor([pads[0][1].data_ptr(), pads[1][1].data_ptr()]), 7)
    assert [int(pad[1, 0]) for pad in pads] == [7, 7]
    assert signals.wait_for_ranks(pads[0], 7, spins=3).tolist() == [1, 0]
    assert signals.wait_for_ranks(pads[0], 8, spins=3).tolist() == [1, 1]


def compile_for_sm_90() -> None:
    from tierbed.dist.kernels import (
        pool_to_ranks as pool,
        put_grads as put,
        step_rows as step,
        weight_grads as dots,
    )

    ptx = compiled(
        pool.pool_to_ranks_kernel,
        {"rows": "*fp32", "weights": "*fp32", "batch": "i32", "stride": "i32"},
        {
            "dim": 64,
            "width": 64,
            "is_aligned": True,
            "rank_count": 4,
            "bags_per_program": pool.BAGS_PER_PROGRAM,
            "is_weighted": False,
            "is_mean": False,
        },
        pool.OPTIONS,
        aligned=["stride"],
    )
    stores = re.findall(r"st\.global[.\w]*", ptx)
    assert stores, "the kernel stores nothing"
    assert all(".v4.b32" in store for store in stores), stores
    assert any(".v4.b32" in load for load in re.findall(r"ld\.global[.\w]*", ptx)), "row loads"
    assert "fma." not in ptx, "a product was not rounded before it was added"
    print(f"stores {sorted(set(stores))}")

    numbers = {"stride": "i32", "first_sample": "i32", "samples": "i32"}
    constants = {"width": 64, "samples_per_program": put.SAMPLES_PER_PROGRAM}
    compiled(put.put_grads_kernel, {"grad": "*fp32", **numbers}, constants, {"num_warps": 2})

    ptx = compiled(
        dots.weight_grads_kernel,
        dict.fromkeys(["weights", "counts", "grads"], "*fp32") | {"use_total": "i32"},
        {"dim": 64, "width": 64, "is_mean": True, "uses_per_program": dots.USES_PER_PROGRAM},
        dots.OPTIONS,
    )
    assert "fma." not in ptx

    floats = ["weights", "state", "scales", "counts", "grads"]
    for kind in step.KINDS.values():
        ptx = compiled(
            step.step_rows_kernel,
            dict.fromkeys(floats, "*fp32")
            | {"use_counts": "*i32", "row_total": "i32"}
            | dict.fromkeys(["lr", "eps", "weight_decay"], "fp32"),
            {
                "dim": 64,
                "width": 64,
                "kind": kind,
                "is_weighted": True,
                "is_mean": True,
                "has_decay": True,
                "rows_per_program": step.ROWS_PER_PROGRAM,
            },
            step.OPTIONS,
        )
        assert "fma." not in ptx, kind
        assert "div.full" not in ptx, "a quotient is not rounded as IEEE 754 says"
        assert "sqrt.approx" not in ptx, "a root is not rounded as IEEE 754 says"


def compiled(
    kernel: object,
    types: dict[str, str],
    constants: dict[str, object],
    options: dict[str, object],
    aligned: list[str] | None = None,
) -> str:
    """Compiles for sm_90 and returns the PTX; what has no type is a pointer to i64."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names  # type: ignore[attr-defined]
    signature = {name: types.get(name, "*i64") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    whole = [name for name in names if signature[name].startswith("*")] + (aligned or [])
    built = triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs=constants,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in whole},
        ),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    registers = registers_of(built)
    assert 0 < registers <= 128, registers
    print(f"{names[0]}: registers {registers}")
    return str(built.asm["ptx"])


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
