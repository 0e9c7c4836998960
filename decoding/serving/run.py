"""From a decoder to a running server."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from decoding.acceptance import Greedy, Sampling
from decoding.decoder import Decoder
from decoding.drafts.history import UserHistories
from decoding.errors import SdtuneError
from decoding.profile import Measured
from decoding.serving.app import create_app
from decoding.serving.batch import ContinuousBatch, DecodingThread
from decoding.serving.connections import run_server
from decoding.serving.control import DraftControl
from decoding.serving.counters import ServerCounters
from decoding.serving.hosts import is_loopback
from decoding.serving.service import ServedModel, Service
from decoding.serving.waiting_room import WaitingRoom

KEY_VARIABLE = "SDTUNE_API_KEY"
"""Environment variable of the API key."""

log = logging.getLogger(__name__)


class ServerError(SdtuneError):
    """A setting with which no server can be started."""


@dataclass(frozen=True)
class ServerLimits:
    """How much a server takes on."""

    num_rows: int = 16
    """Sequences that are decoded together."""
    max_waiting: int = 256
    """Requests that may wait for a row."""
    max_length: int = 4096
    """Most tokens of a prompt and its answer; less if the model's context is shorter."""


def new_service(
    decoder: Decoder,
    tokenizer: Any,
    name: str,
    limits: ServerLimits,
    *,
    always_draft: bool = False,
    history: int = 0,
    measured: Measured | None = None,
) -> Service:
    """Return the service of a decoder's model under `name`; its decoding thread has not begun.

    `history` are the tokens of a user's earlier answers that drafts may copy from; `measured` is what the metrics show of the
    profile, to compare with.
    """
    target, room = decoder.target, WaitingRoom(limits.max_waiting)
    counters = ServerCounters(name)
    model: Any = target.model
    eos = model.generation_config.eos_token_id
    max_length = min(limits.max_length, target.context_length or limits.max_length)
    # Shapes of passes are prepared now, if the runner has any: the first requests would wait for them.
    sampling = Sampling(torch.Generator(target.device))
    decoder.prepare(1, max_length, limits.num_rows, acceptances=(Greedy(), sampling))
    control = None if decoder.drafter is None or always_draft else DraftControl()
    batch = ContinuousBatch(
        decoder, room, num_rows=limits.num_rows, max_length=max_length, control=control, observer=counters.observe
    )
    counters.gauge("vllm:num_requests_running", "Requests that are being decoded.", lambda: batch.num_running)
    counters.gauge("vllm:num_requests_waiting", "Requests that wait for a row.", lambda: len(room))
    drafting = "1 while rounds draft, 0 in plain rounds."
    counters.gauge(
        "sdtune:drafting", drafting, lambda: decoder.drafter is not None and (control is None or control.drafts)
    )
    if control is not None:
        counters.watch(control)
    if measured is not None:
        counters.compare_with(measured)
    served = ServedModel(
        name,
        tokenizer,
        target.device,
        vocabulary_size=model.get_input_embeddings().num_embeddings,
        eos_token_ids=frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos),
    )
    histories = UserHistories(max_tokens=history) if history else None
    return Service(served, DecodingThread(batch, room), counters, histories)


def api_key_for(host: str) -> str | None:
    """Return the key that clients must send, from `SDTUNE_API_KEY`.

    Raises `ServerError` if there is none and `host` can be reached from other machines.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(host):
        raise ServerError(
            f"{host} can be reached from other machines: set {KEY_VARIABLE} to a key that clients must send, "
            "or serve on 127.0.0.1"
        )
    return key


def refuse_busy_address(host: str, port: int) -> None:
    """Raise `ServerError` if `port` of `host` cannot be listened on, before a model is loaded for it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            listener.bind(address)
    except (OSError, OverflowError) as cause:
        raise ServerError(f"cannot listen on {host}, port {port} ({cause}): choose another --port or --host") from None


def serve(
    service: Service, *, host: str, port: int, api_key: str | None, hosts: Sequence[str], drain_seconds: int
) -> None:
    """Serve until SIGTERM or Ctrl-C. Requests that are being answered then have `drain_seconds` to end."""
    app = create_app(service, api_key=api_key, hosts=hosts)
    run_server(
        app,
        host=host,
        port=port,
        log_level="info",
        drain_seconds=drain_seconds,
        end_answers=service.end_answers,
    )
    if service.decoding.is_running:
        log.warning("ending within a pass: the drain is over")
        os._exit(0)  # torch would abort: a thread that runs its operators must not outlive Python
