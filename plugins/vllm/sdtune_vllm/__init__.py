"""Profiles of sdtune in vLLM. `register` is the entry point of `vllm.general_plugins`; it changes nothing for other methods.

vLLM's method `custom_class` hands its proposer the target's modules and takes lists of different lengths, but it reserves no slots
for what a draft writes, shows the proposer token ids alone, and has no draft passes to record. Five changes of the V1 model runner
mend that; each asks whether the proposer is ours.
"""

from __future__ import annotations

import inspect
from typing import Any

VERSIONS = ("0.31.", "0.32.")
"""Beginnings of the versions of vLLM that the plugin was run with."""
PROPOSER = "sdtune_vllm.proposer.SelfDraft"
PROPOSING = (
    "self",
    "scheduler_output",
    "sampled_token_ids",
    "sampling_metadata",
    "hidden_states",
    "sample_hidden_states",
    "aux_hidden_states",
    "spec_decode_metadata",
    "common_attn_metadata",
    "slot_mappings",
)
"""Parameters of `GPUModelRunner.propose_draft_token_ids`."""


class _State:
    """What `register` has done in this process."""

    problem: str | None = "the plugin was not loaded: VLLM_PLUGINS, if it is set, has to name sdtune"


def problem() -> str | None:
    """Return why profiles cannot be drafted in this process, or None. Without the changes, no token would be drafted."""
    return _State.problem


def register() -> None:
    """Change vLLM's model runner, once in a process; of a version that does not fit, only `problem` tells."""
    if _State.problem is None:
        return
    import vllm
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _State.problem = _misfit(vllm.__version__, VllmConfig, GPUModelRunner)
    if _State.problem is None:
        _reserve_slots(VllmConfig)
        _hand_over(GPUModelRunner)


def _misfit(version: str, config: Any, runner: Any) -> str | None:
    if not version.startswith(VERSIONS):
        return f"vLLM {version} was not run with this plugin: it takes {' and '.join(f'{each}x' for each in VERSIONS)}"
    if not isinstance(inspect.getattr_static(config, "num_lookahead_tokens", None), property):
        return "vLLM's VllmConfig has no property num_lookahead_tokens"
    for name, parameters in (
        ("propose_draft_token_ids", PROPOSING),
        ("_input_fits_in_drafter", ("self", "common_attn_metadata")),
        ("capture_model", ("self",)),
    ):
        if (reason := differs(runner, name, parameters)) is not None:
            return reason
    return None


def differs(owner: Any, name: str, parameters: tuple[str, ...]) -> str | None:
    """Return why a function of vLLM's class or module `owner` does not fit, or None."""
    function = getattr(owner, name, None)
    if function is not None and tuple(inspect.signature(function).parameters) == parameters:
        return None
    where = owner.__name__.rpartition(".")[2]
    return f"vLLM's {where}.{name} has other parameters than in the versions that this plugin was run with"


def is_ours(config: Any) -> bool:
    """Return True if an engine of this `VllmConfig` drafts by a profile."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method == "custom_class" and speculative.model == PROPOSER


def _reserve_slots(config: Any) -> None:
    """Have the scheduler reserve slots for the drafts: without them, drafts are written into blocks of other requests."""
    own = config.num_lookahead_tokens.fget

    def num_lookahead_tokens(self: Any) -> int:
        return int(self.num_speculative_tokens if is_ours(self) else own(self))

    config.num_lookahead_tokens = property(num_lookahead_tokens)


def _hand_over(runner: Any) -> None:
    own_init, own_propose, own_fits = runner.__init__, runner.propose_draft_token_ids, runner._input_fits_in_drafter
    own_capture = runner.capture_model

    def __init__(self: Any, vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> None:
        own_init(self, vllm_config, device, *args, **kwargs)
        if is_ours(vllm_config) and self.drafter.reads_states:
            self.use_aux_hidden_state_outputs = True  # as for EAGLE-3: the states at the exit of each pass

    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled_token_ids: Any, *rest: Any) -> Any:
        if not is_ours(self.vllm_config):
            return own_propose(self, scheduler_output, sampled_token_ids, *rest)
        given = dict(zip(PROPOSING[3:], rest, strict=True))
        return self.drafter.draft(
            self, scheduler_output, sampled_token_ids, given["aux_hidden_states"], given["slot_mappings"]
        )

    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        # One text near the limit would replace the drafts of the whole batch by zeros; ours are limited one by one.
        return common_attn_metadata is not None if is_ours(self.vllm_config) else own_fits(self, common_attn_metadata)

    def capture_model(self: Any) -> Any:
        memory = own_capture(self)
        if is_ours(self.vllm_config):
            self.drafter.record(self)
        return memory

    runner.__init__ = __init__
    runner.capture_model = capture_model
    runner.propose_draft_token_ids = propose_draft_token_ids
    runner._input_fits_in_drafter = _input_fits_in_drafter
