#!/usr/bin/env bash
# One metric with a wrong name costs MLflow the whole batch, and a folder is no tracking store any more.
#
# Version:   mlflow-skinny 3.17.2, with the store of SQLite
# Behaviour: `log_batch` checks all names first: parentheses or a comma in one name, and no metric of the batch is kept.
#            `file:` stores are refused unless MLFLOW_ALLOW_FILE_STORE=true, with which most examples began.
#            `active_run()` and `last_active_run()` know the runs of the calling thread only.
# Seen:      mlflow 3.17.2: kept {}, file store refused, another thread sees None
# Fails if one of these changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet mlflow-skinny==3.17.2 sqlalchemy alembic
cd "$folder"
env -u MLFLOW_TRACKING_URI env/bin/python - 2>/dev/null <<'PYTHON'
import threading
from pathlib import Path

import mlflow
from mlflow.entities import Metric

client = mlflow.MlflowClient()
run = client.create_run("0").info.run_id
try:
    client.log_batch(run, metrics=[Metric("good", 1.0, 1, 1), Metric("reward (reward)", 1.0, 1, 1)])
except mlflow.MlflowException:
    pass
kept = client.get_run(run).data.metrics
seen = []
with mlflow.start_run():
    thread = threading.Thread(target=lambda: seen.append(mlflow.last_active_run()))
    thread.start()
    thread.join()
refused = ""
try:
    mlflow.MlflowClient(Path.cwd().as_uri()).create_run("0")
except mlflow.MlflowException as error:
    refused = str(error)
assert kept == {}, kept
assert seen == [None], seen
assert "MLFLOW_ALLOW_FILE_STORE" in refused, refused
print(f"mlflow {mlflow.__version__}: kept {kept}, file store refused, another thread sees {seen[0]}")
PYTHON
