"""Bodies of requests: OpenAI's completions and chat completions, as far as this server supports them.

What would change the answer and is not supported is refused. What cannot change it is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from decoding.text import LogitsProcessor

MAX_STOPS = 16
MAX_PROMPTS = 64
MAX_SEED = 2**63 - 1


def _encodable(text: str) -> str:
    """Refuse halves of surrogate pairs, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is not valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Stop = Annotated[Text, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]
Off = Literal[False, 0] | None


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="Not in OpenAI's API: each chunk has the usage so far.")


class GenerationBody(BaseModel):
    """What both kinds of completions share. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="Not in OpenAI's API; 0 and -1 are off, as in vLLM.")
    repetition_penalty: float | None = Field(None, gt=0, le=2, description="Not in OpenAI's API.")
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(False, description="Not in OpenAI's API; for benchmarks.")

    n: Literal[1] | None = None
    frequency_penalty: Off = None
    presence_penalty: Off = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @field_validator("frequency_penalty", "presence_penalty", mode="before")
    @classmethod
    def _zero(cls, value: Any) -> Any:
        return None if value == 0 else value

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def reports_usage(self) -> bool:
        """True if a stream ends with the usage."""
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

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    best_of: Literal[1] | None = None
    echo: Off = None
    logprobs: Off = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        given: Any = self.prompt
        single = isinstance(given, str) or isinstance(given[0], int)
        return [given] if single else list(given)


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Off = None
    top_logprobs: Off = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    chat_template_kwargs: dict[str, bool | int | float | Text] | None = None
