"""The demo model's corpus: source files of the running interpreter's standard library, their tokens and windows."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tuner.evaluation.models.demo_model.recipe import CorpusName, Recipe, RecipeError

END_OF_TEXT = "<|endoftext|>"
NOT_LIBRARY = ("site-packages", "/test", "encodings", "idlelib", "pydoc_data", "lib2to3", "turtledemo")
CORPORA: tuple[str, ...] = get_args(CorpusName)


@dataclass(frozen=True)
class Corpus:
    """Source files to train on and to hold out; paths lie below `root`."""

    name: str
    root: Path
    training_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]
    num_duplicates: int = 0

    @property
    def held_out_names(self) -> list[str]:
        """Held-out files as paths relative to `root`."""
        return [path.relative_to(self.root).as_posix() for path in self.held_out_files]


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def library_corpus(name: str, root: Path | None = None, num_held_out: int = 40) -> Corpus:
    """Return the standard library below `root`, shuffled with a fixed seed, its first files held out.

    The corpus "library+tests" adds the `test` package to the training files. Raises `RecipeError` for another name, or if
    the interpreter comes without tests.
    """
    if name not in CORPORA:
        raise RecipeError(f"unknown corpus {name!r}; valid: {', '.join(CORPORA)}")
    root = root or standard_library()
    library = sorted(path for path in root.rglob("*.py") if is_library(path.relative_to(root)))
    random.Random(0).shuffle(library)
    held_out, training = library[:num_held_out], library[num_held_out:]
    if name == "library+tests":
        tests = sorted((root / "test").rglob("*.py"))
        if not tests:
            raise RecipeError(
                "this interpreter comes without its `test` package; install it, or use the corpus 'library'"
            )
        training += [path for path in tests if "data" not in path.relative_to(root).parts]
    distinct = without_copies(training, held_out)
    return Corpus(name, root, tuple(distinct), tuple(held_out), len(training) - len(distinct))


def is_library(relative: Path) -> bool:
    """Return whether a source file is code of the library: no test, table, application or installed package."""
    return not any(part in f"/{relative.as_posix()}" for part in NOT_LIBRARY)


def read_source(path: Path) -> str | None:
    """Return the text of a source file, or None if it is not UTF-8, as a few tests are on purpose."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def without_copies(files: Sequence[Path], held_out: Sequence[Path], share: float = 0.5) -> list[Path]:
    """Return the files that are not copies of a held-out one.

    A copy has the same text, or shares more than `share` of the distinct lines of either file. Files of fewer than ten
    distinct lines are compared as texts only: their lines (imports, `pass`) are common.
    """
    texts = {read_source(path) or "" for path in held_out} - {""}
    held_lines = [lines for lines in map(distinct_lines, texts) if len(lines) >= 10]

    def is_copy(text: str) -> bool:
        lines = distinct_lines(text)
        if text in texts or len(lines) < 10:
            return text in texts
        return any(len(lines & held) > share * min(len(lines), len(held)) for held in held_lines)

    return [path for path in files if not is_copy(read_source(path) or "")]


def distinct_lines(text: str) -> set[str]:
    """Return the lines that are long enough to identify a file."""
    return {stripped for line in text.splitlines() if len(stripped := line.strip()) > 8}


def train_tokenizer(files: Sequence[Path], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of the training files; token 0 begins every file and ends every text."""
    bpe = ByteLevelBPETokenizer()
    texts = (text for path in files if (text := read_source(path)) is not None)
    bpe.train_from_iterator(texts, vocab_size=vocabulary_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def encode(tokenizer: PreTrainedTokenizerFast, files: Sequence[Path]) -> Tensor:
    """Return the concatenated files as token ids [length] (int32); token 0 begins each file.

    Raises `RecipeError` if no file is readable.
    """
    texts = [text for path in files if (text := read_source(path)) is not None]
    if not texts:
        raise RecipeError("the corpus has no readable file to train on or to hold out")
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (0, *ids)], dtype=torch.int32)


def window_starts(num_tokens: int, recipe: Recipe, step: int) -> list[int]:
    """Return the positions at which the windows of `step` begin.

    Each epoch cuts the corpus anew into adjoining windows and takes each once. Step and seed alone decide a batch, so a
    resumed run sees the batches of an uninterrupted one. Raises `RecipeError` for a corpus of less than two windows.
    """
    num_windows = (num_tokens - recipe.context) // recipe.context
    if num_windows < 1:
        needed = 2 * recipe.context
        raise RecipeError(f"the corpus has {num_tokens} tokens; windows of {recipe.context} need at least {needed}")
    first = step * recipe.batch_size
    starts = []
    for position in range(first, first + recipe.batch_size):
        epoch, index = divmod(position, num_windows)
        offset, order = epoch_order(num_windows, recipe.context, f"{recipe.seed}/{epoch}")
        starts.append(offset + order[index] * recipe.context)
    return [min(start, num_tokens - recipe.context - 1) for start in starts]


def epoch_order(num_windows: int, context: int, seed: str) -> tuple[int, list[int]]:
    """Return the offset of an epoch's first window in tokens, and the order of its windows."""
    generator = random.Random(seed)
    offset, order = generator.randrange(context), list(range(num_windows))
    generator.shuffle(order)
    return offset, order


def windows(tokens: Tensor, starts: Sequence[int], context: int) -> Tensor:
    """Return token ids [windows, context + 1] (int64): inputs and, shifted by one, targets."""
    return torch.stack([tokens[start : start + context + 1] for start in starts]).long()
