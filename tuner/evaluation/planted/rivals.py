"""How many candidates `joint` decodes until it has what a general-purpose search has after its whole budget.

Both choose in the same space, on the planted problems with precisions: kind, precision, blocks to skip, exit, lookups, side leaves,
rule and its parameters. Nothing is replayed: each evaluation is a candidate that was really decoded, at the problem's prices. A
candidate costs the same each time, so that the best of many is no lucky one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from studies.contract import TrialRecord, TrialState
from studies.searches.registry import DEFAULT_STUDIES
from tuner.evaluation.planted.problem import precision_problem
from tuner.evaluation.planted.searching import run_search
from tuner.progress import Progress
from tuner.tables import figures_table

OURS = DEFAULT_STUDIES[0]
RIVALS = ("whole_space_tpe", "whole_space_random")
ENOUGH = 0.1
"""Share of a rival's budget within which the default search should have what the rival found."""


@dataclass(frozen=True)
class Course:
    """The evaluations of one search on the problem of a seed, in order."""

    seed: int
    search: str
    speedups: tuple[float, ...]
    """Speed-up of each decoded candidate; 0 for one that was pruned or failed."""
    drafts: tuple[str, ...] = ()
    """Draft of each candidate, in words."""

    @classmethod
    def of(cls, seed: int, search: str, records: Iterable[TrialRecord]) -> Course:
        """Build from the trials of a search; a repeated candidate was not decoded again, and plain decoding needs no search."""
        decoded = [each for each in records if each.repeat_of is None and each.candidate.draft.drafts]
        speedups = tuple((each.speedup or 0.0) if each.state is TrialState.COMPLETE else 0.0 for each in decoded)
        return cls(seed, search, speedups, tuple(each.candidate.draft.describe() for each in decoded))

    @property
    def best(self) -> float:
        """Best speed-up; 1 if nothing was faster than plain decoding."""
        return max(1.0, *self.speedups)

    def reached(self, speedup: float) -> int | None:
        """Return the number of evaluations after which `speedup` was reached, 0 for plain decoding's, None if never."""
        if speedup <= 1.0:
            return 0
        return next((count for count, each in enumerate(self.speedups, start=1) if each >= speedup), None)


@dataclass(frozen=True)
class Match:
    """The default search against one rival on the problem of a seed."""

    ours: Course
    rival: Course
    budget: int
    """Trials that the rival had; repeated candidates among them were decoded once."""

    @property
    def share(self) -> float | None:
        """Evaluations until ours had the rival's best, as a share of those that the rival decoded; None if it never had."""
        reached = self.ours.reached(self.rival.best)
        return None if reached is None else reached / len(self.rival.speedups)

    @property
    def is_enough(self) -> bool:
        """True if ours had the rival's best within `ENOUGH` of the rival's evaluations."""
        return self.share is not None and self.share <= ENOUGH

    def facts(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        return {"ours": asdict(self.ours), "rival": asdict(self.rival), "budget": self.budget, "share": self.share}


def match_rivals(seeds: Iterable[int], num_trials: int, progress: Progress) -> list[Match]:
    """Run the default search with its own limits and each rival for `num_trials` trials, on the problems of these seeds."""
    matches = []
    for seed in seeds:
        problem = precision_problem(seed)
        _, records = run_search(OURS, problem, progress)
        ours = Course.of(seed, OURS, records)
        for name in RIVALS:
            _, records = run_search(name, problem, progress, max_trials=num_trials)
            matches.append(found := Match(ours, Course.of(seed, name, records), num_trials))
            progress.say(
                f"seed {seed}: {name} found {found.rival.best:.3f} in {len(found.rival.speedups)} evaluations, "
                f"{OURS} had it after {ours.reached(found.rival.best) or 'none'} of {len(ours.speedups)}"
            )
    return matches


def matches_table(matches: Sequence[Match]) -> Table:
    """Return a table with a row for each seed and rival."""
    table = figures_table(
        "Evaluations until the best (real decoding, priced by a table)",
        ("seed", "rival"),
        "evaluations",
        "its best",
        "after",
        f"{OURS}'s best",
        "after",
        "has the rival's after",
        "share",
    )
    for match in matches:
        ours, rival = match.ours, match.rival
        reached = ours.reached(rival.best)
        table.add_row(
            str(rival.seed),
            rival.search,
            str(len(rival.speedups)),
            f"{rival.best:.3f}",
            str(rival.reached(rival.best)),
            f"{ours.best:.3f}",
            f"{ours.reached(ours.best)} of {len(ours.speedups)}",
            "never" if reached is None else str(reached),
            "" if match.share is None else f"{match.share:.1%}",
        )
    if matches:
        enough = sum(match.is_enough for match in matches)
        table.caption = f"{enough} of {len(matches)} within {ENOUGH:.0%} of the rival's evaluations"
    return table
