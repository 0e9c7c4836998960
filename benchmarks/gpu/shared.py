"""What the steps share: the device, the prompts, and models that are made once, when the first step needs them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from benchmarks.widening import LayerMap, complete_widths, load_source, widen, widen_feature_head, widen_head
from decoding.drafts import EarlyExit, FeatureHeadDraft
from decoding.errors import ExitHeadError
from decoding.head_folder import HeadFolder
from decoding.runners.features import NO_FEATURES, SpeedFeatures
from decoding.runners.graphs import CudaGraphs, OutputsT, PassRecorder
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.target.heads import new_feature_head
from tuner.config import DistillSettings
from tuner.fields import PromptSettings
from tuner.heads.texts import GeneratedText
from tuner.heads.training import Run, Student, train
from tuner.inputs.models import Loaded, eos_token_ids
from tuner.inputs.prompts import PromptSet, load_prompts

DEMO = Path("configs/demo")
DATASET, GROUP_COLUMN = DEMO / "prompts.jsonl", "file"
TUNING_PROMPTS, HELD_OUT_PROMPTS, NEW_TOKENS = 16, 16, 48
TRAINED_EXITS = (2, 4, 6, 8)
"""Exits of the trained model whose heads are widened: at 8B sizes each takes 436 MB."""
NUM_TEXTS, NUM_READ = 256, 16
"""Texts that the feature head learns from, and their first tokens, which are not learned."""
STEPS, BATCH_SIZE, UNROLLED = 400, 8, 3

T = TypeVar("T")


class TimedRecorder:
    """Records with another recorder; `seconds` holds the duration of each recording, its first run included."""

    def __init__(self, inner: PassRecorder) -> None:
        self.seconds: list[float] = []
        self.num_recorded = 0
        self._inner = inner

    def record(self, run: Callable[[], OutputsT]) -> tuple[OutputsT, Callable[[], OutputsT]]:
        """See `PassRecorder.record`. Capturing waits for the device, so the host's clock tells."""
        start = time.perf_counter()
        outputs, play = self._inner.record(run)
        self.seconds.append(time.perf_counter() - start)
        self.num_recorded = self._inner.num_recorded
        return outputs, play


class TrainedHead(NamedTuple):
    draft: FeatureHeadDraft
    steps: int
    seconds: float


class Shared:
    """The device, and models by need. Everything is read from the checkout that is the current folder."""

    def __init__(self, out: Path, device: str, preset: str) -> None:
        self.out, self.preset, self.device = out, preset, torch.device(device)
        # CPUs without instructions for bfloat16 are slow in it.
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.recorder = TimedRecorder(CudaGraphs(self.device)) if self.device.type == "cuda" else None
        self.seconds: dict[str, float] = {}
        """Seconds that each shared object took to make."""
        self._head: TrainedHead | None = None

    @cached_property
    def source(self) -> PreTrainedModel:
        """The trained demo model in float32 on the CPU."""
        return load_source(DEMO / "model")

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(DEMO / "model", trust_remote_code=False)

    @cached_property
    def wide(self) -> PreTrainedModel:
        """The widened model, built on the device: nothing of its size is on the CPU or on disk."""
        widths = complete_widths(self.source.config, self.preset, {})
        make = partial(widen, self.source, widths, dtype=self.dtype, device=str(self.device))
        return self._timed("widening", make)

    @cached_property
    def loaded(self) -> Loaded:
        """The widened model as if it had been loaded from a folder."""
        return Loaded(self.wide, self.tokenizer, f"widened-{self.preset}", None)

    @cached_property
    def eager(self) -> Target:
        return Target(self.wide)

    @cached_property
    def static(self) -> Target:
        """The widened model, run by the static runner without speed features."""
        return self._timed("static runner", partial(self.static_with, NO_FEATURES, self.recorder))

    def static_with(self, features: SpeedFeatures, recorder: TimedRecorder | None = None) -> Target:
        """Return the widened model, run by another static runner. Raises `UnsupportedRunnerError` for impossible features."""
        return Target(self.wide, partial(StaticRunner, features=features, recorder=recorder))

    @cached_property
    def heads_folder(self) -> Path:
        """Folder of the widened exit heads, written unless an earlier run has done so for the same model."""
        return self._timed("exit heads", self._write_heads)

    def _write_heads(self) -> Path:
        folder = self.out / "heads"
        wide, source = HeadFolder(self.eager, folder), Target(self.source)
        folder.mkdir(exist_ok=True, parents=True)
        for trained, exit_layer in zip(TRAINED_EXITS, self.exit_layers, strict=True):
            try:
                known = wide.facts(exit_layer) is not None
            except ExitHeadError:  # of another model
                known = False
            if not known:
                widen_head(DEMO / "heads" / f"exit_head_{trained}.safetensors", source, self.eager, folder)
        return folder

    @cached_property
    def heads(self) -> HeadFolder:
        return HeadFolder(self.static, self.heads_folder)

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """The exits of the widened model that have a head."""
        layers = LayerMap(self.source.config.num_hidden_layers, self.wide.config.num_hidden_layers)
        return tuple(map(layers.depth, TRAINED_EXITS))

    @cached_property
    def exit_draft(self) -> EarlyExit:
        """The draft of the third exit with a head: a quarter of the model."""
        exit_layer = self.exit_layers[2]
        return self.heads.drafts([exit_layer])[exit_layer]

    @property
    def bare_exit(self) -> EarlyExit:
        """The same exit without its head: the model's own norm and LM head read its states."""
        return self.exit_draft.model_copy(update={"head": None, "head_sha256": None})

    def feature_head(self, seconds: float) -> TrainedHead:
        """Return the draft of a feature head, trained on the demo model for at most `seconds` by the first step that asks.

        None is committed. Its texts are the prompts that the committed exit heads were distilled on, read as they are: the model
        continues none, which would take longer than the training.
        """
        if self._head is None:
            narrow = Target(copy.deepcopy(self.source).to(self.device))
            run = Run({narrow.num_layers: Student(new_feature_head(narrow))}, most_seconds=seconds)
            settings = DistillSettings(head="feature", unrolled_steps=UNROLLED, steps=STEPS, batch_size=BATCH_SIZE)
            train(run, narrow, self._texts(), settings, 0)
            widen_feature_head(run.students[narrow.num_layers].stored_head(), narrow, self.eager, self.heads_folder)
            draft = self.heads.feature_draft()
            assert draft is not None, "it was written just now"
            self._head = TrainedHead(draft, run.step, run.seconds)
        return self._head

    def _texts(self) -> list[GeneratedText]:
        found = self._load_prompts(DEMO / "distill_prompts.jsonl", NUM_TEXTS, 1, 1, PromptSettings())
        texts = [prompt.token_ids for prompt in found.tuning]
        return [GeneratedText(each[:NUM_READ], each[NUM_READ:]) for each in texts if len(each) > NUM_READ]

    @cached_property
    def prompts(self) -> PromptSet:
        """Tuning and held-out prompts: the split of the search."""
        return self._split(HELD_OUT_PROMPTS)

    def held_out(self, count: int) -> list[tuple[int, ...]]:
        """Return held-out prompts; those of another split than the search's where that has too few."""
        found = self.prompts if count <= HELD_OUT_PROMPTS else self._split(count)
        return [prompt.token_ids for prompt in found.held_out[:count]]

    def _split(self, held_out: int) -> PromptSet:
        settings = PromptSettings(group_column=GROUP_COLUMN)
        return self._load_prompts(DATASET, TUNING_PROMPTS, held_out, NEW_TOKENS, settings)

    def _load_prompts(self, path: Path, tuning: int, held_out: int, tokens: int, settings: PromptSettings) -> PromptSet:
        return load_prompts(
            str(path),
            self.tokenizer,
            num_tuning=tuning,
            num_held_out=held_out,
            max_new_tokens=tokens,
            context_length=self.source.config.max_position_embeddings,
            seed=0,
            settings=settings,
        )

    def tuning_prompts(self, count: int) -> list[tuple[int, ...]]:
        return [prompt.token_ids for prompt in (*self.prompts.tuning, *self.prompts.held_out)[:count]]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return eos_token_ids(self.wide)

    @property
    def profile(self) -> Path:
        """The file that the search writes its profile into."""
        return self.out / "profile.yaml"

    def tiny(self) -> PreTrainedModel:
        """Return a random float32 model of a few small layers on the device."""
        config = type(self.source.config)(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            initializer_range=0.2,  # large enough for logits far apart
        )
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), self.device:
            torch.manual_seed(0)
            return LlamaForCausalLM(config).eval()

    def _timed(self, name: str, make: Callable[[], T]) -> T:
        start = time.perf_counter()
        made = make()
        self.seconds[name] = time.perf_counter() - start
        return made

    def device_answers(self) -> bool:
        """Return whether the device still computes: after some errors of CUDA every later call fails too."""
        try:
            return bool(torch.ones(1, device=self.device).sum().item() == 1.0)
        except RuntimeError:
            return False
