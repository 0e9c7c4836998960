"""What the server keeps for tuning: numbers, and not too many."""

from __future__ import annotations

import time

from decoding.arms.windows import TimedWindow
from decoding.decode import Request
from decoding.rounds import Prefill, Round
from decoding.serving.observations import Observations
from decoding.serving.waiting_room import Job, RequestEnd, Stopped
from decoding.text import Ending


def _serve(observations: Observations, num_prompt: int, num_rounds: int, end: RequestEnd) -> None:
    job = Job(Request([7] * num_prompt, Ending(99)), lambda _: None)
    observations.observe(job, Prefill(7, 0.1))
    for _ in range(num_rounds):
        observations.observe(job, Round((7, 7), 3, 1, 0.1, 0.0))
    observations.observe(job, end)


def test_windows_and_requests_are_numbers_and_bounded() -> None:
    observations = Observations(limit=5)
    for number in range(12):
        observations.window("code", TimedWindow(1, 1.0, 8, 16 + number, 0.5, 24, (4, 2, 2), context=40.26))
        _serve(observations, 3, number, RequestEnd(Stopped.CANCELLED if number % 2 else None))
    found = observations.document()
    assert [each["number"] for each in found["windows"]] == [8, 9, 10, 11, 12]
    assert [each["number"] for each in found["requests"]] == [8, 9, 10, 11, 12]
    assert found["server"] != Observations().server, "a server that is started again counts from 1 under another name"
    assert abs(found["windows"][-1].pop("ended") - time.time()) < 60
    assert [each["tokens"] for each in found["windows"]] == [23, 24, 25, 26, 27]
    assert found["windows"][-1] == {
        "number": 12,
        "arm": "code",
        "sequences": 1.0,
        "rounds": 8,
        "context": 40.3,
        "tokens": 27,
        "seconds": 0.5,
        "tokens_per_second": 54.0,
        "drafted": 24,
        "accepted_lengths": [4, 2, 2],
    }
    assert found["requests"][-1] == {"number": 12, "prompt_tokens": 3, "new_tokens": 23}
    assert len(found["requests"]) == 5
    assert not observations._num_new, "ended requests are forgotten"


def test_a_request_that_ended_before_its_prompt_was_read_is_no_observation() -> None:
    observations = Observations()
    observations.observe(Job(Request([1], Ending(1)), lambda _: None), RequestEnd(Stopped.CANCELLED))
    assert observations.document() == {"server": observations.server, "windows": [], "requests": []}
