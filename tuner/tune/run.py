"""One tuning of an engine's speculation: a few servers, each at the settings that are predicted to be best so far, and a last one.

Our formulation. One server decodes plainly all the time. The first server of each kind of draft has a usual setting; costs are
fitted to what was measured, the settings that they predict to be fastest are measured next, and so on, until no prediction is
faster than what was measured. The fastest measured settings are then measured on prompts that took no part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.engines.bench import Crowd, EngineDecoding, LoadFigures
from tuner.errors import DatasetError, EngineError
from tuner.export.schedule import join_ranges
from tuner.measuring.baseline import FEWEST_DECODED
from tuner.measuring.contender import PLAIN
from tuner.results import check_results_folder, plain_text, write_result
from tuner.tune.costs import Costs, PlainOr, Setting, Tried, best
from tuner.tune.report import Tuned, describe, tuned_json, tuned_table
from tuner.tune.task import TuneTask, tune_task

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tuner.engines.methods import Method
    from tuner.progress import Progress
    from tuner.tune.config import TuneConfig

NAME = "tune"
VERIFYING = 0.1
"""Cost of a drafted token in steps that is supposed until one is measured: it decides the first lookup."""
MATTERS = 0.01
"""Logarithm of the speed-up that a prediction must add for a server to be started, per load."""
FIRST_LENGTHS = (8, 2)
"""Drafted tokens of the first servers of a method that cannot be replayed. One that runs no model drafts no more than it finds, so
its first server has the most tokens: what longer drafts would be is known of no other."""


def run_and_write(config: TuneConfig, *, progress: Progress) -> tuple[RenderableType, Path, str | None]:
    """Tune, write `tune.json` and `tune.txt`, and return the table, the JSON file, and the error to end with after they are shown.

    Raises SdtuneError for wrong input, and for an engine that is not found or fails.
    """
    check_results_folder(config.out)
    with tune_task(config, progress) as task:
        found = tune(task, progress)
    shown = tuned_table(found)
    write_result(config.out, f"{NAME}.txt", plain_text(shown))
    write_result(config.out, f"{NAME}.json", json.dumps(tuned_json(found), indent=1))
    wrong = f"{found.num_different} texts differ from {task.program.title}'s own plain decoding"
    return shown, config.out / f"{NAME}.json", wrong if found.num_different else None


def tune(task: TuneTask, progress: Progress) -> Tuned:
    """Find the fastest settings, and measure them on the held-out prompts. What an earlier run measured is not measured again.

    Raises `EngineError` if the engine runs no draft.
    """
    version, began = task.program.version(), time.monotonic() - task.kept.seconds
    with task.server(PLAIN, (), progress) as plain:
        crowd = task.crowd(plain.client, task.prompts.tuning, progress)
        if (written := sum(map(len, crowd.alone))) < FEWEST_DECODED * len(crowd.alone):
            raise DatasetError(
                f"{task.program.title} writes {written} tokens after {len(crowd.alone)} prompts, too few to be timed: give "
                "prompts that the model continues at greater length, or more --max-new-tokens"
            )
        costs = Costs(crowd.prompts, crowd.alone)
        search(
            task,
            task.methods,
            costs,
            lambda name, flags, loads: _measure(task, plain, crowd, name, flags, loads, progress),
        )
        search_seconds = time.monotonic() - began
        progress.say(f"{len(costs.measured)} measurements, {task.num_started - 1} servers with a draft")
        _, chosen = best(costs, task.methods, task.sequences, measured_only=True)
        held_out = task.crowd(plain.client, task.prompts.held_out, progress)
        confirmed: dict[int, LoadFigures] = {}
        for name, flags, loads in servers(chosen, lambda setting, number: False):
            # A server with a schedule runs the draft model where nothing is drafted too: what that costs is to be known.
            idle = any(each.method.has_schedule and each.method.runs_model for each in loads.values())
            found = _measure(task, plain, held_out, name, flags, task.sequences if idle else loads, progress)
            if found is None:
                raise EngineError(f"{name} does not run: {task.failed[name]}")
            confirmed |= found
    task.kept.discard()
    return Tuned(
        config=task.config,
        program=task.program,
        profile=task.profile,
        version=version,
        served=task.served,
        chosen=chosen,
        confirmed=confirmed,
        costs=costs,
        failed=task.failed,
        num_servers=task.num_started,
        search_seconds=search_seconds,
        seconds=time.monotonic() - began,
        fingerprint=task.prompts.fingerprint,
    )


Measure = Callable[[str, Sequence[str], Mapping[int, Setting]], Mapping[int, LoadFigures] | None]
"""Measures a server with these flags at the numbers of requests that have a setting; None if the engine does not run it."""


def search(task: TuneTask, methods: Sequence[Method], costs: Costs, measure: Measure) -> None:
    """Measure settings until those that are predicted to be fastest have been measured, or no further server may start."""

    tried: set[tuple[Setting, int]] = set()

    def run(chosen: Mapping[int, PlainOr]) -> bool:
        """Measure what is new of these settings; return whether anything was."""
        new = list(servers(chosen, lambda setting, number: (setting, number) in tried))
        for name, flags, loads in new:
            found = measure(name, flags, loads)
            tried.update((setting, number) for number, setting in loads.items())
            for number, each in (found or {}).items():
                costs.add(Tried(loads[number], number, each.measurement))
        if new and costs.measured:
            costs.fit()
        return bool(new)

    for setting in first_settings(methods, costs, task.sequences):
        run(dict.fromkeys(task.sequences, setting))
    if not costs.measured:
        raise EngineError("; ".join(task.failed.values()) or f"{task.program.title} has nothing to tune")
    most = task.num_started + task.config.further_servers
    while task.num_started < most:
        (expected, chosen), (known, _) = (
            best(costs, methods, task.sequences, measured_only=each) for each in (False, True)
        )
        if expected - known <= MATTERS * len(task.sequences) or not run(chosen):
            break


def first_settings(methods: Sequence[Method], costs: Costs, sequences: Sequence[int]) -> Iterator[Setting]:
    """Yield a setting or two of each kind of draft, from which its costs are fitted."""
    kinds: dict[str, list[Method]] = {}
    for method in methods:
        kinds.setdefault(method.kind, []).append(method)
    for of_kind in kinds.values():
        if of_kind[0].lookup is not None:
            yield min(
                (Setting(method, number) for method in of_kind for number in method.lengths),
                key=lambda setting: _supposed(costs, setting, sequences[0]),
            )
        else:
            lengths = of_kind[0].lengths
            most = FIRST_LENGTHS if of_kind[0].runs_model else (lengths[-1], *FIRST_LENGTHS[1:])
            usual = [max((each for each in lengths if each <= one), default=lengths[0]) for one in most]
            yield from (Setting(of_kind[0], number) for number in dict.fromkeys(usual))


def _supposed(costs: Costs, setting: Setting, sequences: int) -> float:
    groups = costs.work(setting, sequences)
    return sum(each["steps"] + VERIFYING * each[f"verified, {sequences}"] for each in groups)


def servers(
    chosen: Mapping[int, PlainOr], skip: Callable[[Setting, int], bool]
) -> Iterator[tuple[str, Sequence[str], dict[int, Setting]]]:
    """Yield name, flags and loads of the servers that measure these settings where they are not to be skipped.

    A server with a schedule has all numbers of tokens; without one, each setting has a server of its own.
    """
    wanted = {number: each for number, each in chosen.items() if each is not None and not skip(each, number)}
    scheduled = {number: each for number, each in wanted.items() if each.method.has_schedule}
    if scheduled:
        lengths = ", ".join(str(each.num_tokens) for each in dict.fromkeys(scheduled.values()))
        method = next(iter(scheduled.values())).method
        yield f"{method.name}, {lengths} tokens", flags_of(method, chosen), scheduled
    for setting in dict.fromkeys(each for each in wanted.values() if not each.method.has_schedule):
        loads = {number: each for number, each in wanted.items() if each == setting}
        yield describe(setting), setting.method.flags(setting.num_tokens, None), loads


def flags_of(method: Method, chosen: Mapping[int, PlainOr]) -> tuple[str, ...]:
    """Return the flags of a server with a schedule, if there is more than one number of tokens."""
    lengths = {number: 0 if each is None else each.num_tokens for number, each in chosen.items()}
    most = max(lengths.values())
    return method.flags(most, None if len(lengths) == 1 else join_ranges(lengths))


def _measure(
    task: TuneTask,
    plain: EngineDecoding,
    crowd: Crowd,
    name: str,
    flags: Sequence[str],
    loads: Iterable[int],
    progress: Progress,
) -> dict[int, LoadFigures] | None:
    found = {number: figures for number in loads if (figures := task.kept.get(crowd, flags, number)) is not None}
    if missing := [number for number in loads if number not in found]:
        try:
            with task.server(name, flags, progress) as drafted:
                for number in missing:
                    began = time.monotonic()
                    found[number] = crowd.measure(plain, drafted, number, progress)
                    task.kept.keep(crowd, flags, found[number], time.monotonic() - began)
        except EngineError as cause:
            task.failed[name] = str(cause)
            progress.say(f"{name}: {cause}")
            return None
    else:
        task.num_started += 1  # an earlier run started it
    return found
