"""The speed-up that an export is predicted to have: sdtune's own decoder under the engine's rules, on tuning prompts.

Under these rules (our formulation) a draft has a fixed length or a threshold, the engine's lookup or none and no side leaves, and
the verification runs all blocks. The engine's kernels, and the memory that a draft model of its own takes, are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from decoding.draft_length import Fixed, TopProbability
from decoding.drafts import Lookup, PromptLookup
from decoding.profile import Decoding
from studies.contract import Candidate
from tuner.errors import DatasetError
from tuner.export.prediction import PredictedSpeedup
from tuner.measuring.baseline import decode_baseline
from tuner.measuring.paired import Bench

if TYPE_CHECKING:
    from decoding.draft_length import DraftLengthRule
    from decoding.head_folder import HeadFolder
    from decoding.target import Target
    from decoding.text import Ending
    from tuner.export.plan import Plan


def engine_candidate(plan: Plan) -> Candidate:
    """Return the profile's draft and rule as the engine runs them."""
    draft, lookup = plan.profile.draft, plan.lookup
    if plan.shape is None:
        assert lookup is not None, "a draft without a model is a lookup"
        copies = PromptLookup(max_ngram=lookup.longest, min_ngram=lookup.shortest)
        return Candidate(draft=copies, draft_length=Fixed(max_tokens=lookup.max_tokens))
    alone = draft.having(lookup=None, tree=None)
    if plan.bits is None and alone.parts.bits is not None:
        alone = alone.having(bits=None)
    if lookup is not None:
        first = Lookup(max_ngram=lookup.longest, min_ngram=lookup.shortest, max_tokens=lookup.max_tokens)
        alone = alone.having(lookup=first)
    most = plan.length.num_tokens
    own: DraftLengthRule = (
        Fixed(max_tokens=most) if plan.threshold is None else TopProbability(max_tokens=most, threshold=plan.threshold)
    )
    return Candidate.model_validate({"draft": alone, "draft_length": own})


def predict_by_rules(
    plan: Plan, target: Target, heads: HeadFolder, prompts: Sequence[Sequence[int]], ending: Ending
) -> PredictedSpeedup:
    """Decode tuning prompts plainly and under the engine's rules; return the speed-up, or why there is none."""
    try:
        baseline = decode_baseline(target, prompts, ending)
    except DatasetError as cause:
        return PredictedSpeedup(None, str(cause))
    decoding = Decoding(prefix_reuse=False, runner=target.runner.name)
    bench = Bench(target, baseline, decoding=decoding, heads=heads)
    measured = bench.measure(engine_candidate(plan), bench.indices)
    return PredictedSpeedup(
        measured.speedup,
        f"{measured.speedup_interval()} by sdtune's own decoder under the engine's rules, on {measured.num_prompts} tuning prompts",
    )
