"""transformers' assisted generation (`assistant_model=`) and its prompt lookup."""

from __future__ import annotations

import json
from typing import Any

from tuner.export.engines.contract import Engine
from tuner.export.plan import Plan


class Transformers(Engine):
    """A draft folder whose `generation_config.json` sets the assistant; for a lookup alone, the settings of `generate`."""

    title: str = "transformers"
    version: str = "5.23, run"
    looks_up_alone: bool = True
    stops_below: bool = True
    reads_layer_lists: bool = True

    def notes(self, plan: Plan) -> list[str]:
        if plan.shape is None:
            return ["Prompt lookup in `generate` takes one sequence at a time."]
        return ["`generate` with an assistant takes one sequence at a time, and reads the prompt with both models."]

    def files(self, plan: Plan) -> dict[str, str]:
        """Return an example, and the arguments of `generate` for a lookup alone."""
        if plan.shape is None:
            return {"lookup.json": _json(self.lookup_settings(plan)), "example.py": _lookup_example(plan)}
        return {"example.py": _assistant_example(plan)}

    def lookup_settings(self, plan: Plan) -> dict[str, Any]:
        assert plan.lookup is not None, "a draft without a model is a lookup"
        return {
            "prompt_lookup_num_tokens": plan.lookup.max_tokens,
            "max_matching_ngram_size": plan.lookup.longest,
        }

    def draft_generation(self, plan: Plan) -> dict[str, Any]:
        return {
            "num_assistant_tokens": plan.length.num_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": plan.threshold or 0.0,
        }


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def _assistant_example(plan: Plan) -> str:
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({plan.model!r}, dtype={plan.dtype!r})
assistant = AutoModelForCausalLM.from_pretrained({str(plan.draft)!r}, dtype={plan.dtype!r})
tokenizer = AutoTokenizer.from_pretrained({plan.model!r})
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
output = model.generate(**inputs, assistant_model=assistant, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""


def _lookup_example(plan: Plan) -> str:
    return f"""import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({plan.model!r}, dtype={plan.dtype!r})
tokenizer = AutoTokenizer.from_pretrained({plan.model!r})
lookup = json.loads(Path(__file__).with_name("lookup.json").read_text())
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
output = model.generate(**inputs, **lookup, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""
