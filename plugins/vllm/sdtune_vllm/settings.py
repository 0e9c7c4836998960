"""The profile that an engine is to draft with, read and checked before anything is loaded. Imports nothing of vLLM."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from decoding.draft_length import CostAwareRule, DraftLengthRule
from decoding.drafts import DraftDocument, EarlyExit, LayerSkip
from decoding.profile import DraftProfile


class UnsupportedError(ValueError):
    """What this plugin, or this way to run vLLM, cannot do; in one line, at the start."""


def profile_of(config: Any) -> tuple[DraftProfile, Path]:
    """Return the profile that vLLM's `--additional-config '{"sdtune": {"profile": FILE}}'` names, and its folder."""
    given = (config.additional_config or {}).get("sdtune")
    if not isinstance(given, dict) or set(given) != {"profile"}:
        raise UnsupportedError("""give --additional-config '{"sdtune": {"profile": "profile.yaml"}}'""")
    path = Path(given["profile"])
    return DraftProfile.load(path), path.parent


def check(config: Any, profile: DraftProfile, folder: Path) -> None:
    """Raise `UnsupportedError` for a profile, a model or a way to run it that the plugin does not draft for."""
    for reason in (*_of_engine(config), *_of_draft(profile.draft, profile.draft_length, folder)):
        raise UnsupportedError(reason)
    if profile.decoding.exact_width is not None:
        raise UnsupportedError("bit-exact mode is sdtune's own: search without --exact")
    target, hf = profile.target, config.model_config.hf_text_config
    found = (config.model_config.architectures[0], hf.num_hidden_layers)
    if found != (target.architecture, target.num_layers):
        raise UnsupportedError(
            f"the profile is for a {target.architecture} of {target.num_layers} layers, and the model is a {found[0]} of {found[1]}"
        )


def _of_engine(config: Any) -> Any:
    parallel, model = config.parallel_config, config.model_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        yield "the model has to be on one device: tensor and pipeline parallel engines were not run with this plugin"
    if parallel.use_ubatching:
        yield "batches in halves (DBO) were not run with this plugin"
    if config.lora_config is not None:
        yield "LoRA changes the layers that draft: serve the merged model"
    if config.kv_transfer_config is not None:
        yield "keys and values that come from elsewhere were not run with this plugin"
    if getattr(config.compilation_config.cudagraph_mode, "name", None) == "FULL":  # an enum of vLLM, or None
        yield (
            "with cudagraph_mode FULL, vLLM itself wrote wrong texts on an H100, also without drafts: leave its default, "
            "FULL_AND_PIECEWISE"
        )
    if model.is_hybrid or model.has_inner_state:
        yield "a recurrent state cannot take back rejected drafts"
    if model.is_multimodal_model:
        yield "the model has parts beside its language model: these were not run with this plugin"


def _of_draft(draft: DraftDocument, rule: DraftLengthRule, folder: Path) -> Any:
    if not draft.drafts:
        yield "the profile says to decode plainly: serve without --speculative-config"
    if draft.parts.bits is not None:
        yield f"the draft has int{draft.parts.bits} weights, which vLLM does not make: tune with `sdtune search --deploy-to vllm`"
    if isinstance(rule, CostAwareRule) and rule.costs is None:
        yield f"the rule {rule.rule} weighs costs, which the profile does not have: nothing measures them in vLLM"
    if draft.runs_model and not isinstance(draft, EarlyExit | LayerSkip):
        yield f"{draft.describe()} does not run in vLLM: skip sets, early exits and copies do"
    if (head := draft.trained_head) is not None:
        if (path := folder / head.file).is_file() is False:
            yield f"there is no {path}, which the profile names"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != head.sha256:
            yield f"{path} is not the head that the profile names: its contents differ"
