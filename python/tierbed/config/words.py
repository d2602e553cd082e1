"""Closed words of options, as types."""

from __future__ import annotations

from typing import Literal

__all__ = ["IoEngine", "LogLevel", "MissMode", "PageSelection", "SnapshotBackend"]

IoEngine = Literal["auto", "io_uring", "pread", "inline"]
LogLevel = Literal["off", "error", "warn", "info"]
MissMode = Literal["read", "surrogate", "default"]
PageSelection = Literal["one_pass", "greedy"]
SnapshotBackend = Literal["direct", "mmap", "memory"]
