"""What tests of kernels look at: what the compiler makes of them for sm_90, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

# One and odd numbers, powers of two, and wide rows: each has tiles of its own.
DIMS = [1, 2, 4, 12, 16, 36, 64, 128, 256, 512, 1024]


def check_rounding(ptx: str) -> None:
    """Every operation is rounded once, as the CPU rounds it."""
    assert "fma." not in ptx, "a product was not rounded before it was added"
    assert "div.full" not in ptx, "a quotient is not rounded as IEEE 754 says"
    assert "sqrt.approx" not in ptx, "a root is not rounded as IEEE 754 says"
    assert ".ftz" not in ptx, "a subnormal number becomes zero"


def check_wide(ptx: str, dim: int, what: str) -> None:
    """Vectors whose elements are a multiple of four are moved 16 bytes at a time."""
    if dim % 4 == 0 and dim >= 64:
        moved = re.findall(what + r"\.global[.\w]*", ptx)
        assert any(".v4.b32" in one for one in moved), (dim, sorted(set(moved)))


def width_of(dim: int) -> int:
    import triton

    return int(triton.next_power_of_2(dim))


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
    registers, stack_bytes = used_by(built)
    assert 0 < registers <= 128, registers
    assert stack_bytes == 0, "values do not fit into registers"
    print(f"{names[0]}: registers {registers}", flush=True)
    return str(built.asm["ptx"])


def used_by(built: object) -> tuple[int, int]:
    """Reads the registers and the bytes of stack of a thread from the cubin, by Triton's tool."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])  # type: ignore[attr-defined]
        file.flush()
        told = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr)
    assert found is not None, told.stdout
    return int(found[1]), int(found[2])
