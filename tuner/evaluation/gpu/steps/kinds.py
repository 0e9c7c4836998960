"""Each kind of draft on the widened model, in batches of one size.

Copies, an exit with a head, a feature head, side leaves, a skip set, and the model in int8 and int4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import Draft, FixedLeaves, LayerSkip, PromptLookup, SuffixDraft, SuffixLookup
from decoding.drafts.precision import BitWidth
from decoding.errors import UnsupportedModelError, one_line
from tuner.bench.contenders import PLAIN
from tuner.contest.contest import Contender
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.feature_head import TrainedHead, train_feature_head
from tuner.evaluation.gpu.shared import NEW_TOKENS, Shared
from tuner.evaluation.gpu.side_by_side import SideBySide, own, plain_static, prompts_of, ratio_text

DRAFTED, COPIED = Fixed(max_tokens=4), Fixed(max_tokens=8)
"""Rules: of drafts that run a model or a head, and of copies."""
LEAVES = FixedLeaves(leaves=2)
TRAINING_SHARE = 0.25
"""Share of a step's seconds in which the feature head may be trained, by the first step that needs it."""
PRECISIONS: tuple[BitWidth, ...] = (8, 4)
"""Bits of quantised drafts of the whole model. Where they have no kernel, their rows show the refusal."""
CHAINS_ONLY = "side leaves: not in batches, which decode the chain alone"


def skip_set(num_layers: int) -> LayerSkip:
    """Return a skip of every other block of the middle half: what a search finds depends on the time that it has."""
    return LayerSkip.blocks(tuple(range(num_layers // 4, 3 * num_layers // 4, 2)))


@dataclass(frozen=True)
class KindsStep:
    """Step: every kind in turns with plain decoding, in batches of one size. Side leaves are for single sequences alone."""

    batch_size: int
    num_prompts: int
    limit_seconds: float
    pessimistic_seconds: float
    max_new_tokens: int = NEW_TOKENS

    @property
    def name(self) -> str:
        """See `GpuStep.name`."""
        return f"kinds-{self.batch_size}"

    @property
    def question(self) -> str:
        """See `GpuStep.question`."""
        how = "one sequence" if self.batch_size == 1 else f"batches of {self.batch_size}"
        return f"What does each kind of draft give with {how}?"

    def run(self, shared: Shared, seconds: float) -> Result:
        """Measure all kinds; the feature head is trained first, unless an earlier step has done so."""
        trained = shared.once("feature head", lambda: train_feature_head(shared, seconds * TRAINING_SHARE))
        drafts, refused = self.drafts(shared, trained), dict[str, str]()
        contenders: dict[str, Contender] = {PLAIN: plain_static(shared)}
        for name, draft in drafts.items():
            rule = DRAFTED if draft.runs_model or draft.has_head else COPIED
            try:
                decoder = Decoder(shared.static, draft, rule, heads=shared.heads)
            except UnsupportedModelError as cause:
                refused[name] = one_line(cause)
            else:
                contenders[name] = own(shared, decoder, draft.describe())
        measured = SideBySide(
            shared.static,
            contenders,
            prompts_of(shared, self.num_prompts),
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
        )
        return {
            "batch_size": self.batch_size,
            "contenders": measured.figures(),
            "drafts": {name: draft.describe() for name, draft in drafts.items()},
            "left_out": {**refused, **measured.left_out},
            "notes": [] if self.batch_size == 1 else [CHAINS_ONLY],
            "feature_head": {"steps": trained.steps, "seconds": trained.seconds},
        }

    def drafts(self, shared: Shared, trained: TrainedHead) -> dict[str, Draft]:
        """Return the draft of each row."""
        suffix = SuffixLookup(max_tokens=COPIED.max_tokens)
        drafts: dict[str, Draft] = {
            "prompt lookup": PromptLookup(),
            "suffix automaton": SuffixDraft(),
            "exit with head": shared.exit_draft,
            "suffix automaton, then exit": shared.exit_draft.with_lookup(suffix),
            "feature head": trained.draft,
            "skip set": skip_set(shared.static.num_layers),
            **{f"int{bits}": LayerSkip(bits=bits) for bits in PRECISIONS},
        }
        if self.batch_size == 1:
            drafts["exit with side leaves"] = shared.exit_draft.with_tree(LEAVES)
            drafts["feature head with side leaves"] = trained.draft.with_tree(LEAVES)
        return drafts

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line per row."""
        for name, each in result["contenders"].items():
            yield (
                f"{name}: {each['tokens_per_second']['value']:.1f} tok/s, {ratio_text(each['over_plain'])} over plain, "
                f"{each['tokens_per_pass']:.2f} tokens per pass, identical {each['identical']}/{each['texts']} + "
                f"{each['ties']} ties"
            )
        for name, reason in result["left_out"].items():
            yield f"{name} left out: {reason[:120]}"
        yield from result["notes"]
        trained = result["feature_head"]
        yield f"feature head: trained for {trained['steps']} steps, {trained['seconds']:.1f} s"
