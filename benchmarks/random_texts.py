"""Random models, drafts, rules and prompts: what is written is what transformers' own greedy `generate` writes, by threads too."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.random_candidates import random_candidates
from benchmarks.small_search import CheckOutcome
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.errors import first_line
from decoding.losslessness import compare
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import Ending
from decoding.timing.round_costs import with_measured_costs

VOCABULARY, NUM_NEW, LONGEST_PROMPT = 64, 24, 40
CASES_PER_MODEL, NUM_PROMPTS = 10, 8
SWITCH_SECONDS = 1e-5
"""Python's switch interval while threads run: five hundred times shorter than by default, so that races show."""


def random_llama(seed: int) -> LlamaForCausalLM:
    """Return a random float32 Llama of 3 to 8 layers whose deeper blocks matter less, so that some drafts are right."""
    stream = random.Random(seed)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=stream.randint(3, 8),
        num_attention_heads=4,
        num_key_value_heads=stream.choice((1, 2, 4)),
        max_position_embeddings=256,
        tie_word_embeddings=stream.random() < 0.5,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
        for index, block in enumerate(model.model.layers):
            for matrix in (block.self_attn.o_proj, block.mlp.down_proj):
                matrix.weight.mul_(0.6**index)
    return model.eval()


def random_prompt(stream: random.Random) -> list[int]:
    return [stream.randrange(1, VOCABULARY) for _ in range(stream.randint(1, LONGEST_PROMPT))]


def compare_with_generate(num_cases: int, seed: int) -> tuple[CheckOutcome, int]:
    """Decode `num_cases` random sequences; return those that differ from `generate`'s, and the number of numerical ties."""
    outcome, num_ties, stream = CheckOutcome("sequences compared with generate"), 0, random.Random(seed)
    while outcome.num_cases < num_cases:
        model_seed = stream.randrange(2**31)
        model = random_llama(model_seed)
        target = Target(model)
        count = min(CASES_PER_MODEL, num_cases - outcome.num_cases)
        for candidate in random_candidates(target, count, model_seed, bits=(8, 4)):
            prompt = random_prompt(stream)
            rule = with_measured_costs(target, candidate.draft, candidate.draft_length, Decoding())
            found = Decoder(target, candidate.draft, rule).generate(Request(prompt, Ending(NUM_NEW))).tokens
            ids = torch.tensor([prompt])
            stock = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW)
            result = compare(target, prompt, stock[0, len(prompt) :].tolist(), found)
            num_ties += result.tie
            wrong = f"model {model_seed}, {candidate.key}: differs from token {result.first_difference}"
            outcome.count(None if result.is_lossless else wrong)
    return outcome, num_ties


def sequences_in_threads(num_sequences: int, num_threads: int, seed: int) -> CheckOutcome:
    """Let threads share one decoder of each of several random drafts."""
    outcome, stream = CheckOutcome(f"sequences of {num_threads} threads on one decoder"), random.Random(seed)
    target = Target(random_llama(seed))
    requests = [Request(random_prompt(stream), Ending(NUM_NEW)) for _ in range(NUM_PROMPTS)]
    plain = plain_decoder(target)
    expected = [plain.generate(request).tokens for request in requests]
    candidates = random_candidates(target, CASES_PER_MODEL, seed, rules=("fixed",))
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            for number, candidate in enumerate(candidates):
                decoder = Decoder(target, candidate.draft, candidate.draft_length)

                def failure(index: int, decoder: Decoder = decoder) -> str | None:
                    try:
                        found = decoder.generate(requests[index]).tokens
                    except Exception as error:  # the outcome that is counted
                        return f"{type(error).__name__}: {first_line(error)}"
                    return None if found == expected[index] else "another sequence"

                share = num_sequences // len(candidates) + (number < num_sequences % len(candidates))
                for wrong in pool.map(failure, [index % NUM_PROMPTS for index in range(share)]):
                    outcome.count(wrong, of=candidate.key)
    finally:
        sys.setswitchinterval(before)
    return outcome
