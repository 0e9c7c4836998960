"""What the steps share: the device, the prompts, and models that are made once, when the first step needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from decoding.drafts import EarlyExit
from decoding.errors import ExitHeadError
from decoding.head_folder import HeadFolder
from decoding.runners.contract import RunnerFactory
from decoding.runners.features import NO_FEATURES, SpeedFeatures
from decoding.runners.graphs import CudaGraphs
from decoding.runners.static import StaticRunner
from decoding.target import Target
from tuner.evaluation.gpu.recorder import TimedRecorder
from tuner.evaluation.models.layout import LayerMap
from tuner.evaluation.models.widen import describe, load_source, widen, widen_head
from tuner.evaluation.models.widths import complete_widths
from tuner.inputs.models import Loaded, eos_token_ids
from tuner.inputs.prompts import PromptSet, load_prompts
from tuner.prompt_settings import PromptSettings

DEMO = Path("configs/demo")
DATASET = DEMO / "prompts.jsonl"
GROUP_COLUMN = "file"
TUNING_PROMPTS, HELD_OUT_PROMPTS, NEW_TOKENS = 16, 16, 48
TRAINED_EXITS = (2, 4, 6, 8)
"""Exits of the trained model whose heads are widened: at 8B sizes each takes 436 MB."""

T = TypeVar("T")


class Shared:
    """The device, and models by need. Everything is read from the checkout that is the current folder."""

    def __init__(self, out: Path, device: str, preset: str) -> None:
        self.out = out
        self.preset = preset
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        """Precision of the widened model. CPUs without instructions for bfloat16 are slow in it."""
        self.recorder = TimedRecorder(CudaGraphs(self.device)) if self.device.type == "cuda" else None
        """Recorder of the shared static target; None where nothing is recorded."""
        self.seconds: dict[str, float] = {}
        """Seconds that each shared object took to make."""
        self._made: dict[str, object] = {}

    @cached_property
    def source(self) -> PreTrainedModel:
        """The trained demo model in float32 on the CPU."""
        return load_source(DEMO / "model")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the demo model, and so of the widened one."""
        return AutoTokenizer.from_pretrained(DEMO / "model", trust_remote_code=False)

    @cached_property
    def wide(self) -> PreTrainedModel:
        """The widened model, built on the device: nothing of its size is on the CPU or on disk."""
        start = time.perf_counter()
        widths = complete_widths(self.source.config, self.preset, {})
        model = widen(self.source, widths, dtype=self.dtype, device=str(self.device))
        self.seconds["widening"] = time.perf_counter() - start
        return model

    @cached_property
    def description(self) -> str:
        """Sizes of the widened model and what of it is idle."""
        return describe(self.source, self.wide)

    @cached_property
    def loaded(self) -> Loaded:
        """The widened model as if it had been loaded from a folder."""
        return Loaded(self.wide, self.tokenizer, f"widened-{self.preset}", None)

    @cached_property
    def eager(self) -> Target:
        """The widened model, run eagerly."""
        return Target(self.wide)

    @cached_property
    def static(self) -> Target:
        """The widened model, run by the static runner without speed features."""
        start = time.perf_counter()
        target = self.static_with(NO_FEATURES, self.recorder)
        self.seconds["static runner"] = time.perf_counter() - start
        return target

    def static_with(self, features: SpeedFeatures, recorder: TimedRecorder | None = None) -> Target:
        """Return the widened model, run by another static runner. Raises `UnsupportedRunnerError` for impossible features."""
        factory: RunnerFactory = partial(StaticRunner, features=features, recorder=recorder)
        return Target(self.wide, factory)

    @cached_property
    def heads_folder(self) -> Path:
        """Folder of the widened exit heads, written unless an earlier run has done so for the same model."""
        start, folder = time.perf_counter(), self.out / "heads"
        wide, source = HeadFolder(self.eager, folder), Target(self.source)
        folder.mkdir(exist_ok=True)
        for trained, exit_layer in zip(TRAINED_EXITS, self.exit_layers, strict=True):
            if not _has_head(wide, exit_layer):
                widen_head(DEMO / "heads" / f"exit_head_{trained}.safetensors", source, self.eager, folder)
        self.seconds["exit heads"] = time.perf_counter() - start
        return folder

    @cached_property
    def heads(self) -> HeadFolder:
        """The widened exit heads."""
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

    @cached_property
    def prompts(self) -> PromptSet:
        """Tuning and held-out prompts: the split of the search."""
        return load_prompts(
            str(DATASET),
            self.tokenizer,
            num_tuning=TUNING_PROMPTS,
            num_held_out=HELD_OUT_PROMPTS,
            max_new_tokens=NEW_TOKENS,
            context_length=self.source.config.max_position_embeddings,
            seed=0,
            settings=PromptSettings(group_column=GROUP_COLUMN),
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-text tokens of the widened model."""
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

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the object of this name, made by the first step that needs it."""
        if name not in self._made:
            start = time.perf_counter()
            self._made[name] = make()
            self.seconds[name] = time.perf_counter() - start
        return cast(T, self._made[name])

    def device_answers(self) -> bool:
        """Return whether the device still computes: after some errors of CUDA every later call fails too."""
        try:
            return bool(torch.ones(1, device=self.device).sum().item() == 1.0)
        except RuntimeError:
            return False

    def release_memory(self) -> None:
        """Hand memory that nothing uses back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def without_head(draft: EarlyExit) -> EarlyExit:
    """Return the same exit without its head: the model's own norm and LM head read its states."""
    return draft.model_copy(update={"head": None, "head_sha256": None})


def _has_head(folder: HeadFolder, exit_layer: int) -> bool:
    """Return whether there is a head for the exit that belongs to the model at hand."""
    try:
        return folder.facts(exit_layer) is not None
    except ExitHeadError:
        return False
