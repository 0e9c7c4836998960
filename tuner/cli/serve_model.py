"""A profile and its model, loaded and served."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from decoding.decoder import plain_decoder
from decoding.deploy import load_decoder
from decoding.profile import DraftProfile
from tuner.cli.launch import SERVER_PACKAGES
from tuner.cli.serve import ServeSettings
from tuner.errors import ConfigError
from tuner.fields import local_profile
from tuner.inputs.models import load


def serve_model(settings: ServeSettings) -> None:
    """Serve until SIGTERM. Raises `SdtuneError` for a wrong profile, model or setting, before anything is loaded if possible."""
    missing = [package for package in SERVER_PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(f"the server is not installed (no {', '.join(missing)}): pip install 'sdtune[serve]'")

    from decoding.serving.hosts import host_names
    from decoding.serving.run import ServerLimits, api_key_for, new_service, refuse_busy_address, serve

    api_key = api_key_for(settings.host)
    hosts = host_names(settings.host, settings.allowed_host)
    refuse_busy_address(settings.host, settings.port)
    path = Path(local_profile(settings.profile))
    profile = DraftProfile.load(path)
    loaded = load(
        settings.model or profile.target.model,
        revision=profile.target.revision,
        dtype=settings.dtype or profile.target.dtype,
        device=settings.device,
    )
    decoder = load_decoder(path).decoder_for(loaded.model)
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
        measured=None if in_engine or settings.plain else profile.measured,
    )

    drafts = "plain decoding" if settings.plain else profile.draft.describe()
    click.echo(f"serving {service.model.name} with {profile.name}: {drafts}", err=True)
    serve(service, host=settings.host, port=settings.port, api_key=api_key, hosts=hosts, drain_seconds=settings.drain)
