"""Runs the job in child processes that are killed with SIGKILL at random moments, until enough kills have happened.

Usage: python -m tests.training.killer FOLDER KILLS SEED. Children are forked after the imports. Each tells its parent of
every step it takes, so that kills fall anywhere in training and in the writing that follows a step, not only into the
start. Prints one JSON line: the newest checkpoint at each kill.
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

from attnlab.training import Callback, Moment, read_result
from tests.training.jobs import job

assert accelerate


class StepToPipe(Callback):
    """Writes one byte for each step."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_step(self, moment: Moment) -> None:
        os.write(self.pipe, b".")


def child(run_dir: Path) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        status = 1
        try:
            job(run_dir, resume=True, checkpoint_every=2, callbacks=[StepToPipe(write_end)])
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    return pid, read_end


def wait_for_steps(read_end: int, steps: int) -> None:
    """Return after so many steps of the child, or at its end."""
    while steps > 0 and (some := os.read(read_end, steps)):
        steps -= len(some)


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    start = time.perf_counter()
    pid, read_end = child(folder / "whole")
    wait_for_steps(read_end, 1)
    first = time.perf_counter()
    assert os.waitpid(pid, 0)[1] == 0
    before, pace = first - start, (time.perf_counter() - first) / 20
    happened: list[str] = []
    finished: list[str] = []
    while len(happened) < kills:
        run_dir = folder / f"killed-{len(finished)}"
        while read_result(run_dir) is None:
            pid, read_end = child(run_dir)
            if len(happened) < kills:
                if chance.random() < 0.2:
                    time.sleep(chance.uniform(0, before))
                else:
                    wait_for_steps(read_end, chance.randint(1, 12))
                    time.sleep(chance.uniform(0, 2 * pace))
                os.kill(pid, signal.SIGKILL)
            else:
                wait_for_steps(read_end, 99)
            status = os.waitpid(pid, 0)[1]
            os.close(read_end)
            if os.WIFSIGNALED(status):
                reached = sorted(p.name for p in run_dir.glob("checkpoints/step-*"))
                happened.append(reached[-1] if reached else "none")
            else:
                assert status == 0, f"the run failed: {status}"
        finished.append(run_dir.name)
    print(json.dumps({"kills": happened, "runs": finished}))


if __name__ == "__main__":
    main()
