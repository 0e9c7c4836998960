"""A sample of the prompts, printed by dry runs exactly as the model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tuner.cli.terminal import visible

if TYPE_CHECKING:
    from tuner.inputs.prompts import Prompt

LONGEST_SHOWN = 1200
"""Characters of a prompt that are shown; of a longer one, the beginning and the end."""


def print_sample(console: Console, prompts: Sequence[Prompt], tokenizer: Any) -> None:
    """Print the first of the prompts with its special tokens, indented, after its row, length and category.

    Control characters are written out.
    """
    prompt = prompts[0]
    category = f", category {visible(prompt.category)}" if prompt.category else ""
    console.print(
        f"sample   row {prompt.row}, {len(prompt.token_ids)} tokens{category}:", highlight=False, markup=False
    )
    for line in shortened(tokenizer.decode(prompt.token_ids)).split("\n"):
        console.print(f"         {visible(line)}", highlight=False, markup=False, soft_wrap=True)


def shortened(text: str) -> str:
    """Return a text of bearable length: of a long one, the beginning and the end."""
    if len(text) <= LONGEST_SHOWN:
        return text
    half = LONGEST_SHOWN // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
