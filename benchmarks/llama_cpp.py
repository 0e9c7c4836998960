"""How fast are plain decoding and a profile beside llama.cpp, which runs GGUF files of the same model, quantised ones among them?

All decode the held-out prompts in turns, one sequence at a time; llama.cpp's times are its own. Each folder holds a `target.gguf`,
as llama.cpp's converter and `llama-quantize` write them, and gives it its name. The texts of a quantised model are its own: it is
another model, and how many of its texts equal plain decoding's is part of the answer.

    LLAMA_CPP=SOURCES python -m benchmarks.llama_cpp F32 Q8_0 Q4_0 --profile profile.yaml --model smollm2 --dataset q.jsonl \\
      --threads 1 --set runner=static --json llama_cpp.json
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.results import ratio_interval, show, write
from benchmarks.task import Printed, facts_of, read_config, search_arguments
from decoding.decoder import Decoder, plain_decoder
from decoding.profile import DraftProfile
from tuner.engines.bench import EngineDecoding
from tuner.engines.contract import Served, ServerSettings, find_engine
from tuner.engines.server import served
from tuner.inputs.models import eos_token_ids
from tuner.measuring.contender import PLAIN, Contender
from tuner.measuring.paired import OwnDecoding
from tuner.measuring.turns import Interleaved
from tuner.search.task import open_bench, prepare

PROFILE = "profile"


def main() -> None:
    """Measure, print and write."""
    parser = search_arguments(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders with a target.gguf")
    parser.add_argument("--profile", type=Path, required=True)
    args = parser.parse_args()
    task = prepare(read_config(args, temperature=0.0, tuning_prompts=2, prompts_per_trial=2), Printed())
    target, eos = task.target, eos_token_ids(task.target.model)
    profile, program = DraftProfile.load(args.profile), find_engine("llama.cpp", None)
    bench = open_bench(task, task.prompts.held_out, "decoding the held-out prompts plainly", Printed())
    decoder = Decoder(target, profile.draft, profile.draft_length, profile.decoding, heads=task.head_folder)
    contenders: list[Contender] = [
        OwnDecoding(PLAIN, plain_decoder(target), eos),
        OwnDecoding(PROFILE, decoder, eos),
    ]
    settings = ServerSettings.of(
        task.prompts.held_out, task.config.max_new_tokens, target.config, threads=args.threads, engine_args=None
    )
    with ExitStack() as running:
        logs = Path(running.enter_context(tempfile.TemporaryDirectory()))
        for folder in args.folders:
            model = Served(str(task.config.model), "float32", folder)
            client = running.enter_context(served(program, model, settings, (), logs))
            contenders.append(EngineDecoding(folder.name, program, client))
        turns = Interleaved(contenders)
        turns.prepare([bench.batch(index) for index in bench.indices], bench.max_new_tokens)
        turns.warm_up([bench.batch(0)])
        measured = bench.compete(turns, bench.indices)
    rows = [
        {
            "contender": name,
            "over plain": f"{each.speedup_interval()}",
            "profile over it": f"{ratio_interval(measured[PROFILE], each)}",
            "identical": each.num_identical,
            "prompts": each.num_prompts,
        }
        for name, each in measured.items()
    ]
    show(f"decode phase, beside llama.cpp {program.version()}", rows)
    samples = {name: each.model_dump(mode="json") for name, each in measured.items()}
    write(args.json, {**facts_of(task), "llama.cpp": program.version(), "rows": rows, "samples": samples}, rows)


if __name__ == "__main__":
    main()
