"""Options of a command that are the fields of a dataclass.

A command takes a dataclass as one parameter, ``limits: Annotated[Limits, Fields(...)]``, and
:func:`add` makes an option of each of its fields. Name, type, bounds, default and text are spelled
once, with the dataclass: the text is the field's under ``Args:`` of the docstring. Options stand
under their titles in the help.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from tierbed._util.bytes import parse_bytes, size_text
from tierbed.cli.options import numbers, words
from tierbed.config.words import Range

__all__ = ["Fields", "add"]


@dataclass(frozen=True, kw_only=True)
class Fields:
    """How the fields of a dataclass are options.

    A field ``head_ms_max`` is the option ``--head-ms-max``. One with ``bytes`` in its name takes a
    size, such as ``16MiB``, and is called without that word; a tuple takes words or numbers with
    commas between.

    Args:
        title: What the help calls them.
        skip: Fields that are no options, and keep their defaults.
        names: Options that are not called like their field.
        defaults: Defaults that are not those of the dataclass.
    """

    title: str = "Options"
    skip: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


Reader = Callable[[Any], Any]


def add(
    app: typer.Typer, name: str, command: Callable[..., None], short_help: str | None = None
) -> None:
    """Adds a command whose parameters may be dataclasses, annotated with :class:`Fields`.

    Args:
        app: Where it goes.
        name: What it is called.
        command: What it does.
        short_help: What the list of commands says; by default the beginning of its docstring.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    readers: dict[str, tuple[type, dict[str, Reader]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        kind, *extras = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        fields = next((extra for extra in extras if isinstance(extra, Fields)), None)
        if fields is None:
            parameters.append(_keyword(parameter.name, parameter.default, hint))
            continue
        options = _options(kind, fields)
        parameters += [option for option, _ in options]
        readers[parameter.name] = kind, {option.name: read for option, read in options}

    def run(**given: Any) -> None:
        for group, (kind, of_field) in readers.items():
            values = {name: read(given.pop(name)) for name, read in of_field.items()}
            given[group] = kind(**values)
        command(**given)

    run.__doc__ = command.__doc__
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, cls=_Grouped, short_help=short_help)(run)


class _Grouped(TyperCommand):
    """A command whose help has a section for each title."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the sections, in the order of their first options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                title = getattr(param, "rich_help_panel", None) or "Options"
                sections.setdefault("Arguments" if is_argument else title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _keyword(name: str, default: Any, hint: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _options(kind: Any, fields: Fields) -> list[tuple[inspect.Parameter, Reader]]:
    """Returns the options of the fields of ``kind``, and what makes a field of each."""
    hints, bounds = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    texts = _texts(kind)
    annotated: Any = Annotated
    options: list[tuple[inspect.Parameter, Reader]] = []
    for one in dataclasses.fields(kind):
        if one.name in fields.skip:
            continue
        hint, default = hints[one.name], fields.defaults.get(one.name, one.default)
        parts = one.name.split("_")
        name = fields.names.get(one.name, "-".join(part for part in parts if part != "bytes"))
        flag = f"--{name}"
        read: Reader = _as_it_is
        if "bytes" in parts:
            hint, default, read = str, size_text(default), _size_of(flag)
        elif get_origin(hint) is tuple:
            read = _list_of(get_args(hint)[0], flag)
            hint, default = str, ",".join(str(value) for value in default)
        bound = None if hint is str else _range_of(bounds[one.name])
        info = typer.Option(
            flag,
            metavar=_choices(hint),
            min=None if bound is None else bound.least,
            max=None if bound is None else bound.most,
            help=texts.get(one.name),
            rich_help_panel=fields.title,
        )
        options.append((_keyword(one.name, default, annotated[hint, info]), read))
    return options


def _texts(kind: type) -> dict[str, str]:
    """Returns what the docstring says of each field, without marks."""
    section = r"^(?:Args|Attributes):\n((?:    .*\n?)+)"
    listed = re.search(section, inspect.getdoc(kind) or "", re.MULTILINE)
    one = r"^    (\w+): (.*(?:\n        .*)*)"
    found = re.findall(one, "" if listed is None else listed[1], re.MULTILINE)
    return {name: " ".join(text.replace("``", "").split()) for name, text in found}


def _choices(hint: Any) -> str | None:
    """Returns the words of a ``Literal``, or of one in a union, as the help shows them."""
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return "|".join(get_args(literals[0])) if literals else None


def _range_of(hint: Any) -> Range | None:
    """Returns the bounds in the annotations of a type, or of a member of a union."""
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, Range):
            return extra
    return next((found for part in get_args(hint) if (found := _range_of(part))), None)


def _size_of(flag: str) -> Reader:
    return lambda text: parse_bytes(text, flag)


def _list_of(kind: type, flag: str) -> Reader:
    return words if kind is str else lambda text: numbers(flag, text, kind)


def _as_it_is(value: Any) -> Any:
    return value
