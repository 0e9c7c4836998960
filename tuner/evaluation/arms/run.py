"""Phases of a script, decoded by a choice of arms and by each arm alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group

from decoding.arms.arm import Arm, check_arms
from decoding.arms.decoder import PLAIN_NAME, ArmedDecoder
from decoding.arms.windows import TimedWindow
from decoding.decode import Request
from decoding.deploy import load_decoder
from studies.ratios import Work, speed_ratio
from tuner.errors import ConfigError
from tuner.evaluation.arms.settings import ArmsEvaluation
from tuner.evaluation.continuous import Always, decode_side_by_side, greedy_requests, read_prompts
from tuner.evaluation.contract import Report
from tuner.evaluation.tables import ratio_cell
from tuner.inputs.models import load
from tuner.profile_address import local_profile
from tuner.progress import Progress
from tuner.results import stamped, write_json
from tuner.tables import figures_table

CHOICE = "choice"
FEWEST_PROMPTS = 4
"""Least number of prompts in a round: a round of one short sequence is mostly noise."""
DELAY = 0.25
"""Share of a phase's rounds, the first ones, in which the choice may look around."""


@dataclass(frozen=True)
class ScriptPhase:
    """A part of the script."""

    name: str
    level: int
    """Sequences side by side."""
    requests: Sequence[Request]

    def of_round(self, number: int, size: int) -> list[Request]:
        """Return the requests of a round; the phase begins again at its first one after its last."""
        return [self.requests[(number * size + index) % len(self.requests)] for index in range(size)]


@dataclass
class PhaseSamples:
    """What was measured in one phase."""

    phase: ScriptPhase
    works: dict[str, list[tuple[float, int]]]
    """Seconds and tokens of each round, by contender."""
    num_different: int = 0
    windows: Counter[str] = field(default_factory=Counter)
    """Windows that the choice decoded with each arm."""


def run_and_write(settings: ArmsEvaluation, progress: Progress) -> Report:
    """Decode all phases; write the file of results if there is one. Raises `SdtuneError` for errors of the user."""
    deployed = [load_decoder(each) for each in (settings.profile, *map(local_profile, settings.arm))]
    profiles = [each.profile for each in deployed]
    check_arms(profiles)
    written = [_written(each) for each in settings.phase]
    identity = profiles[0].target
    loaded = load(settings.model or identity.model, revision=identity.revision, dtype=identity.dtype, device="cpu")
    first = deployed[0].decoder_for(loaded.model)
    if first.drafter is None:
        raise ConfigError(f"profile {profiles[0].name!r} decodes plainly: there is nothing to choose")
    decoders = [first, *(each.decoder_on(first.target) for each in deployed[1:])]
    arms = [Arm.of(profile, decoder) for profile, decoder in zip(profiles, decoders, strict=True)]
    phases = [
        ScriptPhase(name, level, greedy_requests(prompts, loaded.tokenizer, settings.max_new_tokens))
        for name, level, prompts in written
    ]
    samples = measure(arms, phases, settings.rounds, settings.prompts_per_row, progress)
    rows = [summary(each) for each in samples]
    succeeded = not any(row["num_different"] for row in rows)
    if settings.out is not None:
        document = {"rows": rows, "succeeded": succeeded}
        write_json(settings.out.parent, settings.out.stem, stamped(document, loaded.model.device))
    return Report(_table(rows), succeeded=succeeded)


def measure(
    arms: Sequence[Arm], phases: Sequence[ScriptPhase], num_rounds: int, prompts_per_row: int, progress: Progress
) -> list[PhaseSamples]:
    """Decode each phase in `num_rounds` rounds by every contender, in turns, after a round without the choice that warms up."""
    windows: list[str] = []

    def note(arm: str, _: TimedWindow) -> None:
        windows.append(arm)

    choice = ArmedDecoder(arms, listener=note)
    _prepare_as_a_server(choice, phases)
    alone = {name: ArmedDecoder(arms, chooser=Always(arm, len(arms))) for arm, name in enumerate(choice.names)}
    contenders = {CHOICE: choice, **alone}
    progress.stage("phases", len(phases) * (num_rounds * len(contenders) + len(alone)))
    found = []
    for phase in phases:
        size = max(FEWEST_PROMPTS, prompts_per_row * phase.level)
        samples = PhaseSamples(phase, {name: [] for name in contenders})
        for decoder in alone.values():  # the choice learns nothing before the phase begins
            decode_side_by_side(decoder, phase.of_round(0, size), phase.level)
            progress.advance()
        windows.clear()
        for number in range(num_rounds):
            requests, texts = phase.of_round(number, size), {}
            names = list(contenders)
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                seconds, texts[name] = decode_side_by_side(contenders[name], requests, phase.level)
                samples.works[name].append((seconds, sum(map(len, texts[name]))))
                progress.advance()
            samples.num_different += sum(
                text != expected
                for name in names
                for text, expected in zip(texts[name], texts[PLAIN_NAME], strict=True)
            )
        samples.windows.update(windows)
        found.append(samples)
    return found


def _prepare_as_a_server(choice: ArmedDecoder, phases: Sequence[ScriptPhase]) -> None:
    """Rehearse every shape of pass of every load: the contender that meets one first would pay for its recording."""
    requests = [request for phase in phases for request in phase.requests]
    shortest = min(len(request.prompt) for request in requests)
    longest = max(len(request.prompt) + request.ending.max_new_tokens for request in requests)
    most = max(phase.level for phase in phases)
    choice.prepare(shortest, longest, most)
    choice.measure_loads(most)


def summary(samples: PhaseSamples) -> dict[str, Any]:
    """Return the row of a phase: each contender's speed, and the choice's ratio to the best arm and to plain decoding."""
    num_rounds = len(samples.works[CHOICE])
    delay = int(DELAY * num_rounds)
    settled = {name: Work.of(works[delay:]) for name, works in samples.works.items()}
    single = [name for name in settled if name != CHOICE]
    best = max(single, key=lambda name: settled[name].tokens_per_second)
    whole = {name: Work.of(samples.works[name]) for name in (CHOICE, PLAIN_NAME)}
    return {
        "phase": samples.phase.name,
        "sequences": samples.phase.level,
        "rounds": num_rounds,
        "delay_rounds": delay,
        "tokens_per_second": {name: work.tokens_per_second for name, work in settled.items()},
        "best_arm": best,
        "choice_over_best": speed_ratio(settled[best], settled[CHOICE]).model_dump(mode="json"),
        "choice_over_plain": speed_ratio(whole[PLAIN_NAME], whole[CHOICE]).model_dump(mode="json"),
        "windows": dict(samples.windows),
        "num_different": samples.num_different,
        "samples": samples.works,
    }


def _written(given: str) -> tuple[str, int, list[str]]:
    """Return name, sequences side by side and prompts of a phase. Raises `ConfigError` for a wrong one."""
    path, separator, level = given.rpartition("@")
    if not (separator and path and level.isdecimal() and int(level)):
        raise ConfigError(f"--phase {given}: give a file and a number of sequences, such as prose.jsonl@8")
    return Path(path).stem, int(level), read_prompts(path)


def _table(rows: Sequence[Mapping[str, Any]]) -> Group:
    names = list(rows[0]["tokens_per_second"])
    table = figures_table("tokens per second", "phase", *names, "choice over best", "choice over plain", "windows")
    for row in rows:
        rates = [f"{row['tokens_per_second'][name]:.1f}" for name in names]
        ratios = [ratio_cell(row[key]) for key in ("choice_over_best", "choice_over_plain")]
        windows = ", ".join(f"{name} {number}" for name, number in row["windows"].items())
        table.add_row(f"{row['phase']}, {row['sequences']}", *rates, *ratios, windows)
    delay = (
        f"rates and `over best` leave out the first {rows[0]['delay_rounds']} of {rows[0]['rounds']} rounds of a phase"
    )
    return Group(table, f"texts that differ: {sum(row['num_different'] for row in rows)}; {delay}")
