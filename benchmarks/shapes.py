"""What passes cost on models of other shapes than SmolLM2's: large vocabularies, windows, more norms, grouped heads, biases.

Random models, each in a process of its own. The passes of a model take turns: a plain one by the eager and by the static runner,
the same with all logits exact, as a sampled request needs them, a verifying one of four positions, and a step of the int8 draft,
from all tokens and from fewer. Beside them stands the share of bytes that its weights have in plain ones, which it would take if
only reading weights counted. Then both drafts decode, and their texts are compared with plain decoding, and with the eager
runner's. How often drafts from fewer tokens are right, random models do not tell.

    python -m benchmarks.shapes --threads 1 --json shapes.json
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.results import show, write
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import DraftView, DraftVocabulary, Target
from decoding.text import Ending
from studies.space import frequent_ids

SIZES = {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 12, "num_attention_heads": 10}
GEMMA = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, heads grouped by 5": ("llama", SIZES | {"num_key_value_heads": 2, "vocab_size": 49_152}),
    "Llama, 131,072 ids, tied": (
        "llama",
        SIZES | {"num_key_value_heads": 2, "vocab_size": 131_072, "tie_word_embeddings": True},
    ),
    "Gemma 3, 262,144 ids, tied, windows": ("gemma3_text", GEMMA | {"vocab_size": 262_144, "sliding_window": 64}),
    "Gemma 2, capped logits, windows": ("gemma2", GEMMA | {"vocab_size": 65_536, "sliding_window": 64}),
    "Mistral, a window": (
        "mistral",
        SIZES | {"num_key_value_heads": 2, "vocab_size": 32_768, "sliding_window": 64, "head_dim": 64},
    ),
    "Qwen 3, normed heads": ("qwen3", SIZES | {"num_key_value_heads": 2, "vocab_size": 65_536, "head_dim": 64}),
    "Qwen 2, biases": ("qwen2", SIZES | {"num_key_value_heads": 2, "vocab_size": 65_536}),
    "Phi 3, fused projections": ("phi3", SIZES | {"num_key_value_heads": 2, "vocab_size": 32_064, "pad_token_id": 0}),
    "OLMo 2, norms after branches": ("olmo2", SIZES | {"num_key_value_heads": 10, "vocab_size": 65_536}),
    "GPT-NeoX, parallel branches, biases": ("gpt_neox", SIZES | {"vocab_size": 50_304}),
}
CONTEXT, TURNS, NEW_TOKENS = 200, 15, 48


def measure(name: str, dtype: str, threads: int) -> dict[str, Any]:
    """Return the row of a shape."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kind, settings = SHAPES[name]
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False).eval()
    eager, target = Target(model), Target(model, "static")
    below = frequent_ids(target)
    view, narrow = (
        DraftView(target, (), (), keep_boundary=False, bits=8, vocabulary=each)
        for each in (None, DraftVocabulary.below(below, config.vocab_size) if below else None)
    )
    ids = torch.randint(1, config.vocab_size, (1, CONTEXT + 4), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        slow, cache, all_logits = (each.new_cache(CONTEXT + 64) for each in (eager, target, target))
        for reader, keys in ((eager, slow), (target, cache), (target, all_logits)):
            reader.forward(ids[:, :CONTEXT], keys, 0, last_only=True)
            keys.length, keys.only_best = CONTEXT, True
        all_logits.only_best = False
        one, four = ids[:, CONTEXT : CONTEXT + 1], ids[:, CONTEXT : CONTEXT + 4]
        passes = {
            "eager": lambda: eager.run(eager.whole, one, slow, CONTEXT, last_only=True),
            "static": lambda: target.run(target.whole, one, cache, CONTEXT, last_only=True),
            "all logits": lambda: target.run(target.whole, one, all_logits, CONTEXT, last_only=True),
            "verify 4": lambda: target.run(target.whole, four, cache, CONTEXT),
            "int8 step": lambda: view.run(one, cache, CONTEXT),
            "from fewer": lambda: narrow.run(one, cache, CONTEXT),
        }
        seconds: dict[str, list[float]] = {each: [] for each in passes}
        for turn in range(TURNS + 2):
            for each, run in passes.items():
                began = perf_counter()
                run()
                if turn >= 2:  # the first ones compile and record
                    seconds[each].append(perf_counter() - began)
    found = {each: median(values) for each, values in seconds.items()}
    request = Request(tuple(ids[0, :32].tolist()), Ending(NEW_TOKENS, frozenset()))
    plain, slowly = (plain_decoder(each).generate(request) for each in (target, eager))
    drafted, fewer = (
        Decoder(target, LayerSkip(bits=8, ids_below=each), Fixed(max_tokens=4)).generate(request)
        for each in (None, below)
    )
    embedding = model.get_input_embeddings().weight
    bytes_read = sum(each.nbytes for each in model.parameters() if each is not embedding)
    bytes_read += embedding.nbytes if model.get_output_embeddings().weight is embedding else 0
    return {
        "shape": name,
        "MB read": bytes_read / 1e6,
        "plain, ms": 1000 * found["static"],
        **{
            f"{each} / plain": found[each] / found["static"]
            for each in ("eager", "all logits", "verify 4", "int8 step", "from fewer")
        },
        "by bytes": 1 / embedding.itemsize,
        "tokens a round": len(drafted.tokens) / max(1, len(drafted.rounds)),
        "identical": drafted.tokens == plain.tokens == fewer.tokens == slowly.tokens,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.only:
        with multiprocessing.get_context("spawn").Pool(1) as process:  # it gives all memory back
            rows.append(process.apply(measure, (name, args.dtype, args.threads)))
        show(f"passes in {args.dtype} after {CONTEXT} tokens", rows)
        write(args.json, {"dtype": args.dtype, "threads": args.threads, "rows": rows}, rows)


if __name__ == "__main__":
    main()
