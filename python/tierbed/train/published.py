"""What a publisher did so far."""

from __future__ import annotations

from dataclasses import dataclass

from tierbed.results import PushedVersion

__all__ = ["Counts"]


@dataclass
class Counts:
    """What was published so far."""

    version: int | None = None
    fulls: int = 0
    deltas: int = 0
    failures: int = 0
    bytes: int = 0
    pause_s: float = 0.0
    pause_s_max: float = 0.0
    pause_s_sum: float = 0.0
    upload_s: float = 0.0
    full_reason: str | None = None
    last_error: str | None = None

    def pause(self, seconds: float) -> None:
        """Counts a pause of training."""
        self.pause_s = seconds
        self.pause_s_max = max(self.pause_s_max, seconds)
        self.pause_s_sum += seconds

    def fail(self, error: BaseException) -> None:
        """Counts a failure."""
        self.failures += 1
        self.last_error = str(error)

    def push(self, version: PushedVersion, full_reason: str | None, seconds: float) -> None:
        """Counts a version that the channel is at."""
        self.version = version.version
        self.bytes += version.file_bytes
        self.upload_s = seconds
        self.last_error = None
        if full_reason is None:
            self.deltas += 1
        else:
            self.fulls += 1
            self.full_reason = full_reason
