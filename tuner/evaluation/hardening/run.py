"""The evaluation, from settings to results."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Group
from rich.text import Text

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import dump
from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip, Lookup
from decoding.profile import DraftProfile, TargetIdentity
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.evaluation.contract import Report
from tuner.evaluation.hardening import bad_inputs, fuzzing, random_texts
from tuner.evaluation.hardening.outcomes import CheckOutcome
from tuner.evaluation.hardening.settings import HardeningEvaluation
from tuner.output_paths import check_writable
from tuner.progress import Progress
from tuner.results import stamped
from tuner.tables import facts_grid

MOST_SHOWN = 10
"""Failures of one check that are shown; the JSON file has them all."""
DATA = '{"prompt": "def f(x):", "file": "a.py"}\n{"prompt": "import os", "file": "b.py"}\n'
CHAT = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}\n'


def run_checks(settings: HardeningEvaluation, progress: Progress) -> Report:
    """Run the checks whose number of cases is not 0."""
    if settings.out is not None:
        check_writable(settings.out, what="the results", name="hardening.json", error=ConfigError)
    tallies, facts = list[CheckOutcome](), dict[str, Any]()
    with TemporaryDirectory(prefix="sdtune-hardening-") as name:
        folder = Path(name)
        if settings.command_lines:
            (folder / "commands").mkdir()
            lines = bad_inputs.command_lines()[: settings.command_lines]
            tally, seconds = bad_inputs.refuse_all(folder / "commands", lines, progress)
            facts["seconds_of_commands"] = [round(each, 2) for each in seconds]
            tallies.append(tally)
        if settings.documents:
            profiles = _profiles(folder)
            tallies.append(fuzzing.damaged_profiles(profiles, folder, settings.documents, settings.seed, progress))
            configurations = [
                dump(SearchConfig(model="m", dataset="d.jsonl")),
                "model: m\ndataset: d\nstudies: {joint: {}}\n",
            ]
            tallies.append(
                fuzzing.damaged_configurations(configurations, folder, settings.documents, settings.seed, progress)
            )
        if settings.data_sets:
            tallies.append(fuzzing.damaged_data([DATA, CHAT], folder, settings.data_sets, settings.seed, progress))
        if settings.kills:
            from tuner.evaluation.hardening.kills import killed_searches

            (folder / "kills").mkdir()
            both, facts["kills"] = killed_searches(settings.kills, folder / "kills", settings.seed, progress)
            tallies += both
        if settings.faults:
            from tuner.evaluation.hardening.failing_stores import searches_with_failing_stores

            (folder / "faults").mkdir()
            tally, facts["faults"] = searches_with_failing_stores(
                settings.faults, settings.locked_seconds, folder / "faults", progress
            )
            tallies.append(tally)
    if settings.texts:
        tally, facts["ties"] = random_texts.compare_with_generate(settings.texts, settings.seed, progress)
        tallies.append(tally)
    if settings.threaded_texts:
        counts = settings.threaded_texts, settings.decoding_threads
        tallies.append(random_texts.texts_in_threads(*counts, settings.seed, progress))
    if settings.out is not None:
        checks = {each.name: {"cases": each.num_cases, "failures": each.failures} for each in tallies}
        document = stamped({"checks": checks, **facts}, torch.device("cpu"))
        write_atomically(settings.out, json.dumps(document, indent=1).encode(), what="the results", error=ConfigError)
    return Report(_shown(tallies), succeeded=not any(each.failures for each in tallies))


def _profiles(folder: Path) -> list[Path]:
    """Write profiles of several kinds, to be damaged."""
    target = TargetIdentity(
        model="m", architecture="LlamaForCausalLM", num_layers=6, dtype="float32", config_sha256="a", weights_sha256="b"
    )
    drafts = (LayerSkip.blocks((2, 3)), EarlyExit(exit_layer=3), LayerSkip(skip_mlp=(1,), bits=8, lookup=Lookup()))
    paths = []
    for number, draft in enumerate(drafts):
        path = folder / f"undamaged-{number}.yaml"
        DraftProfile(name="p", target=target, draft=draft, draft_length=Fixed(max_tokens=4)).save(path)
        paths.append(path)
    return paths


def _shown(tallies: list[CheckOutcome]) -> Group:
    grid = facts_grid()
    for each in tallies:
        grid.add_row(each.name, f"{each.num_cases} cases, {len(each.failures)} failures")
    lines = [Text(f"{each.name}: {failure}") for each in tallies for failure in each.failures[:MOST_SHOWN]]
    return Group(grid, *lines)
