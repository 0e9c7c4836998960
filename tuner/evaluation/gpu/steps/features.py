"""Each speed feature of the static runner, off and on in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import DraftLengthRule, Fixed, TopProbability
from decoding.drafts import EarlyExit
from decoding.errors import UnsupportedRunnerError, one_line
from decoding.runners.features import SpeedFeatures
from decoding.target import Target
from tuner.bench.contenders import PLAIN
from tuner.contest.contest import Contender
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.shared import NEW_TOKENS, Shared, without_head
from tuner.evaluation.gpu.side_by_side import SideBySide, own, plain_static, prompts_of, ratio_text

NUM_PROMPTS = 4
WORTHWHILE = 1.02
"""Speed-up from which a feature deserves to be on by default."""
FIXED: DraftLengthRule = Fixed(max_tokens=4)
LOOKING: DraftLengthRule = TopProbability(max_tokens=6)


@dataclass(frozen=True)
class FeatureStep:
    """Step: one feature, off and on, on the same prompts in turns."""

    feature: str
    features: SpeedFeatures
    rule: DraftLengthRule | None
    """Rule of the draft that the feature concerns; None for plain decoding, which then is what is timed."""
    limit_seconds: float
    pessimistic_seconds: float
    has_head: bool = True
    """Whether the draft is the exit with its head, or the same exit without one."""

    @property
    def name(self) -> str:
        """See `GpuStep.name`."""
        return f"feature-{self.feature.replace('_', '-')}"

    @property
    def question(self) -> str:
        """See `GpuStep.question`."""
        return f"Does `{self.feature}` pay, and does it change the output?"

    def run(self, shared: Shared, seconds: float) -> Result:
        """Measure off and on; a feature that this torch or this model cannot have is refused, with the reason."""
        try:
            target = shared.static_with(self.features)
        except UnsupportedRunnerError as cause:
            return {"refused": one_line(cause)}
        contenders: dict[str, Contender] = {PLAIN: plain_static(shared)}
        if self.rule is not None:
            contenders["off"] = own(shared, self._decoder(shared, shared.static), "drafted, feature off")
        contenders["on"] = own(shared, self._decoder(shared, target), "feature on")
        prompts = prompts_of(shared, NUM_PROMPTS)
        measured = SideBySide(shared.static, contenders, prompts, max_new_tokens=NEW_TOKENS, repeats=2)
        if "on" in measured.left_out:
            return {"refused": measured.left_out["on"]}
        gain, figures = measured.ratio("on", PLAIN if self.rule is None else "off"), measured.figures()
        lossless = figures["on"]["identical"] + figures["on"]["ties"] == figures["on"]["texts"]
        return {"gain": gain, "lossless": lossless, "pays": pays(gain, lossless=lossless), "contenders": figures}

    def _decoder(self, shared: Shared, target: Target) -> Decoder:
        if self.rule is None:
            return plain_decoder(target)
        return Decoder(target, self.draft(shared), self.rule, heads=shared.heads)

    def draft(self, shared: Shared) -> EarlyExit:
        """Return the draft that the feature concerns."""
        return shared.exit_draft if self.has_head else without_head(shared.exit_draft)

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the gain and the verdict."""
        if "refused" in result:
            yield f"not possible here: {result['refused']}"
            return
        on = result["contenders"]["on"]
        verdict = "pays: on by default" if result["pays"] else "stays off"
        yield f"{ratio_text(result['gain'])} on over off: {verdict}"
        yield f"identical {on['identical']}/{on['texts']} + {on['ties']} ties"


def pays(gain: Mapping[str, Any], *, lossless: bool) -> bool:
    """Return whether a feature deserves to be on by default: worthwhile, certain, and without a wrong token."""
    return lossless and gain["value"] >= WORTHWHILE and gain["ci95"][0] > 1


FUSED_PROJECTIONS = FeatureStep("fused_projections", SpeedFeatures(fused_projections=True), None, 20, 18)
"""Moves the weights of the model that the steps share, so that everything recorded before is recorded again."""
FEATURE_STEPS = (
    FeatureStep("plain_chain", SpeedFeatures(plain_chain=8), None, 12, 11),
    # An exit head reads states that the host hands to it: its rounds are never recorded as a whole.
    FeatureStep("whole_rounds", SpeedFeatures(whole_rounds=True), FIXED, 12, 11, has_head=False),
    FeatureStep("draft_vocabulary", SpeedFeatures(draft_vocabulary=32768), FIXED, 12, 11),
    FeatureStep("look_every", SpeedFeatures(look_every=3), LOOKING, 12, 11),
    FeatureStep("varlen_attention", SpeedFeatures(varlen_attention=True), None, 12, 11),
    FeatureStep("coordinate_descent", SpeedFeatures(coordinate_descent=True), None, 22, 20),
)
"""One step per other field of `SpeedFeatures`, the quickest to compile first; coordinate descent compiles longest."""
