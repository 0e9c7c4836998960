"""The steps in order, the most valuable first.

First the compiler, which nothing else is to wait for; then whether replays compute what they should, as no figure means anything
otherwise; then the figures that the project promises: roofline, switch of candidates, search, bench, batches, losslessness; then
each kind of draft; then what decides about defaults: the features, one step each, so that one that compiles too long costs only
itself, and the microbenchmark of attention. The step that moves the weights of the shared model comes after all others that
record passes over it. The last one, for which transformers compiles the whole model, is not part of the ten minutes: it gets the
time that the others leave, or the next run.
"""

from __future__ import annotations

from collections.abc import Iterable

from tuner.evaluation.gpu.contract import GpuStep
from tuner.evaluation.gpu.steps.attention import AttentionBackends
from tuner.evaluation.gpu.steps.benching import STOCK, STOCK_COMPILED, STOCK_OF_BATCHES, DemoLosslessness, ProfileBench
from tuner.evaluation.gpu.steps.compiling import Compilation
from tuner.evaluation.gpu.steps.environment import EnvironmentFacts
from tuner.evaluation.gpu.steps.features import FEATURE_STEPS, FUSED_PROJECTIONS
from tuner.evaluation.gpu.steps.kinds import KindsStep
from tuner.evaluation.gpu.steps.prefix_reuse import PrefixReuse
from tuner.evaluation.gpu.steps.rates import PlainRates
from tuner.evaluation.gpu.steps.replays import ReplaysAgain, TinyReplays, WideReplays
from tuner.evaluation.gpu.steps.searching import WholeSearch
from tuner.evaluation.gpu.steps.switching import CandidateSwitch

PLAN: tuple[GpuStep, ...] = (
    EnvironmentFacts(),
    Compilation(),
    TinyReplays(),
    WideReplays(),
    PlainRates(),
    CandidateSwitch(),
    WholeSearch(),
    ReplaysAgain(),
    ProfileBench(1, STOCK, prompts=8, limit_seconds=20, pessimistic_seconds=18),
    ProfileBench(4, STOCK_OF_BATCHES, prompts=8, limit_seconds=15, pessimistic_seconds=13),
    ProfileBench(16, STOCK_OF_BATCHES, prompts=32, limit_seconds=22, pessimistic_seconds=20),
    DemoLosslessness("float32", limit_seconds=25, pessimistic_seconds=23),
    DemoLosslessness("bfloat16", limit_seconds=20, pessimistic_seconds=18),
    KindsStep(1, 3, limit_seconds=28, pessimistic_seconds=26),
    KindsStep(4, 8, limit_seconds=10, pessimistic_seconds=9),
    KindsStep(16, 32, limit_seconds=10, pessimistic_seconds=9),
    PrefixReuse(),
    *FEATURE_STEPS,
    AttentionBackends(),
    FUSED_PROJECTIONS,
    ProfileBench(1, STOCK_COMPILED, prompts=4, limit_seconds=120, pessimistic_seconds=115, suffix="-hf-static"),
)
"""To add a step, write its file and name it here; `tests` hold the sum of the limits."""


def steps_named(names: Iterable[str]) -> tuple[GpuStep, ...]:
    """Return the steps with these names, in the order given. Raises KeyError for an unknown name."""
    by_name = {step.name: step for step in PLAN}
    return tuple(by_name[name] for name in names)
