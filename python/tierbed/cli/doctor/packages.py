"""Versions of Tierbed and what it is used with, and what torch sees of the machine."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tierbed import _native
from tierbed.cli.doctor.findings import Finding
from tierbed.cli.doctor.system import System

__all__ = ["Torch", "findings"]

#: What is tested together with Tierbed, and named where it is installed.
_TESTED = ("torchrec", "fbgemm-gpu", "lightning", "accelerate", "polars", "datasets", "faiss-cpu")
#: Packages of the extras.
_EXTRAS = {"data": "pyarrow", "ray": "ray", "yaml": "pyyaml"}


@dataclass(frozen=True)
class Torch:
    """What torch says of itself and of GPUs.

    Args:
        version: Of torch.
        threads: Of its operators.
        cuda: The CUDA it was built for; None: it was built without.
        devices: Names of the GPUs that it can use.
        trouble: What it says of a GPU that it cannot use.
    """

    version: str
    threads: int
    cuda: str | None
    devices: tuple[str, ...] = ()
    trouble: str = ""

    @classmethod
    def ask(cls) -> Torch:
        """Asks torch."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            is_there = torch.cuda.is_available()
        count = torch.cuda.device_count() if is_there else 0
        return cls(
            torch.__version__,
            torch.get_num_threads(),
            torch.version.cuda,
            tuple(torch.cuda.get_device_name(at) for at in range(count)),
            " ".join(str(one.message) for one in said).partition("\n")[0],
        )


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required() -> tuple[str, ...]:
    try:
        return tuple(importlib.metadata.requires("tierbed") or ())
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return ()


@dataclass(frozen=True)
class Packages:
    """Where versions come from.

    Args:
        version_of: Gives the version of a package, None where it is not installed.
        requires: What the package tierbed says that it needs.
    """

    version_of: Callable[[str], str | None] = _version_of
    requires: tuple[str, ...] = field(default_factory=_required)


def findings(system: System, said: Torch, packages: Packages | None = None) -> list[Finding]:
    """Returns what there is to say of packages and GPUs."""
    packages = packages or Packages()
    return [
        _tierbed(packages),
        _needed(packages),
        _torch(system, said),
        _cuda(system, said),
        _extras(packages),
    ]


def _tierbed(packages: Packages) -> Finding:
    native, installed = _native.version(), packages.version_of("tierbed")
    found = f"{native}, Python {platform.python_version()}"
    values = {"version": native, "python": platform.python_version(), "installed": installed}
    if installed not in (None, native):
        advice = "pip install --force-reinstall tierbed"
        found += f", but its Python part is {installed}"
        return Finding("tierbed", "problem", found, advice, values)
    return Finding("tierbed", "ok", found, "", values)


def _needed(packages: Packages) -> Finding:
    """Compares what must be there with the least versions that the package names."""
    there, wrong = {}, []
    for line in packages.requires:
        need = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<[\d.]+)?", line.strip())
        if need is None:  # of an extra, or of another Python
            continue
        name, least = need.groups()
        there[name] = packages.version_of(name)
        if there[name] is None or _numbers(there[name] or "") < _numbers(least):
            wrong.append(f"{name}>={least}")
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in there.items())
    if wrong:
        advice = "pip install " + " ".join(f"'{one}'" for one in wrong)
        return Finding("packages", "problem", found, advice, {"versions": there})
    return Finding("packages", "ok", found or "run from its sources", "", {"versions": there})


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _torch(system: System, said: Torch) -> Finding:
    found = f"{said.version}, {said.threads} threads"
    values = {"version": said.version, "threads": said.threads}
    most = max(1, int(min(system.cpus, system.cpu_quota() or system.cpus)))
    if said.threads > most:
        advice = f"more threads than processors: OMP_NUM_THREADS={most}, torch.set_num_threads"
        return Finding("torch", "warning", found, advice, values)
    return Finding("torch", "ok", found, "", values)


def _cuda(system: System, said: Torch) -> Finding:
    driver = re.search(
        r"Kernel Module(?: for \S+)?\s+([\d.]+)", system.text("proc/driver/nvidia/version") or ""
    )
    values: dict[str, Any] = {
        "torch_cuda": said.cuda,
        "driver": driver[1] if driver else None,
        "devices": list(said.devices),
    }
    if said.devices:
        found = f"{', '.join(said.devices)}; CUDA {said.cuda}"
        found += f", driver {driver[1]}" if driver else ""
        return Finding("CUDA", "ok", found, "", values)
    if driver is None:
        built = f"torch is built for CUDA {said.cuda}" if said.cuda else "torch is built without it"
        return Finding("CUDA", "ok", f"no GPU, and none is needed; {built}", "", values)
    found = f"the driver {driver[1]} is there, and torch uses no GPU"
    if said.cuda is None:
        advice = "a torch that is built for CUDA, if the dense model shall run on the GPU"
    else:
        found += f": {said.trouble}" if said.trouble else ""
        advice = (
            f"a driver for CUDA {said.cuda}, or a torch for an older CUDA; in a container pass "
            "the GPU on (docker run --gpus all); look at CUDA_VISIBLE_DEVICES"
        )
    return Finding("CUDA", "warning", found, advice, values)


def _extras(packages: Packages) -> Finding:
    there = {name: packages.version_of(package) for name, package in _EXTRAS.items()}
    tested = {name: packages.version_of(name) for name in ("tierbed-bench", *_TESTED)}
    shown = [f"{_EXTRAS[name]} {version} ({name})" for name, version in there.items() if version]
    shown += [f"{name} {version}" for name, version in tested.items() if version]
    values = {"extras": there, "beside": {k: v for k, v in tested.items() if v}}
    return Finding("extras", "ok", ", ".join(shown) or "none", "", values)
