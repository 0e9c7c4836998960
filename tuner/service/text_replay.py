"""Texts of production replayed before a search is run again: which of the known candidates promise most on what is asked now.

Nothing is generated and nothing is measured but costs of passes. Greedy decoding has written the continuations, so the replay of a
study (`studies.prediction`) tells what each candidate would have drafted on them and what its rounds would have cost. The result
orders the trials of the warm start, and is shown as a prediction.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from decoding.documents.strict_yaml import Document
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.target import Target
from studies.contract import Candidate
from studies.costs.table import CostTable
from studies.prediction.contract import Prediction
from studies.prediction.pools import lookups
from studies.prediction.predictor import Predictor
from studies.prediction.survey import Survey
from studies.searches.predicted import PredictedSettings
from tuner.drift.contract import ObservedText
from tuner.inputs.memory import explained_shortage
from tuner.progress import Progress
from tuner.search.problem import costs_of
from tuner.search.task import Task
from tuner.service.contract import PredictedCandidate, TextReplay
from tuner.stage_clock import Stage

REPLAYED_TOKENS = 2048
"""Tokens of continuations that are replayed, about: of the newest texts. Each takes a share of a pass for each draft."""
NUM_LOOKUPS = 3
"""Best lookups that are tried beside the known candidates: they cost next to nothing, and a change of texts may make them pay."""
FEWEST_MAX_TOKENS = PredictedSettings().max_tokens
"""Longest draft of the cost table, unless a candidate drafts more: as the usual studies ask for, so that one table serves both."""


class RatedCandidates(Document):
    """What was replayed, and the candidates in the order of their predictions."""

    replay: TextReplay
    candidates: tuple[Candidate, ...] = ()


def replay_texts(
    task: Task,
    known: Sequence[Candidate],
    champion: Candidate | None,
    texts: Sequence[ObservedText],
    progress: Progress,
) -> RatedCandidates:
    """Rate the `known` candidates, the champion among them, and a few lookups on texts of production; the oldest text comes first.

    Without a text that this model writes, no candidate is returned.
    """
    start = time.perf_counter()
    progress.stage("replaying texts of production")
    remedy = "restart the service without --accept-texts, or forget the texts (`sdtune jobs forget`)"
    with task.budget.clock.stage(Stage.CHOOSING), explained_shortage("replaying texts of production", remedy):
        surveyed = survey_texts(
            task.target,
            texts,
            decoding=task.decoding,
            heads=task.head_folder,
            batch_size=task.config.batch_size,
            seed=task.config.seed,
        )
        if surveyed is None:
            return RatedCandidates(replay=TextReplay(texts=0, left_out=len(texts)))
        survey, left_out = surveyed
        longest = max([FEWEST_MAX_TOKENS, *(each.draft_length.max_tokens for each in known)])
        bits = {each.draft.weight_bits for each in known} - {None}
        costs = costs_of(task, _contexts(task, survey), longest, None, progress, bits=[each for each in bits if each])
        rated = rate(survey, costs, known, task.decoding, longest, batch_size=task.config.batch_size)
    known_keys = {each.key for each in known}
    replay = TextReplay(
        texts=len(survey.indices),
        tokens=survey.num_positions,
        left_out=left_out,
        predicted=[
            PredictedCandidate(
                description=f"{candidate.draft.describe()}; {candidate.draft_length.describe()}",
                origin="champion" if candidate == champion else "trial" if candidate.key in known_keys else "lookup",
                predicted_speedup=round(prediction.speedup, 4),
            )
            for candidate, prediction in rated
        ],
        seconds=round(time.perf_counter() - start, 3),
    )
    return RatedCandidates(replay=replay, candidates=tuple(candidate for candidate, _ in rated))


def survey_texts(
    target: Target,
    texts: Sequence[ObservedText],
    *,
    decoding: Decoding,
    heads: HeadFolder | None,
    batch_size: int,
    seed: int,
) -> tuple[Survey, int] | None:
    """Return the survey of the newest texts that this model writes by greedy decoding, and the number of those it does not.

    None if there is none. One pass over each text tells; texts that do not fit into the model are left out unread.
    """
    newest = _newest(each for each in reversed(texts) if _fits(target, each))
    left_out = sum(not _fits(target, each) for each in texts)
    while newest := newest[: len(newest) // batch_size * batch_size or len(newest)]:
        prompts, continuations = [each.prompt for each in newest], [each.continuation for each in newest]
        survey = Survey(target, prompts, continuations, decoding=decoding, seed=seed, heads=heads)
        if all(survey.are_greedy):
            return survey, left_out
        written = [text for text, is_greedy in zip(newest, survey.are_greedy, strict=True) if is_greedy]
        left_out += len(newest) - len(written)
        newest = written
    return None


def rate(
    survey: Survey,
    costs: CostTable,
    known: Iterable[Candidate],
    decoding: Decoding,
    max_tokens: int,
    *,
    batch_size: int = 1,
) -> list[tuple[Candidate, Prediction]]:
    """Return the known candidates and the best lookups with their predictions, the fastest first."""
    predictor = Predictor(survey, costs, max_tokens=max_tokens, decoding=decoding, batch_size=batch_size)
    known = list(known)
    predictor.record(each.draft for each in known)
    found = {each: predictor.predict(each.draft, each.draft_length) for each in known}
    for prediction in map(predictor.best, lookups(predictor, NUM_LOOKUPS)):
        found.setdefault(Candidate(draft=prediction.draft, draft_length=prediction.rule), prediction)
    return sorted(found.items(), key=lambda each: -each[1].speedup)


def _newest(texts: Iterable[ObservedText]) -> list[ObservedText]:
    """Return the first of `texts` that have `REPLAYED_TOKENS` tokens together, at least one."""
    found, tokens = list[ObservedText](), 0
    for text in texts:
        if tokens >= REPLAYED_TOKENS:
            break
        found.append(text)
        tokens += len(text.continuation)
    return found


def _fits(target: Target, text: ObservedText) -> bool:
    """Return whether a text has tokens that the model knows, and no more than its context holds."""
    length = len(text.prompt) + len(text.continuation)
    has_room = target.context_length is None or length <= target.context_length
    return has_room and max(*text.prompt, *text.continuation) < target.config.vocab_size


def _contexts(task: Task, survey: Survey) -> list[int]:
    """Return the shortest and the longest context of the texts and of the search, whose studies then need no other table."""
    starts = [len(prompt) for prompt, _ in survey.written] + [len(each.token_ids) for each in task.prompts.tuning]
    ends = [len(prompt) + len(continuation) for prompt, continuation in survey.written]
    ends += [len(each.token_ids) + task.config.max_new_tokens for each in task.prompts.tuning]
    return sorted({min(starts), max(ends)})
