"""The demo model's prompts: beginnings of functions, classes and files, cut from source files the model never saw.

Run as `python -m tuner.evaluation.models.demo_prompts`; with `--part training` it cuts prompts for exit heads to
learn from, out of files that the
model was trained on. Deterministic: the same files, tokenizer and seed give the same prompts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from tuner.evaluation.models.demo_model import library_corpus, read_source, standard_library, write_atomically

DEFINITION = re.compile(r"^ *(?:async def|def|class) ", re.MULTILINE)
LINE_END = re.compile(r"(?<=[^\n])\n")  # not of an empty line

# A first training stage saw `msvc9compiler.py`, which repeats most of this one: its prompts would be remembered, not continued.
NEARLY_SEEN = frozenset({"distutils/msvccompiler.py"})

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class CutPrompt:
    """A code prefix and the file it is from, relative to the standard library."""

    prompt: str
    file: str


@dataclass(frozen=True)
class Cut:
    """How prompts are cut out of a file; lengths in tokens."""

    shortest: int = 64
    longest: int = 512
    continuation: int = 160  # real text that must follow, so that a generation can be compared with it
    most_per_file: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"lengths must be 1 <= shortest <= longest, got {self.shortest} and {self.longest}")


def cut_file(text: str, name: str, cut: Cut, count: CountTokens) -> list[str]:
    """Prompts of one file that do not overlap, in order, at most `most_per_file` of them and evenly spread.

    Each begins with the file or with a definition, aims at a length drawn log-uniformly, and ends before a line break: the
    model's tokens join the break with the indentation behind it, so a prompt ending in one would split a token.
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
    """The last line end that keeps text[begin:end] within `aim` tokens, or None if it would be below `shortest`."""
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
    """At most `most` of the items, from the first to the last at equal distances."""
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // max(most - 1, 1)] for index in range(most)]


def choose(by_file: dict[str, list[str]], num_prompts: int, seed: int) -> list[CutPrompt]:
    """Take prompts file by file in turns until there are enough, then mix them, so that any first few are of many files."""
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
    """The prompts from `files` (relative to `root`)."""
    by_file = {name: cut_file(text, name, cut, count) for name in files if (text := read_source(root / name))}
    return choose(by_file, num_prompts, cut.seed)


def seen_files(unseen: Sequence[str], num_prompts: int) -> list[str]:
    """Enough of the files that the model was trained on for that many prompts, chosen at random."""
    corpus = library_corpus("library")
    names = [path.relative_to(corpus.root).as_posix() for path in corpus.training_files]
    seen = sorted(set(names) - set(unseen))
    return random.Random(0).sample(seen, min(len(seen), max(1, num_prompts // 4)))


@click.command(context_settings={"show_default": True})
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True),
    default=Path("configs/demo/model"),
    help="For its tokenizer.",
)
@click.option(
    "--held-out", type=click.Path(path_type=Path, exists=True), default=Path("configs/demo/held_out_files.json")
)
@click.option(
    "--part",
    type=click.Choice(["held-out", "training"]),
    default="held-out",
    help="Files to cut from: unseen, or seen.",
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("configs/demo/prompts.jsonl"))
@click.option("--num-prompts", type=click.IntRange(1), default=120)
@click.option("--shortest", type=click.IntRange(1), default=Cut.shortest, help="Tokens of a prompt at least.")
@click.option("--longest", type=click.IntRange(1), default=Cut.longest, help="Tokens of a prompt at most.")
@click.option("--seed", type=int, default=Cut.seed)
def main(
    model: Path, held_out: Path, part: str, out: Path, num_prompts: int, shortest: int, longest: int, seed: int
) -> None:
    """Cut the demo prompts from files of the running interpreter's standard library."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    unseen = json.loads(held_out.read_text(encoding="utf-8"))
    files = (
        [name for name in unseen if name not in NEARLY_SEEN] if part == "held-out" else seen_files(unseen, num_prompts)
    )
    try:
        cut = Cut(seed=seed, shortest=shortest, longest=longest)
        prompts = build_prompts(
            standard_library(), files, lambda text: len(tokenizer(text)["input_ids"]), num_prompts, cut
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    lines = [json.dumps({"prompt": p.prompt, "file": p.file}, ensure_ascii=False) + "\n" for p in prompts]
    write_atomically(out, lambda partial: partial.write_text("".join(lines), encoding="utf-8"))
    Console().print(f"{len(prompts)} prompts from {len({p.file for p in prompts})} files")


if __name__ == "__main__":
    main()
