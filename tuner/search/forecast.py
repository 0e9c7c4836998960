"""Forecast of a search's time, from a moment of plain decoding: its stages, and the distillation of missing heads.

Our formulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from studies.costs.plan import plan_passes
from tuner.config import SearchConfig
from tuner.heads.distill import MOST_EVALUATED, num_training_prompts
from tuner.heads.memory import heads_that_fit
from tuner.heads.time_plan import DistillationTime, distillation_time
from tuner.inputs.memory import ModelSize, free_bytes
from tuner.measuring.cost_cache import stored_table
from tuner.measuring.cost_table import BUDGET_SECONDS, FEWEST_SWEEPS, resolve_terms
from tuner.measuring.paired import Bench
from tuner.measuring.pulse import Pulse, measure_pulse
from tuner.search.heat import least_candidates
from tuner.search.task import Task
from tuner.search.time_plan import PlainRate, Sizes, TimePlan, least_seconds, plan_search
from tuner.stage_clock import Stage

PASS_OVER_PLAIN = 1.5
"""Mean seconds of the passes of a cost table, over a plain pass; a plain one is timed for every two of them."""
SURVEY_READS = 3.0
"""Passes over all surveyed positions, beside those of the exits: reading, proposals, predictions."""


@dataclass(frozen=True)
class Forecast:
    """Measured rate of plain decoding, and what it means for the time of a search."""

    sizes: Sizes
    rate: PlainRate
    preparing: float
    """Seconds until studies propose their first candidates."""
    distillation: DistillationTime | None
    """Time to distil missing exit heads; None if there is none to distil."""

    @property
    def least(self) -> float:
        """Seconds of the shortest search with a result."""
        return least_seconds(self.sizes, self.rate, self.preparing)

    def plan(self, left: float) -> TimePlan:
        """Return the plan of a search with `left` seconds."""
        return plan_search(self.sizes, self.rate, left, self.preparing)


def forecast(task: Task) -> Forecast:
    """Measure the rate of plain decoding for a moment and return the forecast."""
    config = task.config
    prompts = [prompt.token_ids for prompt in task.prompts.tuning]
    pulse = measure_pulse(task.target, prompts, max_new_tokens=config.max_new_tokens, num_sequences=config.batch_size)
    rate = PlainRate(pulse.prefill_seconds, pulse.token_seconds, config.max_new_tokens)
    opening = task.budget.clock.seconds().get(Stage.WRITING, 0.0)
    program = None if task.deployment is None else task.deployment.program
    sizes = Sizes.of(
        config,
        may_have_ties=task.target.dtype != torch.float32,
        opening_seconds=opening,
        heat=0 if program is None else least_candidates(program),
        start_seconds=0.0 if program is None else program.usual_start_seconds,
    )
    return Forecast(sizes, rate, preparing_seconds(task, pulse), _distillation(task, pulse))


def rate_of(bench: Bench, seconds: float, pulse: PlainRate) -> PlainRate:
    """Return the rate that decoding the prompts of `bench` for `seconds` has shown; it replaces the one of the pulse.

    The continuations' true lengths count: text that ends early makes decoding shorter than planned.
    """
    scale = seconds / max(1, len(bench.indices)) / pulse.sample
    return PlainRate(pulse.prefill_seconds * scale, pulse.token_seconds * scale, pulse.new_tokens)


def num_surveyed(config: SearchConfig) -> int:
    """Return the most prompts that a study of the search surveys."""
    per_batch = config.batch_size * config.max_new_tokens
    tokens = [getattr(config.study_settings(name), "pool_tokens", 0) for name in config.study]
    batches = [each // per_batch + 1 for each in tokens if each]
    return min(config.tuning_prompts, config.batch_size * max(batches, default=0))


def preparing_seconds(task: Task, pulse: Pulse) -> float:
    """Return the estimated seconds until the studies propose their first candidates: cost table and surveys."""
    surveyed = num_surveyed(task.config)
    if not surveyed:
        return 0.0
    return _cost_table_seconds(task, pulse) + _survey_seconds(task, pulse, surveyed)


def _cost_table_seconds(task: Task, pulse: Pulse) -> float:
    """Return the seconds of measuring a cost table, 0 if there is one on disk."""
    config = task.config
    most = [getattr(config.study_settings(name), "max_tokens", 0) for name in config.study]
    lengths = [len(prompt.token_ids) for prompt in task.prompts.tuning]
    contexts = sorted({min(lengths), max(lengths) + config.max_new_tokens})
    bits = config.wanted_bits(task.target.device)
    terms = resolve_terms(task.target, max_tokens=max(1, *most), contexts=contexts, bits=bits)
    if stored_table(task.target, terms, config.batch_size) is not None:
        return 0.0
    fitted, held_out = plan_passes(terms, config.seed)
    sweep = 1.5 * len([*fitted, *held_out]) * PASS_OVER_PLAIN * pulse.token_seconds
    return max(BUDGET_SECONDS, FEWEST_SWEEPS * sweep)


def _survey_seconds(task: Task, pulse: Pulse, surveyed: int) -> float:
    """Return the seconds of surveys: reading the sequences, and the logits of every exit at the surveyed positions."""
    size, mean = ModelSize.of(task.target.model), _mean_length(task)
    output_share = size.vocabulary * size.hidden_size / size.num_parameters
    new_tokens = task.config.max_new_tokens
    reads = SURVEY_READS * (mean + new_tokens) + size.num_layers * output_share * new_tokens
    return surveyed * reads * pulse.position_seconds


def _distillation(task: Task, pulse: Pulse) -> DistillationTime | None:
    config = task.config
    if not task.missing_heads or config.distill == "never":
        return None
    size, num_heads = ModelSize.of(task.target.model), len(task.missing_heads)
    most = config.distillation.prompt_tokens
    longest = min(most, max(len(prompt.token_ids) for prompt in task.prompts.tuning))
    fit = heads_that_fit(size, longest, config.distillation, free_bytes(str(task.target.device)))
    return distillation_time(
        size,
        config.distillation,
        pulse,
        num_heads=num_heads,
        heads_at_once=config.distillation.heads_at_once or fit or num_heads,
        num_prompts=num_training_prompts(config, task.prompts),
        prompt_tokens=min(most, _mean_length(task)),
        num_evaluated=min(len(task.prompts.held_out), MOST_EVALUATED),
    )


def _mean_length(task: Task) -> float:
    """Return the mean number of tokens of a tuning prompt."""
    lengths = [len(prompt.token_ids) for prompt in task.prompts.tuning]
    return sum(lengths) / len(lengths)
