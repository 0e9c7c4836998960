"""A profile and its model, loaded and served."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from decoding.decoder import plain_decoder
from decoding.deploy import load_decoder
from decoding.deploy.registry import is_address
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

    from decoding.serving.alias_watch import AliasWatch, hand_over
    from decoding.serving.run import ServerLimits, api_key_for, new_service, serve

    api_key = api_key_for(settings.host)
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
    limits = ServerLimits(
        settings.max_batch,
        settings.max_waiting,
        settings.max_length,
        may_fall_back=not settings.always_draft,
        tuned_batch=1 if profile.measured is None else profile.measured.batch_size,
    )
    service = new_service(decoder, loaded.tokenizer, settings.served_model_name or profile.target.model, limits)
    decoding = service.decoding

    def take_over(new: Path) -> None:
        """Build the new profile's decoder beside the running requests, and hand it over between two passes."""
        click.echo(f"taking over {DraftProfile.load(new).name} from {settings.profile}", err=True)
        hand_over(decoding, new)

    drafts = "plain decoding" if settings.plain else profile.draft.describe()
    click.echo(f"serving {service.model.name} with {profile.name}: {drafts}", err=True)
    watch = AliasWatch(lambda: Path(local_profile(settings.profile)), path, take_over, seconds=settings.poll)
    if is_address(settings.profile) and not settings.plain:
        watch.start()
    try:
        serve(service, host=settings.host, port=settings.port, api_key=api_key, drain_seconds=settings.drain)
    finally:
        watch.stop()
