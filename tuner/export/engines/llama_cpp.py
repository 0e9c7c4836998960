"""llama.cpp: conversion to GGUF, flags of `llama-server`, and a preset."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from tuner.export.engines import gguf_converter
from tuner.export.engines.contract import Engine, command, script
from tuner.export.plan import Plan

GGUF = ".gguf"
CONVERT, CONVERTER, TARGET, DRAFT = "convert.sh", "gguf_converter.py", f"target{GGUF}", f"draft{GGUF}"
OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}
QUANTISED = {8: "Q8_0", 4: "Q4_0"}
"""llama.cpp's types nearest to our quantised weights: also one scale per group and symmetric, but rounded otherwise."""


class LlamaCpp(Engine):
    """Lookup first, a threshold and a quantised draft all have counterparts here."""

    title: str = "llama.cpp"
    version: str = "build 11434, run on a CPU"
    looks_up_alone: bool = True
    looks_up_first: bool = True
    stops_below: bool = True
    quantises: bool = True
    has_ngram_range: bool = False

    def notes(self, plan: Plan) -> list[str]:
        notes = []
        if plan.lookup is not None:
            notes.append(
                f"Its lookup has one length of n-grams, {plan.lookup.longest}, and copies from the latest match."
            )
        if plan.threshold is not None:
            notes.append("`p-min` drops the unsure token; our rule verifies it too.")
        if plan.bits is not None:
            notes.append(
                f"{QUANTISED[plan.bits]} rounds otherwise than our int{plan.bits}: acceptance differs a little."
            )
        return notes

    def files(self, plan: Plan) -> dict[str, str]:
        settings = self.settings(plan)
        flags = [f"--{name} {quote(value)}" for name, value in settings.items()]
        launch = command("exec llama-server", *flags, '"$@"')
        preset = ["[sdtune]", *(f"{name} = {value}" for name, value in settings.items())]
        return {
            CONVERT: script(*_conversions(plan)),
            CONVERTER: Path(gguf_converter.__file__).read_text(encoding="utf-8"),
            "launch.sh": script(launch),
            "preset.ini": "\n".join(preset) + "\n",
        }

    def settings(self, plan: Plan) -> dict[str, str]:
        """Return the long flags of `llama-server`, without dashes, and their values."""
        lookup, settings = plan.lookup, {"model": f"{plan.out}/{TARGET}"}
        kinds = [*(["ngram-simple"] if lookup else []), *(["draft-simple"] if plan.shape else [])]
        if plan.shape is not None:
            settings["model-draft"] = _draft_file(plan)
        settings["spec-type"] = ",".join(kinds)
        if lookup is not None:
            settings |= {
                "spec-ngram-simple-size-n": str(lookup.longest),
                "spec-ngram-simple-size-m": str(lookup.max_tokens),
            }
        if plan.shape is not None:
            settings["spec-draft-n-max"] = str(plan.length.num_tokens)
        if plan.shape is not None and plan.threshold is not None:
            settings["spec-draft-p-min"] = f"{plan.threshold:.4g}"
        return settings


def conversion(model: str, dtype: str, file: str) -> str:
    """Return the command that converts a model's folder to a GGUF file."""
    outtype = OUTTYPES[dtype]
    return f'python {CONVERTER} "$LLAMA_CPP/convert_hf_to_gguf.py" --outtype {outtype} {quote(model)} --outfile {quote(file)}'


def _draft_file(plan: Plan) -> str:
    return f"{plan.out}/draft{'' if plan.bits is None else f'-{QUANTISED[plan.bits]}'}.gguf"


def _conversions(plan: Plan) -> list[str]:
    """Return the commands that make the GGUF files; `LLAMA_CPP` names llama.cpp's sources, which hold the converter.

    A target that is there is kept. The converter itself writes the draft in Q8_0; for other types it is quantised afterwards.
    """
    whole = f"{plan.out}/{TARGET}"
    commands = [f"[ -e {quote(whole)} ] || {conversion(plan.model, plan.dtype, whole)}"]
    model = str(plan.draft) if plan.needs_draft_folder else plan.model
    if plan.bits == 8:
        commands.append(conversion(model, "int8", _draft_file(plan)))
    elif plan.needs_draft_folder:
        whole = f"{plan.out}/{DRAFT}"
        commands.append(conversion(model, plan.dtype, whole))
    if plan.bits == 4:
        commands.append(f"llama-quantize {quote(whole)} {quote(_draft_file(plan))} {QUANTISED[plan.bits]}")
    return commands
