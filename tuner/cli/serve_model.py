"""A profile and its model, loaded and served."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from decoding.arms.arm import Arm, check_arms
from decoding.arms.decoder import ArmedDecoder
from decoding.decoder import plain_decoder
from decoding.deploy import load_decoder
from decoding.profile import DraftProfile
from tuner.cli.launch import SERVER_PACKAGES
from tuner.cli.serve import ServeSettings
from tuner.errors import ConfigError
from tuner.inputs.models import load
from tuner.profile_address import local_profile


def serve_model(settings: ServeSettings) -> None:
    """Serve until SIGTERM. Raises `SdtuneError` for a wrong profile, model or setting, before anything is loaded if possible."""
    missing = [package for package in SERVER_PACKAGES if find_spec(package) is None]
    if missing:
        raise ConfigError(f"the server is not installed (no {', '.join(missing)}): pip install 'sdtune[serve]'")

    from decoding.serving.batch import RowDecoder
    from decoding.serving.hosts import host_names
    from decoding.serving.run import ServerLimits, api_key_for, new_service, refuse_busy_address, serve

    api_key = api_key_for(settings.host)
    hosts = host_names(settings.host, settings.allowed_host)
    refuse_busy_address(settings.host, settings.port)
    path = Path(local_profile(settings.profile))
    profile = DraftProfile.load(path)
    others_loaded = [load_decoder(local_profile(each)) for each in settings.arm]
    if others_loaded and (settings.plain or settings.always_draft):
        raise ConfigError("--arm leaves the choice to the server: use it without --plain and --always-draft")
    check_arms([profile, *(each.profile for each in others_loaded)])
    loaded = load(
        settings.model or profile.target.model,
        revision=profile.target.revision,
        dtype=settings.dtype or profile.target.dtype,
        device=settings.device,
    )
    decoder = load_decoder(path).decoder_for(loaded.model)
    if settings.plain:
        decoder = plain_decoder(decoder.target)
    others = [Arm.of(each.profile, each.decoder_on(decoder.target)) for each in others_loaded]

    arms = [*([Arm.of(profile, decoder)] if decoder.drafter is not None else []), *others]
    chooses = arms and not settings.plain and not settings.always_draft
    served: RowDecoder = ArmedDecoder(arms) if chooses else decoder
    limits = ServerLimits(settings.max_batch, settings.max_waiting, settings.max_length)
    name = settings.served_model_name or profile.target.model
    click.echo(f"preparing for up to {limits.num_rows} requests at a time", err=True)
    service = new_service(served, loaded.tokenizer, name, limits)

    drafts = "plain decoding" if settings.plain else profile.draft.describe()
    drafts = "; or ".join(
        [drafts, *(f"{each.profile.name}: {each.profile.draft.describe()}" for each in others_loaded)]
    )
    click.echo(f"serving {service.model.name} with {profile.name}: {drafts}", err=True)
    serve(service, host=settings.host, port=settings.port, api_key=api_key, hosts=hosts, drain_seconds=settings.drain)
