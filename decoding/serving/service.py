"""A served model: requests of the protocol become jobs of the batch, and their tokens become text."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError

from decoding.acceptance import Acceptance, Greedy, Sampling
from decoding.arms.decoder import ArmedDecoder
from decoding.decode import Request
from decoding.errors import UnsupportedRequestError, first_line
from decoding.rounds import Prefill, Round
from decoding.serving.counters import ServerCounters
from decoding.serving.engine import DecodingThread
from decoding.serving.protocol import ChatBody, CompletionBody, GenerationBody
from decoding.serving.text_stream import TextStream
from decoding.serving.waiting_room import Job, RequestEnd, Stopped
from decoding.text import Ending, Shaping

DEFAULT_MAX_TOKENS = 16
"""New tokens of a completion that names no limit, as in OpenAI's API; a chat completion may fill the context."""


class RequestFailedError(Exception):
    """A request that was cut off by an error, or by the end of the server."""

    def __init__(self, reason: str, *, is_shutdown: bool) -> None:
        super().__init__(reason)
        self.is_shutdown = is_shutdown


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer; the last piece has the reason of the end."""

    text: str
    finish_reason: str | None = None
    num_tokens: int = 0
    """Tokens of the answer so far."""


@dataclass(frozen=True)
class ServedModel:
    """What the server needs to know about its model."""

    name: str
    tokenizer: Any
    device: torch.device
    vocabulary_size: int
    eos_token_ids: frozenset[int]


class Service:
    """Starts requests on the decoding thread, and hands out their text in the event loop."""

    def __init__(self, model: ServedModel, decoding: DecodingThread, counters: ServerCounters) -> None:
        self.model, self.decoding, self.counters = model, decoding, counters
        self._tokenizing = asyncio.Lock()

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.decoding.batch.max_length

    @property
    def is_below_promise(self) -> bool:
        """True while the alarm of the arms is raised."""
        decoder = self.decoding.batch.decoder
        return isinstance(decoder, ArmedDecoder) and decoder.chooser.is_below_promise

    async def chat_prompt(self, body: ChatBody) -> list[int]:
        """Return the token ids of a conversation. Raises `UnsupportedRequestError` if the chat template does not take it."""
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        return await self._tokenized(self._render, messages, body.chat_template_kwargs or {})

    async def prompt(self, given: str | list[int]) -> list[int]:
        """Return the token ids of a prompt. Raises `UnsupportedRequestError` for an empty one or unknown tokens."""
        if isinstance(given, str):
            return await self._tokenized(self._encode, given, True)
        unknown = next((token for token in given if token >= self.model.vocabulary_size), None)
        if unknown is not None:
            raise UnsupportedRequestError(f"the model has {self.model.vocabulary_size} tokens, and none is {unknown}")
        return given

    async def _tokenized(self, encode: Any, *arguments: Any) -> list[int]:
        """Encode in another thread, because long texts take long; one at a time, because tokenizers have state."""
        async with self._tokenizing:
            ids: list[int] = await asyncio.to_thread(encode, *arguments)
        if not ids:
            raise UnsupportedRequestError("the prompt is empty: at least one token is needed to continue from")
        return ids

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self.model.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _render(self, messages: list[dict[str, str]], settings: dict[str, Any]) -> list[int]:
        if not getattr(self.model.tokenizer, "chat_template", None):
            raise UnsupportedRequestError("the model has no chat template: use /v1/completions")
        render = self.model.tokenizer.apply_chat_template
        # Settings of the method itself are not the client's: one of them is the template.
        reserved = sorted(settings.keys() & inspect.signature(render).parameters.keys())
        if reserved:
            raise UnsupportedRequestError(f"chat_template_kwargs cannot set {reserved[0]}")
        try:
            text = render(messages, tokenize=False, add_generation_prompt=True, **settings)
        except (TemplateError, TypeError, ValueError) as cause:
            raise UnsupportedRequestError(f"the chat template does not take it: {first_line(cause)}") from None
        return self._encode(text, False)

    def request(self, body: GenerationBody, prompt: Sequence[int], index: int = 0) -> Request:
        """Return the request for prompt number `index`. Raises `UnsupportedRequestError` if it exceeds the context."""
        limit = getattr(body, "max_completion_tokens", None) or body.max_tokens
        room = self.max_length - len(prompt)
        if limit is None:
            limit = min(DEFAULT_MAX_TOKENS, room) if isinstance(body, CompletionBody) else room
        if limit > room or room < 1:
            raise UnsupportedRequestError(
                f"the server takes {self.max_length} tokens, and the prompt has {len(prompt)}: "
                f"{max(limit, 1)} new ones do not fit"
            )
        acceptance: Acceptance = Greedy()
        if not body.is_greedy:
            generator = torch.Generator(self.model.device)
            if body.seed is None:
                generator.seed()
            else:
                generator.manual_seed(body.seed + index)
            acceptance = Sampling(generator)
        ending = Ending(limit, frozenset() if body.ignore_eos else self.model.eos_token_ids)
        return Request(prompt, ending, acceptance, Shaping(body.processors()))

    def start(self, body: GenerationBody, request: Request) -> Answer:
        """Let a request wait for its turn. Raises `WaitingRoomFullError`."""
        return Answer(self, request, body.stops, fresh=body.seed is not None)


class Answer:
    """The answer to one request as it is decoded. To be used in the event loop that made it."""

    def __init__(self, service: Service, request: Request, stops: Sequence[str], *, fresh: bool) -> None:
        self._service, self._ending = service, request.ending
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Prefill | Round | RequestEnd] = asyncio.Queue()
        self._text = TextStream(service.model.tokenizer, stops)
        self._is_counted = False
        self._job = Job(request, self._listen, fresh=fresh)
        service.decoding.room.put(self._job)

    def _listen(self, event: Prefill | Round | RequestEnd) -> None:
        """Hand an event of the decoding thread to the event loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def cancel(self) -> None:
        """Stop decoding. Does nothing after the end."""
        self._finish("abort")

    def _finish(self, reason: str) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._service.counters.finished(reason)
            self._service.decoding.room.cancel(self._job)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the text as it becomes certain; the last piece has the finish reason. Raises `RequestFailedError`.

        If the iterator is closed early, decoding stops.
        """
        last = -1
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, RequestEnd):
                    if event.stopped is not None:
                        raise RequestFailedError(event.reason, is_shutdown=event.stopped is Stopped.CLOSED)
                    reason = "stop" if last in self._ending.eos_token_ids else "length"
                    text = self._text.finish()
                    # What was held back may contain a stop string.
                    yield self._last(text, "stop" if self._text.is_stopped else reason)
                    return
                tokens = (event.token,) if isinstance(event, Prefill) else event.tokens
                last = tokens[-1]
                text = self._text.add(tokens)
                if self._text.is_stopped:
                    yield self._last(text, "stop")
                    return
                if text:
                    yield Piece(text, None, self._text.num_tokens)
        finally:
            self.cancel()

    def _last(self, text: str, reason: str) -> Piece:
        self._finish(reason)
        return Piece(text, reason, self._text.num_tokens)
