"""The result of a tuning: the flags to paste, the table by number of requests, and the JSON. Measures nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from tuner.engines.methods import EXPORTED
from tuner.export.schedule import (
    KEY,
    MeasuredSchedule,
    ScheduledLoad,
    figures_json,
    in_words,
    join_ranges,
    proved,
)
from tuner.fields import PromptSettings
from tuner.inputs.models import resolve_device
from tuner.results import public_name, stamped
from tuner.review.tables import identical
from tuner.tables import facts_grid, figures_table

if TYPE_CHECKING:
    from decoding.profile import DraftProfile
    from tuner.engines.bench import LoadFigures
    from tuner.engines.contract import EngineProgram, Served
    from tuner.tune.config import TuneConfig
    from tuner.tune.costs import Costs, PlainOr, Setting


@dataclass(frozen=True)
class Tuned:
    """What was chosen, and what it is worth on prompts that took no part."""

    config: TuneConfig
    program: EngineProgram
    profile: DraftProfile | None
    version: str
    served: Served
    chosen: Mapping[int, PlainOr]
    """The setting for each number of requests side by side; None for plain decoding."""
    confirmed: Mapping[int, LoadFigures]
    """On held-out prompts, for the numbers with a setting; all numbers for a draft model with a schedule."""
    costs: Costs
    failed: Mapping[str, str]
    num_servers: int
    search_seconds: float
    """Until the settings were chosen."""
    seconds: float
    """Of everything, from the first server on."""
    fingerprint: str

    @property
    def num_different(self) -> int:
        """Number of texts that differ from the engine's plain decoding, ties apart."""
        measured = [each.measurement for each in self.costs.measured]
        measured += [each.measurement for each in self.confirmed.values()]
        return sum(each.num_different for each in measured)

    @property
    def proved(self) -> dict[int, PlainOr]:
        """The settings that are proved to be faster on the held-out prompts; None elsewhere."""
        return {
            number: setting if number in self.confirmed and proved(self.confirmed[number].measurement) else None
            for number, setting in self.chosen.items()
        }

    def uses(self) -> list[tuple[str, str]]:
        """Return where to use which flags, as phrases and flags: one line where the engine has a schedule."""
        proved = self.proved
        settings = list(dict.fromkeys(each for each in proved.values() if each is not None))
        if not settings:
            return []
        if settings[0].method.has_schedule:
            lengths = {number: 0 if each is None else each.num_tokens for number, each in proved.items()}
            entries = join_ranges(lengths)
            schedule = None if len(lengths) == 1 else entries
            return [(self._where(entries), self._shown(settings[0].method.flags(max(lengths.values()), schedule)))]
        uses = []
        for setting in settings:
            entries = join_ranges({n: setting.num_tokens if each == setting else 0 for n, each in proved.items()})
            uses.append((self._where(entries), self._shown(setting.method.flags(setting.num_tokens, None))))
        return uses

    def _where(self, entries: Sequence[tuple[int, int, int]]) -> str:
        """Return where flags are to be used; of one number of requests alone, other numbers are not known of."""
        (number, *others) = self.chosen
        return (
            in_words(entries) if others else f"measured with {number} at a time: --sequences measures more side by side"
        )

    @property
    def slower(self) -> dict[int, LoadFigures]:
        """Where a server with the whole schedule is surely slower than one without a draft, though it drafts nothing there."""
        return {
            number: each
            for number, each in self.confirmed.items()
            if self.chosen[number] is None and each.measurement.speedup_interval().ci95[1] < 1
        }

    def schedule(self) -> MeasuredSchedule | None:
        """Return what an export of the profile takes as its schedule; None for other drafts."""
        methods = [each.method.name for each in self.chosen.values() if each is not None]
        if self.profile is None or methods[:1] not in ([EXPORTED], []):
            return None
        loads = []
        for number, setting in self.proved.items():
            figures = self.confirmed.get(number)
            speedup = None if figures is None else figures.measurement.speedup_interval()
            tokens = 0 if setting is None else setting.num_tokens
            found = {"speedup": speedup} if tokens else {"scheduled": speedup}
            loads.append(ScheduledLoad(sequences=number, num_tokens=tokens, **found))
        return MeasuredSchedule(
            engine=self.program.title,
            engine_version=self.version,
            date=datetime.now(UTC).date().isoformat(),
            target_weights_sha256=self.profile.target.weights_sha256,
            draft=self.profile.draft.model_dump(mode="json"),
            entries=join_ranges({each.sequences: each.num_tokens for each in loads}),
            loads=tuple(loads),
        )

    def _shown(self, flags: Sequence[str]) -> str:
        return shlex.join(word.replace(f"{self.served.out}/", "") for word in flags)


def describe(setting: Setting) -> str:
    """Return a phrase such as `n-grams of 3, 8 tokens`."""
    return f"{setting.method.name}, {setting.num_tokens} token{'s' if setting.num_tokens > 1 else ''}"


def tuned_table(found: Tuned) -> RenderableType:
    """Return a line per number of requests, and the flags below."""
    title = f"{found.program.title} ({found.version}): speculation on held-out prompts (95 % intervals)"
    headings = ("plain\ntok/s", "tok/s", "over plain", "accepted/\ndrafted", "iden-\ntical")
    table, legend = figures_table(title, ("side by side", "setting"), *headings), facts_grid()
    for number, setting in found.chosen.items():
        described = "plain decoding" if setting is None else describe(setting)
        if number not in found.confirmed:
            table.add_row(str(number), described, *[""] * len(headings))
            continue
        measured = found.confirmed[number].measurement
        table.add_row(
            str(number),
            described,
            f"{measured.plain_tokens_per_second:.1f}",
            f"{measured.draft_tokens_per_second:.1f}",
            f"{measured.speedup_interval()}",
            f"{measured.num_accepted_draft_tokens}/\n{measured.num_draft_tokens}",
            identical(measured.num_identical, measured.num_prompts, measured.num_ties, "\n"),
        )
    legend.add_row(
        "over plain", "tokens of all requests over wall clock, prompts included, in turns with plain decoding"
    )
    uses = found.uses()
    for where, flags in uses:
        legend.add_row("use", f"{flags}\n{where}")
    if not uses:
        legend.add_row("use", "no draft: none is proved to be faster at any of these numbers of requests")
    for number, figures in found.slower.items():
        legend.add_row(
            "slower",
            f"{number} side by side, a server with the whole schedule is slower than one without a draft, "
            f"{figures.measurement.speedup_interval()}: where that is the usual number, serve without it",
        )
    if most := max((each.num_plain_different for each in found.confirmed.values()), default=0):
        legend.add_row(
            "plain", f"side by side, up to {most} texts of plain decoding differ from those of the prompts alone"
        )
    if found.num_different:
        legend.add_row(
            "different", f"{found.num_different} texts differ from {found.program.title}'s own plain decoding"
        )
    for name, reason in found.failed.items():
        legend.add_row("failed", f"{name}: {reason}")
    legend.add_row(
        "took",
        f"{found.search_seconds / 60:.1f} minutes to choose, {found.seconds / 60:.1f} in all; {found.num_servers} servers",
    )
    return Group(table, legend)


def tuned_json(found: Tuned) -> dict[str, Any]:
    """Return all figures with their intervals and samples as plain data."""
    config, schedule = found.config, found.schedule()
    facts = {
        "model": public_name(found.served.model),
        "profile": None if found.profile is None else found.profile.name,
        "draft_model": None if config.draft_model is None else public_name(config.draft_model),
        "dataset": public_name(config.dataset),
        "dataset_fingerprint": found.fingerprint,
        "engine": found.program.title,
        "engine_version": found.version,
        "engine_args": config.engine_args,
        "dtype": found.served.dtype,
        **{name: getattr(config, name) for name in ("max_new_tokens", "threads", "seed", *PromptSettings.model_fields)},
        "search_seconds": found.search_seconds,
        "seconds": found.seconds,
        "servers": found.num_servers,
        "use": [{"where": where, "flags": flags} for where, flags in found.uses()],
        "tried": [
            {"setting": describe(each.setting), "sequences": each.sequences, **figures_json(each.measurement)}
            for each in found.costs.measured
        ],
        "chosen": [
            {
                "setting": "plain decoding" if setting is None else describe(setting),
                "sequences": number,
                "predicted": None if setting is None else found.costs.predicted(setting, number),
                **(figures_json(found.confirmed[number].measurement) if number in found.confirmed else {}),
            }
            for number, setting in found.chosen.items()
        ],
        KEY: None if schedule is None else schedule.model_dump(mode="json"),
        "failed": dict(found.failed),
    }
    return stamped(facts, resolve_device("auto"))
