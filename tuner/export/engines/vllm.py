"""vLLM: a draft model, or n-gram lookup, by `--speculative-config`; or the profile itself, by the plugin of `plugins/vllm`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from decoding.draft_length import RULES, CostAwareRule
from decoding.profile import DraftProfile
from tuner.errors import ExportError
from tuner.export.engines.contract import Engine, command, script
from tuner.export.plan import NgramSettings, Plan

NATIVE_RULES = tuple(name for name, rule in RULES.items() if not issubclass(rule, CostAwareRule))
"""Draft-length rules that need no costs, which nothing measures in vLLM."""
OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")
"""Parts of a path by which vLLM takes a draft model for one of another method, whatever `method` says (0.32 and 0.33)."""
SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
"""Without earlier answers: a measurement that sends a prompt twice would copy all of it from the first answer."""
MTP_TYPES = (
    "bailing_hybrid",
    "deepseek_",
    "dots3_note",
    "ernie4_5_moe",
    "exaone4_5",
    "exaone_moe",
    "glm4_moe",
    "glm5_next",
    "glm_moe_dsa",
    "hy_v",
    "inkling",
    "kimi_k3",
    "longcat_flash",
    "mimo",
    "minimax_m3",
    "nemotron_h",
    "pangu_ultra_moe",
    "qwen3_5",
    "qwen3_next",
    "qwen4_exp",
    "step3p",
)
"""Beginnings of the `model_type` of families whose draft models vLLM turns into their multi-token prediction layers
(`hf_config_override` of `vllm.config.speculative`, 0.32).
"""


def refuse_mtp(config: Any, engine: str) -> None:
    if config.model_type.startswith(MTP_TYPES):
        raise ExportError(
            f"{engine} takes every draft model of type {config.model_type} for multi-token prediction layers, and would load "
            "something else: use the family's own MTP there, or keep the profile with --to folder"
        )


class Vllm(Engine):
    """Settings as JSON for `--speculative-config`, with a schedule by batch size if there is one."""

    title: str = "vLLM"
    version: str = "0.32 and 0.33; 0.32 run on a CPU"
    looks_up_alone: bool = True
    has_automaton: bool = True
    has_schedule: bool = True

    def check(self, plan: Plan, config: Any) -> None:
        if plan.shape is None:
            return
        found = [word for word in OTHER_METHODS if word in str(plan.draft).lower()]
        if found:
            raise ExportError(
                f"vLLM takes a draft model whose path contains {found[0]!r} for another method, whatever the settings say: "
                f"choose another --out than {plan.out}"
            )
        refuse_mtp(config, self.title)

    def notes(self, plan: Plan) -> list[str]:
        if plan.lookup is not None and plan.lookup.automaton is not None:
            return [
                "vLLM's `suffix` needs `pip install arctic-inference`. With `suffix_decoding_max_cached_requests` above 0 it "
                "copies from earlier answers too, which the tuned automaton does not read."
            ]
        if plan.shape is None:
            return ["vLLM's `ngram` copies from the earliest match, our prompt lookup from the latest."]
        return [
            "Of its own accord it has neither copies before a draft model nor a stop at an unlikely token "
            "(`enable_adaptive_verification` is for DSpark): the plugin `sdtune-vllm` has both.",
            "Where the longest sequence and its draft exceed `max_model_len`, vLLM stops drafting for the whole batch.",
            "Its default model runner runs draft models without CUDA graphs; `VLLM_USE_V2_MODEL_RUNNER=0` has them. Measure both.",
        ]

    def files(self, plan: Plan) -> dict[str, str]:
        launch = command(
            f"exec vllm serve {shlex.quote(plan.model)}",
            f"--dtype {plan.dtype}",
            '--speculative-config "$(cat speculative_config.json)"',
            '"$@"',
        )
        return {"speculative_config.json": json.dumps(self.settings(plan)) + "\n", "launch.sh": script(launch)}

    def settings(self, plan: Plan) -> dict[str, Any]:
        if plan.shape is None:
            assert plan.lookup is not None, "a draft without a model is a lookup"
            settings: dict[str, Any] = {**_copies(plan.lookup), "num_speculative_tokens": plan.lookup.max_tokens}
        else:
            settings = {
                "method": "draft_model",
                "model": str(plan.draft),
                "num_speculative_tokens": plan.length.num_tokens,
            }
        if plan.schedule is not None:
            settings["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in plan.schedule]
        return settings


def _copies(lookup: NgramSettings) -> dict[str, Any]:
    if (automaton := lookup.automaton) is None:
        return {"method": "ngram", "prompt_lookup_max": lookup.longest, "prompt_lookup_min": lookup.shortest}
    return {
        **SUFFIX,
        "suffix_decoding_max_spec_factor": automaton.max_spec_factor,
        "suffix_decoding_min_token_prob": automaton.min_token_prob,
    }


def native_flags(profile: DraftProfile, path: Path) -> tuple[str, ...] | None:
    """Return the flags by which vLLM drafts with a profile itself, with the plugin of `plugins/vllm`; None if that cannot."""
    draft, rule = profile.draft, profile.draft_length
    if not draft.drafts or draft.parts.bits or (isinstance(rule, CostAwareRule) and rule.costs is None):
        return None
    speculative = {
        "method": "custom_class",
        "model": "sdtune_vllm.proposer.SelfDraft",
        "num_speculative_tokens": profile.longest_draft,
    }
    additional = json.dumps({"sdtune": {"profile": str(path)}})
    return ("--speculative-config", json.dumps(speculative), "--additional-config", additional)


def native_command(profile: DraftProfile, path: Path) -> str | None:
    """Return the command of a server with `native_flags`, or None."""
    flags = native_flags(profile, path)
    if flags is None:
        return None
    return shlex.join(["vllm", "serve", profile.target.model, "--dtype", profile.target.dtype, *flags])
