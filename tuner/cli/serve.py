"""`sdtune serve`: an OpenAI-compatible server for a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from pydantic import Field

from decoding.errors import one_line
from tuner.cli.options import GroupedCommand, keys_of, options_of, settings_from
from tuner.cli.terminal import use_threads
from tuner.errors import ConfigError
from tuner.fields import DECODING, Extra, ProfileSettings

SERVER: Extra = {"group": "Server"}
LIMITS: Extra = {"group": "Limits"}


class ServeSettings(ProfileSettings):
    host: str = Field("127.0.0.1", description="Address to listen on.", json_schema_extra=SERVER)
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.", json_schema_extra=SERVER)
    allowed_host: tuple[str, ...] = Field(
        (),
        description="Another name in the Host header, as a proxy passes it on; repeatable, * for any.",
        json_schema_extra=SERVER,
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        description="Name that clients give; default: the profile's model.",
        json_schema_extra=SERVER,
    )
    chat_template: Path | None = Field(
        None,
        description="File of a chat template (Jinja); default: the tokenizer's, or labelled paragraphs, as in the search.",
        json_schema_extra={**SERVER, "metavar": "FILE"},
    )
    drain: int = Field(
        30, ge=1, description="Seconds that running requests have after SIGTERM.", json_schema_extra=SERVER
    )
    max_batch: int = Field(16, ge=1, description="Most requests decoded together.", json_schema_extra=LIMITS)
    max_waiting: int = Field(
        256, ge=1, description="Most requests that wait; more get status 429.", json_schema_extra=LIMITS
    )
    max_length: int = Field(
        4096,
        ge=2,
        description="Most tokens of a prompt and its answer, at most the model's context.",
        json_schema_extra=LIMITS,
    )
    always_draft: bool = Field(
        False, description="Draft also where plain rounds are faster.", json_schema_extra=DECODING
    )
    plain: bool = Field(False, description="Decode plainly, to compare with.", json_schema_extra=DECODING)


@click.command(cls=GroupedCommand)
@keys_of(ServeSettings)
@options_of(
    ServeSettings,
    only=[name for name in ServeSettings.model_fields if name not in ("drain", "max_waiting", "always_draft")],
    positions=("profile",),
)
def serve(**flags: Any) -> None:
    """Serve a profile's model by OpenAI's HTTP API, with continuous batching.

    PROFILE is a file that `sdtune search` wrote, or an address such as models:/NAME@champion. The address is looked up
    once: start the server again after a promotion.

    \b
      POST /v1/completions, /v1/chat/completions   at once or streamed; stop, seed, temperature, top_p
      GET  /v1/models, /health
      GET  /metrics                                for Prometheus, by vLLM's names

    Requests are decoded together, and each gets the text that it would get alone: greedy output is plain decoding's. A client
    that goes away frees its row. Ctrl-C or SIGTERM lets running requests end.

    Rounds draft only where that is faster: one round in 64 is plain, as a control, and where drafts are slower for as many
    requests, rounds are plain.

    Only this machine can connect, unless --host says otherwise. Then clients must send the key in the environment variable
    SDTUNE_API_KEY as a bearer token; without that variable the server does not start. Put a proxy with TLS before it.

    \b
    Examples:
      sdtune serve profile.yaml --threads 1
      curl 127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "def main():"}'
      SDTUNE_API_KEY=$(cat key) sdtune serve models:/llama-code@champion --host 0.0.0.0
    """
    settings = settings_from(ServeSettings, flags)

    from decoding.decoder import plain_decoder
    from decoding.deploy import load_decoder
    from decoding.profile import DraftProfile
    from decoding.serving.hosts import host_names
    from decoding.serving.run import ServerLimits, api_key_for, new_service, refuse_busy_address
    from decoding.serving.run import serve as serve_requests
    from tuner.inputs.models import load_target

    use_threads(settings.threads)
    api_key = api_key_for(settings.host)
    hosts = host_names(settings.host, settings.allowed_host)
    refuse_busy_address(settings.host, settings.port)
    if settings.chat_template is not None and not settings.chat_template.is_file():
        raise ConfigError(f"chat_template: there is no file {settings.chat_template}")
    profile = DraftProfile.load(settings.profile)
    loaded = load_target(profile, settings)
    if settings.chat_template is not None:
        loaded.tokenizer.chat_template = _template(settings.chat_template, loaded.tokenizer)
    decoder = load_decoder(settings.profile).decoder_for(loaded.model)
    if settings.plain:
        decoder = plain_decoder(decoder.target)
    limits = ServerLimits(settings.max_batch, settings.max_waiting, settings.max_length)
    name = settings.served_model_name or profile.target.model
    click.echo(f"preparing for up to {limits.num_rows} requests at a time", err=True)
    in_engine = profile.provenance is not None and profile.provenance.engine is not None
    service = new_service(
        decoder,
        loaded.tokenizer,
        name,
        limits,
        always_draft=settings.always_draft,
        history=0 if settings.plain else profile.decoding.history,
        measured=None if in_engine or settings.plain else profile.measured,
    )

    drafts = "plain decoding" if settings.plain else profile.draft.describe()
    click.echo(f"serving {service.model.name} with {profile.name}: {drafts}", err=True)
    serve_requests(
        service, host=settings.host, port=settings.port, api_key=api_key, hosts=hosts, drain_seconds=settings.drain
    )


def _template(path: Path, tokenizer: Any) -> str:
    """Return the text of a chat template; raise `ConfigError` for one that does not take a message of the user."""
    try:
        template = path.read_text(encoding="utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], chat_template=template, tokenize=False)
    except Exception as cause:  # a chat template is a program and may raise anything
        raise ConfigError(f"chat_template: {path} does not take a user's message: {one_line(cause)}") from None
    return template
