"""SGLang: a draft model by `STANDALONE`, lookup by `NGRAM`."""

from __future__ import annotations

from shlex import quote
from typing import Any, ClassVar

from tuner.export.engines.contract import Engine, command, script
from tuner.export.engines.vllm import refuse_mtp
from tuner.export.plan import Plan


class SgLang(Engine):
    """Flags of `sglang.launch_server`, after the released source; not run."""

    title: ClassVar[str] = "SGLang"
    version: ClassVar[str] = "0.5.23, after its source; not run"
    looks_up_alone: ClassVar[bool] = True

    def check(self, plan: Plan, config: Any) -> None:
        """Refuse families with multi-token prediction layers, which were not read in SGLang's source."""
        if plan.shape is not None:
            refuse_mtp(config, self.title)

    def notes(self, plan: Plan) -> list[str]:
        """Return what `NGRAM` does otherwise."""
        return ["SGLang's `NGRAM` matches in a trie; lengths of n-grams stay its own."] if plan.shape is None else []

    def files(self, plan: Plan) -> dict[str, str]:
        """Return `launch.sh`."""
        launch = [
            f"python -m sglang.launch_server --model-path {quote(plan.model)}",
            f"--dtype {plan.dtype}",
            *self.flags(plan),
        ]
        return {"launch.sh": script(command(*launch, '"$@"'))}

    def flags(self, plan: Plan) -> list[str]:
        """Return the flags of speculative decoding; `--speculative-num-draft-tokens` counts the last sure token too."""
        if plan.shape is None:
            assert plan.lookup is not None, "a draft without a model is a lookup"
            return ["--speculative-algorithm NGRAM", f"--speculative-num-draft-tokens {plan.lookup.max_tokens + 1}"]
        return [
            "--speculative-algorithm STANDALONE",
            f"--speculative-draft-model-path {quote(str(plan.draft))}",
            f"--speculative-num-steps {plan.length.num_tokens}",
            "--speculative-eagle-topk 1",
            f"--speculative-num-draft-tokens {plan.length.num_tokens + 1}",
        ]
