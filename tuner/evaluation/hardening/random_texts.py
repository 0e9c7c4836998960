"""Random models, drafts, rules and prompts: each text is compared with that of transformers' own greedy `generate`."""

from __future__ import annotations

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import RULES
from decoding.losslessness import compare
from decoding.profile import Decoding
from decoding.target import Target
from decoding.text import Ending
from decoding.timing.draft_costs import with_measured_costs
from studies.prediction.skip_space import SkipSpace
from tuner.evaluation.hardening.outcomes import CheckOutcome
from tuner.evaluation.random_candidates import RandomCandidates
from tuner.progress import Progress

VOCABULARY, NUM_NEW, LONGEST_PROMPT = 64, 24, 40
CASES_PER_MODEL = 10


def random_llama(seed: int) -> LlamaForCausalLM:
    """Return a random float32 Llama of 3 to 8 layers whose deeper blocks matter less, so that some drafts are right."""
    stream = random.Random(seed)
    heads = stream.choice((1, 2, 4))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=stream.randint(3, 8),
            num_attention_heads=4,
            num_key_value_heads=heads,
            max_position_embeddings=256,
            tie_word_embeddings=stream.random() < 0.5,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
        for index, block in enumerate(model.model.layers):
            for matrix in (block.self_attn.o_proj, block.mlp.down_proj):
                matrix.weight.mul_(0.6**index)
    return model.eval()


def random_prompt(stream: random.Random) -> list[int]:
    """Return a prompt of 1 to `LONGEST_PROMPT` tokens."""
    return [stream.randrange(1, VOCABULARY) for _ in range(stream.randint(1, LONGEST_PROMPT))]


def stock_text(model: LlamaForCausalLM, prompt: list[int]) -> tuple[int, ...]:
    """Return the tokens that `generate` writes after a prompt."""
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW)
    assert isinstance(output, torch.Tensor)
    return tuple(output[0, len(prompt) :].tolist())


def compare_with_generate(num_cases: int, seed: int, progress: Progress) -> tuple[CheckOutcome, int]:
    """Decode `num_cases` random texts; return those that differ from `generate`'s, and the number of numerical ties."""
    tally, num_ties, stream = CheckOutcome("texts compared with generate"), 0, random.Random(seed)
    progress.stage(tally.name, num_cases)
    while tally.num_cases < num_cases:
        model_seed = stream.randrange(2**31)
        model = random_llama(model_seed)
        target = Target(model)
        candidates = RandomCandidates(
            SkipSpace.of(target), target.num_layers, {}, list(RULES), 8, (8, 4), with_leaves=True
        ).draw(min(CASES_PER_MODEL, num_cases - tally.num_cases), model_seed)
        for candidate in candidates:
            prompt = random_prompt(stream)
            rule = with_measured_costs(target, candidate.draft, candidate.draft_length, Decoding())
            found = Decoder(target, candidate.draft, rule).generate(Request(prompt, Ending(NUM_NEW))).tokens
            result = compare(target, prompt, stock_text(model, prompt), found)
            num_ties += result.tie
            wrong = f"model {model_seed}, {candidate.key}: differs from token {result.first_difference}"
            tally.count(None if result.is_lossless else wrong)
            progress.advance()
    return tally, num_ties


def texts_in_threads(num_texts: int, num_threads: int, seed: int, progress: Progress) -> CheckOutcome:
    """Let threads share one decoder of each of several random drafts."""
    from tuner.evaluation.hardening.threads import RIGHT, decode_in_threads

    tally, stream = CheckOutcome(f"texts of {num_threads} threads on one decoder"), random.Random(seed)
    progress.stage(tally.name, num_texts)
    model = random_llama(seed)
    target = Target(model)
    prompts = [random_prompt(stream) for _ in range(8)]
    expected = [stock_text(model, prompt) for prompt in prompts]
    drafts = RandomCandidates(SkipSpace.of(target), target.num_layers, {}, ["fixed"], 6, (8,), with_leaves=True).draw(
        5, seed
    )
    for number, candidate in enumerate(drafts):
        decoder = Decoder(target, candidate.draft, candidate.draft_length)
        share = num_texts // len(drafts) + (number < num_texts % len(drafts))

        def write(prompt: object, decoder: Decoder = decoder) -> tuple[int, ...]:
            return decoder.generate(Request(list(prompt), Ending(NUM_NEW))).tokens  # type: ignore[call-overload]

        for outcome, count in decode_in_threads(write, prompts, expected, num_threads, share).items():
            for _ in range(count):
                tally.count(None if outcome == RIGHT else f"{candidate.key}: {outcome}")
        progress.advance(share)
    return tally
