"""What ``tierbed demo online`` saw: accuracy and age of each server's answers, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierbed._util.report import print_table, write_json
from tierbed.errors import TierbedError
from tierbed.recipes.metrics import auc
from tierbed_bench.common import percentile
from tierbed_bench.figures import save_figure

__all__ = ["Answer", "Asked", "Published", "report"]

WINDOW = 16
COLORS = {"fresh_1": "#3b6ea5", "fresh_2": "#5aa469", "first_snapshot": "#b5651d"}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A snapshot or a delta, as its trainer said.

    Args:
        published: Its name.
        identity: What answers call it.
        sample: Samples trained until then.
        committed_at_s: When the step ended that it has.
        seconds: What publishing took.
        rows: Rows in it.
        bytes: Bytes of it.
    """

    published: str
    identity: str
    sample: int
    committed_at_s: float
    seconds: float
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A server's answer to a batch.

    Args:
        at_s: When it came.
        seconds: What it took.
        identity: What it was answered from.
        logit: ``[B]``.
    """

    at_s: float
    seconds: float
    identity: str
    logit: Sequence[float]


@dataclass
class Asked:
    """All that one server was asked.

    Args:
        answers: What came back, in order.
        labels: Of each answer's samples.
        failed: Requests without an answer.
    """

    answers: list[Answer] = field(default_factory=list)
    labels: list[Sequence[float]] = field(default_factory=list)
    failed: int = 0

    def add(self, labels: Sequence[float], answer: Answer | None) -> None:
        """Notes an answer, or a failure."""
        if answer is None:
            self.failed += 1
            return
        self.answers.append(answer)
        self.labels.append(labels)

    def auc(self, begin: int, end: int) -> float:
        """Returns the AUC over the answers ``begin..end``."""
        labels = [label for batch in self.labels[begin:end] for label in batch]
        logits = [logit for one in self.answers[begin:end] for logit in one.logit]
        return auc(labels, logits)


@dataclass(frozen=True)
class _Series:
    seconds: list[float]
    auc: list[float]
    age_s: list[float]


def report(
    out: Path,
    asked: Mapping[str, Asked],
    published: Mapping[str, Published],
    begun_s: float,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Prints the table; writes ``report.json`` and ``report.png``.

    Args:
        out: The folder.
        asked: What each server answered.
        published: By identity.
        begun_s: When the first request was sent.
        more: Facts that are written with these.

    Returns:
        The facts.

    Raises:
        TierbedError: A server answered from something never published, or went back.
    """
    rows = [_row(name, one, published) for name, one in asked.items()]
    deltas = [one for one in published.values() if one.published != "base"]
    facts: dict[str, Any] = {
        "deltas": len(deltas),
        "delta_rows_max": max(one.rows for one in deltas),
        "delta_bytes_max": max(one.bytes for one in deltas),
        "publish_s_max": max(one.seconds for one in deltas),
        **(more or {}),
        "servers": rows,
    }
    series = {name: _series(one, published, begun_s) for name, one in asked.items()}
    write_json(out / "report.json", facts)
    save_figure(out / "report.png", lambda figure: _draw(figure, series), (9, 6))
    print_table("Online learning: the newest samples, asked of each server", rows)
    print(f"report: {out / 'report.json'}, picture: {out / 'report.png'}")
    return facts


def _row(name: str, asked: Asked, published: Mapping[str, Published]) -> dict[str, Any]:
    _check(name, asked, published)
    ages = [one.at_s - published[one.identity].committed_at_s for one in asked.answers]
    half = len(asked.answers) // 2
    return {
        "server": name,
        "requests": len(asked.answers),
        "failed": asked.failed,
        "generations": len({one.identity for one in asked.answers}),
        "auc_second_half": round(asked.auc(half, len(asked.answers)), 4),
        "age_s_p50": round(percentile(ages[half:], 0.5), 2),
        "age_s_p99": round(percentile(ages[half:], 0.99), 2),
        "first_answer_s_max": _first_answer_s(asked, published),
        "ms_p99": round(1e3 * percentile([one.seconds for one in asked.answers], 0.99), 1),
    }


def _first_answer_s(asked: Asked, published: Mapping[str, Published]) -> float | None:
    """Returns the longest time from a step's end to the first answer that has it, if any has."""
    first: dict[str, float] = {}
    for one in asked.answers:
        first.setdefault(one.identity, one.at_s - published[one.identity].committed_at_s)
    of_deltas = [age for key, age in first.items() if published[key].published != "base"]
    return round(max(of_deltas), 2) if of_deltas else None


def _check(name: str, asked: Asked, published: Mapping[str, Published]) -> None:
    newest = -1
    for one in asked.answers:
        if one.identity not in published:
            raise TierbedError(f"{name} answers from {one.identity}, which was never published")
        sample = published[one.identity].sample
        if sample < newest:
            raise TierbedError(f"{name} went back to an older generation")
        newest = sample


def _series(asked: Asked, published: Mapping[str, Published], begun_s: float) -> _Series:
    ends = range(WINDOW, len(asked.answers) + 1, 4)
    return _Series(
        [asked.answers[end - 1].at_s - begun_s for end in ends],
        [asked.auc(end - WINDOW, end) for end in ends],
        [
            one.at_s - published[one.identity].committed_at_s
            for one in (asked.answers[end - 1] for end in ends)
        ],
    )


def _draw(figure: Any, series: Mapping[str, _Series]) -> None:
    quality, age = figure.subplots(2, 1, sharex=True)
    for name, one in series.items():
        label = name.replace("_", " ")
        quality.plot(one.seconds, one.auc, label=label, color=COLORS[name])
        age.plot(one.seconds, one.age_s, label=label, color=COLORS[name])
    quality.set_ylabel("AUC, newest samples")
    quality.legend()
    age.set_ylabel("age of the answer's model, s")
    age.set_yscale("log")
    age.set_xlabel("seconds")
