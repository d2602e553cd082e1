"""Options made of the fields of a dataclass: names, types, bounds, defaults, texts, groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer

from tierbed.cli import run
from tierbed.cli.fields import Fields, add
from tierbed.config.words import Positive, Range


@dataclass(frozen=True, kw_only=True)
class Baking:
    """How bread is baked.

    Args:
        oven: What it is baked in,
            ``gas`` or ``wood``.
        flour_bytes_max: Most flour.
        loaves: How many.
        heat: Share of the fire.
        seeds: What is on top.
        weights: Of the loaves.
        is_salted: With salt.
        recipe: Where it is written.
        secret: Nobody's business.
    """

    oven: Literal["gas", "wood"] = "wood"
    flour_bytes_max: int = 3 << 20
    loaves: Positive | None = None
    heat: Annotated[float, Range(0.0, 1.0)] = 0.5
    seeds: tuple[str, ...] = ("sesame", "poppy")
    weights: tuple[float, ...] = (0.5, 1.0)
    is_salted: bool = False
    recipe: Path | None = None
    secret: int = 7


BAKED: list[tuple[str, Baking]] = []


def bake(
    name: Annotated[str, typer.Argument(help="Who bakes.")],
    *,
    how: Annotated[
        Baking,
        Fields(
            title="Baking",
            skip=("secret",),
            names={"is_salted": "salt/--no-salt"},
            defaults={"heat": 0.25},
        ),
    ],
) -> None:
    """Bake bread."""
    BAKED.append((name, how))


def called(*arguments: str) -> int:
    BAKED.clear()
    commands = typer.Typer(rich_markup_mode=None)
    commands.callback()(lambda: None)
    add(commands, "bake", bake)
    return run(commands, "bakery", ["bake", *arguments])


def test_defaults_are_those_of_the_dataclass_but_for_those_that_are_named() -> None:
    assert called("ada") == 0
    assert [("ada", Baking(heat=0.25))] == BAKED


def test_every_kind_of_field_is_read() -> None:
    given = ("--oven", "gas", "--flour-max", "1GiB", "--loaves", "3", "--heat", "1")
    more = ("--seeds", "oats, rye", "--weights", "2,3.5", "--salt", "--recipe", "book")
    assert called("ada", *given, *more) == 0
    assert BAKED[0][1] == Baking(
        oven="gas",
        flour_bytes_max=1 << 30,
        loaves=3,
        heat=1.0,
        seeds=("oats", "rye"),
        weights=(2.0, 3.5),
        is_salted=True,
        recipe=Path("book"),
    )


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--oven", "coal", "--oven"),
        ("--flour-max", "much", "--flour-max is not a size"),
        ("--loaves", "0", "--loaves"),
        ("--heat", "1.5", "--heat"),
        ("--weights", "1,heavy", "--weights must be numbers"),
        ("--secret", "1", "--secret"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_the_option(
    option: str, value: str, told: str, capsys: Any
) -> None:
    assert called("ada", option, value) == 2
    assert told in capsys.readouterr().err
    assert BAKED == []


def test_the_help_has_the_texts_under_their_title(capsys: Any) -> None:
    assert called("--help") == 0
    said = capsys.readouterr().out
    _, _, group = said.partition("Baking:")
    words = " ".join(group.split())
    for expected in (
        "--oven gas|wood What it is baked in, gas or wood. [default: wood]",
        "--flour-max SIZE Most flour. [default: 3MiB]",
        "How many. [x>=1]",
        "[default: 0.25; 0.0<=x<=1.0]",
        "What is on top. [default: sesame,poppy]",
        "--salt / --no-salt With salt.",
    ):
        assert expected in words
    assert "secret" not in said
    assert "Who bakes." in said
