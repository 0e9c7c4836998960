"""vLLM with the plugin of `plugins/vllm`, which runs a profile itself: nothing is written but a command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from decoding.draft_length import RULES, CostAwareRule
from decoding.profile import DraftProfile

NATIVE_RULES = tuple(name for name, rule in RULES.items() if not issubclass(rule, CostAwareRule))
"""Draft-length rules that need no costs, which nothing measures in vLLM."""


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
