"""Does everything work, and say so, where the kernel refuses io_uring?

Containers often do. The refusal is made here with a seccomp filter in a child process, which
needs no privilege and no tool; where ``strace`` is installed, it injects the same error once more.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

# Loads a filter that answers io_uring_setup (425 on every architecture) with EPERM, then runs
# the program given as arguments.
REFUSE = """
import ctypes, os, struct, sys
def rule(code, jump_true, jump_false, value):
    return struct.pack("HBBI", code, jump_true, jump_false, value)
program = b"".join([
    rule(0x20, 0, 0, 0),              # load the number of the system call
    rule(0x15, 0, 1, 425),            # io_uring_setup?
    rule(0x06, 0, 0, 0x00050000 | 1), # yes: EPERM
    rule(0x06, 0, 0, 0x7FFF0000),     # no: allow
])
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("rules", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
filter_ = Program(len(program) // 8, program)
for arguments in [(38, 1, 0, 0, 0), (22, 2, ctypes.byref(filter_), 0, 0)]:
    if libc.prctl(*arguments) != 0:
        sys.exit(f"no seccomp here: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
"""

TRAIN = """
import json, sys
import torch
import tierbed as tb
with tb.Store.open(sys.argv[1], dram_budget="4MiB", seed=1) as store:
    table = tb.EmbeddingBagConfig(name="t", num_embeddings=100_000, embedding_dim=16)
    emb = tb.EmbeddingBagCollection([table], store=store)
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        ids = torch.randint(0, 100_000, (2000,), generator=generator)
        bags = tb.KeyedJaggedTensor(["t"], ids, lengths=torch.ones(2000, dtype=torch.int64))
        emb(bags).values().sum().backward()
    store.checkpoint("end")
    print(json.dumps(store.stats()["store"]["io"]))
"""


def refused(*command: str) -> list[str]:
    """The command that runs ``command`` with io_uring refused."""
    return [sys.executable, "-c", REFUSE, *command]


@pytest.fixture(scope="module", autouse=True)
def _can_refuse() -> None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("seccomp filters are built here for 64-bit Linux only")
    done = subprocess.run(refused("/bin/true"), capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(done.stderr.strip())


def io_statistics(command: list[str]) -> dict[str, object]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_training_falls_back_and_names_the_reason(tmp_path: Path) -> None:
    io = io_statistics(refused(sys.executable, "-c", TRAIN, str(tmp_path / "store")))
    assert io["engine"] == "pread_pool"
    assert "EPERM" in str(io["fallback_reason"])
    assert int(str(io["read_count"])) > 100


def test_a_ring_asked_for_by_name_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    program = TRAIN.replace("seed=1)", "seed=1, io=tb.IoOptions(engine='io_uring'))", 1)
    done = subprocess.run(
        refused(sys.executable, "-c", program, str(tmp_path / "store")),
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "UnsupportedError" in done.stderr
    assert "auto" in done.stderr


def test_the_store_tests_pass_on_the_pread_pool() -> None:
    suites = ["unit/test_store.py", "unit/test_refusals.py", "parity/test_torch.py"]
    done = subprocess.run(
        refused(
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow",
            *[str(TESTS / suite) for suite in suites],
        ),
        capture_output=True,
        text=True,
        cwd=TESTS.parents[1],
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_same_under_strace(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed; the seccomp filter above refuses as well")
    inject = "inject=io_uring_setup:error=EPERM"
    log = str(tmp_path / "log")
    trace = [strace, "-f", "-qq", "-o", log, "-e", "trace=io_uring_setup", "-e", inject]
    done = subprocess.run([*trace, "/bin/true"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"strace cannot trace here: {done.stderr.strip()}")
    io = io_statistics([*trace, sys.executable, "-c", TRAIN, str(tmp_path / "store")])
    assert io["engine"] == "pread_pool"
    assert "INJECTED" in Path(log).read_text()


def test_doctor_names_the_filter_and_what_to_change(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tierbed", "doctor", str(tmp_path), "--no-speed", "--json"]
    done = subprocess.run(refused(*command, "-"), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, "it works without io_uring"
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    ring = checks["io_uring"]
    assert (ring["state"], ring["engine"]) == ("warning", "pread_pool")
    assert "EPERM" in ring["refusal"]
    assert ring["has_seccomp_filter"] is True
    assert "io_uring_setup" in ring["advice"]
    assert list(tmp_path.iterdir()) == []
