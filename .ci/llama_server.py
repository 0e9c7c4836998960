"""`llama-server` of llama.cpp's build in the wheel `xllamacpp`: the same server, started with the flags that we write.

The wheel has no program. Its kernels use AVX2 at most; a server built for the machine is faster.
"""

from __future__ import annotations

import sys
import threading

import xllamacpp

SWITCHES = ("--metrics", "--no-webui")


def params_of(flags: list[str]) -> xllamacpp.CommonParams:
    """Return the parameters that the flags set; exit for an unknown one, as the server would."""
    params = xllamacpp.CommonParams()
    draft, ngram = params.speculative.draft, params.speculative.ngram_simple
    words = iter(flags)
    for flag in words:
        if flag in SWITCHES:
            params.endpoint_metrics |= flag == "--metrics"
            continue
        value = next(words)
        match flag:
            case "--model":
                params.model.path = value
            case "--host":
                params.hostnames = [value]
            case "--port":
                params.port = int(value)
            case "--ctx-size":
                params.n_ctx = int(value)
            case "--parallel":
                params.n_parallel = int(value)
            case "--threads":
                for each in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
                    each.n_threads = int(value)
            case "--model-draft":
                draft.mparams.path = value
            case "--spec-type":
                params.speculative.types = [_kind(name) for name in value.split(",")]
            case "--spec-draft-n-max":
                draft.n_max = int(value)
            case "--spec-draft-n-min":
                draft.n_min = int(value)
            case "--spec-draft-p-min":
                draft.p_min = float(value)
            case "--spec-ngram-simple-size-n":
                ngram.size_n = int(value)
            case "--spec-ngram-simple-size-m":
                ngram.size_m = int(value)
            case _:
                sys.exit(f"error: invalid argument: {flag}")
    return params


def _kind(name: str) -> xllamacpp.common_speculative_type:
    member = f"COMMON_SPECULATIVE_TYPE_{name.upper().replace('-', '_')}"
    return getattr(xllamacpp.common_speculative_type, member)


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        sys.exit(print(f"version: {xllamacpp.__version__.rpartition('.')[2]} (xllamacpp {xllamacpp.__version__})"))
    server = xllamacpp.Server(params_of(sys.argv[1:]))
    threading.Event().wait()
