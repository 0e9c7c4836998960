"""Strict YAML documents: read, validate against a pydantic model, and report errors in one line.

The module knows nothing of the documents' meaning; `decoding.profile` and the tuner's configuration both use it.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from decoding.errors import SdtuneError, one_line

MOST_VALUES = 50_000
"""Most values of a document: a thousand times as many as a profile has."""
MOST_SHOWN = 80
"""Most characters of a value in an error."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_HOURS = 8760
"""Longest duration: a year. Clocks and locks of the standard library take no longer ones than some hundred years."""
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, which a terminal obeys, and halves of surrogate pairs, which no file and no database takes."""
_NO_LINE = re.compile(_NO_TEXT.pattern[:-1] + r"\t\n\r\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""The same with ends of lines, and characters that turn the direction of writing."""


def parse_duration(value: Any) -> float:
    """Return the seconds of a number or of a string such as `90s`, `10m` or `1.5h`.

    Raises `ValueError` for anything else, and for durations that are not finite or longer than `LONGEST_HOURS`.
    """
    number, unit = value, "s"
    if isinstance(value, bool) or not isinstance(value, int | float):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", str(value).strip().lower())
        if match is None or (match[2] or "s") not in UNITS:
            raise ValueError("must be a duration such as 90s, 10m or 1.5h")
        number, unit = float(match[1]), match[2] or "s"
    if not abs(number) <= LONGEST_HOURS * 3600 / UNITS[unit]:
        raise ValueError(f"must be a duration of at most {LONGEST_HOURS}h")
    return number * UNITS[unit]


Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]
"""A configuration value that is a duration, in seconds after validation."""


def _is_one_line(text: str) -> str:
    if _NO_LINE.search(text):
        raise ValueError("must be one line without control characters")
    return text


Line = Annotated[str, AfterValidator(_is_one_line)]
"""A name that is shown."""


class Document(BaseModel):
    """Frozen data that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


DocumentT = TypeVar("DocumentT", bound=BaseModel)


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that rejects duplicate keys, of which PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        seen = set()
        for key in (self.construct_object(each, deep=deep) for each in own):
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"a {type(key).__name__} as a key", node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _load(text: str) -> Any:
    """Return the data of a YAML document, of at most `MOST_VALUES` with aliases written out."""
    loader = _StrictLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _num_values(root, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"it holds more than {MOST_VALUES} values, aliases written out")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values of a node with aliases written out; `known` are those of other nodes, by identity."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # while it is counted: a node inside itself never ends
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [child for each in inside for child in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


def read_mapping(path: Path, *, what: str, error: type[SdtuneError]) -> dict[str, Any]:
    """Parse the YAML file at `path` into a mapping.

    Raises `error`, in one line, if the file is missing, unreadable, not valid YAML or not a mapping.
    """
    try:
        data = _load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"no such {what}: {path}") from None
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"cannot read the {what} {path}: {cause}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as cause:
        # PyYAML lets some internal errors escape, such as the ValueError of the date 2026-13-01.
        raise error(f"the {what} {path} is not valid YAML: {one_line(cause)}") from None
    if not isinstance(data, dict):
        raise error(f"the {what} {path} must be a mapping of keys to values, got {type(data).__name__}")
    return data


def read_value(text: str, *, source: str, error: type[SdtuneError]) -> Any:
    """Return the YAML value of a text. Raises `error`, in one line, if it is not valid YAML."""
    try:
        return _load(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as cause:
        raise error(f"{source}: {shortened(text)} is not valid YAML: {one_line(cause)}") from None


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings as one; of values that both have, `above` wins, and mappings are merged in turn."""
    both = {**below, **above}
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            both[key] = merged(below[key], value)
    return both


def validate(model: type[DocumentT], data: Any, *, source: str, error: type[SdtuneError]) -> DocumentT:
    """Build `model` from plain data.

    Raises `error` with the first wrong key, its value and what would be right; also for text with control characters and for
    numbers that are not finite, whatever the model takes.
    """
    _refuse_no_text(data, source, error)
    try:
        return model.model_validate(data)
    except ValidationError as cause:
        raise error(f"{source}: {_describe(cause, model, data)}") from None


def _refuse_no_text(data: Any, source: str, error: type[SdtuneError]) -> None:
    """Raise `error` for text that a terminal obeys or that cannot be encoded, and for infinite numbers and NaN."""
    left: list[tuple[str, Any]] = [("", data)]
    while left:
        where, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{where}.{key}".lstrip("."), each) for key, each in value.items()]
            left += [(where, key) for key in value]  # taken before the values, whose place they name
        elif isinstance(value, list | tuple):
            left += [(f"{where}.{index}".lstrip("."), each) for index, each in enumerate(value)]
        elif isinstance(value, str) and (found := _NO_TEXT.search(value)):
            raise error(
                f"{source}: {where or 'the document'}: {found[0]!a} is a control character or half of a pair, not text"
            )
        elif isinstance(value, float) and not math.isfinite(value):
            raise error(f"{source}: {where}: must be a finite number (got {value})")


def dump(document: BaseModel) -> str:
    """Return the document as YAML: keys in model order, innermost collections on one line."""
    data = document.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a hint that lists the valid names, the closest match to `word` first."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + "valid: " + ", ".join(names)


def _describe(failure: ValidationError, model: type[BaseModel], data: Any) -> str:
    errors = failure.errors(include_url=False)
    # A misspelt key is also a missing key: report the spelling.
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    where = ".".join(_written_location(first["loc"], data)) or "the document"
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}; {suggest(str(first['loc'][-1]), _known_keys(model, first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"key {where!r} is missing"
    if first["type"] == "union_tag_not_found":
        return f"key '{where}.{first['ctx']['discriminator'].strip(chr(39))}' is missing"
    if first["type"] == "union_tag_invalid":
        context = {key: str(value).replace("'", "") for key, value in first["ctx"].items()}
        known = context["expected_tags"].split(", ")
        return f"{where}.{context['discriminator']}: unknown value {context['tag']!r}; {suggest(context['tag'], known)}"
    message = first["msg"].removeprefix("Value error, ")
    value = first.get("input")
    found = shortened(value)
    shown = "" if isinstance(value, dict | BaseModel) or found in message else f" (got {found})"
    return f"{where}: {message[:1].lower()}{message[1:]}{shown}"


def shortened(value: Any) -> str:
    """Return a value as it is shown in an error, without the middle of a long one."""
    shortening = reprlib.Repr()
    shortening.maxstring = shortening.maxother = shortening.maxlong = MOST_SHOWN
    shortening.maxlist = shortening.maxtuple = shortening.maxdict = 8
    return shortening.repr(value)


def _written_location(location: tuple[int | str, ...], data: Any) -> list[str]:
    """Return the location without discriminated-union tags, which pydantic inserts and documents do not contain."""
    written = []
    for depth, part in enumerate(location):
        is_tag = isinstance(data, dict) and part not in data and depth < len(location) - 1
        if is_tag:
            continue
        written.append(str(part))
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            data = None
    return written


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the model accepts at `location`, found by walking its JSON Schema."""
    schema = model.model_json_schema(by_alias=True)
    definitions = schema.get("$defs", {})
    nodes = [_resolve(schema, definitions)]
    for part in location:
        nodes = [child for node in nodes for child in _children(node, str(part), definitions)]
    return sorted({key for node in nodes for key in node.get("properties", {})})


def _children(node: dict[str, Any], part: str, definitions: dict[str, Any]) -> list[dict[str, Any]]:
    properties = node.get("properties", {})
    if part in properties:
        return list(_variants(properties[part], definitions))
    # A tag selects the variant that has it as a constant.
    return [node] if any(part == field.get("const") for field in properties.values()) else []


def _variants(node: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    node = _resolve(node, definitions)
    yield node
    for variant in (*node.get("anyOf", []), *node.get("oneOf", [])):
        yield from _variants(variant, definitions)


def _resolve(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    return definitions[node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else node
