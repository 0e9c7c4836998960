"""A whole search on the widened model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.evaluation.gpu.contract import OutOfTimeError, Result
from tuner.evaluation.gpu.shared import (
    DATASET,
    GROUP_COLUMN,
    HELD_OUT_PROMPTS,
    NEW_TOKENS,
    TUNING_PROMPTS,
    Shared,
)

if TYPE_CHECKING:
    from tuner.config import SearchConfig

SHARE_OF_SEARCH = 0.85
"""Share of the step's seconds for the whole search, which may overrun its time by a lap of the race."""


@dataclass(frozen=True)
class WholeSearch:
    """Step: `sdtune search` with the static runner, whose profile the next steps use."""

    name: str = "search"
    question: str = "Does a search find a profile that beats plain static decoding?"
    limit_seconds: float = 70
    pessimistic_seconds: float = 67

    def run(self, shared: Shared, seconds: float) -> Result:
        """Search for a share of the time. Raises `OutOfTimeError` with the best trial if the step is interrupted."""
        from tuner.progress import Unwatched
        from tuner.search.run import InterruptedSearchError, search
        from tuner.search.task import prepare

        config = search_config(shared, seconds * SHARE_OF_SEARCH)
        progress = Unwatched()
        task = prepare(config, progress, loaded=shared.loaded, target=shared.static)
        try:
            result = search(task, progress)
        except InterruptedSearchError as stopped:
            best = stopped.best
            found = {"best_so_far": best.candidate.draft.describe() if best else None, "out": str(stopped.out)}
            raise OutOfTimeError(found) from None
        confirmed = result.confirmed
        return {
            "profile": result.profile.model_dump(mode="json"),
            "winner": result.winner.candidate.draft.describe(),
            "rule": result.winner.candidate.draft_length.describe(),
            "speedup": confirmed.speedup_interval().model_dump(mode="json"),
            "tokens_per_second": confirmed.draft_tokens_per_second,
            "plain_tokens_per_second": confirmed.plain_tokens_per_second,
            "identical": confirmed.num_identical,
            "ties": confirmed.num_ties,
            "texts": confirmed.num_prompts,
            "trials": result.cost.num_trials,
            "ended": dict(result.studies),
        }

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the winner and its confirmed speed-up."""
        from tuner.evaluation.gpu.side_by_side import ratio_text

        if "speedup" not in result:
            yield f"best so far: {result['best_so_far']}"
            return
        yield f"{result['winner']}; {result['rule']}"
        yield (
            f"{ratio_text(result['speedup'])} over plain on held-out prompts, {result['tokens_per_second']:.1f} tok/s, "
            f"identical {result['identical']}/{result['texts']} + {result['ties']} ties, {result['trials']} trials"
        )


def search_config(shared: Shared, seconds: float) -> SearchConfig:
    """Return the configuration of the search, with `seconds` for all of it."""
    from tuner.config import SearchConfig

    return SearchConfig.model_validate(
        {
            "model": shared.loaded.name,
            "dataset": str(DATASET),
            "group_column": GROUP_COLUMN,
            "tuning_prompts": TUNING_PROMPTS,
            "held_out_prompts": HELD_OUT_PROMPTS,
            "max_new_tokens": NEW_TOKENS,
            "finalists": 2,
            "timeout": f"{max(seconds, 1):.0f}s",
            "device": str(shared.device),
            "runner": "static",
            "heads": shared.heads_folder,
            "distill": "never",
            "stock": False,  # other steps compare with generate
            "storage": f"sqlite:///{shared.out / 'sdtune.db'}",
            "tracking_uri": f"sqlite:///{shared.out / 'mlflow.db'}",
            "out": shared.profile,
            "studies": {"joint": {"exit_layers": list(shared.exit_layers)}},
        }
    )
