"""The recipe of the demo model: a small Llama-style code model made for early exits and skipped layers.

Trained on the Python standard library's own sources with layer dropout that grows with depth and a loss at a random exit
(LayerSkip, arXiv 2404.16710), by Muon on the layers' matrices and AdamW on the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from decoding.documents.strict_yaml import Document
from decoding.errors import SdtuneError
from tuner.fields import TRAINING, Extra

if TYPE_CHECKING:
    from transformers import LlamaConfig

ARCHITECTURE: Extra = {"group": "Architecture"}
CorpusName = Literal["library", "library+tests"]


class RecipeError(SdtuneError):
    """A run that cannot start or continue as asked."""


class Recipe(Document):
    """Settings that decide the trained weights, apart from the files, the device and the weights to start from."""

    num_layers: int = Field(24, ge=2, description="Blocks; an exit needs one after it.", json_schema_extra=ARCHITECTURE)
    hidden_size: int = Field(160, ge=1, description="Width of the hidden states.", json_schema_extra=ARCHITECTURE)
    num_heads: int = Field(5, ge=1, description="Attention heads.", json_schema_extra=ARCHITECTURE)
    mlp_size: int = Field(432, ge=1, description="Neurons of an MLP.", json_schema_extra=ARCHITECTURE)
    vocabulary_size: int = Field(4096, ge=1, description="Tokens of the vocabulary.", json_schema_extra=ARCHITECTURE)
    max_positions: int = Field(1024, ge=1, description="Positions of the model.", json_schema_extra=ARCHITECTURE)
    steps: int = Field(4000, ge=1, description="Training steps.", json_schema_extra=TRAINING)
    batch_size: int = Field(4, ge=1, description="Windows per step.", json_schema_extra=TRAINING)
    context: int = Field(
        768, ge=1, description="Tokens per window; more than prompt and continuation need.", json_schema_extra=TRAINING
    )
    muon_rate: float = Field(0.02, description="Learning rate of Muon.", json_schema_extra=TRAINING)
    adamw_rate: float = Field(3e-3, description="Learning rate of AdamW.", json_schema_extra=TRAINING)
    weight_decay: float = Field(0.02, description="Weight decay of the layers' matrices.", json_schema_extra=TRAINING)
    rate_scale: float = Field(
        1.0, description="Factor of both learning rates; below 1 for a continued run.", json_schema_extra=TRAINING
    )
    warmup_steps: int = Field(60, ge=0, description="Steps of linear warm-up.", json_schema_extra=TRAINING)
    hold_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the steps before the learning rates fall linearly to 0.",
        json_schema_extra=TRAINING,
    )
    gradient_norm: float = Field(1.0, gt=0, description="Largest norm of the gradient.", json_schema_extra=TRAINING)
    max_layer_dropout: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Probability of skipping the last block; 0, with --exit-weight 0, trains an ordinary model.",
        json_schema_extra=TRAINING,
    )
    exit_weight: float = Field(0.3, ge=0, description="Weight of the early-exit loss.", json_schema_extra=TRAINING)
    seed: int = Field(0, description="Seed of weights, windows and layer dropout.", json_schema_extra=TRAINING)
    checkpoint_every: int = Field(200, ge=1, description="Steps between checkpoints.", json_schema_extra=TRAINING)
    evaluate_every: int = Field(1000, ge=1, description="Steps between held-out losses.", json_schema_extra=TRAINING)
    curve_every: int = Field(20, ge=1, description="Steps per row of the training curve.", json_schema_extra=TRAINING)

    @model_validator(mode="after")
    def _context_fits(self) -> Recipe:
        if self.context > self.max_positions:
            raise ValueError(f"context must be within 1..{self.max_positions} positions, got {self.context}")
        return self

    def llama_config(self) -> LlamaConfig:
        """Return the architecture in transformers' terms."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocabulary_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.mlp_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            rms_norm_eps=1e-5,
        )

    def layer_dropout(self, index: int) -> float:
        """Return the probability of skipping block `index`: exponential in depth, 0 at the first (LayerSkip, section 4.1)."""
        return self.max_layer_dropout * (2 ** (index / (self.num_layers - 1)) - 1)

    def rate_factor(self, step: int) -> float:
        """Return the factor of both learning rates at `step`: linear warm-up, plateau, linear decay to 0."""
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        decay = min(1.0, (1 - step / self.steps) / max(1 - self.hold_share, 1e-9))
        return self.rate_scale * warmup * decay
