"""What the steps share: the device, the prompts, and models that are made once, when the first step needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from benchmarks.widening import LayerMap, load_source, widen, widen_head, widths_of
from decoding.drafts import EarlyExit
from decoding.errors import ExitHeadError
from decoding.head_folder import HeadFolder
from decoding.runners.graphs import CudaGraphs
from decoding.runners.static import StaticRunner
from decoding.target import Target
from tuner.fields import PromptSettings
from tuner.inputs.models import Loaded, eos_token_ids
from tuner.inputs.prompts import PromptSet, load_prompts

DEMO = Path("configs/demo")
DATASET, GROUP_COLUMN = DEMO / "prompts.jsonl", "file"
TUNING_PROMPTS, HELD_OUT_PROMPTS, NEW_TOKENS = 16, 16, 48
TRAINED_EXITS = (2, 4, 6, 8)
"""Exits of the trained model whose heads are widened: at 8B sizes each takes 436 MB."""

T = TypeVar("T")


class Shared:
    """The device, and models by need. Everything is read from the checkout that is the current folder."""

    def __init__(self, out: Path, device: str, preset: str) -> None:
        self.out, self.preset, self.device = out, preset, torch.device(device)
        # CPUs without instructions for bfloat16 are slow in it.
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.recorder = CudaGraphs(self.device) if self.device.type == "cuda" else None
        self.seconds: dict[str, float] = {}
        """Seconds that each shared object took to make."""

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
        widths = widths_of(self.preset, self.source.config)
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
        """The widened model, run by the static runner."""
        runner = partial(StaticRunner, recorder=self.recorder)
        return self._timed("static runner", partial(Target, self.wide, runner))

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

    @cached_property
    def prompts(self) -> PromptSet:
        """Tuning and held-out prompts: the split of the search."""
        return self._split(HELD_OUT_PROMPTS)

    def held_out(self, count: int) -> list[tuple[int, ...]]:
        """Return held-out prompts; those of another split than the search's where that has too few."""
        found = self.prompts if count <= HELD_OUT_PROMPTS else self._split(count)
        return [prompt.token_ids for prompt in found.held_out[:count]]

    def _split(self, held_out: int) -> PromptSet:
        return load_prompts(
            str(DATASET),
            self.tokenizer,
            num_tuning=TUNING_PROMPTS,
            num_held_out=held_out,
            max_new_tokens=NEW_TOKENS,
            context_length=self.source.config.max_position_embeddings,
            seed=0,
            settings=PromptSettings(group_column=GROUP_COLUMN),
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
