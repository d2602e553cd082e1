"""What the tests of Triton kernels run in processes of their own.

``interpret`` compares with the CPU kernels under ``TRITON_INTERPRET=1``; ``compile`` looks at what
the compiler makes of the same source for sm_90, without a GPU.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import step_cases
import tiles_cases
import torch
from compile_kit import DIMS, check_rounding, check_wide, compiled, width_of

import tierbed as tb
from tierbed.dist.kernels import pool_to_ranks, put_grads, signals
from tierbed.dist.kernels.launch import OPTIONS


def draw_case(
    seed: int, dim: int, counts: list[int], is_weighted: bool, length_max: int = 10
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, sizes = sum(counts), [40, 7, 100]
    lengths = torch.randint(0, length_max + 1, (len(sizes), batch), generator=generator)
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


def on_cpu(
    case: dict[str, torch.Tensor], is_mean: bool, is_weighted: bool, kind: str = "fp32"
) -> torch.Tensor:
    """Pools by the engine, in one process."""
    dim = case["rows"].shape[1]
    pooling = "mean" if is_mean else "sum"
    bounds = [*case["first_rows"].tolist(), case["rows"].shape[0]]
    names = "abc"
    with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        tables = [
            tb.EmbeddingBagConfig(
                bounds[at + 1] - bounds[at], dim, name, pooling=pooling, data_type=kind
            )
            for at, name in enumerate(names)
        ]
        own: Any = store if kind == "fp32" else tb.CodedStore()
        rows = tb.EmbeddingBagCollection(tables, store=own, is_weighted=is_weighted)
        for at, name in enumerate(names):
            own.write_rows(name, 0, case["rows"][bounds[at] : bounds[at + 1]].contiguous())
        weights = case["weights"] if is_weighted else None
        bags = tb.KeyedJaggedTensor(list(names), case["ids"], weights, lengths=case["lengths"])
        with torch.no_grad():
            return rows(bags).values().detach().clone()


def on_kernel(
    case: dict[str, torch.Tensor],
    counts: list[int],
    is_mean: bool,
    is_weighted: bool,
    *,
    is_single: bool = False,
    kind: str = "fp32",
) -> torch.Tensor:
    """Pools by the kernel into an output of each rank, and joins those."""
    dim, lengths = case["rows"].shape[1], case["lengths"]
    stride = 3 * dim + 4
    outputs = [torch.full((count, stride), float("nan")) for count in counts]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows, heads = case["rows"], None
    if kind == "int8":
        rows, heads = pool_to_ranks.split_codes(tb.codec.Codec("int8", dim).encode(rows))
    elif kind != "fp32":
        rows = rows.to(torch.float16 if kind == "fp16" else torch.bfloat16)
    pool_to_ranks.pool_to_ranks(
        rows,
        case["first_rows"],
        (case["ids"], offsets, case["weights"] if is_weighted else None),
        torch.tensor([output.data_ptr() for output in outputs]),
        case["first_samples"],
        torch.tensor([0, dim, 2 * dim]),
        stride,
        is_mean=is_mean,
        is_aligned=dim % 4 == 0,
        is_single=is_single,
        heads=heads,
    )
    found = torch.cat(outputs)
    assert found[:, 3 * dim :].isnan().all(), "wrote beside its columns"
    return found[:, : 3 * dim].contiguous()


def refuse_types() -> None:
    """Rows of other types are refused, and taken when they are brought to one that is known."""
    case = draw_case(0, 4, [2], False)
    offsets, out = torch.zeros(7, dtype=torch.int64), torch.full((2, 12), float("nan"))

    def pool(dtype: torch.dtype, heads: torch.Tensor | None = None) -> None:
        pool_to_ranks.pool_to_ranks(
            case["rows"].to(dtype),
            case["first_rows"],
            (case["ids"], offsets, None),
            torch.tensor([out.data_ptr()]),
            case["first_samples"],
            torch.tensor([0, 4, 8]),
            12,
            heads=heads,
        )

    for dtype, heads in [
        (torch.float64, None),
        (torch.uint8, None),
        (torch.float32, torch.zeros(147, dtype=torch.int32)),
    ]:
        with pytest.raises(tb.InvalidError, match="give heads to uint8 alone"):
            pool(dtype, heads)
    pool(torch.float16)
    assert bool((out == 0).all())


def interpret() -> None:
    step_cases.interpret_all()
    tiles_cases.interpret_all()
    shapes = [(64, [3, 0, 9, 2]), (8, [11, 6]), (16, [5]), (12, [4, 3]), (3, [2, 2])]
    ways = [(False, False), (True, False), (False, True), (True, True)]
    for seed, (dim, counts) in enumerate(shapes):
        if seed == 1:
            # A program is what takes the interpreter's time: from here on they are few.
            pool_to_ranks.BAGS_MAX = pool_to_ranks.LOAD_BYTES = 64
        for is_mean, is_weighted in ways:
            case = draw_case(seed, dim, counts, is_weighted)
            if seed == 1:
                # Subnormal numbers, and their quotients, are kept.
                case["rows"] *= 1e-39
            expected = on_cpu(case, is_mean, is_weighted)
            found = on_kernel(case, counts, is_mean, is_weighted)
            assert torch.equal(found, expected), (dim, is_mean, is_weighted)
    for is_mean, is_weighted in ways:
        # Bags of no id and of one, by the loop and without it.
        case = draw_case(9, 12, [11, 30], is_weighted, length_max=1)
        case["rows"][::2] *= -0.0
        expected = on_cpu(case, is_mean, is_weighted)
        for is_single in (False, True):
            found = on_kernel(case, [11, 30], is_mean, is_weighted, is_single=is_single)
            # Zeros of either sign are equal, and their bits are not.
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), is_single

    for kind in ("fp16", "bf16", "int8"):
        for dim, is_mean, is_weighted in [(12, True, True), (64, False, False), (3, False, True)]:
            case = draw_case(dim, dim, [5, 4], is_weighted, length_max=6)
            expected = on_cpu(case, is_mean, is_weighted, kind)
            found = on_kernel(case, [5, 4], is_mean, is_weighted, kind=kind)
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (kind, dim)
    refuse_types()

    pads = [torch.zeros(2, 32, dtype=torch.int32) for _ in range(2)]
    signals.signal_ranks(torch.tensor([pads[0][1].data_ptr(), pads[1][1].data_ptr()]), 7)
    assert [int(pad[1, 0]) for pad in pads] == [7, 7]
    assert signals.wait_for_ranks(pads[0], 7, spins=3).tolist() == [1, 0]
    assert signals.wait_for_ranks(pads[0], 8, spins=3).tolist() == [1, 1]
    # Epochs wrap around: half way, a later one is a negative number.
    signals.signal_ranks(torch.tensor([pads[0][1].data_ptr()]), (1 << 31) + 2)
    assert signals.wait_for_ranks(pads[0], (1 << 31) + 1, spins=3).tolist()[1] == 0
    assert signals.wait_for_ranks(pads[0], (1 << 31) + 3, spins=3).tolist()[1] == 1


def compile_for_sm_90() -> None:
    for dim in DIMS:
        compile_pool(dim)
        compile_put(dim)
    compile_pool_of_types()
    step_cases.compile_all()
    compile_signals()


def compile_pool(dim: int) -> None:
    for is_mean in (False, True) if dim == 64 else (True,):
        ptx = pool_ptx(dim, is_mean, is_single=False)
        first_add = ptx.index("add.rn.f32")
        first_row = next(re.finditer(ROW_LOAD, ptx)).start()
        indices = re.findall(r"ld\.global\.L1::evict_first[.\w:]*\.b64", ptx[:first_row])
        assert len(indices) >= 4, "an index waits for a row"
        assert len(re.findall(ROW_LOAD, ptx[:first_add])) >= 4, "rows wait for one another"
    for is_mean in (False, True) if dim == 64 else (False,) if dim in (12, 1024) else ():
        ptx = pool_ptx(dim, is_mean, is_single=True)
        assert "bra" not in ptx, "a bag of one id needs no loop"
        assert "shfl.sync.bfly" not in ptx, "a bag of one id needs no longest bag"


# Rows skip the first cache.
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "u8": 1}
ROW_LOAD = r"ld\.global\.cg[.\w]*"


def compile_pool_of_types() -> None:
    """Rows in fewer bytes are loaded 16 bytes at a time too."""
    for kind in ("fp16", "bf16", "u8"):
        pool_ptx(64 if kind == "bf16" else 256, False, kind == "bf16", kind)


def pool_ptx(dim: int, is_mean: bool, is_single: bool, kind: str = "fp32") -> str:
    tile = pool_to_ranks.pool_tile(dim, is_single=is_single, item_bytes=ITEM_BYTES[kind])
    ptx = compiled(
        pool_to_ranks.pool_to_ranks_kernel,
        {"rows": f"*{kind}", "heads": "*i32", "weights": "*fp32"}
        | dict.fromkeys(["batch", "stride"], "i32"),
        {
            "dim": dim,
            "width": width_of(dim),
            "is_aligned": dim % 4 == 0,
            "rank_count": 4,
            "bags_per_program": tile.bags,
            "rows_at_once": tile.rows_at_once,
            "is_single": is_single,
            "is_coded": kind == "u8",
            "is_weighted": is_mean,
            "is_mean": is_mean,
        },
        {**OPTIONS, "num_warps": tile.warps},
        aligned=["stride"],
    )
    check_rounding(ptx)
    loads, stores = re.findall(ROW_LOAD, ptx), re.findall(r"st\.global\.cs[.\w]*", ptx)
    assert loads, "rows of one use fill the first cache"
    assert stores, "outputs fill the caches, or nothing is stored"
    assert "L1::evict_first" in ptx, "indices fill the caches"
    if dim % 4 == 0 and dim >= 64:
        assert all(".v4.b32" in load for load in loads), loads
        assert all(".v4.b32" in store for store in stores), stores
        print(f"stores {sorted(set(stores))}")
    return ptx


def compile_put(dim: int) -> None:
    samples, warps = put_grads.put_tile(dim)
    ptx = compiled(
        put_grads.put_grads_kernel,
        {"grad": "*fp32", "stride": "i32", "first_sample": "i32", "samples": "i32"},
        {"width": width_of(dim), "is_aligned": dim % 4 == 0, "samples_per_program": samples},
        {"num_warps": warps},
        aligned=["stride"],
    )
    check_wide(ptx, dim, "ld")
    check_wide(ptx, dim, "st")


def compile_signals() -> None:
    constants = {"rank_count": 4, "has_asm": True}
    ptx = compiled(signals.signal_kernel, {"epoch": "i32"}, constants, {"num_warps": 1})
    assert "st.global.release.sys.b32" in ptx, "a signal is not behind what was written before"
    assert "atom." not in ptx, "words in memory of the host are not read and written at once"
    ptx = compiled(
        signals.wait_kernel,
        {"words": "*i32", "epoch": "i32", "spins": "i32", "late": "*i32"},
        constants,
        {"num_warps": 1},
    )
    assert "ld.global.acquire.sys.b32" in ptx, "what is behind a wait may come before it"
    assert "atom." not in ptx, "words in memory of the host are not read and written at once"


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_sm_90}[sys.argv[1]]()
