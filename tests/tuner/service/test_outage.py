"""The service while PostgreSQL is away."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2

from benchmarks.postgres import programs
from tests.support.postgres import postgres
from tests.support.service import listening
from tuner.service.admission import Allowed
from tuner.service.app import ServiceSettings, create_service
from tuner.service.jobs import Jobs

PATIENCE = 60.0
"""Seconds for an answer: requests hung for good, and a busy machine needs some."""


def _pg_ctl(url: str, *arguments: str) -> None:
    folder, found = Path(url.rpartition("=")[2]), programs()
    assert found is not None, "the server runs"
    user = "postgres" if os.getuid() == 0 else None
    command = [str(found / "pg_ctl"), "-D", str(folder / "data"), *arguments]
    subprocess.run(command, user=user, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def test_every_request_is_answered_while_the_database_is_away_and_all_is_well_when_it_is_back(tmp_path: Path) -> None:
    with postgres() as url:
        jobs = Jobs(url, is_patient=False)
        app = create_service(jobs, ServiceSettings(Allowed(["m"], ["d"]), tmp_path))
        body = {"config": {"model": "m", "dataset": "d"}}
        with listening(app) as address, httpx2.Client(base_url=address, timeout=PATIENCE) as client:
            job = client.post("/v1/searches", json=body).json()["id"]
            _pg_ctl(url, "-m", "immediate", "stop")
            paths = ["/", "/health", "/metrics", "/v1/searches", "/v1/workers", f"/v1/searches/{job}"] * 7
            with ThreadPoolExecutor(45) as pool:
                answers = [pool.submit(client.get, path) for path in paths]
                answers += [pool.submit(client.post, "/v1/searches", json=body) for _ in range(3)]
                assert {each.result().status_code for each in answers} == {503}
            assert client.get("/health").status_code == 503
            _pg_ctl(url, "-w", "-o", f"-k {url.rpartition('=')[2]} -c listen_addresses='' -c fsync=off", "start")
            end = time.monotonic() + PATIENCE
            while client.get("/health").status_code != 200:
                assert time.monotonic() < end
            assert client.get(f"/v1/searches/{job}").json()["state"] == "queued"
            assert client.post("/v1/searches", json=body).status_code == 200
        jobs.close()
