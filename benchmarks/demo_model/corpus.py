"""The demo model's corpus: source files of the running interpreter's standard library, their tokens and windows."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
NOT_LIBRARY = ("site-packages", "/test", "encodings", "idlelib", "pydoc_data", "lib2to3", "turtledemo")
LIBRARY = Path(sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True)
class Corpus:
    """Source files below `LIBRARY` to train on and to hold out."""

    training_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]


def library_corpus(*, with_tests: bool, num_held_out: int = 40) -> Corpus:
    """Return the standard library, shuffled with a fixed seed, its first files held out; the `test` package only trains."""
    library = sorted(path for path in LIBRARY.rglob("*.py") if _is_library(path.relative_to(LIBRARY)))
    random.Random(0).shuffle(library)
    held_out, training = library[:num_held_out], library[num_held_out:]
    if with_tests:
        tests = sorted((LIBRARY / "test").rglob("*.py"))
        if not tests:
            raise ValueError("this interpreter comes without its `test` package: install it, or train with --no-tests")
        training += [path for path in tests if "data" not in path.relative_to(LIBRARY).parts]
    return Corpus(tuple(without_copies(training, held_out)), tuple(held_out))


def _is_library(relative: Path) -> bool:
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
    held_lines = [lines for lines in map(_distinct_lines, texts) if len(lines) >= 10]

    def is_copy(text: str) -> bool:
        lines = _distinct_lines(text)
        if text in texts or len(lines) < 10:
            return text in texts
        return any(len(lines & held) > share * min(len(lines), len(held)) for held in held_lines)

    return [path for path in files if not is_copy(read_source(path) or "")]


def _distinct_lines(text: str) -> set[str]:
    """Return the lines that are long enough to identify a file."""
    return {stripped for line in text.splitlines() if len(stripped := line.strip()) > 8}


def train_tokenizer(files: Sequence[Path], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of the training files; token 0 begins every file and ends every output."""
    bpe = ByteLevelBPETokenizer()
    texts = (text for path in files if (text := read_source(path)) is not None)
    bpe.train_from_iterator(texts, vocab_size=vocabulary_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def encode(tokenizer: PreTrainedTokenizerFast, files: Sequence[Path]) -> Tensor:
    """Return the concatenated files as token ids [length] (int32); token 0 begins each file."""
    texts = [text for path in files if (text := read_source(path)) is not None]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (0, *ids)], dtype=torch.int32)


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the bytes per token of a byte-level BPE [vocabulary]; its alphabet has one character per byte."""
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return torch.tensor([0 if index in special else len(name) for index, name in enumerate(names)])


def window_starts(num_tokens: int, context: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Return the positions at which the windows of `step` begin.

    Each epoch cuts the corpus anew into adjoining windows and takes each once. Step and seed alone decide a batch, so a
    resumed run sees the batches of an uninterrupted one. Raises ValueError for a corpus of less than two windows.
    """
    num_windows = (num_tokens - context) // context
    if num_windows < 1:
        raise ValueError(f"the corpus has {num_tokens} tokens; windows of {context} need at least {2 * context}")
    starts = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, index = divmod(position, num_windows)
        generator = random.Random(f"{seed}/{epoch}")
        offset, order = generator.randrange(context), list(range(num_windows))
        generator.shuffle(order)
        starts.append(offset + order[index] * context)
    return [min(start, num_tokens - context - 1) for start in starts]


def windows(tokens: Tensor, starts: Sequence[int], context: int) -> Tensor:
    """Return token ids [windows, context + 1] (int64): inputs and, shifted by one, targets."""
    return torch.stack([tokens[start : start + context + 1] for start in starts]).long()
