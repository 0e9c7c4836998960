"""The HTTP interface: OpenAI's paths and error objects, streamed as server-sent events or answered at once.

An own small application and not transformers' serving handlers, which are no public API and call no draft in their batches.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.errors import UnsupportedRequestError
from decoding.serving.protocol import ChatBody, CompletionBody, GenerationBody, refusal
from decoding.serving.service import Answer, Piece, RequestFailedError, Service
from decoding.serving.waiting_room import WaitingRoomFullError

MAX_BODY_BYTES = 4 * 2**20
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RETRY_SECONDS = "1"


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        headers = {"Retry-After": RETRY_SECONDS} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


def create_app(
    service: Service,
    *,
    api_key: str | None = None,
    hosts: Sequence[str] = ("*",),
) -> ASGIApp:
    """Return the application. With an `api_key` all paths but /health and /metrics need it as a bearer token.

    `hosts` are the names in the Host header of a request; see `decoding.serving.hosts`.

    The decoding thread starts and stops with the application.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.decoding.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.decoding.stop)

    # Without documentation pages, which would load scripts from elsewhere.
    app = FastAPI(
        title="sdtune", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, max_body_size=MAX_BODY_BYTES
    )
    _answer_errors(app)
    guarded = [Depends(_key_check(api_key))]

    @app.get("/health")
    async def health() -> Response:
        is_alive = service.decoding.is_alive
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.counters.text(), media_type=METRICS_TYPE)

    @app.get("/openapi.json", dependencies=guarded, include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return _model_card(service)

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(body: CompletionBody, request: Request) -> Response:
        _check_model(service, body.model)
        prompts = [await service.prompt(body, prompt) for prompt in body.prompts]
        return await _respond(service, request, body, prompts)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        _check_model(service, body.model)
        prompt = await service.chat_prompt(body)
        return await _respond(service, request, body, [prompt])

    return PlainErrors(
        TrustedHostMiddleware(app, list(hosts), www_redirect=False),
        {
            400: ApiError(400, "unknown host name in the Host header: the server can allow it by --allowed-host"),
            413: ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_long"),
            500: ApiError(500, "the server has failed: its log has the error", kind="server_error"),
        },
    )


class PlainErrors:
    """Answers with an error object where starlette answers with plain text."""

    def __init__(self, app: ASGIApp, errors: Mapping[int, ApiError]) -> None:
        self._app, self._errors = app, errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on but plain errors of a known status, and those of a long body, which are replaced."""
        is_replaced = False

        async def replacing(message: Message) -> None:
            nonlocal is_replaced
            error = self._errors.get(message["status"]) if message["type"] == "http.response.start" else None
            if error is not None and (error.status == 413 or _is_plain(message)):
                is_replaced = True
                await error.response(scope, receive, send)
            elif not is_replaced:
                await send(message)

        await self._app(scope, receive, replacing)


def _is_plain(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/plain")


def _key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if api_key is not None and not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            raise ApiError(401, "wrong or missing API key", code="invalid_api_key")

    return check


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model.name:
        message = f"the model {name!r} does not exist; this server has {service.model.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "sdtune",
        "max_model_len": service.max_length,
    }


def _answer_errors(app: FastAPI) -> None:
    """Turn every error into OpenAI's error object."""

    def answering(answer: Callable[[Any], ApiError]) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def handle(_: Request, error: Exception) -> Response:
            return answer(error).response

        return handle

    for error, answer in ANSWERS.items():
        app.add_exception_handler(error, answering(answer))


def _failure(error: RequestFailedError) -> ApiError:
    return ApiError(503 if error.is_shutdown else 500, str(error), kind="server_error")


def _validation(error: RequestValidationError) -> ApiError:
    message, param, code = refusal(error.errors()[0])
    return ApiError(400, message, param=param, code=code)


ANSWERS: dict[type[Exception], Callable[[Any], ApiError]] = {
    ApiError: lambda error: error,
    UnsupportedRequestError: lambda error: ApiError(400, str(error)),
    WaitingRoomFullError: lambda error: ApiError(503 if error.is_closed else 429, str(error), kind="overloaded_error"),
    RequestFailedError: _failure,
    RequestValidationError: _validation,
    StarletteHTTPException: lambda error: ApiError(error.status_code, str(error.detail)),
}


def _choice(body: GenerationBody, index: int, text: str, reason: str | None) -> dict[str, Any]:
    shown = {"message": {"role": "assistant", "content": text}} if isinstance(body, ChatBody) else {"text": text}
    return {"index": index, **shown, "logprobs": None, "finish_reason": reason}


def _chunk(body: GenerationBody, index: int, text: str, reason: str | None) -> dict[str, Any]:
    if isinstance(body, ChatBody):
        return _delta(index, {"content": text} if text else {}, reason)
    return _choice(body, index, text, reason)


def _delta(index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


async def _respond(
    service: Service, request: Request, body: GenerationBody, prompts: Sequence[Sequence[int]]
) -> Response:
    is_chat = isinstance(body, ChatBody)
    kind, prefix = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
    requests = [service.request(body, prompt, index) for index, prompt in enumerate(prompts)]
    answers: list[Answer] = []
    try:
        for each in requests:
            answers.append(service.start(body, each))
    except WaitingRoomFullError:
        for answer in answers:
            answer.cancel()
        raise
    num_prompt = sum(map(len, prompts))
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model.name}
    if body.stream:
        head["object"] = f"{kind}.chunk" if is_chat else kind
        events = _stream(head, body, answers, num_prompt)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    wholes = await _unless_gone(request, answers)
    choices = [
        _choice(body, index, "".join(piece.text for piece in pieces), pieces[-1].finish_reason)
        for index, pieces in enumerate(wholes)
    ]
    usage = _usage(num_prompt, sum(pieces[-1].num_tokens for pieces in wholes))
    return JSONResponse({**head, "object": kind, "choices": choices, "usage": usage})


def _usage(num_prompt: int, num_new: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


async def _unless_gone(request: Request, answers: Sequence[Answer]) -> list[list[Piece]]:
    """Wait for all answers. If the client goes away or one fails, the others are cancelled."""

    async def collect(answer: Answer) -> list[Piece]:
        return [piece async for piece in answer.pieces()]

    async def gone() -> None:
        # The body has been read: the next message says that the client has gone.
        while (await request.receive())["type"] != "http.disconnect":
            pass

    whole = asyncio.gather(*map(collect, answers))
    watch = asyncio.ensure_future(gone())
    both: list[asyncio.Future[Any]] = [whole, watch]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            raise HTTPException(499, "the client has gone")
        return whole.result()
    finally:
        for each in both:
            each.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        for answer in answers:
            answer.cancel()


async def _stream(
    head: dict[str, Any], body: GenerationBody, answers: Sequence[Answer], num_prompt: int
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of all answers as they come. Closed early, it cancels them."""
    queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

    async def forward(index: int, answer: Answer) -> None:
        try:
            async for piece in answer.pieces():
                queue.put_nowait((index, piece))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.ensure_future(forward(index, answer)) for index, answer in enumerate(answers)]
    num_open, num_new = len(answers), [0] * len(answers)

    def usage() -> dict[str, Any]:
        if body.reports_usage_continuously:
            return {"usage": _usage(num_prompt, sum(num_new))}
        return {"usage": None} if body.reports_usage else {}

    try:
        for index in range(len(answers) if isinstance(body, ChatBody) else 0):  # the role comes first
            yield _event({**head, "choices": [_delta(index, {"role": "assistant", "content": ""}, None)], **usage()})
        while num_open:
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                error = _failure(piece) if isinstance(piece, RequestFailedError) else ApiError(500, str(piece))
                yield _event(error.body)
                break
            if piece.finish_reason is not None:
                num_open -= 1
            num_new[index] = piece.num_tokens
            yield _event({**head, "choices": [_chunk(body, index, piece.text, piece.finish_reason)], **usage()})
        if body.reports_usage and not num_open:
            yield _event({**head, "choices": [], "usage": _usage(num_prompt, sum(num_new))})
        yield b"data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()
        for answer in answers:
            answer.cancel()


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
