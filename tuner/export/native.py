"""vLLM with the plugin of `plugins/vllm`, which runs a profile itself: nothing is written but a command."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

from decoding.profile import DraftProfile


def native_command(profile: DraftProfile, path: Path) -> str | None:
    """Return the command by which vLLM drafts with a profile itself, with the plugin of `plugins/vllm`; None if that cannot."""
    draft, head = profile.draft, profile.draft.trained_head
    if not draft.drafts or draft.parts.bits or draft.parts.tree or (head is not None and head.is_autoregressive):
        return None
    speculative = {
        "method": "custom_class",
        "model": "sdtune_vllm.proposer.SelfDraft",
        "num_speculative_tokens": profile.longest_draft,
    }
    flags = {
        "--dtype": profile.target.dtype,
        "--speculative-config": json.dumps(speculative),
        "--additional-config": json.dumps({"sdtune": {"profile": str(path)}}),
    }
    words = [f"{name} {quote(value)}" for name, value in flags.items()]
    return " ".join([f"vllm serve {quote(profile.target.model)}", *words])
