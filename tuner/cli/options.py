"""Command-line options derived from documents: each field is a flag with its type, default and description as help.

A flag that is not given is None (or empty), so that a configuration file or the document's default decides.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from decoding.documents.strict_yaml import validate
from tuner.errors import ConfigError

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
DocumentT = TypeVar("DocumentT", bound=BaseModel)

SCALARS: Mapping[type, tuple[click.ParamType, str]] = MappingProxyType(
    {
        int: (click.INT, "N"),
        float: (click.FLOAT, "X"),
        Path: (click.Path(path_type=Path), "PATH"),
        str: (click.STRING, "TEXT"),
    }
)


ESCAPES: Mapping[str, str] = MappingProxyType({r"\n": "\n", r"\t": "\t", r"\\": "\\"})
"""Sequences with which a flag writes what a shell makes hard to write."""


class EscapedText(click.ParamType):
    """Text in which `\\n` is a line break, `\\t` a tab and two backslashes one; in a YAML file, YAML's own rules hold."""

    name = "TEXT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text that the escapes stand for; other backslashes stay."""
        return re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], str(value))


FIRST_HEADINGS = ("Configuration", "Problem")
LAST_HEADINGS = ("Decoding", "Files and stores", "Options")


class GroupedOption(click.Option):
    """Option that knows the heading it is listed under."""

    def __init__(self, *args: Any, heading: str = "Options", **settings: Any) -> None:
        self.heading = heading
        super().__init__(*args, **settings)


class GroupedCommand(click.Command):
    """Command whose help lists options under their headings: what it works on first, devices and files last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per heading, in order."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(parameter, "heading", "Options"), []).append(record)
        for heading in sorted(sections, key=_rank):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])


def _rank(heading: str) -> int:
    """Return the position of a heading; headings that are in neither list are between the two, in their order."""
    if heading in FIRST_HEADINGS:
        return FIRST_HEADINGS.index(heading) - len(FIRST_HEADINGS)
    return LAST_HEADINGS.index(heading) + 1 if heading in LAST_HEADINGS else 0


def options_of(
    document: type[BaseModel],
    *,
    only: Iterable[str] | None = None,
    flags: Mapping[str, str] = MappingProxyType({}),
    may_be_in_file: bool = False,
) -> Callable[[CallableT], CallableT]:
    """Return a decorator that adds an option for every field of `document`, or for the fields named in `only`.

    `flags` gives fields another flag than their name. Nested documents and mappings have no flag. Fields without a default
    are required, unless they `may_be_in_file`. Raises TypeError for a field whose type no option can hold.
    """
    fields = document.model_fields
    options = [
        _option(name, fields[name], flags.get(name), required=not may_be_in_file)
        for name in (fields if only is None else only)
        if not _is_nested(fields[name])
    ]

    def decorate(command: CallableT) -> CallableT:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def settings_from(document: type[DocumentT], flags: Mapping[str, Any]) -> DocumentT:
    """Return the document that the given flags make. Raises `ConfigError` naming the wrong one."""
    return validate(document, given(flags), source="command line", error=ConfigError)


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that were given on the command line."""
    return {name: value for name, value in flags.items() if value is not None and value != ()}


def _option(name: str, field: FieldInfo, flag: str | None, *, required: bool) -> Callable[[CallableT], CallableT]:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    settings = _value(_annotation(field), name)
    if extra.get("escapes"):
        settings = {**settings, "type": EscapedText()}
    if "metavar" in extra:
        settings["metavar"] = extra["metavar"]
    shown = flag or f"--{name.replace('_', '-')}"
    if settings.pop("is_switch", False):
        shown, settings = (shown, {"is_flag": True}) if field.default is False else (f"{shown}/--no-{shown[2:]}", {})
        settings["default"] = None  # else click fills in False
    return click.option(
        shown,
        name,
        cls=GroupedOption,
        heading=str(extra.get("group", "Options")),
        required=required and field.is_required(),
        help=_help(field),
        **settings,
    )


def _value(annotation: Any, name: str) -> dict[str, Any]:
    """Return the settings of an option that holds values of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        base, *metadata = arguments
        if any(isinstance(each, BeforeValidator) for each in metadata) and get_args(base) != (str, ...):
            return {"type": click.STRING}  # the validator reads text: a duration, a list of layers
        return _bounded(_value(base, name), metadata)
    if origin is Literal:
        return {"type": click.Choice(arguments)}
    if origin is tuple:
        return {**_value(arguments[0], name), "multiple": True}
    if annotation is bool:
        return {"is_switch": True}
    if annotation in SCALARS:
        kind, metavar = SCALARS[annotation]
        return {"type": kind, "metavar": metavar}
    raise TypeError(f"no option can hold the field {name!r} of type {annotation!r}")


def _bounded(settings: dict[str, Any], metadata: Iterable[Any]) -> dict[str, Any]:
    """Return the settings with the bounds that the metadata sets for numbers."""
    bounds: dict[str, Any] = {}
    for each in metadata:
        match each:
            case Ge():
                bounds |= {"min": _whole(each.ge)}
            case Gt():
                bounds |= {"min": _whole(each.gt), "min_open": True}
            case Le():
                bounds |= {"max": _whole(each.le)}
    ranges = {click.INT: click.IntRange, click.FLOAT: click.FloatRange}
    if not bounds or settings.get("type") not in ranges:
        return settings
    return {**settings, "type": ranges[settings["type"]](**bounds)}


def _whole(bound: Any) -> Any:
    """Return 0 for 0.0, so that messages read well."""
    return int(bound) if bound == int(bound) else bound


def _annotation(field: FieldInfo) -> Any:
    """Return the type of a field's values, None aside, with its metadata."""
    annotation = _without_none(field.annotation)
    return Annotated[annotation, *field.metadata] if field.metadata else annotation


def _without_none(annotation: Any) -> Any:
    """Return `T` for `T | None`, anything else as it is."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else annotation


def _is_nested(field: FieldInfo) -> bool:
    kind = _without_none(field.annotation)
    return get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))


def _help(field: FieldInfo) -> str:
    """Return the description followed by the default, unless there is none or the description names it."""
    description = field.description or ""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined or default is None or default is False or default == ():
        return description
    return f"{description}  [default: {_shown(default)}]"


def _shown(default: Any) -> str:
    if default is True:
        return "yes"
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
