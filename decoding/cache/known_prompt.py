"""What the target has computed of a prompt, kept so that later decodings of the same prompt need not read it again."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import DynamicCache

from decoding.cache.earlier_turns import EarlierTurns
from decoding.cache.kv_cache import KVCache


class KnownPrompt:
    """Keys, values and last logits of a prompt: kept by the first request that carries this, recalled by later ones.

    They are those of one target with one runner, bit for bit what it would compute again. On a CPU, reading a prompt can take as
    long as decoding the answer, and a search decodes the same few prompts with every candidate.
    """

    def __init__(self) -> None:
        self._turns = EarlierTurns(DynamicCache())
        self._logits: Tensor | None = None
        self.seconds = 0.0
        """Seconds that reading the prompt took."""

    @property
    def is_read(self) -> bool:
        return self._logits is not None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        kept = [tensor for layer in self._turns.past.layers for tensor in (layer.keys, layer.values)]
        return sum(tensor.nbytes for tensor in kept) + (0 if self._logits is None else self._logits.nbytes)

    def keep(self, cache: KVCache, logits: Tensor) -> None:
        """Keep what a cache that has read the prompt, and nothing else, holds, and the logits [1, vocabulary] after it."""
        self._turns.store(cache)
        self._logits = logits.clone()

    def recall(self, cache: KVCache) -> Tensor:
        """Write the keys and values into an empty cache, and return the logits [1, vocabulary] after the prompt."""
        assert self._logits is not None, "a prompt that was read"
        self._turns.load(cache)
        return self._logits
