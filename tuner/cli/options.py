"""Command-line options derived from documents: fields are flags with their type, default and description as help.

Fields that most users never need are keys of the YAML file without a flag: `--set KEY=VALUE` reaches them, `--help-all` lists
them. A flag that is not given is None (or empty), so that a configuration file or the document's default decides.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from decoding.documents.strict_yaml import merged, read_value, validate
from tuner.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    def __init__(self, *args: Any, heading: str = "Options", **settings: Any) -> None:
        self.heading = heading
        super().__init__(*args, **settings)


class Position(click.Argument):
    """Argument with a line of help that may also be given by the flag of its name, such as `--model`."""

    def __init__(self, names: Sequence[str], *, field: FieldInfo, **settings: Any) -> None:
        super().__init__(
            names, metavar=names[0].upper() if settings.get("required") else f"[{names[0].upper()}]", **settings
        )
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        self.heading = str(extra.get("group", "Options"))
        self.line = _help(field)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx).strip("[]"), self.line

    def handle_parse_result(self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]) -> Any:
        assert self.name is not None
        if (by_flag := opts.get(_flag_of(self.name))) is not None:
            if isinstance(by_position := opts.get(self.name), str):
                raise click.UsageError(
                    f"{self.name} is given twice: {by_position!r} and --{self.name} {by_flag!r}", ctx
                )
            opts = {**opts, self.name: by_flag}
        return super().handle_parse_result(ctx, opts, args)


def _flag_of(position: str) -> str:
    return f"{position}_by_flag"


class KeyOption(GroupedOption):
    def __init__(self, *args: Any, document: type[BaseModel], **settings: Any) -> None:
        self.document = document
        super().__init__(*args, heading="Configuration", **settings)


class GroupedCommand(click.Command):
    """Command whose help lists options under their headings: what it works on first, devices and files last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; a flag that does not exist, but is a key, is refused with the way to give it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as wrong:
            key = wrong.option_name.lstrip("-").replace("-", "_").removeprefix("no_")
            keys = {
                name for option in self.params if isinstance(option, KeyOption) for name in option.document.model_fields
            }
            if key not in keys:
                raise
            raise click.UsageError(f"No such option {wrong.option_name!r}. Give --set {key}=VALUE.", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None and record[1]:
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
    positions: Sequence[str] = (),
    flags: Mapping[str, str] = MappingProxyType({}),
    may_be_in_file: bool = False,
) -> Callable[[CallableT], CallableT]:
    """Return a decorator that adds an option for every field of `document`, or for the fields named in `only`.

    The fields of `positions` are arguments, in this order, which a flag gives too. `flags` gives fields another flag than their
    name. Nested documents and mappings have no
    flag. Fields without a default are required, unless they `may_be_in_file`. Raises TypeError for a field whose type no option can
    hold.
    """
    fields, heading = document.model_fields, getattr(document, "HEADING", "Options")
    options = [
        _option(name, fields[name], flags.get(name), heading, required=not may_be_in_file)
        for name in (fields if only is None else only)
        if not _is_nested(fields[name]) and name not in positions
    ]
    arguments = [each for name in positions for each in _position(name, fields[name], required=not may_be_in_file)]
    return _decorator([*arguments, *options])


def keys_of(
    document: type[BaseModel], inside: Callable[[], Mapping[str, type[BaseModel]]] = dict
) -> Callable[[CallableT], CallableT]:
    """Return a decorator that adds `--set` for the keys of a document and `--help-all`, which lists those without a flag.

    `inside` imports the documents of mappings whose fields the document itself does not know, by key.
    """

    def help_all(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
        if is_wanted and not ctx.resilient_parsing:
            formatter = ctx.make_formatter()
            ctx.command.format_help(ctx, formatter)
            shown = {parameter.name for parameter in ctx.command.params}
            own = {
                key: field
                for key, field in _keys(document)
                if key not in shown and get_origin(field.annotation) is not dict
            }
            _write_keys(formatter, "Keys of the YAML file, or --set KEY=VALUE", own)
            for prefix, other in inside().items():
                _write_keys(formatter, f"Keys of {prefix}", dict(_keys(other, f"{prefix}.")))
            click.echo(formatter.getvalue().rstrip())
            ctx.exit()

    return _decorator(
        [
            click.option(
                "--set",
                SET,
                cls=KeyOption,
                document=document,
                multiple=True,
                metavar="KEY=VALUE",
                help="Set a key of the YAML file that has no flag; dots lead into mappings; repeatable.",
            ),
            click.option(
                "--help-all",
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=help_all,
                help="Show this message and the keys that have no flag.",
            ),
        ]
    )


SET = "assigned"
"""Name under which a command gets the values of `--set`."""


def _decorator(options: Iterable[Callable[[Any], Any]]) -> Callable[[CallableT], CallableT]:
    def decorate(command: CallableT) -> CallableT:
        for option in reversed([*options]):
            command = option(command)
        return command

    return decorate


def settings_from(document: type[DocumentT], flags: Mapping[str, Any]) -> DocumentT:
    """Return the document that flags and `--set` make. Raises `ConfigError` naming the wrong one."""
    return validate(document, given(document, flags), source="command line", error=ConfigError)


def given(document: type[BaseModel], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the command line gives, flags and `--set` alike, as the YAML file would.

    Names of `flags` may be dotted. Raises `ConfigError` for what is not KEY=VALUE, or is given twice.
    """
    found: dict[str, Any] = {}
    for name, value in flags.items():
        if name != SET and value is not None and value != ():
            found = merged(found, _nested(name, value))
    for text in flags.get(SET, ()):
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {text}: give KEY=VALUE, such as finalists=3")
        if _at(found, key) is not None:
            raise ConfigError(f"--set {key}: {key} is given twice on the command line")
        found = merged(found, _nested(key, _parsed(document, key, value)))
    return found


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _at(data: Any, key: str) -> Any:
    """Return what a mapping has at a dotted key, or on the way to it if that is no mapping; None if there is nothing."""
    for part in key.split("."):
        if not isinstance(data, dict):
            break
        data = data.get(part)
    return data


def _parsed(document: type[BaseModel], key: str, text: str) -> Any:
    """Return the value of `--set`: text for a field that takes text, else what YAML reads in it."""
    field = dict(_keys(document)).get(key)
    if field is not None:
        kind = _without_none(field.annotation)
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("escapes"):
            return EscapedText().convert(text, None, None)
        if kind in (str, Path) or (
            get_origin(kind) is Literal and all(isinstance(each, str) for each in get_args(kind))
        ):
            return text
    return read_value(text, source=f"--set {key}", error=ConfigError)


def _keys(document: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted keys of a document with their fields, nested documents included."""
    for name, field in document.model_fields.items():
        kind = _without_none(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _write_keys(formatter: click.HelpFormatter, heading: str, keys: Mapping[str, FieldInfo]) -> None:
    with formatter.section(heading):
        formatter.write_dl([(key, _help(field)) for key, field in keys.items()])


def _position(name: str, field: FieldInfo, *, required: bool) -> list[Callable[[Any], Any]]:
    """Return the argument of a field, and the hidden flag that gives it too."""
    return [
        click.argument(name, cls=Position, field=field, required=required and field.is_required()),
        click.option(f"--{name}", _flag_of(name), hidden=True, expose_value=False),
    ]


def _option(
    name: str, field: FieldInfo, flag: str | None, heading: str, *, required: bool
) -> Callable[[CallableT], CallableT]:
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
        heading=str(extra.get("group", heading)),
        required=required and field.is_required(),
        help=_help(field),
        **settings,
    )


def _value(annotation: Any, name: str) -> dict[str, Any]:
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
