#!/usr/bin/env bash
# wandb.init() in a thread asks on the terminal for ever, and the interpreter aborts at its exit.
#
# Version:   wandb 0.31.0, nobody logged in, standard input a terminal
# Behaviour: `init()` asks "Enter your choice" on whatever thread it is called, also with Settings(login_timeout=5). The
#            thread holds the lock of standard input, so the process ends with "Fatal Python error:
#            _enter_buffered_busy" and SIGABRT, though its program was through. `wandb.login(prompt=False)` asks nobody.
# Seen:      wandb 0.31.0: asked, still asking after 20 s, the process ended with -6
# Fails if it times out, or the process ends with 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet wandb==0.31.0
cd "$folder"
cat > asks.py <<'PYTHON'
import threading

import wandb


def begin():
    wandb.init(settings=wandb.Settings(login_timeout=5))


thread = threading.Thread(target=begin, daemon=True)
thread.start()
thread.join(20)
print("still asking" if thread.is_alive() else "timed out", flush=True)
PYTHON
env/bin/python - <<'PYTHON'
import os
import pty
import sys
from importlib.metadata import version

pid, terminal = pty.fork()
if pid == 0:
    environment = {"HOME": os.getcwd(), "PATH": os.environ["PATH"], "TERM": "xterm"}
    os.execve(sys.executable, [sys.executable, "asks.py"], environment)
shown = b""
try:
    while part := os.read(terminal, 4096):
        shown += part
except OSError:
    pass
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert b"Enter your choice" in shown, shown
assert b"still asking" in shown, shown
assert code == -6, code
print(f"wandb {version('wandb')}: asked, still asking after 20 s, the process ended with {code}")
PYTHON
