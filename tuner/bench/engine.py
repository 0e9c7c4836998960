"""A profile's export in an engine that a bench starts: its files, its servers and the drafts to measure."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tuner.bench.task import BenchTask, prepare_bench
from tuner.engines.bench import EngineDecoding, write_alone
from tuner.engines.contract import ServerSettings, find_engine
from tuner.engines.server import Client, served
from tuner.export.run import export
from tuner.export.settings import ExportSettings
from tuner.measuring.contender import PROFILE
from tuner.results import public_name

if TYPE_CHECKING:
    from studies.measurement import Measurement
    from tuner.bench.config import BenchConfig
    from tuner.engines.contract import EngineProgram
    from tuner.export.plan import Plan
    from tuner.progress import Progress

EXPORT = "export"
MOST_REPLAYED = 8
"""Prompts whose drafts transformers makes once more."""
LEAST = 0.95
"""Share of the acceptance by transformers that an engine must reach; rounding costs less than the rest."""


@dataclass
class EngineTask:
    """A profile's export, and the engine that runs it."""

    task: BenchTask
    program: EngineProgram
    version: str
    plan: Plan
    settings: ServerSettings
    logs: Path
    remarks: tuple[str, ...] = ()
    """What the engine's files differ in, one sentence each."""

    @contextmanager
    def server(self, flags: Sequence[str], progress: Progress, *, what: str) -> Iterator[Client]:
        """Serve with these flags of a draft, or plainly without, while the context lasts."""
        progress.stage(f"starting {self.program.title} {what}")
        with served(self.program, self.plan, self.settings, flags, self.logs) as client:
            yield client

    def drafts(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield names and flags: the export's own draft, then the engine's."""
        yield PROFILE, self.program.draft_flags(self.plan)
        yield from self.program.own_drafts(self.plan, self.task.config.profile).items()

    def contender(self, name: str, client: Client, flags: Sequence[str] = ()) -> EngineDecoding:
        """Return a server as a contender."""
        shown = shlex.join(self.shown(flags))
        described = shown or f"{self.program.title} without drafts"
        return EngineDecoding(name, self.program, client, description=described, settings={"flags": shown})

    def acceptance(self, plain: Client, measurement: Measurement, progress: Progress) -> dict[str, float] | None:
        """Return the share of the export's drafted tokens accepted here, and in transformers; None unless a model drafts alone."""
        plan, length = self.plan, self.plan.length.num_tokens
        if (
            not plan.needs_draft_folder
            or plan.lookup is not None
            or plan.threshold is not None
            or plan.bits is not None
        ):
            return None
        samples = measurement.samples[:MOST_REPLAYED]
        prompts = [self.task.measured[sample.prompt].token_ids for sample in samples]
        texts = write_alone(self.program, plain, prompts, self.task.max_new_tokens + length, progress)
        progress.stage("the same drafts in transformers")
        drafted = sum(sample.drafted or 0 for sample in samples)
        return {
            "engine": sum(sample.accepted for sample in samples) / drafted if drafted else 0.0,
            "transformers": acceptance_rate(plan.draft, prompts, texts, length, dtype=plan.dtype),
        }

    def shown(self, flags: Sequence[str]) -> tuple[str, ...]:
        """Return flags without this machine's folders."""
        folders = {str(self.task.config.profile): self.task.config.profile.name, str(self.plan.out): EXPORT}
        for folder, name in folders.items():
            flags = [word.replace(folder, name) for word in flags]
        return tuple(flags)

    def facts(self) -> dict[str, Any]:
        """Return what the figures were measured with."""
        words = self.shown(self.program.launch(self.plan, self.settings, 0, ()).command)
        return {
            **self.task.facts(),
            "runner": None,
            "engine": self.program.title,
            "engine_version": self.version,
            "plain_command": shlex.join(map(public_name, words)),
            "threads": self.task.config.threads,
        }


@contextmanager
def engine_task(config: BenchConfig, progress: Progress) -> Iterator[EngineTask]:
    """Export the profile into `config.out`, and yield what is needed to run it.

    Raises SdtuneError for wrong input, for what has no counterpart in the engine, and for an engine that is not found or fails.
    """
    assert config.engine is not None, "the caller has looked"
    program = find_engine(config.engine, config.engine_home)
    version = program.version()
    task = prepare_bench(config, progress)
    config.out.mkdir(exist_ok=True)
    settings = ExportSettings(
        profile=config.profile,
        to=config.engine,
        out=config.out / EXPORT,
        overwrite=True,
        model=config.model,
        dtype=config.dtype,
        device=config.device,
    )
    plan = export(settings, progress, loaded=task.loaded).plan
    assert plan is not None, "an engine's export has a plan"
    with tempfile.TemporaryDirectory(prefix="sdtune-engine-") as logs:
        server = ServerSettings.of(
            task.measured,
            task.max_new_tokens,
            task.target.config,
            threads=config.threads,
            engine_args=config.engine_args,
        )
        engine = EngineTask(task, program, version, plan, server, Path(logs))
        progress.stage(f"files for {program.title}")
        engine.remarks = program.prepare(plan, engine.logs / "convert.log")
        yield engine


def acceptance_rate(
    draft: Path, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], num_tokens: int, *, dtype: str
) -> float:
    """Return accepted over drafted tokens of a folder's model that drafts `num_tokens` greedily in each round.

    `texts` are the target's own after the prompts, each with `num_tokens` more than an engine is asked for, since a round drafts
    beyond the last token.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=dtype, trust_remote_code=False)
    rounds = accepted = 0
    for prompt, text in zip(prompts, texts, strict=True):
        whole, cache, at = [*prompt, *text], DynamicCache(), len(prompt) + 1
        while at < len(whole) - num_tokens:
            if (over := cache.get_seq_length() - (at - 1)) > 0:
                cache.crop(-over)
            drafted, given = list[int](), whole[cache.get_seq_length() : at]
            with torch.inference_mode():
                for _ in range(num_tokens):
                    logits = model(torch.tensor([given]), past_key_values=cache).logits[0, -1]
                    given = [int(logits.argmax())]
                    drafted += given
            right = takewhile(lambda both: both[0] == both[1], zip(drafted, whole[at:], strict=False))
            matching = sum(1 for _ in right)
            rounds, accepted, at = rounds + 1, accepted + matching, at + matching + 1
    return accepted / (rounds * num_tokens) if rounds else 0.0
