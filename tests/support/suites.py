"""Suites and comparisons for tests, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decoding.profile import Interval
from tuner.bench.sample import TextSample
from tuner.evaluation.suite.result import BenchFound, MeasuredContender, SearchFound


def text_sample(
    prompt: int, decode_seconds: float, *, tokens: int = 20, passes: int = 20, **changes: Any
) -> TextSample:
    """Return a sample with a prefill of half a second for one token, identical to plain decoding."""
    facts: dict[str, Any] = {
        "prompt": prompt,
        "repeat": 0,
        "prompt_tokens": 10,
        "prefill_seconds": 0.5,
        "prefill_tokens": 1,
        "decode_seconds": decode_seconds,
        "decode_tokens": tokens,
        "passes": passes,
        "accepted_lengths": (0, passes) if tokens == 2 * passes else (passes,),
        "identical": True,
    }
    return TextSample(**(facts | changes))


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
