"""The kernels compile for other processors than this one, whose forms the other tests cannot run."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from decoding.kernels.compiled import _read, _with_headers

KERNELS = ("attention.cpp", "linear.cpp", "quantised.cpp")
PROCESSORS = {"AVX2": "haswell", "AVX-512": "skylake-avx512", "AMX": "sapphirerapids"}
"""For each kind of processor one of gcc's names for it."""


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="the names are gcc's for x86")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_kernels_compile_for_other_processors(processor: str, tmp_path: Path) -> None:
    sources = [tmp_path / name for name in KERNELS]
    for source in sources:
        source.write_text(_with_headers(_read(source.name)), encoding="utf-8")
    command = ["g++", "-fsyntax-only", "-std=c++20", f"-march={PROCESSORS[processor]}"]
    found = subprocess.run(
        [*command, *(f"-I{path}" for path in include_paths()), *map(str, sources)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
