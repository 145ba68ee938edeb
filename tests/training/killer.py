"""Runs the job in child processes that are killed with SIGKILL at random moments, until enough kills have happened.

Usage: python -m tests.training.killer FOLDER KILLS SEED. Children are forked after the imports, so that most of a child's
life is training. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import accelerate

from attnlab.training import read_result
from tests.training.jobs import job

assert accelerate


def child(run_dir: Path) -> int:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        status = 1
        try:
            job(run_dir, resume=True, checkpoint_every=2)
            status = 0
        finally:
            os._exit(status)
    return pid


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    start = time.perf_counter()
    assert os.waitpid(child(folder / "whole"), 0)[1] == 0
    whole = time.perf_counter() - start
    happened, finished = [], []
    while len(happened) < kills:
        run_dir = folder / f"killed-{len(finished)}"
        while read_result(run_dir) is None:
            pid = child(run_dir)
            if len(happened) < kills:
                time.sleep(chance.uniform(0, whole))
                os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if os.WIFSIGNALED(status):
                reached = sorted(p.name for p in run_dir.glob("checkpoints/step-*"))
                happened.append(reached[-1] if reached else "before the first checkpoint")
            else:
                assert status == 0, f"the run failed: {status}"
        finished.append(run_dir.name)
    print(json.dumps({"kills": happened, "runs": finished}))


if __name__ == "__main__":
    main()
