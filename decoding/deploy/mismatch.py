"""Profiles compared with the model and the setting that they are used with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
import transformers
from transformers import PreTrainedModel

from decoding.errors import ExitHeadError, TargetMismatchError, UnsupportedModelError, UnsupportedRunnerError
from decoding.fingerprint import fingerprint
from decoding.profile import DraftProfile
from decoding.target.stand_ins import has_compiled_forward

OnMismatch = Literal["error", "warn", "plain"]
"""What happens with a profile that does not fit.

`error` raises. `warn` drafts on a model with other weights or another configuration if it has the same number of layers, and raises
for anything else. `plain` decodes plainly, with a warning that says why.
"""

MISMATCHES = (TargetMismatchError, ExitHeadError, UnsupportedModelError, UnsupportedRunnerError)
"""Errors of a profile that does not fit the model, or whose files are missing or altered."""

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
"""Versions that change the speed of a draft."""


def check_choice(on_mismatch: str) -> None:
    if on_mismatch not in get_args(OnMismatch):
        raise ValueError(f"on_mismatch is {on_mismatch!r}, not one of {', '.join(get_args(OnMismatch))}")


def check_target(profile: DraftProfile, model: PreTrainedModel) -> None:
    expected, found = profile.target, fingerprint(model)
    if found.config_sha256 != expected.config_sha256:
        what = "another configuration"
    elif found.weights_sha256 != expected.weights_sha256:
        what = "other weights"
    else:
        return
    raise TargetMismatchError(
        f"profile {profile.name!r} was tuned for {expected.model} ({expected.architecture}, {expected.num_layers} layers), but the "
        f"model given, {model.config.name_or_path or type(model).__name__}, has {what}: load the model it was tuned for, or tune "
        "this one with `sdtune search`"
    )


def fits(profile: DraftProfile, model: PreTrainedModel) -> bool:
    try:
        check_target(profile, model)
    except TargetMismatchError:
        return False
    return True


def check_depth(profile: DraftProfile, model: PreTrainedModel, mismatch: TargetMismatchError) -> None:
    layers = model.config.get_text_config().num_hidden_layers
    if layers != profile.target.num_layers:
        raise TargetMismatchError(f"{mismatch} (the model has {layers} layers: an error also with on_mismatch='warn')")


def unmeasured_setting(profile: DraftProfile, model: PreTrainedModel) -> str | None:
    """Return one line that names what differs from the setting in which the profile was measured, or None.

    Device, precision, threads, and versions of torch and transformers are compared where the profile records them. Versions are
    compared without their build.
    """
    differences = "; ".join(_differences(profile, model))
    if not differences:
        return None
    return (
        f"profile {profile.name!r} is used in another setting than it was measured in: {differences}. Its speed-up may not hold "
        "here: measure it with `sdtune bench`, or tune again with `sdtune search`"
    )


def compiled_model(model: PreTrainedModel) -> str | None:
    """Return one line that says that the model, or a module in it, is compiled, or None."""
    # torch has no public way to ask.
    if not any(module._compiled_call_impl is not None or has_compiled_forward(module) for module in model.modules()):
        return None
    return (
        "the model is compiled, wholly or in part: drafts run other parts of it, for which what was compiled is left out, or "
        "compiled again. Give the model uncompiled: a profile's runner 'static' compiles the blocks itself"
    )


def _differences(profile: DraftProfile, model: PreTrainedModel) -> Iterator[str]:
    identity, figures = profile.target, profile.measured
    device, dtype = model.device.type, str(model.dtype).removeprefix("torch.")
    if identity.device is not None and torch.device(identity.device).type != device:
        recorded = identity.device if figures is None else f"{identity.device} ({figures.device})"
        yield f"device {device}, not {recorded}"
    if identity.dtype != dtype:
        yield f"dtype {dtype}, not {identity.dtype}"
    if figures is None:
        return
    if profile.provenance is not None and (engine := profile.provenance.engine) is not None:
        yield f"sdtune's decoder, not {engine.name} {engine.version}"
    threads = torch.get_num_threads()
    if device == "cpu" and figures.threads is not None and figures.threads != threads:
        yield f"{threads} thread{'s' if threads > 1 else ''}, not {figures.threads}"
    for package, found in VERSIONS.items():
        measured = figures.versions.get(package, found)
        if _public(measured) != _public(found):
            yield f"{package} {found}, not {measured}"


def _public(version: str) -> str:
    """Return a version without its build, such as `+cpu`."""
    return version.partition("+")[0]
