"""`sdtune evaluate planted`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tuner.errors import SearchError
from tuner.evaluation.contract import EVALUATION, Evaluation, Report, ResultsFile

if TYPE_CHECKING:
    from tuner.progress import Progress


class PlantedEvaluation(Evaluation):
    """Test whether the searches find redundancy that was planted in random models.

    Small models, of 12 blocks: predicted and joint against the best of all sets of blocks, by real decoding that is priced
    from a table, so that the best is known. Small models with precisions, of 10 blocks: joint against the best of all sets
    in 16, 8 and 4 bits, whose prices and agreement are planted. Large models: the share of planted sublayers that the best
    proposal skips. Rivals: TPE and random search in the whole space of drafts and rules, on small models with precisions,
    against the number of candidates that joint decodes until it has what they found.

    The exhaustive search of a seed takes minutes, with precisions longer. Optima that --out already holds are not searched again.

    \b
    Example:
      sdtune evaluate planted --seeds 3 --threads 1
    """

    seeds: int = Field(10, ge=0, description="Small problems; 0 skips them.", json_schema_extra=EVALUATION)
    precision_seeds: int = Field(
        4, ge=0, description="Small problems with precisions; 0 skips them.", json_schema_extra=EVALUATION
    )
    layers: tuple[Annotated[int, Field(ge=4)], ...] = Field(
        (32, 80), description="Sizes of the large problems; repeatable.", json_schema_extra=EVALUATION
    )
    large_seeds: int = Field(2, ge=0, description="Large problems of each size.", json_schema_extra=EVALUATION)
    rival_seeds: int = Field(
        4, ge=0, description="Small problems with precisions for rivals; 0 skips them.", json_schema_extra=EVALUATION
    )
    rival_trials: int = Field(100, ge=1, description="Trials of each rival.", json_schema_extra=EVALUATION)
    out: ResultsFile = None

    def run(self, progress: Progress) -> Report:
        """Search small and large problems, write the JSON file if one is named, and return the tables."""
        from tuner.evaluation.planted.check import (
            BLOCKS,
            PRECISIONS,
            Optimum,
            find_best_of_all,
            known_optima,
            recover,
            results_table,
            write_results,
        )
        from tuner.evaluation.planted.rivals import match_rivals
        from tuner.output_paths import check_writable

        if self.out is not None:
            check_writable(self.out, what="the results", name="planted.json", error=SearchError)
        optima = known_optima(self.out) if self.out is not None else []

        def keep(optimum: Optimum) -> None:
            optima.append(optimum)
            if self.out is not None:
                write_results([], [], self.out, optima)

        found = []
        for kind, seeds in ((BLOCKS, self.seeds), (PRECISIONS, self.precision_seeds)):
            found += find_best_of_all(range(seeds), progress, kind=kind, optima=tuple(optima), on_optimum=keep)
        recovered = recover(self.layers, range(self.large_seeds), progress)
        matches = match_rivals(range(self.rival_seeds), self.rival_trials, progress)
        if self.out is not None:
            write_results(found, recovered, self.out, optima, matches)
        return Report(results_table(found, recovered, matches), width=110)
