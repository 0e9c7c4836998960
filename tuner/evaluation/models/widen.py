"""Widening: a model that computes what a trained small one computes, and costs what a wide one costs.

Acceptance, entropy and redundancy of layers stay the trained model's, so searches and decoders can be measured at sizes
that nobody trained for the purpose. Figures of such a model are always reported as widened.

The trained model is embedded in a random wide one, and everything else is silenced (our formulation). Added dimensions of
the hidden states always hold zero: their columns of the embedding and their rows of `o_proj` and `down_proj` are zero. Added
heads and MLP neurons compute with random weights, and their columns of `o_proj` and `down_proj` are zero. Weights that only
ever multiply zeros stay random, so no weight matrix is trivial as a whole. Five things make it exact:

* RMSNorm takes its mean over H dimensions instead of h: gains are multiplied by sqrt(h / H) and epsilon by h / H.
* A head longer by a factor m keeps the trained rotary frequencies: pair k among d has the frequency of pair m * k among
  m * d. The other dimensions of its queries are zero, and its queries grow by sqrt(m) against attention's scaling.
* Tied embeddings are untied: every pass reads the whole head either way, and most wide models have an untied one.
* Added layers have zero `o_proj` and `down_proj`: identities that cost a layer. They are spread evenly, so that an exit is as
  deep, relative to the model, as it was. A draft that skips only them is always accepted, as no draft of a real model is: with
  a quarter of added layers this alone is worth up to a third, which figures of such a model must say.
* A padding token's logit is the mean of the trained logits, minus a positive number: below the largest logit at every state,
  so greedy output is the trained model's. The number is 2,048 over the root mean square of the trained hidden states:
  padding takes a share of 1e-5 or less on the demo model, so sampling, entropy and confidence are nearly the trained model's.
  LM heads have no bias: the number comes from one added dimension of constant value (`layout.ConstantDimension`).

In float32 the logits are the trained model's up to rounding. In bfloat16 activations round otherwise in a wide model, and so do
its gains unless H / h is a power of 4. ConfLayers' sublayer entropy is taken over the hidden dimensions, so the zeros show in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from decoding.errors import first_line
from decoding.exit_heads import (
    FEATURE_HEAD,
    FEATURE_SCHEMA,
    HeadFacts,
    head_name,
    load_exit_head,
    read_facts,
    save_head,
)
from decoding.fingerprint import fingerprint
from decoding.target import FeatureHead, Target
from tuner.evaluation.models.layout import JOIN, Layout, wide_epsilon
from tuner.evaluation.models.widths import WidenError, Widths, check_widths

ORIGIN_KEY = "sdtune_widened_from"
"""Key in the configuration of a widened model that identifies its source weights."""


def widen(
    model: PreTrainedModel,
    widths: Widths,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
    on_parameter: Callable[[], None] = lambda: None,
) -> PreTrainedModel:
    """Return a model of `widths` that computes what `model`, a LlamaForCausalLM, computes.

    `on_parameter` is called once per parameter. The random weights depend on dtype, device and seed; the output does not.
    Raises `WidenError` if `model` does not fit into `widths`.
    """
    check_architecture(model.config)
    check_widths(model.config, widths)
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
        torch.manual_seed(seed)
        wide = AutoModelForCausalLM.from_config(_wide_config(model, widths), dtype=dtype, trust_remote_code=False)
    layout = Layout(model.config, wide.config, place)
    narrow = model.state_dict()  # the head of tied embeddings among them
    for name, parameter in wide.state_dict().items():
        if (source := layout.source_name(name)) is None:
            layout.silence(name, parameter)
        else:
            layout.embed(name, parameter, narrow[source])
        on_parameter()
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval()


def check_architecture(config: object) -> None:
    """Raise `WidenError` for any model but a Llama: other architectures have other parts to silence."""
    if not isinstance(config, LlamaConfig):
        raise WidenError(f"only a LlamaForCausalLM can be widened, got a model of {type(config).__name__}")


def _wide_config(model: PreTrainedModel, widths: Widths) -> LlamaConfig:
    config = copy.deepcopy(model.config)
    identity = fingerprint(model)
    origin = {"weights_sha256": identity.weights_sha256, "config_sha256": identity.config_sha256}
    changes = {
        **asdict(widths),
        "rms_norm_eps": wide_epsilon(config, widths),
        "tie_word_embeddings": False,
        ORIGIN_KEY: {**origin, **asdict(Widths.of(config))},
    }
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def widen_head(path: Path, narrow: Target, wide: Target, folder: Path) -> Path:
    """Widen the exit head at `path` of the model `narrow`, write it into `folder` for the model `wide`, and return its path.

    In a model with added layers the exit is the one that computes the same, and the file is named after it.
    It computes what the trained head computes, so the facts on its training are kept. Raises `ExitHeadError` for a file that
    is not a head of `narrow`, or a folder that cannot be written.
    """
    facts = read_facts(path)
    narrow_head = load_exit_head(path, narrow, facts.exit_layer)
    trained, head = narrow_head.block.state_dict(), wide.new_exit_head(narrow_head.vocabulary)
    layout = Layout(narrow.config, wide.config, wide.device)
    exit_layer = layout.layers.depth(facts.exit_layer)
    for name, parameter in head.block.state_dict().items():
        layout.embed(name, parameter, trained[name])
    identity = fingerprint(wide.model)
    changes = {
        "config_sha256": identity.config_sha256,
        "weights_sha256": identity.weights_sha256,
        "exit_layer": exit_layer,
        "num_layers": wide.num_layers,
    }
    save_head(folder / head_name(exit_layer), head, facts.model_copy(update=changes))
    return folder / head_name(exit_layer)


def widen_feature_head(head: FeatureHead, narrow: Target, wide: Target, folder: Path) -> Path:
    """Widen a feature head of the model `narrow`, write it into `folder` for the model `wide`, and return its path.

    Its two norms keep their epsilon, which weighs more on a wider state: it drafts nearly what the trained head drafts. Raises
    `ExitHeadError` if the folder cannot be written.
    """
    trained, widened = head.block.state_dict(), wide.new_feature_head(head.vocabulary)
    layout = Layout(narrow.config, wide.config, wide.device)
    token_size = float(narrow.model.get_input_embeddings().weight.detach().float().square().mean().sqrt())
    for name, parameter in widened.block.state_dict().items():
        if name.split(".")[-2] == JOIN:
            layout.embed_join(parameter, trained[name], token_size)
        else:
            layout.embed(name, parameter, trained[name])
    identity = fingerprint(wide.model)
    facts = HeadFacts(
        schema=FEATURE_SCHEMA,
        exit_layer=wide.num_layers,
        num_layers=wide.num_layers,
        architecture=type(wide.model).__name__,
        config_sha256=identity.config_sha256,
        weights_sha256=identity.weights_sha256,
    )
    save_head(folder / FEATURE_HEAD, widened, facts)
    return folder / FEATURE_HEAD


def num_parameters(model: PreTrainedModel) -> int:
    """Return the number of values in the weights; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def describe(source: PreTrainedModel, wide: PreTrainedModel) -> str:
    """Return how many parameters were widened to how many, and how many layers and tokens of the wide model do nothing."""
    before, after = Widths.of(source.config), Widths.of(wide.config)
    layers, tokens = after.num_hidden_layers - before.num_hidden_layers, after.vocab_size - before.vocab_size
    idle = [f"{layers} of {after.num_hidden_layers} layers are identities"] * bool(layers)
    idle += [f"{tokens:,} of {after.vocab_size:,} tokens are padding"] * bool(tokens)
    size = num_parameters(wide)
    return f"{num_parameters(source):,} parameters widened to {size:,} ({', '.join([f'{size / 1e9:.2f} B', *idle])})"


def load_source(folder: Path) -> PreTrainedModel:
    """Return the model to widen, in float32. Raises `WidenError` if there is none or it is not a Llama."""
    try:
        check_architecture(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    except (OSError, ValueError, KeyError) as cause:
        raise WidenError(f"cannot load the model {folder}: {first_line(cause)}") from None
