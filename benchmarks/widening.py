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
  LM heads have no bias: the number comes from one added dimension of constant value (`ConstantDimension`).

In float32 the logits are the trained model's up to rounding. In bfloat16 activations round otherwise in a wide model, and so do
its gains unless H / h is a power of 4. ConfLayers' sublayer entropy is taken over the hidden dimensions, so the zeros show in it.

    python -m benchmarks.widening --model configs/demo/model --preset 250m --heads configs/demo/heads --out widened/demo-250m
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from benchmarks.task import arguments
from decoding.errors import SdtuneError
from decoding.exit_heads import head_name, load_exit_head, new_exit_head, read_facts, save_head
from decoding.fingerprint import fingerprint
from decoding.target import Target
from tuner.inputs.models import DTYPES

SILENT_OUTSIDE = frozenset({"embed_tokens", "o_proj", "down_proj"})
FINAL_NORM = "norm"
NORMS = frozenset({"input_layernorm", "post_attention_layernorm", FINAL_NORM})
PADDING_GAIN = 64.0
"""Gain of the constant dimension in the final norm; it is 0 in all others."""
PADDING_PUSH = 2048.0
"""Logits that padding tokens lie below the mean of the others if the trained hidden states have a root mean square of 1.

The last states of the demo model reach 120. Far lower logits would be the largest of all in absolute value, and comparisons
of logits relative to the largest one would then overlook differences.
"""


class WidenError(SdtuneError):
    """A model that cannot be widened as asked, or a folder that cannot be written."""


@dataclass(frozen=True)
class Widths:
    """Sizes of a Llama that widening changes."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    vocab_size: int

    @classmethod
    def of(cls, config: LlamaConfig) -> Widths:
        """Return the sizes of a configuration."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key-value head."""
        return self.num_attention_heads // self.num_key_value_heads


def _sizes(*sizes: int) -> dict[str, int]:
    return dict(zip(Widths.__dataclass_fields__, sizes, strict=False))


PRESETS: dict[str, dict[str, int]] = {
    # Grown in every way, but still small enough for a CPU: to try out commands.
    "demo": _sizes(192, 512, 6, 6, 32, 32, 8192),
    # With the demo's 24 layers: more than the caches of a CPU hold.
    "250m": _sizes(1024, 2304, 16, 8, 64),
    # With the demo's 24 layers and its vocabulary of 4,096: hardly any LM head.
    "5b": _sizes(4096, 14336, 32, 8, 128),
    # Every size of Llama-3.1-8B: 8,030,261,248 parameters.
    "llama-8b-like": _sizes(4096, 14336, 32, 8, 128, 32, 128256),
}
"""Sizes by name; those that a preset lacks are the source's."""


def widths_of(preset: str, config: LlamaConfig) -> Widths:
    """Return the sizes of a preset for a source of `config`; raise `WidenError` unless the source can be embedded in them."""
    source, wide = Widths.of(config), Widths(**{**asdict(Widths.of(config)), **PRESETS[preset]})
    smaller = [name for name, size in asdict(wide).items() if size < getattr(source, name)]
    problems = {
        f"{', '.join(smaller)} would get smaller": bool(smaller),
        "fewer query heads would share a key-value head": wide.group_size < source.group_size,
        "the length of a head is no multiple of the source's": wide.head_dim % source.head_dim != 0,
        "longer heads need rotary embeddings of type default": wide.head_dim != source.head_dim
        and config.rope_parameters["rope_type"] != "default",
        # Padding is kept down by an added dimension.
        "a larger vocabulary needs a larger hidden_size": wide.vocab_size > source.vocab_size
        and wide.hidden_size == source.hidden_size,
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        raise WidenError(f"a model of {asdict(source)} cannot be widened to {preset}: {'; '.join(found)}")
    return wide


@dataclass(frozen=True)
class ConstantDimension:
    """An added dimension of the hidden states with the same value at each position, for a padded vocabulary.

    The norms of the blocks have gain 0 for it, so no block sees it. Its square is a constant summand of the mean square
    in each RMSNorm, which a smaller epsilon makes up for.
    """

    index: int
    value: float
    """A power of two, so that no precision rounds it."""

    @classmethod
    def of(cls, narrow: LlamaConfig, wide: Widths) -> ConstantDimension | None:
        """Return the dimension, or None if the vocabulary is not padded.

        Its square takes at most half of what the epsilon of the source adds to the sum of squares.
        """
        if wide.vocab_size == narrow.vocab_size:
            return None
        room = narrow.rms_norm_eps * narrow.hidden_size / 2
        return cls(narrow.hidden_size, 2.0 ** math.floor(math.log2(room) / 2))


def wide_epsilon(narrow: LlamaConfig, wide: Widths) -> float:
    """Return the RMSNorm epsilon of the wide model."""
    constant = ConstantDimension.of(narrow, wide)
    taken = constant.value**2 if constant else 0.0
    return (narrow.rms_norm_eps * narrow.hidden_size - taken) / wide.hidden_size


@dataclass(frozen=True)
class LayerMap:
    """The trained layers among the layers of a deeper model, spread evenly; the added ones compute the identity."""

    num_trained: int
    num_layers: int

    def depth(self, num_trained: int) -> int:
        """Return the number of layers of the deep model that hold the first `num_trained` trained ones.

        An exit after them is as deep, relative to the whole model, as it was in the trained model.
        """
        return num_trained * self.num_layers // self.num_trained

    @property
    def trained(self) -> dict[int, int]:
        """The trained layer by layer of the deep model; added layers are missing."""
        return {self.depth(index): index for index in range(self.num_trained)}


class Layout:
    """Positions of a narrow model's coordinates in a wide one."""

    def __init__(self, narrow: LlamaConfig, wide: LlamaConfig, device: torch.device) -> None:
        source, target = Widths.of(narrow), Widths.of(wide)
        self.layers = LayerMap(source.num_hidden_layers, target.num_hidden_layers)
        self._constant = ConstantDimension.of(narrow, target)
        self._vocabulary = source.vocab_size
        self.gain = (source.hidden_size / target.hidden_size) ** 0.5
        self.query_gain = (target.head_dim / source.head_dim) ** 0.5
        heads = range(source.num_attention_heads)
        group_size = source.group_size
        query_heads = [head // group_size * target.group_size + head % group_size for head in heads]
        inside = _inside_head(source.head_dim, target.head_dim)

        def at(indices: Tensor) -> Tensor:
            return indices.to(device)

        def of_heads(indices: list[int], dims: Tensor) -> Tensor:
            return at((torch.tensor(indices)[:, None] * target.head_dim + dims).flatten())

        hidden = at(torch.arange(source.hidden_size))
        neurons = at(torch.arange(source.intermediate_size))
        vocabulary = at(torch.arange(narrow.vocab_size))
        queries = of_heads(query_heads, inside)
        keys = of_heads(list(range(source.num_key_value_heads)), inside)
        self.hidden = hidden
        self.whole_query_heads = of_heads(query_heads, torch.arange(target.head_dim))
        self._rows_and_columns = {
            "embed_tokens": (vocabulary, hidden),
            "lm_head": (vocabulary, hidden),
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (neurons, hidden),
            "up_proj": (neurons, hidden),
            "down_proj": (hidden, neurons),
        }

    def source_name(self, name: str) -> str | None:
        """Return the narrow model's name of the wide model's parameter `name`, or None in an added layer."""
        head, layers, rest = name.partition("layers.")
        if not layers:
            return name
        index, _, inside = rest.partition(".")
        trained = self.layers.trained.get(int(index))
        return None if trained is None else f"{head}layers.{trained}.{inside}"

    @torch.no_grad()
    def silence(self, name: str, wide: Tensor) -> None:
        """Make the parameter `name` part of a layer that adds nothing to the hidden states."""
        module = name.split(".")[-2]
        if module in SILENT_OUTSIDE:
            wide.zero_()
        elif module in NORMS and self._constant:
            wide[self._constant.index] = 0

    @torch.no_grad()
    def embed(self, name: str, wide: Tensor, narrow: Tensor) -> None:
        """Write the parameter `name` of the narrow model into the wide model's, which holds random values."""
        module, kind = name.split(".")[-2:]
        if module in NORMS:
            wide[self.hidden] = _like(wide, narrow.float() * self.gain)
            if self._constant:
                wide[self._constant.index] = PADDING_GAIN if module == FINAL_NORM else 0.0
            return
        rows, columns = self._rows_and_columns[module]
        if kind == "bias":
            wide, narrow, columns = wide[:, None], narrow[:, None], columns[:1]
        if module in SILENT_OUTSIDE:
            wide.zero_()
        if module == "q_proj":
            wide[self.whole_query_heads[:, None], columns] = 0
            narrow = narrow.float() * self.query_gain
        wide[rows[:, None], columns] = _like(wide, narrow)
        if self._constant and module in ("embed_tokens", "lm_head"):
            self._pad_vocabulary(module, wide, narrow, self._constant)

    def _pad_vocabulary(self, module: str, wide: Tensor, narrow: Tensor, constant: ConstantDimension) -> None:
        """Fill the rows of padding tokens: a logit below the mean of all others, and the embeddings of trained tokens."""
        size, hidden = self._vocabulary, narrow.shape[1]
        if module == "embed_tokens":
            padding = torch.arange(size, wide.shape[0], device=wide.device) % size
            wide[size:, :hidden] = _like(wide, narrow)[padding]
            wide[:, constant.index] = constant.value
        else:
            wide[size:, :hidden] = _like(wide, narrow.float().mean(0))
            wide[:size, constant.index] = 0
            wide[size:, constant.index] = -PADDING_PUSH * self.gain / (PADDING_GAIN * constant.value)


def _inside_head(narrow: int, wide: int) -> Tensor:
    """Return the dimensions of a wide head that rotate at a narrow head's frequencies; pairs are half a head apart."""
    pairs = torch.arange(narrow // 2) * (wide // narrow)
    return torch.cat([pairs, pairs + wide // 2])


def _like(wide: Tensor, values: Tensor) -> Tensor:
    return values.to(wide.device, wide.dtype)


ORIGIN_KEY = "sdtune_widened_from"
"""Key in the configuration of a widened model that identifies its source weights."""


def widen(
    model: PreTrainedModel,
    widths: Widths,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> PreTrainedModel:
    """Return a model of `widths` that computes what `model`, a LlamaForCausalLM, computes.

    The random weights depend on dtype and device; the output does not.
    Raises `WidenError` for a model of another class.
    """
    if not isinstance(model.config, LlamaConfig):  # other architectures have other parts to silence
        raise WidenError(f"only a LlamaForCausalLM can be widened, got a model of {type(model.config).__name__}")
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
        torch.manual_seed(0)
        wide = AutoModelForCausalLM.from_config(_wide_config(model, widths), dtype=dtype, trust_remote_code=False)
    layout = Layout(model.config, wide.config, place)
    narrow = model.state_dict()  # the head of tied embeddings among them
    for name, parameter in wide.state_dict().items():
        if (source := layout.source_name(name)) is None:
            layout.silence(name, parameter)
        else:
            layout.embed(name, parameter, narrow[source])
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval()


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
    trained, head = narrow_head.state_dict(), new_exit_head(wide)
    layout = Layout(narrow.config, wide.config, wide.device)
    exit_layer = layout.layers.depth(facts.exit_layer)
    for name, parameter in head.state_dict().items():
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


def load_source(folder: str | Path) -> PreTrainedModel:
    """Return the model to widen, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


def main() -> None:
    """Widen a model and its exit heads, and write the folder."""
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="folder of the trained model")
    parser.add_argument("--preset", choices=PRESETS, required=True, help="llama-8b-like has the sizes of Llama-3.1-8B")
    parser.add_argument("--heads", type=Path, help="folder of the source's exit heads, to be widened into OUT/heads")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.out.exists():
        raise WidenError(f"{args.out} exists: choose another --out")
    source = load_source(args.model)
    widths = widths_of(args.preset, source.config)
    wide = widen(source, widths, dtype=DTYPES[args.dtype], device=args.device)
    wide.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model, trust_remote_code=False).save_pretrained(args.out)
    if args.heads:
        (args.out / "heads").mkdir()
        narrow_target, wide_target = Target(source), Target(wide)
        for path in sorted(args.heads.glob("*.safetensors")):
            widen_head(path, narrow_target, wide_target, args.out / "heads")
    before, size = (sum(each.numel() for each in model.parameters()) for model in (source, wide))
    layers = widths.num_hidden_layers - source.config.num_hidden_layers
    tokens = widths.vocab_size - source.config.vocab_size
    print(f"{before:,} parameters widened to {size:,} in {args.dtype}: {args.out}")
    print(
        f"{layers} of {widths.num_hidden_layers} layers are identities, {tokens:,} of {widths.vocab_size:,} tokens padding"
    )


if __name__ == "__main__":
    main()
