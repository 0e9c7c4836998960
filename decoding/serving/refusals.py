"""What is wrong with a body, in the words of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from decoding.serving.protocol import FORM

KINDS = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    list: "an array",
    dict: "an object",
    bytes: "one without the content type application/json",
}
EXPECTED = {
    "string_type": "a string",
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a decimal",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
MOST_SHOWN, MOST_NAMED = 40, 100
"""Characters of a value and of a name that are repeated."""


class Refusal(NamedTuple):
    """The error object of a wrong key."""

    message: str
    param: str | None
    code: str | None


def refusal(error: Mapping[str, Any]) -> Refusal:
    """Return what pydantic's `error` says."""
    kind, context, given = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "json_invalid":
        return Refusal(f"the body is not valid JSON: {context.get('error', '')}", None, None)
    name = _name(error["loc"])
    if kind == "unknown_parameter":
        name = f"{name}.{context['key']}" if name else context["key"]
    what = f"'{name[:MOST_NAMED]}'" if name else "body"
    if kind == "missing" and name:
        return Refusal(f"Missing required parameter: {what}.", name, "missing_required_parameter")
    if kind in ("extra_forbidden", "unknown_parameter"):
        return Refusal(f"Unknown parameter: {what}.", name, "unknown_parameter")
    if kind in EXPECTED:
        message = (
            f"Invalid type for {what}: expected {EXPECTED[kind]}, but got {KINDS.get(type(given), 'null')} instead."
        )
        return Refusal(message, name, "invalid_type")
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        sort = "string" if isinstance(given, str) else "array"
        long = kind.endswith("long")
        limit = f"{'maximum' if long else 'minimum'} length {context['max_length' if long else 'min_length']}"
        got = f"one with length {len(given)}" if given else f"an empty {sort}"
        wrong = f"{sort} too {'long' if long else 'short'}"
        message = f"Invalid {what}: {wrong}. Expected {KINDS[type(given)]} with {limit}, but got {got} instead."
        return Refusal(message, name, f"{sort}_{'above_max' if long else 'below_min'}_length")
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        (side, limit), low = next(iter(context.items())), kind.startswith("greater")
        sort = "integer" if isinstance(given, int) else "decimal"
        sign = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}[side]
        message = (
            f"Invalid {what}: {sort} {'below minimum' if low else 'above maximum'} value. "
            f"Expected a value {sign} {limit}, but got {_shown(given)} instead."
        )
        return Refusal(message, name, f"{sort}_{'below_min' if low else 'above_max'}_value")
    if kind == "literal_error":
        message = f"Invalid value for {what}: {_shown(given)}. Supported values are: {context['expected']}."
        return Refusal(message, name, "invalid_value")
    said = str(error["msg"]).removeprefix("Value error, ")
    return Refusal(f"Invalid {what}: {said}; got {_shown(given)}.", name, kind if kind.startswith("invalid") else None)


def _name(place: tuple[str | int, ...]) -> str | None:
    """Return a key as OpenAI writes it, such as `messages[0].role`."""
    name = ""
    for key in place:
        if isinstance(key, int):
            name += f"[{key}]"
        elif key != "body" and not key.startswith(FORM):
            name += f".{key}" if name else key
    return name or None


def _shown(given: Any) -> str:
    # A value may be megabytes long, or half of a surrogate pair.
    if isinstance(given, int) and not isinstance(given, bool) and given.bit_length() > 128:
        return "a number with more digits than are shown here"
    if isinstance(given, list | dict):
        return KINDS[type(given)]
    return ascii(given[:MOST_SHOWN]) if isinstance(given, str) else json.dumps(given)
