"""Runs of ft as MLflow's own server and client see them: python tests/peers/tracked.py FT, in the repository.

Starts MLflow's server on a free port, with its files in a folder of its own. Needs the package mlflow.
"""
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import mlflow

ft = os.path.abspath(sys.argv[1])
root = pathlib.Path.cwd()
work = pathlib.Path(tempfile.mkdtemp())
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
url = f"http://127.0.0.1:{port}"
server = subprocess.Popen(
    [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1",
     "--backend-store-uri", f"sqlite:///{work}/mlflow.db", "--artifacts-destination", str(work / "artifacts")],
    stdout=subprocess.DEVNULL, stderr=open(work / "server.log", "w"), start_new_session=True)


def answers():
    try:
        return urllib.request.urlopen(url + "/health", timeout=1).status == 200
    except OSError:
        return False


def train(name, *more, stop=None):
    """Trains the quickstart in a folder; with `stop`, sends SIGTERM once the metrics have that many steps."""
    out = work / name
    command = [ft, "run", "recipes/quickstart.toml", f"name={name}", f"run.output={out}", "run.device=cpu",
               "run.save_every=5", "run.eval_every=5", "log.samples=['What colour is the sky?', \"Who's there? <b>é</b>\"]",
               f"log.mlflow={url}", "log.mlflow_experiment=peers", *more]
    run = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while stop and sum('"event":"step"' in line for line in lines(out)) < stop:
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.05)
    if stop:
        run.send_signal(signal.SIGTERM)
    err = run.communicate()[1]
    assert run.returncode == (143 if stop else 0), err
    assert "log.mlflow" not in err, err
    return [json.loads(line) for line in lines(out)]


def lines(out):
    path = out / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def check(client, experiment, name, status, events):
    runs = client.search_runs([experiment.experiment_id], f"tags.`mlflow.runName` = '{name}'")
    assert len(runs) == 1, runs
    run = runs[0]
    assert run.info.status == status, run.info.status
    assert run.data.params["model.source"] == '"data/model"' and run.data.params["run.save_every"] == "5"
    assert len(run.data.params) > 50 and run.data.tags["versions.ft"]
    compared = 0
    for kind, group, keys in [("step", "train", ["loss", "lr", "grad_norm"]), ("eval", "eval", ["loss"])]:
        for key in keys:
            stored = {m.step: m.value for m in client.get_metric_history(run.info.run_id, f"{group}/{key}")}
            own = {e["step"]: e[key] for e in events if e["event"] == kind}
            assert stored == own, (name, key, stored, own)
            compared += len(own)
    table = client.load_table(experiment.experiment_id, "samples.json", run_ids=[run.info.run_id])
    stored = {(row.step, row.prompt): row.reply for row in table.itertuples()}
    own = {(e["step"], e["prompt"]): e["reply"] for e in events if e["event"] == "sample"}
    assert stored == own and len(own) > 2, (name, stored, own)
    return compared + len(own)


try:
    while not answers():
        assert server.poll() is None, (work / "server.log").read_text()
        time.sleep(0.2)
    mlflow.set_tracking_uri(url)
    client = mlflow.MlflowClient()
    events = train("whole", "run.steps=10")
    experiment = client.get_experiment_by_name("peers")
    compared = check(client, experiment, "whole", "FINISHED", events)
    events = train("stopped", "run.steps=2000", stop=7)
    compared += check(client, experiment, "stopped", "KILLED", events)
    last = max(e["step"] for e in events if e["event"] == "step")
    events = train("stopped", f"run.steps={last + 5}", "--resume", "--accept-change", "run.steps")
    compared += check(client, experiment, "stopped", "FINISHED", events)
    print(f"mlflow {mlflow.__version__}: 2 runs, one of them resumed; {compared} numbers and texts equal")
finally:
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
