"""Options of a command that are the fields of a dataclass.

A command takes a dataclass as one parameter, ``limits: Annotated[Limits, Fields(...)]``, and
:func:`add` makes an option of each of its fields. Name, type, bounds, default and text are spelled
once, with the dataclass: the text is the field's under ``Args:`` of the docstring. Options stand
under their titles in the help. Of a command with a ``section`` a file sets them, too
(:mod:`tierbed.cli.configuration`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from tierbed._util.bytes import size_text
from tierbed._util.progress import Progress
from tierbed.cli import hints
from tierbed.cli.configuration import ConfigFile, PrintConfig, effective, optional_params
from tierbed.cli.settings import Effective, Key, Kind, Setting
from tierbed.config.words import Range

__all__ = ["Fields", "add"]

#: What the help says that an option takes; a list of words has commas between.
_METAVARS: dict[Kind, str] = {
    "size": "SIZE",
    "seconds": "TIME",
    "whole": "N",
    "number": "X",
    "list": "A,B",
}
_QUIET = Annotated[
    bool, typer.Option("--quiet", "-q", help="Say nothing but the result, warnings and errors.")
]


@dataclass(frozen=True, kw_only=True)
class Fields:
    """How the fields of a dataclass are options.

    A field ``head_ms_max`` is the option ``--head-ms-max``. A whole number with ``bytes`` in its
    name takes a size, such as ``16MiB``, and is called without that word; a tuple takes words or
    numbers with commas between.

    Args:
        title: What the help calls them.
        skip: Fields that are no options, and keep their defaults.
        names: Options that are not called like their field.
        defaults: Defaults that are not those of the dataclass.
        section: Where a file has them; None: where it has the command's own.
        sections: Where a file has single fields.
    """

    title: str = "Options"
    skip: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    section: str | None = None
    sections: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Option:
    """A parameter of a command, and what it is in a file."""

    parameter: inspect.Parameter
    setting: Setting


def add(
    app: typer.Typer,
    name: str,
    command: Callable[..., None],
    short_help: str | None = None,
    *,
    section: str | None = None,
) -> None:
    """Adds a command whose parameters may be dataclasses, annotated with :class:`Fields`.

    Args:
        app: Where it goes.
        name: What it is called.
        command: What it does.
        short_help: What the list of commands says; by default the beginning of its docstring.
        section: Where a file has its own options; None: it reads no file.
    """
    annotated = get_type_hints(command, include_extras=True)
    options: list[_Option] = []
    groups: dict[str, tuple[type, list[Setting]]] = {}
    told: list[str] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = annotated[parameter.name]
        kind, *extras = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        fields = next((extra for extra in extras if isinstance(extra, Fields)), None)
        if kind is Effective:
            told.append(parameter.name)
        elif fields is None:
            options.append(_plain(parameter, hint, section))
        else:
            of_fields = _options(kind, replace(fields, section=fields.section or section))
            options += of_fields
            groups[parameter.name] = kind, [option.setting for option in of_fields]

    def run(context: typer.Context, **given: Any) -> None:
        Progress.is_quiet = given.pop("quiet")
        values = {s.name: s.read(given[s.name]) for s in (option.setting for option in options)}
        for group, (kind, settings) in groups.items():
            values[group] = kind(**{setting.name: values.pop(setting.name) for setting in settings})
        if section is not None:
            text = effective(context, given)
            if given["print_config"]:
                typer.echo(text, nl=False)
                return
            values.update(dict.fromkeys(told, Effective(text)))
        command(**values)

    parameters = [_keyword("context", inspect.Parameter.empty, typer.Context)]
    parameters += [option.parameter for option in options]
    parameters.append(_keyword("quiet", False, _QUIET))
    if section is not None:
        parameters.append(_keyword("config", None, ConfigFile))
        parameters.append(_keyword("print_config", False, PrintConfig))
        settings = [option.setting for option in options if option.setting.section]
        vars(run)["settings"] = settings
    run.__doc__ = command.__doc__
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, cls=_Grouped, short_help=short_help)(run)


class _Grouped(TyperCommand):
    """A command whose help has a section for each title."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the words; where they ask for what is set, nothing must be given."""
        optional_params(ctx, super().get_params(ctx), args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options."""
        params: list[Any] = optional_params(ctx, super().get_params(ctx))
        return params

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


def _plain(parameter: inspect.Parameter, hint: Any, section: str | None) -> _Option:
    """Returns the option of a parameter that is no dataclass."""
    key = hints.mark(hint, Key) or Key(section)
    info = hints.mark(hint, typer.models.ParameterInfo)
    declared = getattr(info, "param_decls", None) or (getattr(info, "default", None),)
    flag = next((word for word in declared if str(word).startswith("--")), None)
    flag = parameter.name.upper() if flag is None else flag.partition("/")[0]
    setting = Setting(
        section=key.section or "",
        key=key.name or flag.removeprefix("--").lower(),
        name=parameter.name,
        flag=flag,
        kind=hints.kind_of(hint),
        is_by_comma=False,
        read=hints.reader(hint, flag),
        text=getattr(info, "help", None) or "",
        choices=hints.choices(hint),
        least=getattr(info, "min", None),
        most=getattr(info, "max", None),
    )
    return _Option(_keyword(parameter.name, parameter.default, hint), setting)


def _options(kind: Any, fields: Fields) -> list[_Option]:
    """Returns the options of the fields of ``kind``."""
    plain, annotated = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    texts = hints.texts(kind)
    found = []
    for one in dataclasses.fields(kind):
        if one.name not in fields.skip:
            default = fields.defaults.get(one.name, one.default)
            text = texts.get(one.name)
            field_ = _Field(one.name, plain[one.name], annotated[one.name], default, text)
            found.append(_option(field_, fields))
    return found


@dataclass(frozen=True)
class _Field:
    """A field of a dataclass: its type without and with annotations, default and text."""

    name: str
    hint: Any
    full_hint: Any
    default: Any
    text: str | None


def _option(one: _Field, fields: Fields) -> _Option:
    hint, default, parts = one.hint, one.default, one.name.split("_")
    takes = hints.kind_of(one.full_hint)
    is_size = "bytes" in parts and takes != "number"
    kept = [part for part in parts if not (is_size and part == "bytes")]
    name = fields.names.get(one.name, "-".join(kept))
    flag = f"--{name.partition('/')[0]}"
    read, choices = hints.reader(one.full_hint, flag), hints.choices(hint)
    is_by_comma = takes == "list" and (hint is str or get_origin(hint) is tuple)
    bound = hints.mark(one.full_hint, Range)
    if is_size:
        hint, default, takes, bound = str, size_text(default), "size", None
        read = hints.size_of(flag)
    elif get_origin(hint) is tuple:
        read = hints.list_of(get_args(hint)[0], flag)
        hint, default = str, ",".join(str(value) for value in default)
    if takes == "flag" and "/" not in name and fields.section is not None:
        name += f"/--no-{name}"
    annotated: Any = Annotated
    info = typer.Option(
        f"--{name}",
        metavar="|".join(choices) or _METAVARS.get(takes),
        min=None if bound is None else bound.least,
        max=None if bound is None else bound.most,
        help=one.text,
        rich_help_panel=fields.title,
    )
    setting = Setting(
        section=fields.sections.get(one.name, fields.section or ""),
        key=flag.removeprefix("--"),
        name=one.name,
        flag=flag,
        kind=takes,
        is_by_comma=is_by_comma,
        read=read,
        text=one.text or "",
        choices=choices,
        least=None if bound is None else bound.least,
        most=None if bound is None else bound.most,
    )
    return _Option(_keyword(one.name, default, annotated[hint, info]), setting)
