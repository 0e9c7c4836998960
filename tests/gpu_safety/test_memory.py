"""Peak memory beside the weights of an 8B model, by running it with fake tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafts import EarlyExit, LayerSkip
from decoding.target import Target
from decoding.text import Ending
from studies.prediction.survey import Survey
from tests.support.fake_8b import GIB, NUM_PARAMETERS, PeakBytes, fake_8b, llama_8b_config
from tests.support.paths import ROOT
from tuner.config import DistillSettings
from tuner.heads.limits import bytes_per_head, heads_that_fit, shared_bytes
from tuner.inputs.memory import ModelSize

NUM_SEQUENCES = 4
NUM_WRITTEN = 64
SURVEY_LAYERS = 8
"""A quarter of the model: the keys and values of its context shrink with it, and so do the budget and the time of the test."""
SURVEY_BUDGET = 1.45
"""GiB for 4,000 tokens of context. With a copy of the context for each round, all 32 layers took 34."""


@pytest.fixture
def target() -> Iterator[Target]:
    with fake_8b() as model:
        yield Target(model)


def test_fake_model_has_the_size_of_the_real_one(target: Target) -> None:
    assert target.model.num_parameters() == NUM_PARAMETERS
    with PeakBytes(target.model) as memory:
        target.model.get_input_embeddings().weight.clone()
    assert memory.peak == 128256 * 4096 * 2


def test_survey_fits_beside_the_model() -> None:
    with fake_8b(num_layers=SURVEY_LAYERS) as model:
        target = Target(model)
        with PeakBytes(model) as memory:
            _survey(target, 4_000).record(LayerSkip.blocks((3, 5)))
    assert memory.peak < SURVEY_BUDGET * GIB


def test_states_of_all_exits_fit_beside_the_model(target: Target) -> None:
    with PeakBytes(target.model) as memory:
        # With heads: without them the states of the prompts are not kept.
        exits = [
            EarlyExit(exit_layer=n, head="head.safetensors", head_sha256="0" * 64) for n in range(1, target.num_layers)
        ]
        survey = _survey(target, 4_000, exits=exits)
        survey.record_all([EarlyExit(exit_layer=1), EarlyExit(exit_layer=31)])
    assert memory.peak < 3 * GIB, "they are 4 GiB"


def _survey(target: Target, context: int, exits: Iterable[int] = ()) -> Survey:
    prompts, continuations = [[1] * context] * NUM_SEQUENCES, [[1] * (NUM_WRITTEN + 1)] * NUM_SEQUENCES
    return Survey(target, prompts, continuations, exits=exits)


def test_distillation_stays_within_its_estimate() -> None:
    settings, prompt_tokens = DistillSettings(), 4_000
    with torch.device("meta"):
        size = ModelSize.of(LlamaForCausalLM(llama_8b_config()), torch.bfloat16)
    command = [sys.executable, "-m", "tests.support.fake_training", str(prompt_tokens)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one_head, two_heads = map(int, done.stdout.split())
    each = bytes_per_head(size, prompt_tokens, settings)
    assert two_heads - one_head == pytest.approx(each, rel=0.02)
    assert 0.4 < (one_head - each) / shared_bytes(size, prompt_tokens, settings) <= 1.0


def test_twelve_heads_do_not_fit_at_once_on_half_a_gpu(target: Target) -> None:
    size = ModelSize.of(target.model)
    free = 40 * 10**9 - size.weight_bytes
    fit = heads_that_fit(size, 500, DistillSettings(), free)
    assert fit is not None
    assert 1 < fit < 12
    needed = fit * bytes_per_head(size, 500, DistillSettings()) + shared_bytes(size, 500, DistillSettings())
    assert needed < free < 12 * bytes_per_head(size, 500, DistillSettings())
    assert heads_that_fit(size, 500, DistillSettings(), 1) == 1


def test_batch_in_lockstep_takes_its_caches_and_little_more() -> None:
    num_sequences, prompt_tokens, new_tokens = 16, 4_000, 4
    requests = [Request((1,) * prompt_tokens, Ending(new_tokens))] * num_sequences
    with fake_8b(num_layers=2) as model:  # the time of this test grows with the layers, and not with the prompts
        target = Target(model)
        with PeakBytes(model) as memory:
            plain_decoder(target).generate_batch(requests)
        caches = num_sequences * (prompt_tokens + new_tokens) * ModelSize.of(model).cache_bytes
    assert caches <= memory.peak < caches + 0.5 * GIB
