"""The sizes of a wide model: presets, completion, and the check that a trained model fits into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from transformers import LlamaConfig

from decoding.errors import SdtuneError


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


def _sizes(hidden: int, intermediate: int, heads: int, key_value_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
    }


_BLOCKS_OF_8B = _sizes(4096, 14336, 32, 8, 128)
PRESETS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # Grown in every way, but still small enough for a CPU: to try out commands.
        "demo": {**_sizes(192, 512, 6, 6, 32), "num_hidden_layers": 32, "vocab_size": 8192},
        # With the demo's 24 layers: more than the caches of a CPU hold.
        "250m": _sizes(1024, 2304, 16, 8, 64),
        # With the demo's 24 layers and its vocabulary of 4,096: hardly any LM head.
        "5b": _BLOCKS_OF_8B,
        # Every size of Llama-3.1-8B: 8,030,261,248 parameters.
        "llama-8b-like": {**_BLOCKS_OF_8B, "num_hidden_layers": 32, "vocab_size": 128256},
    }
)
"""Sizes by name; those that a preset lacks are the source's."""


def complete_widths(config: LlamaConfig, preset: str | None, given: Mapping[str, int | None]) -> Widths:
    """Return the widths: those `given`, then the preset's, then heads of the source's length and group size.

    Layers and vocabulary are the source's unless given. Raises `WidenError` if another size is missing.
    """
    sizes = dict(PRESETS[preset]) if preset else {}
    sizes |= {name: size for name, size in given.items() if size is not None}
    for name in ("hidden_size", "intermediate_size"):
        if name not in sizes:
            raise WidenError(f"the wide model needs a {name}: give --{name.replace('_', '-')} or --preset")
    for name in ("head_dim", "num_hidden_layers", "vocab_size"):
        sizes.setdefault(name, getattr(config, name))
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
    if wide.vocab_size > source.vocab_size and wide.hidden_size == source.hidden_size:
        raise WidenError("a larger vocabulary needs a larger hidden_size: padding is kept down by an added dimension")
