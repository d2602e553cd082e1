"""Closed words of options, as types."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "Backend",
    "Durability",
    "IoEngine",
    "LogLevel",
    "MissMode",
    "OnMismatch",
    "Order",
    "PageSelection",
    "SnapshotBackend",
]

Backend = Literal[
    "file", "memory", "cold", "lsm", "lsm_plain", "hashdb", "mmap", "rocksdb", "rocksdb_universal"
]
Durability = Literal["checkpoint", "step"]
IoEngine = Literal["auto", "io_uring", "pread", "inline"]
LogLevel = Literal["off", "error", "warn", "info"]
MissMode = Literal["read", "surrogate", "default"]
OnMismatch = Literal["error", "fallback", "fallback_cold"]
Order = Literal["auto", "forward", "window"]
PageSelection = Literal["one_pass", "greedy"]
SnapshotBackend = Literal["direct", "mmap", "memory"]
