#!/usr/bin/env bash
# A quotation mark in the name of an annotation makes an exported torch trace invalid JSON.
#
# Version:   torch 2.13.0 (torch.profiler, Kineto's Chrome trace)
# Behaviour: `record_function('load "train" split')` is written as `"name": "load "train" split"`, unescaped. The rest of
#            the file is intact, but a JSON parser stops there, and a viewer shows only what came before.
# Seen:      torch 2.13.0: invalid JSON at the annotation; the events behind it are whole
# Fails if torch escapes the name, or writes it in another way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy
cd "$folder"
env/bin/python - <<'PYTHON' 2>errors.txt || { cat errors.txt >&2; exit 1; }
import json
import re

import torch

with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    with torch.profiler.record_function('load "train" split'):
        torch.ones(2) + 1
    torch.ones(3) * 2
profiler.export_chrome_trace("trace.json")
text = open("trace.json").read()
position = text.index('load "train" split')
try:
    json.loads(text)
    raise SystemExit(f"torch {torch.__version__}: the trace is valid JSON now")
except ValueError as error:
    assert abs(error.pos - position) < 20, (error.pos, position)
whole = [json.loads(event) for event in re.findall(r"\n  (\{\n    \"ph\": \"X\".*?\n  \})", text[position:], re.DOTALL)]
assert len(whole) >= 2, len(whole)
print(f"torch {torch.__version__}: invalid JSON at the annotation; the events behind it are whole")
PYTHON
