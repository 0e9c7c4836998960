"""The task of a search: model, prompts and exit heads, loaded and checked before anything is run or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from decoding.drafts import EarlyExit
from decoding.errors import DistillationError, UnsupportedModelError
from decoding.fingerprint import Fingerprint, fingerprint, hash_json
from decoding.head_folder import HeadFolder
from decoding.probe import probe
from decoding.profile import Decoding
from decoding.runners import AUTO, PLAIN_RUNNER, bit_exact_runners, has_bit_exact_mode
from decoding.target import Target
from decoding.text import Ending
from decoding.timing.runner_choice import fastest_runner
from tuner.config import SearchConfig
from tuner.errors import ConfigError
from tuner.heads.plan import num_spare
from tuner.inputs.checkpoint import checkpoint_configuration
from tuner.inputs.memory import explained_shortage, gigabytes
from tuner.inputs.models import Loaded, eos_token_ids, load, target_identity
from tuner.inputs.prompts import Prompt, PromptSet, check_rows, search_prompts
from tuner.inputs.rows import open_rows
from tuner.measuring.baseline import decode_baseline, most_known_bytes
from tuner.measuring.contender import PriceList, WallClock
from tuner.measuring.machine import MachineWatch
from tuner.measuring.paired import MOST_KEPT, Bench
from tuner.output_paths import check_folder_writable, check_writable
from tuner.progress import Progress
from tuner.results import device_name
from tuner.search.budget import LEAST_LEFT, WRITING_SECONDS, Budget
from tuner.search.engine import Deployment, deployment_of, restricted
from tuner.search.memory_plan import plan_memory
from tuner.search.storage import FINISHED, existing_store
from tuner.stage_clock import Stage, StageClock


@dataclass(frozen=True)
class Task:
    """Everything a search needs, loaded and checked before anything is written."""

    config: SearchConfig
    loaded: Loaded
    target: Target
    prompts: PromptSet
    identity: Mapping[str, Any]
    """Identity of the search, with which stored studies are resumed: model, data, device and decoding."""
    model: Fingerprint
    head_folder: HeadFolder
    """Folder of the trained heads: one object for the whole search, so that few heads are in memory."""
    heads: Mapping[int, EarlyExit]
    """Drafts of the existing exit heads that the studies use, by exit layer."""
    missing_heads: tuple[int, ...]
    """Exit layers whose head a study asks for and that have none yet."""
    budget: Budget
    """Time of the search, counted from the start of the command."""
    watch: MachineWatch = field(default_factory=MachineWatch)
    """Signs that other work disturbs the search."""
    prices: PriceList | None = None
    """What trials, race and confirmation charge in place of real seconds, for checks of the search itself."""
    deployment: Deployment | None = None
    """The engine that the search deploys to; None if production decodes as this process does."""
    settings: str = ""
    """What identifies the command; see `settings_sha256`."""
    configuration: str | None = None
    """Hash of the checkpoint's configuration; None for a model that was loaded before."""

    @property
    def decoding(self) -> Decoding:
        """Decoding of the trials, the race and the profile, with the runner that was chosen."""
        runner = self.target.runner
        return Decoding(
            temperature=self.config.temperature,
            prefix_reuse=self.config.prefix_reuse,
            runner=runner.name,
            exact_width=runner.exact_width,
            history=self.config.history,
        )

    @property
    def needs_continuations(self) -> bool:
        """True if candidates are compared with plain continuations of each prompt alone, and not with those timed beside them.

        Two sampled sequences cannot be compared, and a batch may round otherwise than a sequence by itself.
        """
        return self.config.temperature > 0 or self.config.batch_size > 1


RESULT = "writing a result"


def open_budget(config: SearchConfig, clock: StageClock) -> Budget:
    """Return the time of a search that began with `clock`, less what earlier runs of it took.

    Raises `SearchError`, before anything is loaded, if they have spent it, or if it is too short for any search, unless there is a
    result to show.
    """
    before = 0.0
    if config.timeout is not None:
        with existing_store(config.storage, config.resolved_experiment()) as store:
            before = 0.0 if store is None else store.elapsed_before()
    budget = Budget(config.timeout, clock, before)
    if before and _is_finished(config, settings_sha256(config)):
        return budget
    if before:
        budget.check(LEAST_LEFT * (config.timeout or 0.0), "going on")
    budget.check(WRITING_SECONDS, RESULT)
    return budget


def _check_time(config: SearchConfig, settings: str, budget: Budget) -> None:
    """Raise `SearchError` if no time is left for a result, unless there is one to show."""
    if not _is_finished(config, settings):
        budget.check(WRITING_SECONDS, RESULT)


def _is_finished(config: SearchConfig, settings: str) -> bool:
    with existing_store(config.storage, config.resolved_experiment()) as store:
        noted = None if store is None else store.noted(FINISHED)
    return noted is not None and noted["settings"] == settings


def settings_sha256(config: SearchConfig) -> str:
    """Return what identifies the command: every setting that may change its result."""
    settings = config.model_dump(mode="json", exclude={"out", "storage", "workers", "ray"})
    return hash_json(settings)


def prepare(
    config: SearchConfig,
    progress: Progress,
    *,
    loaded: Loaded | None = None,
    target: Target | None = None,
    budget: Budget | None = None,
) -> Task:
    """Load model, prompts and exit heads, and check all that can be checked before anything is run or written.

    A model that is `loaded` already, or a `target` of it with its runner, is used in place of the configured one. The time of the
    search counts from here unless a `budget` is given.
    """
    budget = budget or Budget(config.timeout, StageClock())
    remedy = "give a lower max_prompt_tokens or --max-new-tokens, --set dtype=bfloat16, or a smaller model"
    with budget.clock.stage(Stage.LOADING), explained_shortage("loading and checking the model", remedy):
        return _prepared(config, progress, loaded, target, budget)


def _prepared(
    config: SearchConfig, progress: Progress, loaded: Loaded | None, target: Target | None, budget: Budget
) -> Task:
    check_writable(config.out)
    settings = settings_sha256(config)
    config = restricted(config)
    rows = open_rows(config.dataset, config)
    check_rows(config, rows)
    configuration = None
    if loaded is None:
        configuration = checkpoint_configuration(config.model, config.revision)
        with existing_store(config.storage, config.resolved_experiment()) as store:
            if store is not None:
                store.check_configuration(configuration)
        loaded = _load_if_it_fits(config, progress)
    _check_time(config, settings, budget)  # a slow disk may have taken all of it
    config = _with_possible_prefix_reuse(config, loaded.model, progress)
    target = target or choose_target(loaded.model, config, progress)
    if config.batch_size > 1 and (reason := target.unbatchable_reason) is not None:
        progress.say(f"the {config.batch_size} sequences of a batch take turns, as no pass can be shared: {reason}")
    wanted = _wanted_heads(config, target)
    folder = HeadFolder(target, config.heads)
    may_distil = config.distill == "auto" and bool(folder.missing(wanted))
    if may_distil:
        check_folder_writable(config.heads, what="exit heads", error=DistillationError)
    spare = num_spare(config) if may_distil else 0
    prompts = search_prompts(config, loaded.tokenizer, target.context_length, num_spare=spare, rows=rows)
    config = config.model_copy(update=_counts(config, prompts))
    _check_time(config, settings, budget)
    for note in prompts.notes:
        progress.say(note)
    heads = folder.drafts(wanted, held_out=token_ids(prompts.held_out))
    if num_seen := folder.num_trained_on(heads, token_ids(prompts.tuning)):
        progress.say(
            f"the heads in {config.heads} were trained on {num_seen} of the {len(prompts.tuning)} tuning prompts: trials "
            "overrate them (the held-out figures do not)"
        )
    model = fingerprint(loaded.model)
    identity = _identity(config, model, prompts, target)
    missing = folder.missing(wanted)
    deployment = deployment_of(config, loaded, target_identity(loaded, target))
    return Task(
        config,
        loaded,
        target,
        prompts,
        identity,
        model,
        folder,
        heads,
        missing,
        budget,
        deployment=deployment,
        settings=settings,
        configuration=configuration,
    )


def _counts(config: SearchConfig, prompts: PromptSet) -> dict[str, int]:
    """Return the numbers of prompts that there are; half of few tuning prompts are left for the race."""
    tuning, per_trial = len(prompts.tuning), config.prompts_per_trial
    if tuning < config.tuning_prompts:
        per_trial = min(per_trial, max(2, tuning // 2))
    return {"tuning_prompts": tuning, "held_out_prompts": len(prompts.held_out), "prompts_per_trial": per_trial}


def _load_if_it_fits(config: SearchConfig, progress: Progress) -> Loaded:
    plan = plan_memory(config)
    plan.refuse_too_large(config.model)
    if plan.free is not None and plan.total > plan.free:
        progress.say(f"memory (estimate): {gigabytes(plan.total)} of {gigabytes(plan.free)} free: {plan.verdict()}")
    progress.stage(f"loading {config.model}")
    return load(config.model, revision=config.revision, dtype=config.dtype, device=config.device)


def token_ids(prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt."""
    return [prompt.token_ids for prompt in prompts]


def _with_possible_prefix_reuse(config: SearchConfig, model: PreTrainedModel, progress: Progress) -> SearchConfig:
    """Return `config`, without prefix reuse where model or mode do not allow it; raise if the model is not supported."""
    capabilities = probe(model, every_part=False)
    if capabilities.refusal:
        raise UnsupportedModelError(capabilities.refusal)
    if not config.prefix_reuse:
        return config
    if not capabilities.prefix_reuse:
        progress.say("this model cannot be verified from the middle: prefix reuse is off")
    elif config.bitwise_width is not None:
        progress.say("bit-exact mode verifies from the first block: prefix reuse is off")
    else:
        return config
    return config.model_copy(update={"prefix_reuse": False})


def _identity(config: SearchConfig, model: Fingerprint, prompts: PromptSet, target: Target) -> dict[str, Any]:
    return {
        "model": list(vars(model).values()),
        "data": prompts.fingerprint,
        "device": device_name(target.device),
        "precision": str(target.dtype),
        "decoding": {
            "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "prompts_per_trial": config.prompts_per_trial,
            "prefix_reuse": config.prefix_reuse,
            "runner": target.runner.name,
            "exact_width": target.runner.exact_width,
            **({"history": config.history} if config.history else {}),
        },
        "batch_size": config.batch_size,
        **({"deploy_to": config.deploy_to} if config.deploy_to else {}),
    }


def choose_target(model: PreTrainedModel, config: SearchConfig, progress: Progress) -> Target:
    """Return the model with the configured runner, or with the fastest one, and report the choice and the preparation."""
    name = config.runner_on(model.device.type, model.get_memory_footprint())
    width = config.bitwise_width
    if width is not None and not (name != AUTO and has_bit_exact_mode(name)):
        name = bit_exact_runners()[0]
    if name == PLAIN_RUNNER:
        return Target(model)
    progress.stage(f"making the model ready for fixed shapes (runner {name})")
    if name != AUTO:
        return Target(model, name, exact_width=width)
    choice = fastest_runner(model, num_sequences=config.batch_size)
    progress.say(f"runner {choice.target.runner.name}: {choice.reason}")
    return choice.target


def _wanted_heads(config: SearchConfig, target: Target) -> tuple[int, ...]:
    """Return the exit layers for which a study needs a head. Raises `ConfigError` for settings that the model cannot satisfy."""
    wanted: set[int] = set()
    for name in config.study:
        settings = config.study_settings(name)
        try:
            settings.check(target)
        except ValueError as cause:
            raise ConfigError(f"studies.{name}: {cause}") from None
        wanted.update(settings.wanted_heads(target.num_layers))
    return tuple(sorted(wanted))


def open_bench(task: Task, prompts: Sequence[Prompt], stage: str, progress: Progress, *, whole: bool = True) -> Bench:
    """Decode these prompts plainly and give the bench to measure on; `stage` says which they are.

    Without `whole` only as far as tells that their continuations are long enough, if the task does not need them.

    What the model knows of them is kept, so that candidates need not read them again. On a GPU, which reads a prompt in the time of
    a few tokens, they do.
    """
    progress.stage(stage, len(prompts))
    baseline = decode_baseline(
        task.target,
        [prompt.token_ids for prompt in prompts],
        Ending(task.config.max_new_tokens, eos_token_ids(task.loaded.model)),
        batch_size=task.config.batch_size,
        categories=[prompt.category for prompt in prompts],
        most_known_bytes=most_known_bytes(task.target.device.type, task.target.weight_bytes),
        whole=whole or task.needs_continuations,
        on_progress=progress.advance,
    )
    if baseline.num_too_short:
        progress.say(f"{baseline.num_too_short} of {len(prompts)} prompts end too soon to measure and are left out")
    if baseline.num_left_over:
        progress.say(
            f"{len(baseline.prompts) + baseline.num_left_over} prompts make {len(baseline.indices)} batches of "
            f"{baseline.batch_size}: {baseline.num_left_over} left out"
        )
    return Bench(
        task.target,
        baseline,
        decoding=task.decoding,
        heads=task.head_folder,
        seed=task.config.seed,
        clock=task.prices or WallClock(task.target.device),
        most_kept=max(
            MOST_KEPT, task.config.finalists + len(task.config.study)
        ),  # the finalists take turns in the race
    )
