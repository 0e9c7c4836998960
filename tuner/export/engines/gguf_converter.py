"""llama.cpp's converter, run for models whose pre-tokenizer it does not know too: `gguf_converter.py CONVERTER ARGUMENTS...`.

The converter recognises a pre-tokenizer by a hash and refuses others. An unknown one is written as `gpt-2`, and the note says so:
it takes no part in prompts and answers of token ids, which a measurement sends and reads. An export holds a copy of this file.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

USUAL = "gpt-2"
NOTE = f"llama.cpp does not know the pre-tokenizer: it is written as {USUAL}. Token ids are right; text may be split otherwise."


def main(converter: Path, arguments: list[str]) -> None:
    """Run the converter with these arguments, as `python CONVERTER ARGUMENTS...` would."""
    # In place of this file's own folder, whose modules have names of others.
    sys.path[:1] = [str(converter.parent), str(converter.parent / "gguf-py")]
    _name_unknown_pre_tokenizers()
    sys.argv = [str(converter), *arguments]
    runpy.run_path(str(converter), run_name="__main__")


def _name_unknown_pre_tokenizers() -> None:
    """Give the converter's base class a name for every pre-tokenizer that it refuses."""
    from conversion.base import TextModel  # type: ignore[import-not-found]

    known = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            print(NOTE, flush=True)
            return USUAL

    TextModel.get_vocab_base_pre = get_vocab_base_pre


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
