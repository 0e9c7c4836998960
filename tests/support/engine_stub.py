"""A folder that looks like llama.cpp's: a converter, and a server that answers as `llama-server` does."""

from __future__ import annotations

import sys
from pathlib import Path

SERVER = """#!{python} -I
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

flags = sys.argv[1:]
if flags == ["--version"]:
    print("version: 11434 (abc)")
    sys.exit(0)
if "--broken" in flags:
    print("error: invalid argument: --broken")
    sys.exit(1)
drafts = "--spec-type" in flags
refused = flags[flags.index("--refuse") + 1] if "--refuse" in flags else None
if drafts and flags[flags.index("--spec-type") + 1] == refused:
    print(f"error: it has no {{refused}}")
    sys.exit(1)
if "--spec-draft-n-max" in flags and int(flags[flags.index("--spec-draft-n-max") + 1]) > 32:
    print("error: too many tokens to draft")
    sys.exit(1)
counts = dict(num_drafts_total=0, num_draft_tokens_total=0, num_accepted_tokens_total=0)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def answer(self, text, status=200):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        metrics = "".join(f"llamacpp:spec_decode_{{name}} {{value}}\\n" for name, value in counts.items())
        self.answer(metrics if self.path == "/metrics" else "ok")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        length = asked["n_predict"]
        tokens = [(sum(asked["prompt"]) + i) % 7 for i in range(length)]
        if drafts:
            for name, many in zip(counts, (3, 6, 4)):
                counts[name] += many
            if "--wrong" in flags:
                tokens[1] += 1
        cost = 10 if not drafts else 20 if "--slow" in flags else 4 if "ngram-simple" in flags else 5
        seconds = dict(prompt_ms=len(asked["prompt"]), predicted_ms=length * cost)
        self.answer(json.dumps(dict(tokens=tokens, timings=seconds)))


HTTPServer(("127.0.0.1", int(flags[flags.index("--port") + 1])), Handler).serve_forever()
"""
CONVERTER = """
import sys
from pathlib import Path
from conversion.base import TextModel
out = Path(sys.argv[sys.argv.index("--outfile") + 1])
out.write_text(TextModel().get_vocab_base_pre(None))
"""
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
"""


def write_llama_cpp(home: Path) -> Path:
    """Write the folder and return it."""
    (home / "build" / "bin").mkdir(parents=True)
    (home / "conversion").mkdir()
    server = home / "build" / "bin" / "llama-server"
    server.write_text(SERVER.format(python=sys.executable))
    server.chmod(0o755)
    (home / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (home / "conversion" / "base.py").write_text(BASE)
    (home / "conversion" / "__init__.py").touch()
    return home
