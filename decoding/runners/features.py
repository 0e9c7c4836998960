"""Optional features of the static runner: all off by default, none measured on a GPU yet.

The expected savings are estimates for an 8B model in bfloat16 on one H100 (our formulation). A feature changes how
passes are computed, never which tokens are written: greedy output still equals plain decoding, up to numerical ties.
Turn features on where a target is made: `Target(model, partial(StaticRunner, features=SpeedFeatures(...)))`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpeedFeatures:
    """The features that are on. Raises `ValueError` for numbers below 1."""

    fused_projections: bool = False
    """Multiply by the query, key and value weights at once, and by the gate and up weights at once.

    The weights become views of one buffer, so that nothing is stored twice. Should save about 14 µs per layer and token: fewer,
    larger matrix products.
    """
    coordinate_descent: bool = False
    """Let inductor tune its kernels by coordinate descent (`coordinate_descent_tuning`), on CUDA only.

    Matrix products with a single position become tuned reductions. Should save about 16 µs per layer and token, and makes
    compilation slower.
    """
    varlen_attention: bool = False
    """Attend to the used part of the whole storage (`torch.nn.attention.varlen`), without masks, on CUDA only.

    One recording per width serves every context length, and long contexts are split among the processors. Should save about 5 µs
    per layer and token at short contexts and 30 µs at 4,000 tokens.
    """
    draft_vocabulary: int | None = None
    """Number of tokens that drafts choose from: the most frequent ones (FR-Spec, arXiv 2502.14856; EAGLE-3); None for all.

    Verification always uses the whole vocabulary; rules see the draft's distribution over these tokens. Drafts read a copy of these
    rows of the LM head: 268 MB for 32,768 rows of 4,096 numbers in bfloat16. A model whose LM head is not a plain linear layer is
    left alone. Should save about 0.3 ms per drafted token with a vocabulary of 128k.
    """
    token_counts: tuple[int, ...] | None = None
    """Occurrences of each token id, which rank the tokens of `draft_vocabulary`; None ranks them by id."""
    plain_chain: int | None = None
    """Number of tokens that plain greedy decoding writes in one recording before the host looks; None for one at a time.

    Should save the host's share of a token, about 0.1 ms.
    """
    look_every: int | None = None
    """Number of tokens that are drafted before a rule looks at their confidences together; None for one at a time.

    Drafts and decisions stay the same; passes after the rule's stop are wasted. Should save a wait per drafted token, about 0.1 ms.
    """
    whole_rounds: bool = False
    """Record a round of known length at once: draft, verification and acceptance.

    Only greedy drafts that skip layers, exits without a head among them, of one sequence; the verification reuses no prefix.
    Should save the host's share of a round, about 0.2 ms.
    """

    def __post_init__(self) -> None:
        for name in ("draft_vocabulary", "plain_chain", "look_every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {number}")


NO_FEATURES = SpeedFeatures()
"""What a runner does by default."""
