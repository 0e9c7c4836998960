"""What a tuning begins with: engine, prompts, the files that the engine loads, and its ways of drafting."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoding.fingerprint import hash_json
from decoding.profile import DraftProfile
from decoding.target import Target
from decoding.text import Ending
from studies.measurement import Measurement
from tuner.engines.bench import Crowd, EngineDecoding, LoadFigures, write_alone
from tuner.engines.contract import EngineProgram, Served, ServerSettings, find_engine
from tuner.engines.server import Client, served
from tuner.errors import ConfigError
from tuner.export.run import export, model_folder_of
from tuner.export.settings import ExportSettings
from tuner.inputs.held_out import find_prompts
from tuner.inputs.models import auto_dtype, load, load_text_config, load_tokenizer
from tuner.measuring.comparison import FEWEST_SAMPLES

if TYPE_CHECKING:
    from tuner.engines.methods import Method
    from tuner.export.plan import Plan
    from tuner.inputs.prompts import Prompt, PromptSet
    from tuner.progress import Progress
    from tuner.tune.config import TuneConfig

EXPORT = "export"
GROUPS = 4
"""Groups of requests side by side, at least, on which settings are chosen."""
MEASURED = "measured.jsonl"


class KeptMeasurements:
    """The measurements of one tuning in a folder, a JSON line each; those of a tuning with other settings are dropped."""

    def __init__(self, out: Path, identity: Any, *, hidden: str) -> None:
        """`hidden` is a folder in flags that is another in each run."""
        self._path, self._hidden = out / MEASURED, hidden
        self._found: dict[str, LoadFigures] = {}
        self.seconds = 0.0
        """What they took."""
        header = json.dumps(identity, sort_keys=True)
        lines = self._path.read_text(encoding="utf-8").split("\n") if self._path.exists() else []
        # The last piece is empty, or a line that a kill cut off.
        kept = lines[1:-1] if lines and lines[0] == header else []
        out.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(f"{line}\n" for line in (header, *kept)), encoding="utf-8")
        for line in kept:
            self._read(json.loads(line))

    def __len__(self) -> int:
        return len(self._found)

    def get(self, crowd: Crowd, flags: Sequence[str], sequences: int) -> LoadFigures | None:
        """Return what a server with these flags did with these prompts side by side, if it was measured."""
        return self._found.get(self._key(crowd, flags, sequences))

    def keep(self, crowd: Crowd, flags: Sequence[str], figures: LoadFigures, seconds: float) -> None:
        """Write a measurement, which took `seconds`, to disk."""
        line = {
            "key": self._key(crowd, flags, figures.sequences),
            "sequences": figures.sequences,
            "different": figures.num_plain_different,
            "seconds": seconds,
            "measurement": figures.measurement.model_dump(mode="json"),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")

    def discard(self) -> None:
        """Remove the file of a tuning that has its result: the next one measures anew."""
        self._path.unlink(missing_ok=True)

    def _read(self, line: dict[str, Any]) -> None:
        measurement = Measurement.model_validate(line["measurement"])
        self._found[line["key"]] = LoadFigures(line["sequences"], measurement, line["different"])
        self.seconds += line["seconds"]

    def _key(self, crowd: Crowd, flags: Sequence[str], sequences: int) -> str:
        return hash_json([crowd.prompts, crowd.alone, shlex.join(flags).replace(self._hidden, ""), sequences])


@dataclass
class TuneTask:
    """An engine, a model and prompts, before a server runs."""

    config: TuneConfig
    program: EngineProgram
    profile: DraftProfile | None
    served: Served
    methods: tuple[Method, ...]
    prompts: PromptSet
    target: Callable[[], Target]
    settings: ServerSettings
    logs: Path
    kept: KeptMeasurements
    num_started: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Drafts that the engine did not run, with its reasons."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """The numbers of requests side by side, ascending."""
        return tuple(sorted({*self.config.sequences}))

    @contextmanager
    def server(self, name: str, flags: Sequence[str], progress: Progress) -> Iterator[EngineDecoding]:
        """Serve with these flags of a draft, or plainly without, while the context lasts."""
        progress.stage(f"starting {self.program.title}: {name}")
        self.num_started += 1
        with served(self.program, self.served, self.settings, flags, self.logs) as client:
            yield EngineDecoding(name, self.program, client)

    def crowd(self, plain: Client, prompts: Sequence[Prompt], progress: Progress) -> Crowd:
        """Return prompts with the texts that the plain server writes after them."""
        token_ids = tuple(prompt.token_ids for prompt in prompts)
        alone = write_alone(self.program, plain, token_ids, self.config.max_new_tokens, progress)
        return Crowd(token_ids, alone, Ending(self.config.max_new_tokens, frozenset()), self.target)


@contextmanager
def tune_task(config: TuneConfig, progress: Progress) -> Iterator[TuneTask]:
    """Find the engine, read tokenizer and prompts, and write the files that the engine loads.

    The model is loaded here only to export a profile, and to tell ties from errors.
    """
    program = find_engine(config.engine, config.engine_home)
    profile = None if config.profile is None else DraftProfile.load(config.profile)
    name, revision = _model_of(config, profile)
    text_config, prompts = load_text_config(name, revision), _prompts(config, profile, progress)
    usual = auto_dtype(text_config) if profile is None else profile.target.dtype
    dtype = usual if config.dtype == "auto" else config.dtype

    @cache
    def target() -> Target:
        """Load the model to tell ties from errors."""
        return Target(load(name, revision=revision, dtype=dtype).model)

    settings = ServerSettings.of(
        (*prompts.tuning, *prompts.held_out),
        config.max_new_tokens,
        text_config,
        threads=config.threads,
        engine_args=config.engine_args,
        sequences=max(config.sequences),
    )
    with tempfile.TemporaryDirectory(prefix="sdtune-engine-") as folder:
        out = Path(folder)
        if config.profile is None:
            progress.stage(f"files for {program.title}")
            model = Served(str(model_folder_of(name, revision)), dtype, out, config.draft_model)
            remarks, methods = program.prepare_model(model, out / "convert.log"), program.methods(model)
        else:
            plan = _exported(config, dtype, out / EXPORT, progress)
            model = Served(plan.model, dtype, plan.out)
            remarks = program.prepare(plan, out / "convert.log")
            methods = program.profile_methods(plan, config.profile)
        for remark in remarks:
            progress.say(remark)
        kept = _kept(config, program, profile, prompts, out)
        if kept:
            progress.say(f"going on from what {config.out} holds ({len(kept)} measured)")
        yield TuneTask(config, program, profile, model, methods, prompts, target, settings, out, kept)


def _kept(
    config: TuneConfig, program: EngineProgram, profile: DraftProfile | None, prompts: PromptSet, hidden: Path
) -> KeptMeasurements:
    identity = {
        "settings": config.model_dump(mode="json", exclude={"out", "further_servers"}),
        "prompts": prompts.fingerprint,
        "engine": program.version(),
        "profile": None if profile is None else profile.model_dump(mode="json"),
    }
    return KeptMeasurements(config.out, identity, hidden=str(hidden))


def _model_of(config: TuneConfig, profile: DraftProfile | None) -> tuple[str, str | None]:
    if profile is not None:
        return config.model or profile.target.model, config.revision or profile.target.revision
    assert config.model is not None, "the settings were checked"
    return config.model, config.revision


def _prompts(config: TuneConfig, profile: DraftProfile | None, progress: Progress) -> PromptSet:
    """Return tuning and held-out prompts: those that the search of the profile held out, where there is one."""
    name, revision = _model_of(config, profile)
    least, most = FEWEST_SAMPLES * max(config.sequences), max(config.sequences)
    given = config.held_out_prompts if "held_out_prompts" in config.model_fields_set else None
    facts = profile.measured.dataset if profile is not None and profile.measured is not None else None
    found, origin = find_prompts(
        config.dataset,
        load_tokenizer(name, revision),
        facts,
        config,
        num_tuning=max(config.tuning_prompts, GROUPS * most),
        num_held_out=given or (None if facts else max(config.held_out_prompts, least)),
        max_new_tokens=config.max_new_tokens,
        context_length=getattr(load_text_config(name, revision), "max_position_embeddings", None),
        seed=config.seed,
    )
    for note in (*([] if profile is None else [f"prompts: {origin}"]), *found.notes):
        progress.say(note)
    if len(found.held_out) < least:
        raise ConfigError(
            f"--sequences {most} needs at least {least} held-out prompts, {FEWEST_SAMPLES} groups, and there are "
            f"{len(found.held_out)}: hold out more (--held-out-prompts), or measure fewer side by side"
        )
    return found


def _exported(config: TuneConfig, dtype: str, out: Path, progress: Progress) -> Plan:
    assert config.profile is not None, "the caller has looked"
    settings = ExportSettings(profile=config.profile, to=config.engine, out=out, model=config.model, dtype=dtype)
    plan = export(settings, progress).plan
    assert plan is not None, "an engine's export has a plan"
    return plan
