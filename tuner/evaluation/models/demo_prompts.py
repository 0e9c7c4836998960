"""The demo model's prompts: beginnings of functions, classes and files, cut from source files the model never saw.

The part `training` holds prompts for training exit heads, cut from files that the model was trained on. Deterministic: the
same files, tokenizer and seed give the same prompts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from decoding.documents.atomic_write import write_atomically
from tuner.evaluation.models.demo_model.corpus import library_corpus, read_source, standard_library
from tuner.evaluation.models.demo_model.recipe import RecipeError
from tuner.evaluation.models.settings import DemoPrompts

DEFINITION = re.compile(r"^ *(?:async def|def|class) ", re.MULTILINE)
LINE_END = re.compile(r"(?<=[^\n])\n")  # not of an empty line

# A first training stage saw `msvc9compiler.py`, which repeats most of this one: its prompts would be remembered, not continued.
NEARLY_SEEN = frozenset({"distutils/msvccompiler.py"})

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class CutPrompt:
    """Code prefix and the file it was cut from, relative to the standard library."""

    prompt: str
    file: str


@dataclass(frozen=True)
class Cut:
    """Settings of cutting prompts; lengths in tokens."""

    shortest: int = 64
    longest: int = 512
    continuation: int = 160  # real text that must follow, so that a generation can be compared with it
    most_per_file: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"lengths must be 1 <= shortest <= longest, got {self.shortest} and {self.longest}")


def cut_file(text: str, name: str, cut: Cut, count: CountTokens) -> list[str]:
    """Return up to `most_per_file` prompts of one file, in order, evenly spread and without overlap.

    Each begins with the file or with a definition, aims at a length drawn log-uniformly, and ends before a line break: the
    model's tokens join the break with the indentation after it, so a prompt ending in one would split a token.
    """
    generator = random.Random(f"{cut.seed}/{name}")
    found: list[str] = []
    free = 0
    for begin in sorted({0, *(match.start() for match in DEFINITION.finditer(text))}):
        if begin < free:
            continue
        aim = round(cut.shortest * (cut.longest / cut.shortest) ** generator.random())
        end = last_line_end(text, begin, cut.shortest, aim, count)
        # Sixteen characters a token are plenty; counting to the end of every file would take most of the time.
        if end is not None and count(text[end : end + 16 * cut.continuation]) >= cut.continuation:
            found.append(text[begin:end])
            free = end
    return evenly_spread(found, cut.most_per_file)


def last_line_end(text: str, begin: int, shortest: int, aim: int, count: CountTokens) -> int | None:
    """Return the last line end that keeps text[begin:end] within `aim` tokens, or None if that is below `shortest`."""
    best = None
    for match in LINE_END.finditer(text, begin):
        end = match.start()
        num_tokens = count(text[begin:end])
        if num_tokens > aim:
            break
        if num_tokens >= shortest:
            best = end
    return best


def evenly_spread(items: Sequence[str], most: int) -> list[str]:
    """Return at most `most` of the items, from the first to the last at equal distances."""
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // max(most - 1, 1)] for index in range(most)]


def choose(by_file: dict[str, list[str]], num_prompts: int, seed: int) -> list[CutPrompt]:
    """Take prompts from the files in turns until there are enough, then shuffle, so that any first few are of many files.

    Raises ValueError if there are too few.
    """
    generator = random.Random(seed)
    queues = {name: generator.sample(prompts, len(prompts)) for name, prompts in sorted(by_file.items())}
    chosen: list[CutPrompt] = []
    while len(chosen) < num_prompts and any(queues.values()):
        turn = [CutPrompt(queue.pop(), name) for name, queue in queues.items() if queue]
        chosen += turn[: num_prompts - len(chosen)]
    if len(chosen) < num_prompts:
        raise ValueError(f"the held-out files give {len(chosen)} prompts, fewer than the {num_prompts} asked for")
    generator.shuffle(chosen)
    return chosen


def build_prompts(root: Path, files: Sequence[str], count: CountTokens, num_prompts: int, cut: Cut) -> list[CutPrompt]:
    """Return the prompts from `files`, which are relative to `root`."""
    by_file = {name: cut_file(text, name, cut, count) for name in files if (text := read_source(root / name))}
    return choose(by_file, num_prompts, cut.seed)


def seen_files(unseen: Sequence[str], num_prompts: int) -> list[str]:
    """Return enough random training files of the model for `num_prompts` prompts."""
    corpus = library_corpus("library")
    names = [path.relative_to(corpus.root).as_posix() for path in corpus.training_files]
    seen = sorted(set(names) - set(unseen))
    return random.Random(0).sample(seen, min(len(seen), max(1, num_prompts // 4)))


def write_prompts(settings: DemoPrompts) -> list[CutPrompt]:
    """Cut prompts out of the interpreter's standard library, write them as JSON lines, and return them.

    Raises `RecipeError` if model or list of files cannot be read, if lengths are wrong, or if there are too few prompts.
    """
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.model, trust_remote_code=False)
        unseen = json.loads(settings.held_out.read_text(encoding="utf-8"))
        if settings.part == "training":
            files = seen_files(unseen, settings.num_prompts)
        else:
            files = [name for name in unseen if name not in NEARLY_SEEN]
        cut = Cut(seed=settings.seed, shortest=settings.shortest, longest=settings.longest)
        prompts = build_prompts(
            standard_library(), files, lambda text: len(tokenizer(text)["input_ids"]), settings.num_prompts, cut
        )
    except (OSError, ValueError) as cause:
        raise RecipeError(str(cause).strip().split("\n")[0]) from None
    lines = [json.dumps({"prompt": each.prompt, "file": each.file}, ensure_ascii=False) + "\n" for each in prompts]
    write_atomically(settings.out, "".join(lines).encode(), what="the prompts", error=RecipeError)
    return prompts
