"""A served model: requests of the protocol become jobs of the batch, and their tokens become text."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError

from decoding.acceptance import Acceptance, Greedy, Sampling
from decoding.conversation import asking
from decoding.drafts.history import UserHistories
from decoding.errors import UnsupportedRequestError, first_line
from decoding.rounds import Prefill, Round
from decoding.serving.batch import DecodingThread
from decoding.serving.counters import ServerCounters
from decoding.serving.protocol import ChatBody, CompletionBody, GenerationBody
from decoding.serving.waiting_room import Job, RequestEnd, Stopped
from decoding.text import Ending, Request, Shaping

DEFAULT_MAX_TOKENS = 16
"""New tokens of a completion that names no limit, as in OpenAI's API; a chat completion may fill the context."""

SPARE_TOKENS = 1024
"""Tokens of a beginning that may be others once the text goes on."""
SHORT_CHARACTERS = 2**16
"""Characters that are tokenised in a moment."""
USUAL_CHARACTERS = 4
"""Characters of a token, to choose the first beginning."""
UNFINISHED = "\ufffd"
"""What the bytes of an incomplete character are decoded to."""


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

    def __init__(
        self,
        model: ServedModel,
        decoding: DecodingThread,
        counters: ServerCounters,
        histories: UserHistories | None = None,
    ) -> None:
        """Drafts may copy from a user's earlier answers if there are `histories`; users are told apart by the body's `user`."""
        self.model, self.decoding, self.counters, self._histories = model, decoding, counters, histories
        self._answers: set[Answer] = set()
        # Tokenizers have state. Long texts have one of their own, so that no short one waits for them.
        self._short = _Tokenizing(model.tokenizer)
        self._long = _Tokenizing(deepcopy(model.tokenizer))

    @property
    def max_length(self) -> int:
        return self.decoding.batch.max_length

    async def chat_prompt(self, body: ChatBody) -> list[int]:
        """Return the token ids of a conversation: by the chat template, or as paragraphs, as a search writes it without one.

        Raises `UnsupportedRequestError` if the chat template does not take it.
        """
        settings = body.chat_template_kwargs or {}
        if not getattr(self.model.tokenizer, "chat_template", None):
            if settings:
                raise UnsupportedRequestError("chat_template_kwargs: the model has no chat template")
            written = asking((message.role, message.text) for message in body.messages)
            return await self._tokenized(written, special=True)
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        text = await asyncio.to_thread(self._render, messages, settings)
        return await self._tokenized(text, special=False)

    async def prompt(self, body: GenerationBody, given: str | list[int]) -> list[int]:
        """Return the token ids of a prompt. Raises `UnsupportedRequestError` for an empty one or unknown tokens.

        A prompt that leaves no room for an answer is refused at once, before the next one is looked at.
        """
        if isinstance(given, str):
            ids = await self._tokenized(given, special=True)
            self._num_new(body, ids)
            return ids
        self._num_new(body, given)
        unknown = next((token for token in given if token >= self.model.vocabulary_size), None)
        if unknown is not None:
            raise UnsupportedRequestError(f"the model has {self.model.vocabulary_size} tokens, and none is {unknown}")
        return given

    async def _tokenized(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text. One that is much too long is refused by its beginning.

        How many characters a token may stand for is not known: an unknown word of any length is one token, and spaces may be none.
        So ever longer beginnings are looked at, until one has twice the tokens that fit: what follows cannot remove that many.
        """
        most = 2 * self.max_length + SPARE_TOKENS
        size = USUAL_CHARACTERS * most
        tokenizing = self._short if len(text) <= SHORT_CHARACTERS else self._long
        while size < len(text):
            if len(await tokenizing(text[:size], special)) > most:
                raise UnsupportedRequestError(
                    f"the server takes {self.max_length} tokens, and the prompt has more than {most}: shorten it"
                )
            size *= 2
        ids = await tokenizing(text, special)
        if not ids:
            raise UnsupportedRequestError("the prompt is empty: at least one token is needed to continue from")
        return ids

    def _render(self, messages: list[dict[str, str]], settings: dict[str, Any]) -> str:
        render = self.model.tokenizer.apply_chat_template
        # Settings of the method itself are not the client's: one of them is the template.
        reserved = sorted(settings.keys() & inspect.signature(render).parameters.keys())
        if reserved:
            raise UnsupportedRequestError(f"chat_template_kwargs cannot set {reserved[0]}")
        try:
            return str(render(messages, tokenize=False, add_generation_prompt=True, **settings))
        except (TemplateError, TypeError, ValueError) as cause:
            raise UnsupportedRequestError(f"the chat template does not take it: {first_line(cause)}") from None

    def _num_new(self, body: GenerationBody, prompt: Sequence[int]) -> int:
        """Return the limit on new tokens. Raises `UnsupportedRequestError` if prompt and answer exceed the context."""
        limit = getattr(body, "max_completion_tokens", None) or body.max_tokens
        room = self.max_length - len(prompt)
        if limit is None:
            limit = min(DEFAULT_MAX_TOKENS, room) if isinstance(body, CompletionBody) else room
        if limit > room or room < 1:
            raise UnsupportedRequestError(
                f"the server takes {self.max_length} tokens, and the prompt has {len(prompt)}: "
                f"{max(limit, 1)} new ones do not fit"
            )
        return limit

    def request(self, body: GenerationBody, prompt: Sequence[int], index: int = 0) -> Request:
        """Return the request for prompt number `index`. Raises `UnsupportedRequestError` if it exceeds the context."""
        limit = self._num_new(body, prompt)
        acceptance: Acceptance = Greedy()
        if not body.is_greedy:
            generator = torch.Generator(self.model.device)
            if body.seed is None:
                generator.seed()
            else:
                generator.manual_seed(body.seed + index)
            acceptance = Sampling(generator)
        ending = Ending(limit, frozenset() if body.ignore_eos else self.model.eos_token_ids)
        history = None if self._histories is None else self._histories.of(body.user or "")
        return Request(prompt, ending, acceptance, Shaping(body.processors()), history)

    def start(self, body: GenerationBody, request: Request) -> Answer:
        """Let a request wait for its turn. Raises `WaitingRoomFullError`."""
        answer = Answer(self, request, body.stops, fresh=body.seed is not None)
        self._answers.add(answer)
        return answer

    def forget(self, answer: Answer) -> None:
        self._answers.discard(answer)

    def end_answers(self) -> None:
        """End all answers now, because the server ends; further requests are refused. To be called in the event loop."""
        self.decoding.room.close()
        for answer in self._answers:
            answer.end(RequestEnd(Stopped.CLOSED, "the server is shutting down"))


class _Tokenizing:
    """A tokenizer that encodes in another thread, one text at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._lock = tokenizer, asyncio.Lock()

    async def __call__(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text, with special tokens around it if the tokenizer adds some."""
        async with self._lock:
            return await asyncio.to_thread(self._encode, text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


class Answer:
    """The answer to one request as it is decoded. To be used in the event loop that made it."""

    def __init__(self, service: Service, request: Request, stops: Sequence[str], *, fresh: bool) -> None:
        self._service, self._ending, self._history = service, request.ending, request.history
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

    def end(self, end: RequestEnd) -> None:
        """End the answer without waiting for the decoding thread. To be called in the event loop."""
        self._events.put_nowait(end)

    def cancel(self) -> None:
        """Stop decoding. Does nothing after the end."""
        self._finish("abort")

    def _finish(self, reason: str) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._service.forget(self)
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
        if self._history is not None:
            self._history.add(self._text.tokens)
        return Piece(text, reason, self._text.num_tokens)


class TextStream:
    """Text of a growing sequence of tokens, without special tokens, a stop string and what follows it.

    The pieces together are what the tokenizer makes of all tokens at once. A piece is held back while it ends within a character,
    or while it may begin a stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self.tokens: list[int] = []
        """The tokens, up to the one that completed a stop string."""
        # The text of tokens depends on the ones before: two windows with the same start are compared.
        self._start = self._read = 0
        self._held = ""
        self.num_tokens = 0
        """Number of tokens, up to the one that completed a stop string."""
        self.is_stopped = False
        """True after a stop string."""

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens and return the text that is certain now. Tokens after a stop string are dropped."""
        pieces = []
        for token in tokens:
            if self.is_stopped:
                break
            self.num_tokens += 1
            self.tokens.append(token)
            pieces.append(self._checked(self._new_text()))
        return "".join(pieces)

    def finish(self) -> str:
        if self.is_stopped:
            return ""
        rest = self._decode(self._start, len(self.tokens))[len(self._decode(self._start, self._read)) :]
        text = self._checked(rest)
        held, self._held = self._held, ""
        return text + held

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self.tokens[start:end], skip_special_tokens=True)
        return text

    def _new_text(self) -> str:
        known, text = self._decode(self._start, self._read), self._decode(self._start, len(self.tokens))
        if len(text) <= len(known) or text.endswith(UNFINISHED):
            return ""
        self._start, self._read = self._read, len(self.tokens)
        return text[len(known) :]

    def _checked(self, text: str) -> str:
        """Return the text before a stop string, without an ending that may become one."""
        text, self._held = self._held + text, ""
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)]
        longest = max((_overlap(text, stop) for stop in self._stops), default=0)
        if longest:
            text, self._held = text[:-longest], text[-longest:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
