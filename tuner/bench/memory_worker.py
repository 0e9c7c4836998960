"""The process that measures the memory of one contender: `python -m tuner.bench.memory_worker`, its order on standard input."""

from __future__ import annotations

import functools
import sys

import torch

from decoding.deploy import load_decoder
from decoding.draft_length import Fixed
from decoding.drafts import PlainDecoding
from decoding.profile import DraftProfile
from tuner.bench.contenders import CONTENDERS, PROFILE, Setting
from tuner.bench.memory import MemoryOrder, PeakMemory, gauge_for
from tuner.bench.modes import profile_by
from tuner.inputs.models import Loaded, eos_token_ids, load
from tuner.measuring.clock import WallClock
from tuner.measuring.recording import Recorder


def measure(order: MemoryOrder) -> PeakMemory:
    """Load the model, make the contender and let it continue the batch; return its peak memory.

    Everything that the contender makes after the weights are there counts: packed weights, exit heads, caches, recordings.
    """
    torch.set_num_threads(order.threads)
    loaded = load(order.model, revision=order.revision, dtype=order.dtype, device=order.device)
    weights = list(loaded.model.parameters())
    for weight in weights:  # weights of a mapped file become resident when they are read
        weight.sum()
    gauge = gauge_for(loaded.model.device)
    assert gauge is not None, "the bench asks only where peaks can be read"
    before = gauge.start()
    contender = CONTENDERS[order.contender](_setting(order, loaded))
    contender.prepare([order.batch], order.max_new_tokens)
    recorder = Recorder(WallClock(loaded.model.device).start(), num_sequences=len(order.batch))
    contender.write(order.batch, order.max_new_tokens, recorder)
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    return PeakMemory(weights_bytes=size, beside_weights_bytes=max(0, gauge.peak() - before))


def _setting(order: MemoryOrder, loaded: Loaded) -> Setting:
    profile = DraftProfile.load(order.profile)
    if order.runner is not None:
        profile = profile_by(order.runner, profile)
    if not order.contender.startswith(PROFILE):  # its exit head is not theirs
        profile = profile.model_copy(update={"draft": PlainDecoding(), "draft_length": Fixed()})
    deploy = functools.partial(load_decoder, folder=order.profile.parent)
    return Setting(
        profile=profile,
        decoder=deploy(profile).decoder_for(loaded.model),
        in_mode=lambda mode: deploy(profile_by(mode, profile)).decoder_for(loaded.model),
        eos_token_ids=eos_token_ids(loaded.model),
        tuning_prompts=order.tuning_prompts,
        max_new_tokens=order.max_new_tokens,
        longest_prompt=max(map(len, order.batch)),
    )


if __name__ == "__main__":
    print(measure(MemoryOrder.model_validate_json(sys.stdin.read())).model_dump_json())
