"""The result of a tuning: the flags to paste, the table by number of requests, and the JSON. Measures nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from tuner.export.schedule import figures_json, in_words, join_ranges, proved
from tuner.fields import PromptSettings
from tuner.inputs.models import resolve_device
from tuner.results import public_name, stamped
from tuner.review.tables import identical
from tuner.tables import facts_grid, figures_table

if TYPE_CHECKING:
    from tuner.engines.bench import LoadFigures
    from tuner.engines.contract import EngineProgram, Served
    from tuner.tune.config import TuneConfig
    from tuner.tune.costs import Costs, PlainOr, Setting


@dataclass(frozen=True)
class Tuned:
    """What was chosen, and what it is worth on prompts that took no part."""

    config: TuneConfig
    program: EngineProgram
    version: str
    served: Served
    chosen: Mapping[int, PlainOr]
    """The setting for each number of requests side by side; None for plain decoding."""
    confirmed: Mapping[int, LoadFigures]
    """On held-out prompts, for the numbers with a setting."""
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
            return [(in_words(entries), self._shown(settings[0].method.flags(max(lengths.values()), schedule)))]
        uses = []
        for setting in settings:
            entries = join_ranges({n: setting.num_tokens if each == setting else 0 for n, each in proved.items()})
            uses.append((in_words(entries), self._shown(setting.method.flags(setting.num_tokens, None))))
        return uses

    def _shown(self, flags: Sequence[str]) -> str:
        return shlex.join(word.replace(f"{self.served.out}/", "") for word in flags)


def describe(setting: Setting) -> str:
    """Return a phrase such as `n-grams of 3, 8 tokens`."""
    return f"{setting.method.name}, {setting.num_tokens} token{'s' if setting.num_tokens > 1 else ''}"


def tuned_table(found: Tuned) -> RenderableType:
    """Return a line per number of requests, and the flags below."""
    title = f"{found.program.title} ({found.version}): its own speculation, on held-out prompts (95 % intervals)"
    headings = ("plain\ntok/s", "tok/s", "over plain", "predicted", "accepted/\ndrafted", "iden-\ntical")
    table, legend = figures_table(title, ("side by side", "setting"), *headings), facts_grid()
    for number, setting in found.chosen.items():
        if setting is None:
            table.add_row(str(number), "plain decoding", *[""] * len(headings))
            continue
        measured = found.confirmed[number].measurement
        table.add_row(
            str(number),
            describe(setting),
            f"{measured.plain_tokens_per_second:.1f}",
            f"{measured.draft_tokens_per_second:.1f}",
            f"{measured.speedup_interval()}",
            f"{found.costs.predicted(setting, number):.2f}",
            f"{measured.num_accepted_draft_tokens}/\n{measured.num_draft_tokens}",
            identical(measured.num_identical, measured.num_prompts, measured.num_ties, "\n"),
        )
    legend.add_row(
        "over plain", "tokens of all requests over wall clock, prompts included, in turns with plain decoding"
    )
    legend.add_row("predicted", "the same on the tuning prompts, by costs fitted to what was measured there")
    uses = found.uses()
    for where, flags in uses:
        legend.add_row("use", f"{flags}\n{where}")
    if not uses:
        legend.add_row("use", "no draft: none is proved to be faster at any of these numbers of requests")
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
    config = found.config
    facts = {
        "model": public_name(config.model),
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
                **({} if setting is None else figures_json(found.confirmed[number].measurement)),
                "plain_different": found.confirmed[number].num_plain_different if setting else 0,
            }
            for number, setting in found.chosen.items()
        ],
        "failed": dict(found.failed),
    }
    return stamped(facts, resolve_device("auto"))
