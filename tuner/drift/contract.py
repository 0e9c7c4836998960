"""The documents of drift: what a production server reports, and what follows from it. All bounded; texts only if asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from decoding.documents.strict_yaml import Document

MOST_REPORTED = 1000
"""Most windows, and most requests, of one report: as many as a server keeps."""
MOST_TEXTS = 100
"""Most texts of one report. 100,000 tokens of texts fit into a body; see `tuner.service.reporter`."""
LONGEST_PROMPT, LONGEST_CONTINUATION = 4096, 512
"""Most tokens of a text, as a server keeps them (`decoding.serving.kept_texts`)."""
LONGEST_DRAFT = 64
MOST_TOKENS = 10_000_000
MOST_SECONDS = 86_400.0

Number = Annotated[int, Field(ge=1, lt=2**53)]
Name = Annotated[str, Field(min_length=1, max_length=300)]
Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ObservedWindow(Document):
    """Consecutive rounds of one arm, timed together: a member of `windows` of a server's `GET /observations`."""

    number: Number = Field(description="Counted from 1 since the server started.")
    ended: float = Field(ge=0, lt=1e11, allow_inf_nan=False, description="Seconds since 1970, by the server's clock.")
    arm: Name = Field(description="Name of the profile, or `plain`.")
    sequences: float = Field(ge=1, le=100_000, allow_inf_nan=False, description="Requests side by side, on average.")
    context: float | None = Field(
        None, ge=0, le=MOST_TOKENS, allow_inf_nan=False, description="Positions of a sequence, on average."
    )
    rounds: int = Field(ge=1, le=MOST_TOKENS)
    tokens: int = Field(ge=1, le=MOST_TOKENS, description="Of all requests together.")
    seconds: float = Field(ge=1e-6, le=MOST_SECONDS, allow_inf_nan=False, description="Without reading prompts.")
    tokens_per_second: float | None = Field(None, ge=0, allow_inf_nan=False)
    drafted: Count = Field(description="Drafted tokens.")
    accepted_lengths: tuple[Count, ...] = Field(
        (), max_length=LONGEST_DRAFT + 2, description="Number of rounds that accepted 0, 1, 2 ... drafted tokens."
    )


class ObservedRequest(Document):
    """The lengths of one request that has ended."""

    number: Number = Field(description="Counted from 1 since the server started.")
    prompt_tokens: Count
    new_tokens: Count


class ObservedText(Document):
    """One greedy request as token ids. It may hold personal data: kept only where both ends ask for it."""

    number: Number = Field(description="Counted from 1 since the server started.")
    prompt: tuple[TokenId, ...] = Field(min_length=1, max_length=LONGEST_PROMPT)
    continuation: tuple[TokenId, ...] = Field(min_length=2, max_length=LONGEST_CONTINUATION)


class Observed(Document):
    """What a server's `GET /observations` returns: the latest windows and requests, the oldest first."""

    server: str = Field(pattern=r"^[0-9a-f]{32}$", description="Identifies a server from its start to its end.")
    windows: list[ObservedWindow] = Field(max_length=MOST_REPORTED)
    requests: list[ObservedRequest] = Field(max_length=MOST_REPORTED)
    texts: list[ObservedText] = Field(
        default_factory=list, max_length=MOST_TEXTS, description="Empty unless they are asked for."
    )


class ObservationReport(Observed):
    """The body of POST /v1/observations."""

    texts: list[ObservedText] = Field(
        default_factory=list,
        max_length=MOST_TEXTS,
        description="Refused unless the service was started with --accept-texts.",
    )

    search: str = Field(pattern=r"^[0-9a-f]{16}$", description="Id of the search whose profile is served.")


@dataclass(frozen=True)
class Kept:
    """The observations of one search that are kept, the oldest first; windows with their servers."""

    windows: Sequence[tuple[str, ObservedWindow]] = ()
    requests: Sequence[ObservedRequest] = ()
    num_texts: int = 0


class Promised(Document):
    """What a profile promises, and for which traffic."""

    name: str = Field(description="Name of the profile, which its windows have as their arm.")
    speedup: float
    low: float = Field(description="Lower end of the 95 % interval of the speed-up.")
    high: float
    batch_size: int = Field(1, ge=1, description="Sequences side by side that it was tuned for.")
    contexts: tuple[int, int] | None = Field(
        None, description="Fewest and most positions of the sequences that it was confirmed on; None if unknown."
    )


class DriftVerdict(StrEnum):
    """Whether a profile still has its speed-up."""

    HOLDS = "holds"
    TOO_LITTLE = "too little data"
    BELOW = "below"
    NOTHING_PROMISED = "nothing promised"


class DriftPosterior(Document):
    """What the observations say of the speed-up of a profile over plain rounds, at the load that it was tuned for."""

    speedup: float = Field(
        description="All drafted over all plain tokens per second and sequence, in pairs of windows."
    )
    low: float = Field(description="Lower end of the central 95 % of the posterior.")
    high: float
    probability_below: float = Field(
        description="That the speed-up lies more than 3 % below the interval of the profile."
    )


class DriftState(Document):
    """GET /v1/searches/ID/observations: the verdict on the profile of a search, and what it follows from."""

    verdict: DriftVerdict
    promised: Promised | None = None
    posterior: DriftPosterior | None = None
    windows: int = Field(0, description="Windows of the profile that are kept.")
    plain_windows: int = Field(0, description="Plain windows that are kept.")
    pairs: int = Field(0, description="Pairs of windows that were compared.")
    blocks: int = Field(0, description="Independent units of the posterior, of some pairs each.")
    elsewhere: int = Field(
        0, description="Windows at another load, or at other lengths, than the profile was tuned for."
    )
    requests: int = Field(0, description="Requests that are kept.")
    texts: int = Field(0, description="Texts that are kept, to be replayed when the search is run again.")
    prompt_tokens: float | None = Field(None, description="Their median.")
    new_tokens: float | None = Field(None, description="Their median.")
    acceptance_by_position: tuple[float, ...] = Field(
        (), description="Share of the profile's rounds that accepted the first, second ... drafted token."
    )
    retuning: str | None = Field(None, description="What was done about a speed-up that is below its interval.")
    latest: float | None = Field(None, description="When the latest window ended, in seconds since 1970.")
