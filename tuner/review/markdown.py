"""The descriptions of runs in MLflow, in Markdown: the whole search, a trial and the experiment."""

from __future__ import annotations

import re
from collections.abc import Iterator

from studies.contract import TrialRecord, TrialState
from tuner.review.document import SearchResult, trial_name
from tuner.review.tables import FinalRow, final_rows
from tuner.review.verdict import verdict

EXPERIMENT_NOTE = (
    "Searches for the fastest lossless self-speculative decoding of one model (sdtune). **A run without a parent is a search**: "
    "its description says whether to ship, and why. Its nested runs are trials. `speedup` is decoding over plain decoding: of "
    "trials on tuning prompts, of the search on held-out prompts, which no trial decoded."
)
WON = "winner: "
"""Start of the name of the winning trial's run."""
MOST_NAME = 90
"""Characters of a run's name, at most."""


def search_note(result: SearchResult, *, profile_path: str) -> str:
    """Return the description of a search's run: verdict, table, cautions, how to load the profile and how to go on."""
    return "\n".join(_search_lines(result, profile_path))


def _search_lines(result: SearchResult, profile_path: str) -> Iterator[str]:
    found = verdict(result)
    yield f"## {found.headline}"
    yield ""
    yield from (f"* {reason}" for reason in found.reasons)
    if found.cautions:
        yield ""
        yield "**Take care**"
        yield ""
        yield from (f"* {caution}" for caution in found.cautions)
    yield ""
    yield "### Held-out prompts"
    yield ""
    yield from _table(result)
    yield ""
    yield from _load(result, profile_path)
    yield "### Look further"
    yield ""
    yield (
        f"The winning trial is `{result.winner.trial}`. Artifacts: `report.html` (charts, what was tried, where time went), "
        "`search.json` (all samples), `held_out.csv`, `race.csv`, `trials.csv`, `config.yaml`."
    )
    yield ""
    yield "Resume, or go on with a larger `--timeout` or `--trials`:"
    yield ""
    yield from _block("sh", result.provenance.command)


def _table(result: SearchResult) -> Iterator[str]:
    """Yield the final table: plain decoding, all candidates, and stock generation."""
    yield "| | speed-up of decoding | end to end | tokens/s | plain's on the same | accepted | identical |"
    yield "|---|---|---|---|---|---|---|"
    rows = list(final_rows(result))
    yield from (_row(row) for row in rows if not row.is_stock)
    if (comparison := result.comparison) is not None:
        yield f"| *in turns on {comparison.num_prompts} of these prompts:* | | | | | | |"
        yield from (_row(row) for row in rows if row.is_stock)
        for name, reason in comparison.left_out.items():
            yield f"| {name} | left out: {_cell(reason)} | | | | | |"
    yield ""
    yield "Speed-ups are over plain decoding, with 95 % intervals. " + " ".join(
        f"{row.name}: {_cell(row.description)}." for row in rows if not row.is_stock
    )


def _row(row: FinalRow) -> str:
    return f"| {f'**{row.name}**' if row.won else row.name} | {' | '.join(row.cells)} |"


def _load(result: SearchResult, profile_path: str) -> Iterator[str]:
    if result.profile.measured is None:
        return
    yield "### Use it"
    yield ""
    yield from _block(
        "python",
        "from decoding.deploy import load_decoder\n\n"
        f'decoder = load_decoder("{profile_path}")\n'
        "output = model.generate(**inputs, custom_generate=decoder)",
    )
    yield "Or make it production's champion, which `load_decoder` fetches by address:"
    yield ""
    yield from _block(
        "sh", f"sdtune promote {result.run_id} --name {registry_name(result.experiment)} --why 'as in its description'"
    )


def registry_name(experiment: str) -> str:
    """Return a name for the registry, without the characters that it refuses."""
    return re.sub(r"[^\w.-]", "-", experiment)


def _block(language: str, code: str) -> Iterator[str]:
    yield f"```{language}"
    yield code
    yield "```"
    yield ""


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def trial_run_name(record: TrialRecord, *, won: bool = False) -> str:
    """Return the name of a trial's run: its number, how it ended unless complete, and the draft in words."""
    state = "" if record.state is TrialState.COMPLETE else f" ({_ending(record)})"
    name = f"{WON if won else ''}{trial_name(record)}{state}: {record.candidate.describe(parameters=True)}"
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 1]}…"


def _ending(record: TrialRecord) -> str:
    return "failed" if record.state is TrialState.FAIL else "pruned"


def trial_note(record: TrialRecord) -> str:
    """Return the description of a trial's run."""
    return "\n\n".join(_trial_lines(record))


def _trial_lines(record: TrialRecord) -> Iterator[str]:
    yield f"{record.candidate.describe(parameters=True)}, proposed by {record.origin}."
    if record.repeat_of is not None:
        yield f"The same candidate as {record.study}/{record.repeat_of}, whose measurement it takes over."
    if record.state is TrialState.PRUNED:
        yield f"**Pruned**, which is no failure: {record.reason}."
    if record.state is TrialState.FAIL:
        yield f"**Failed**: {record.reason}."
    if (measured := record.measurement) is not None:
        interval = f"{measured.speedup_interval()}" if len(measured.samples) > 1 else f"{measured.speedup:.2f}"
        yield (
            f"Speed-up of decoding on {measured.num_prompts} tuning prompts: {interval}; {measured.draft_acceptance_rate:.0%} of "
            f"the drafted tokens accepted, {measured.mean_acceptance_length:.2f} tokens per round."
        )
    if (predicted := record.notes.get("predicted_speedup")) is not None:
        yield f"Predicted before it was measured: {predicted}."
