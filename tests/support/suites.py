"""Suites and comparisons for tests, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decoding.profile import Interval
from studies.measurement import PairedPrefill, PromptSample
from tuner.evaluation.suite.result import BenchFound, MeasuredContender, SearchFound


def text_sample(
    prompt: int, decode_seconds: float, *, tokens: int = 20, passes: int = 20, **changes: Any
) -> PromptSample:
    """Return a sample with a prefill of half a second for one token, identical to plain decoding."""
    accepted = tokens - passes
    facts: dict[str, Any] = {
        "prompt": prompt,
        "plain_seconds": 2.0,
        "plain_tokens": tokens,
        "draft_seconds": decode_seconds,
        "draft_tokens": tokens,
        "rounds": passes,
        "drafted": accepted,
        "accepted": accepted,
        "prefill": PairedPrefill(plain_seconds=0.5, plain_tokens=1, draft_seconds=0.5, draft_tokens=1),
        "identical": True,
    }
    return PromptSample(**(facts | changes))


def measured(seconds: Sequence[float], *, passes: int = 20) -> MeasuredContender:
    """Return a contender with these decode seconds of 20 tokens for each prompt."""
    samples = tuple(text_sample(prompt, each, passes=passes) for prompt, each in enumerate(seconds))
    return MeasuredContender(description="a draft", settings={}, samples=samples)


def bench_found(seconds: Mapping[str, Sequence[float]], **changes: Any) -> BenchFound:
    """Return a comparison of contenders with these decode seconds by prompt."""
    num_prompts = len(next(iter(seconds.values())))
    facts: dict[str, Any] = {
        "facts": {"runner": "eager"},
        "counted": tuple(range(num_prompts)),
        "num_prompts": num_prompts,
        "prompt_tokens": (10,) * num_prompts,
        "measured": {name: measured(each) for name, each in seconds.items()},
        "left_out": {},
    }
    return BenchFound(**(facts | changes))


def search_found(*, claims_speedup: bool = True) -> SearchFound:
    """Return the result of a search of five trials."""
    return SearchFound(
        study="joint",
        draft="exit at 2",
        is_measurable=True,
        claims_speedup=claims_speedup,
        confirmed=Interval(value=1.2, ci95=(1.1, 1.3)),
        candidate_sha256="0" * 64,
        trials=5,
        search_seconds=10.0,
        distillation_seconds=0.0,
        studies={"joint": "five trials"},
    )
