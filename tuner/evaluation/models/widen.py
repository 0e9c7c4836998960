"""Widening: a model that computes what a trained small one computes, and costs what a wide one costs.

Acceptance, entropy and redundancy of layers stay the trained model's, so searches and decoders can be measured at sizes
that nobody trained for the purpose. Figures of such a model are always reported as widened.

The trained model is embedded in a random wide one, and everything else is silenced (our formulation). Added dimensions of
the hidden states always hold zero: their columns of the embedding and their rows of `o_proj` and `down_proj` are zero. Added
heads and MLP neurons compute with random weights, and their columns of `o_proj` and `down_proj` are zero. Weights that only
ever multiply zeros stay random, so no weight matrix is trivial as a whole. Three things make it exact:

* RMSNorm takes its mean over H dimensions instead of h: gains are multiplied by sqrt(h / H) and epsilon by h / H.
* A head longer by a factor m keeps the trained rotary frequencies: pair k among d has the frequency of pair m * k among
  m * d. The other dimensions of its queries are zero, and its queries grow by sqrt(m) against attention's scaling.
* Tied embeddings are untied: every pass reads the whole head either way, and most wide models have an untied one.

In float32 the logits are the trained model's up to rounding. In bfloat16 activations round otherwise in a wide model, and so do
its gains unless H / h is a power of 4. ConfLayers' sublayer entropy is taken over the hidden dimensions, so the zeros show in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from decoding.errors import SdtuneError, first_line
from decoding.exit_heads import load_exit_head, read_facts, save_exit_head
from decoding.fingerprint import fingerprint
from decoding.target import Target
from tuner.evaluation.models.settings import Widening
from tuner.inputs.models import DTYPES
from tuner.progress import Progress

ORIGIN_KEY = "sdtune_widened_from"
"""Key in the configuration of a widened model that identifies its source weights."""
SILENT_OUTSIDE = frozenset({"embed_tokens", "o_proj", "down_proj"})
NORMS = frozenset({"input_layernorm", "post_attention_layernorm", "norm"})


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

    @classmethod
    def of(cls, config: LlamaConfig) -> Widths:
        """Return the sizes of a configuration."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key-value head."""
        return self.num_attention_heads // self.num_key_value_heads


PRESETS = {
    # 24 layers make about 250 M parameters: more than the caches of a CPU hold.
    "250m": Widths(1024, 2304, 16, 8, 64),
    # The blocks of an 8B model, which has 32 blocks and a larger vocabulary.
    "8b": Widths(4096, 14336, 32, 8, 128),
}


def complete_widths(config: LlamaConfig, preset: str | None, given: Mapping[str, int | None]) -> Widths:
    """Return the widths: those `given`, then the preset's, then heads of the source's length and group size.

    Raises `WidenError` if a size is missing.
    """
    sizes = asdict(PRESETS[preset]) if preset else {}
    sizes |= {name: size for name, size in given.items() if size is not None}
    for name in ("hidden_size", "intermediate_size"):
        if name not in sizes:
            raise WidenError(f"the wide model needs a {name}: give --{name.replace('_', '-')} or --preset")
    sizes.setdefault("head_dim", config.head_dim)
    sizes.setdefault("num_attention_heads", sizes["hidden_size"] // sizes["head_dim"])
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"] // Widths.of(config).group_size)
    return Widths(**sizes)


def check_widths(config: LlamaConfig, wide: Widths) -> None:
    """Raise `WidenError` unless a model of `config` can be embedded in a model of widths `wide`."""
    source = Widths.of(config)
    for name, size in asdict(wide).items():
        if size < getattr(source, name):
            raise WidenError(
                f"{name} {size} is smaller than the source's {getattr(source, name)}: a model only gets wider"
            )
    if wide.num_attention_heads % wide.num_key_value_heads:
        raise WidenError(
            f"{wide.num_attention_heads} heads do not divide into {wide.num_key_value_heads} key-value heads"
        )
    if wide.hidden_size % wide.num_attention_heads:
        raise WidenError(f"hidden_size {wide.hidden_size} is not a multiple of {wide.num_attention_heads} heads")
    if wide.group_size < source.group_size:
        raise WidenError(
            f"{wide.group_size} query heads share a key-value head, in the source {source.group_size}: give at least as many, by "
            "fewer key-value heads or more heads"
        )
    if wide.head_dim % source.head_dim:
        raise WidenError(f"head_dim {wide.head_dim} is not a multiple of the source's {source.head_dim}")
    if wide.head_dim != source.head_dim and (rope := config.rope_parameters["rope_type"]) != "default":
        raise WidenError(f"head_dim can change only with rotary embeddings of type default, not {rope}")


class Layout:
    """Positions of a narrow model's coordinates in a wide one."""

    def __init__(self, narrow: LlamaConfig, wide: LlamaConfig, device: torch.device) -> None:
        source, target = Widths.of(narrow), Widths.of(wide)
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

    @torch.no_grad()
    def embed(self, name: str, wide: Tensor, narrow: Tensor) -> None:
        """Write the parameter `name` of the narrow model into the wide model's, which holds random values."""
        module, kind = name.split(".")[-2:]
        if module in NORMS:
            wide[self.hidden] = _like(wide, narrow.float() * self.gain)
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


def _inside_head(narrow: int, wide: int) -> Tensor:
    """Return the dimensions of a wide head that rotate at a narrow head's frequencies; pairs are half a head apart."""
    pairs = torch.arange(narrow // 2) * (wide // narrow)
    return torch.cat([pairs, pairs + wide // 2])


def _like(wide: Tensor, values: Tensor) -> Tensor:
    return values.to(wide.device, wide.dtype)


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
        wide = AutoModelForCausalLM.from_config(_wide_config(model, widths), dtype=dtype)
    layout = Layout(model.config, wide.config, place)
    narrow = model.state_dict()  # the head of tied embeddings among them
    for name, parameter in wide.state_dict().items():
        layout.embed(name, parameter, narrow[name])
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
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / widths.hidden_size,
        "tie_word_embeddings": False,
        ORIGIN_KEY: {**origin, **asdict(Widths.of(config))},
    }
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def widen_head(path: Path, narrow: Target, wide: Target, folder: Path) -> Path:
    """Widen the exit head at `path` of the model `narrow`, write it into `folder` for the model `wide`, and return its path.

    It computes what the trained head computes, so the facts on its training are kept. Raises `ExitHeadError` for a file that
    is not a head of `narrow`, or a folder that cannot be written.
    """
    facts = read_facts(path)
    trained = load_exit_head(path, narrow, facts.exit_layer).state_dict()
    head = wide.new_exit_head()
    layout = Layout(narrow.config, wide.config, wide.device)
    for name, parameter in head.state_dict().items():
        layout.embed(name, parameter, trained[name])
    identity = fingerprint(wide.model)
    owner = {"config_sha256": identity.config_sha256, "weights_sha256": identity.weights_sha256}
    save_exit_head(folder / path.name, head, facts.model_copy(update=owner))
    return folder / path.name


def num_parameters(model: PreTrainedModel) -> int:
    """Return the number of values in the weights; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def load_source(folder: Path) -> PreTrainedModel:
    """Return the model to widen, in float32. Raises `WidenError` if there is none or it is not a Llama."""
    try:
        check_architecture(AutoConfig.from_pretrained(folder))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError) as cause:
        raise WidenError(f"cannot load the model {folder}: {first_line(cause)}") from None


def check_device(device: str) -> None:
    """Raise `WidenError` for a device that does not exist."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as cause:
        raise WidenError(f"no device {device!r} on this machine ({first_line(cause)}); try cpu or cuda") from None


def head_files(folder: Path) -> list[Path]:
    """Return the files of the exit heads in a folder. Raises `WidenError` if there are none."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WidenError(f"there is no exit head in {folder}")
    return paths


def check_out(out: Path) -> None:
    """Raise `WidenError` if `out` exists."""
    if out.exists():
        raise WidenError(f"{out} exists; choose another --out")


def write_widened(
    source: PreTrainedModel, wide: PreTrainedModel, folder: Path, out: Path, heads: Sequence[Path] = ()
) -> None:
    """Write `wide`, the tokenizer in the source's `folder`, and the widened exit heads as `out`/heads, whole or not at all.

    Raises `WidenError` if `out` exists or cannot be written, `ExitHeadError` for a head of another model.
    """
    check_out(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as beside:
            whole = Path(beside) / out.name
            wide.save_pretrained(whole)
            AutoTokenizer.from_pretrained(folder).save_pretrained(whole)
            if heads:
                narrow_target, wide_target = Target(source), Target(wide)
                (whole / "heads").mkdir()
                for path in heads:
                    widen_head(path, narrow_target, wide_target, whole / "heads")
            whole.rename(out)
    except (OSError, ValueError) as cause:
        raise WidenError(f"cannot write the widened model {out}: {first_line(cause)}") from None


def run_and_write(settings: Widening, progress: Progress) -> str:
    """Widen the model and its heads, write the folder, and return a line on what was done.

    Raises `WidenError` or `ExitHeadError` for errors of the user; then nothing remains on disk.
    """
    check_out(settings.out)
    check_device(settings.device)
    heads = head_files(settings.heads) if settings.heads else []
    source = load_source(settings.model)
    given = {name: getattr(settings, name) for name in Widths.__dataclass_fields__}
    widths = complete_widths(source.config, settings.preset, given)
    check_widths(source.config, widths)
    progress.stage("widening parameters", len(source.state_dict()))
    wide = widen(
        source,
        widths,
        dtype=DTYPES[settings.dtype],
        device=settings.device,
        seed=settings.seed,
        on_parameter=progress.advance,
    )
    write_widened(source, wide, settings.model, settings.out, heads)
    widened = f", {len(heads)} exit heads in {settings.out / 'heads'}" if heads else ""
    return (
        f"{num_parameters(source):,} parameters widened to {num_parameters(wide):,} in {settings.dtype}: "
        f"{settings.out}{widened}"
    )
