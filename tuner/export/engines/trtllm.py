"""TensorRT-LLM: a draft model or n-grams by a YAML file."""

from __future__ import annotations

from shlex import quote
from typing import Any, ClassVar

import yaml

from tuner.export.engines.contract import Engine, command, script
from tuner.export.engines.vllm import refuse_mtp
from tuner.export.plan import Plan


class TensorRtLlm(Engine):
    """`config.yaml` for `trtllm-serve`, after the class of its arguments; not run."""

    title: ClassVar[str] = "TensorRT-LLM"
    version: ClassVar[str] = "after `llm_args.py` of 2026; not run"
    looks_up_alone: ClassVar[bool] = True
    has_schedule: ClassVar[bool] = True

    def check(self, plan: Plan, config: Any) -> None:
        """Refuse families with multi-token prediction layers, which were not read in its source."""
        if plan.shape is not None:
            refuse_mtp(config, self.title)

    def notes(self, plan: Plan) -> list[str]:
        """Return the traps of its settings."""
        if plan.shape is None:
            return []
        return [
            "The literal is `Draft_Target` in the class; older recipes say `DraftTarget`.",
            "A schedule never says 0 here: the draft's cache would stay stale, and acceptance collapse.",
        ]

    def files(self, plan: Plan) -> dict[str, str]:
        """Return `config.yaml` and `launch.sh`."""
        settings = yaml.safe_dump({"speculative_config": self.settings(plan)}, sort_keys=False)
        launch = command(
            f"trtllm-serve {quote(plan.model)}", '--extra_llm_api_options "$(dirname "$0")/config.yaml"', '"$@"'
        )
        return {"config.yaml": settings, "launch.sh": script(launch)}

    def settings(self, plan: Plan) -> dict[str, Any]:
        """Return the value of `speculative_config`."""
        if plan.shape is None:
            assert plan.lookup is not None, "a draft without a model is a lookup"
            return {
                "decoding_type": "NGram",
                "max_draft_len": plan.lookup.max_tokens,
                "max_matching_ngram_size": plan.lookup.longest,
            }
        settings: dict[str, Any] = {
            "decoding_type": "Draft_Target",
            "max_draft_len": plan.length.num_tokens,
            "speculative_model": str(plan.draft),
        }
        if plan.schedule is not None:
            settings["draft_len_schedule"] = {first: max(tokens, 1) for first, _, tokens in plan.schedule}
        return settings
