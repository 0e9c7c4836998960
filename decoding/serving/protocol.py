"""Bodies of requests: OpenAI's completions and chat completions, as far as this server supports them.

What would change the answer and is not supported is refused, in the words of OpenAI's API. What cannot change it is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from decoding.text import LogitsProcessor

MAX_STOPS = 16
MAX_PROMPTS = 64
MAX_MESSAGES = 2048
"""As in OpenAI's API."""
MAX_SEED = 2**63 - 1
GREEDY_BELOW = 1e-5
"""Temperature below which decoding is greedy, as in vLLM: scores divided by less than that may be infinite."""
FORM = "form of "
"""Begins the tags of keys that take several forms; a tag is no part of a key's name in an error."""
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


def _encodable(text: str) -> str:
    """Refuse halves of surrogate pairs, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is not valid Unicode") from None
    return text


def _form(given: Any) -> str | None:
    """Return which form of a key a value is meant to have, so that its error is the one of that form."""
    if not isinstance(given, list):
        return FORM + "text" if isinstance(given, str) else None
    first = given[0] if given else ""
    if isinstance(first, list):
        return FORM + "token lists"
    return FORM + ("texts" if isinstance(first, str | dict) else "tokens")


def _form_of_texts(given: Any) -> str | None:
    form = _form(given)
    return form if form in (None, FORM + "text") else FORM + "texts"


def _forms(find: Callable[[Any], str | None]) -> Discriminator:
    return Discriminator(find, custom_error_type="invalid_type", custom_error_message="expected a string or an array")


def _only(*supported: Any) -> BeforeValidator:
    """Refuse all but these values; `true` is not 1."""

    def check(given: Any) -> Any:
        if not any(type(given) is type(each) and given == each for each in supported):
            shown = [
                each for index, each in enumerate(supported) if each not in supported[:index]
            ]  # 0 once, not 0.0 too
            values = " and ".join(map(json.dumps, shown)) + (" are" if len(shown) > 1 else " is")
            raise PydanticCustomError("unsupported_value", "only {values} supported", {"values": values})
        return given

    return BeforeValidator(check)


def _scalar(given: Any) -> Any:
    if not isinstance(given, bool | int | float | str):
        raise PydanticCustomError("invalid_type", "expected a boolean, a number or a string")
    return _encodable(given) if isinstance(given, str) else given


Text = Annotated[str, AfterValidator(_encodable)]
Stop = Annotated[Text, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Penalty = Annotated[Any, _only(None, 0, 0.0)]
Off = Annotated[Any, _only(None, False, 0)]
One = Annotated[Any, _only(None, 1)]
Nothing = Annotated[Any, _only(None)]


class Body(BaseModel):
    """A JSON object whose keys and types are taken at their word: unknown keys are refused, and `true` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, given: Any) -> Any:
        # One error in place of one for each of many unknown keys, which takes seconds.
        if isinstance(given, dict) and len(given) > len(cls.model_fields):
            key = next(key for key in given if key not in cls.model_fields)
            raise PydanticCustomError("unknown_parameter", "unknown parameter {key}", {"key": key})
        return given


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Off = None
    continuous_usage_stats: bool = Field(False, description="Not in OpenAI's API: each chunk has the usage so far.")


class GenerationBody(Body):
    """What both kinds of completions share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="Not in OpenAI's API; 0 and -1 are off, as in vLLM.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=2, description="Not in OpenAI's API.")
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED)
    stop: (
        Annotated[
            Annotated[Stop, Tag(FORM + "text")]
            | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True), Tag(FORM + "texts")],
            _forms(_form_of_texts),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(False, description="Not in OpenAI's API; for benchmarks.")

    n: One = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: Annotated[Any, _only(None, {})] = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @field_validator("stream_options")
    @classmethod
    def _streams(cls, given: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if given is not None and not info.data.get("stream"):
            raise PydanticCustomError("invalid_value", "it is only allowed when 'stream' is true")
        return given

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        return (self.temperature is not None and self.temperature < GREEDY_BELOW) or self.top_k == 1

    @property
    def reports_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def reports_usage_continuously(self) -> bool:
        """True if each chunk of a stream has the usage so far. As in vLLM, that needs `include_usage`."""
        return self.reports_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def processors(self) -> tuple[LogitsProcessor, ...]:
        """Return transformers' logits processors for these settings, in the order of `generate`."""
        from transformers.generation import (
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        found: list[LogitsProcessor] = []
        if self.repetition_penalty not in (None, 1.0):
            found.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.is_greedy:
            return tuple(found)
        if self.temperature not in (None, 1.0):
            found.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k is not None and self.top_k > 0:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p not in (None, 1.0):
            found.append(TopPLogitsWarper(self.top_p))
        return tuple(found)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. Several prompts give several choices."""

    prompt: Annotated[
        Annotated[Text, Tag(FORM + "text")]
        | Annotated[TokenIds, Tag(FORM + "tokens")]
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag(FORM + "texts")]
        | Annotated[
            list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag(FORM + "token lists")
        ],
        _forms(_form),
    ]
    best_of: One = None
    echo: Off = None
    logprobs: Off = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        single = isinstance(given, str) or isinstance(given[0], int)
        return [given] if single else list(given)


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag(FORM + "text")] | Annotated[list[TextPart], Field(fail_fast=True), Tag(FORM + "texts")],
        _forms(_form_of_texts),
    ]
    name: str | None = None
    # An answer that a client sends back has these.
    refusal: Nothing = None
    annotations: Annotated[Any, _only(None, [])] = None
    audio: Nothing = None
    tool_calls: Annotated[Any, _only(None, [])] = None
    function_call: Nothing = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Off = None
    top_logprobs: Off = None
    tools: Annotated[Any, _only(None, [])] = None
    tool_choice: Annotated[Any, _only(None, "none")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, _only(None, [])] = None
    function_call: Annotated[Any, _only(None, "none")] = None
    modalities: Annotated[Any, _only(None, ["text"])] = None
    audio: Nothing = None
    prediction: Nothing = None
    reasoning_effort: Nothing = None
    verbosity: Nothing = None
    web_search_options: Nothing = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Annotated[Any, AfterValidator(_scalar)]] | None = None


def refusal(error: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    """Return message, parameter and code of OpenAI's error object for an error of pydantic."""
    kind, context, given = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "json_invalid":
        return (f"the body is not valid JSON: {context.get('error', '')}", None, None)
    name = _name(error["loc"])
    if kind == "unknown_parameter":
        name = f"{name}.{context['key']}" if name else context["key"]
    what = f"'{name[:MOST_NAMED]}'" if name else "body"
    if kind == "missing" and name:
        return (f"Missing required parameter: {what}.", name, "missing_required_parameter")
    if kind in ("extra_forbidden", "unknown_parameter"):
        return (f"Unknown parameter: {what}.", name, "unknown_parameter")
    if kind in EXPECTED:
        message = (
            f"Invalid type for {what}: expected {EXPECTED[kind]}, but got {KINDS.get(type(given), 'null')} instead."
        )
        return message, name, "invalid_type"
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        sort = "string" if isinstance(given, str) else "array"
        long = kind.endswith("long")
        limit = f"{'maximum' if long else 'minimum'} length {context['max_length' if long else 'min_length']}"
        got = f"one with length {len(given)}" if given else f"an empty {sort}"
        wrong = f"{sort} too {'long' if long else 'short'}"
        message = f"Invalid {what}: {wrong}. Expected {KINDS[type(given)]} with {limit}, but got {got} instead."
        return message, name, f"{sort}_{'above_max' if long else 'below_min'}_length"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        (side, limit), low = next(iter(context.items())), kind.startswith("greater")
        sort = "integer" if isinstance(given, int) else "decimal"
        sign = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}[side]
        message = (
            f"Invalid {what}: {sort} {'below minimum' if low else 'above maximum'} value. "
            f"Expected a value {sign} {limit}, but got {_shown(given)} instead."
        )
        return message, name, f"{sort}_{'below_min' if low else 'above_max'}_value"
    if kind == "literal_error":
        message = f"Invalid value for {what}: {_shown(given)}. Supported values are: {context['expected']}."
        return message, name, "invalid_value"
    if kind == "unsupported_value":
        message = f"Unsupported value: {what} does not support {_shown(given)} with this model: {error['msg']}."
        return message, name, kind
    said = str(error["msg"]).removeprefix("Value error, ")
    return (f"Invalid {what}: {said}; got {_shown(given)}.", name, kind if kind.startswith("invalid") else None)


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
