"""ABC_MLP's kernels on a GPU: every head size and number of slots, float32 and bfloat16, and tests that need a GPU.

``python -m tests.kernels.abc.test_abc_gpu benchmarks/results/test_gpu.json [seconds [processes]]`` writes a record of it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("triton")

import attnlab as al
from attnlab.kernels.abc import HEAD_SIZES, abc_attention, abc_step
from tests.kernels.abc.cases import Case, bound, check, dense, errors, inputs, poisoned, relative

pytestmark = pytest.mark.gpu

SLOTS = (4, 31, 32, 64, 100, 128, 200, 256)
SCALES = (1.0, 8.0, 30.0)


def pairs() -> list[tuple[int, int, str]]:
    """Every head size with slots of every tile, full and padded; the dtypes take turns."""
    return [(d, n, kind) for kind in ("bfloat16", "float32") for n in SLOTS for d in HEAD_SIZES]


def worst(pair: tuple[int, int, str]) -> dict[str, Any]:
    """The errors of one pair at three scales of the control logits, in poisoned memory, and which are beyond bounds."""
    d, n, kind = pair
    # Whole chunks have kernels of their own, and so have heads of whole tiles.
    length = 192 if d % 64 == 0 else 150
    row: dict[str, Any] = {"d": d, "slots": n, "dtype": kind}
    beyond = []
    for i, scale in enumerate(SCALES):
        case = Case(d=d, slots=n, length=length, heads=2, groups=1, scale=scale, dtype=getattr(torch, kind), device="cuda",
                    started=i == 2, ended=i == 2)  # fmt: skip
        try:
            with poisoned():
                case_errors = errors(case, seed=time.time_ns() // 1000 % 100000)
        except Exception as error:
            return row | {"beyond": f"{type(error).__name__}: {error}"[:500]}
        beyond += [f"{name} {e:.4f} at {scale:g}" for name, e in case_errors.items() if not e < bound(name, case)]
        row[f"scale {scale:g}"] = max(e for name, e in case_errors.items() if name != "ds")
        row[f"ds at {scale:g}"] = case_errors["ds"]
    return row | {"beyond": ", ".join(beyond)}


def all_pairs(processes: int) -> Iterator[dict[str, Any]]:
    """``worst`` of every pair; of each dtype, first those that between them compile every kernel."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for kind in ("bfloat16", "float32"):
            todo = [p for p in pairs() if p[2] == kind]
            first = [p for p in todo if p[0] in (32, 64, 80, 128)]
            yield from pool.imap_unordered(worst, first)
            yield from pool.imap_unordered(worst, [p for p in todo if p not in first], chunksize=2)


def by_slots(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst of all head sizes, for each dtype and number of slots."""
    table = []
    for kind, n in sorted({(r["dtype"], r["slots"]) for r in rows}):
        here = [r for r in rows if (r["dtype"], r["slots"]) == (kind, n)]
        line = {"dtype": kind, "slots": n, "head sizes": len(here)}
        for name in [f"{what} {scale:g}" for scale in SCALES for what in ("scale", "ds at")]:
            line[name] = max((r[name] for r in here if name in r), default=None)
        table.append(line | {"beyond a bound": sum(bool(r["beyond"]) for r in here)})
    return table


def test_every_pair_of_head_size_and_slots() -> None:
    wrong = [row for row in all_pairs(min(16, os.cpu_count() or 1)) if row["beyond"]]
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 63, 100, 4097])
def test_lengths(length: int, dtype: torch.dtype) -> None:
    if length < 1000:
        check(Case(d=64, slots=64, length=length, heads=2, groups=2, dtype=dtype, device="cuda"))
        return
    # The dense reference would not fit: two halves, the second from the state after the first, are the whole.
    made, _, _ = inputs(Case(d=64, slots=64, length=length, groups=2, dtype=dtype, device="cuda"))
    whole, end = abc_attention(*made)
    first, state = abc_attention(*(t[:, :, :2000] for t in made))
    second, last = abc_attention(*(t[:, :, 2000:] for t in made), state=state)
    most = 1e-5 if dtype == torch.float32 else 5e-3
    assert relative(torch.cat([first, second], 2), whole) < most
    for got, want in zip(last, end, strict=True):
        assert relative(got, want) < most


def test_the_longest() -> None:
    made, _, _ = inputs(Case(d=128, slots=64, length=131072, groups=2, dtype=torch.bfloat16, device="cuda"))
    out, _ = abc_attention(*made)
    grads = torch.autograd.grad(out.float().square().sum(), made)
    assert all(t.isfinite().all() for t in (out, *grads))


@pytest.mark.parametrize(
    "case",
    [
        Case(d=64, slots=64, length=130, masked=True, batch=2, scale=8, dtype=torch.bfloat16),
        Case(d=64, slots=64, length=130, causal=False, keys=77, heads=4, groups=1, dtype=torch.bfloat16),
        Case(d=64, slots=64, length=203, packed=(5, 0, 133, 1, 64), started=True, ended=True, dtype=torch.bfloat16),
        Case(d=64, slots=64, length=203, packed=(5, 0, 133, 1, 64), causal=False, started=True, dtype=torch.bfloat16),
        Case(d=64, slots=64, length=192, heads=8, groups=2, scale=8, dtype=torch.bfloat16),
        Case(d=128, slots=128, length=192, heads=3, groups=1, dtype=torch.bfloat16),
        # Heads of their own, of whole chunks.
        Case(d=32, slots=64, length=192, heads=2, groups=2, dtype=torch.bfloat16),
        Case(d=32, slots=20, length=192, heads=2, groups=2, scale=8, started=True, ended=True, dtype=torch.bfloat16),
        Case(d=32, slots=64, length=203, packed=(5, 0, 133, 1, 64), started=True, ended=True, dtype=torch.bfloat16),
        Case(d=128, slots=32, length=192, heads=2, groups=2, dtype=torch.bfloat16),
        Case(d=128, slots=64, length=192, heads=2, groups=2, dtype=torch.bfloat16),
        Case(d=256, slots=64, length=192, heads=2, groups=2, dtype=torch.bfloat16),
        # Few slots, in float64.
        Case(d=64, slots=16, length=130, masked=True, batch=2, scale=8),
        Case(d=64, slots=16, length=130, causal=False, keys=77, heads=4, groups=1, masked=True),
        Case(d=64, slots=16, length=203, packed=(5, 0, 133, 1, 64), started=True, ended=True, scale=30),
    ],
    ids=str,
)
def test_padded_cross_packed_and_grouped(case: Case) -> None:
    check(Case(**{**vars(case), "device": "cuda"}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_segments_of_a_long_sequence(dtype: torch.dtype) -> None:
    """Long enough to be cut, forward and backward, against the same in pieces that are not."""
    made, _, _ = inputs(Case(d=64, slots=64, length=2048, groups=1, dtype=dtype, device="cuda"))
    pull = torch.randn_like(made[0])
    whole = torch.autograd.grad((abc_attention(*made)[0] * pull).sum(), made)
    state, outs = None, []
    for begin in range(0, 2048, 256):
        out, state = abc_attention(*(t[:, :, begin : begin + 256] for t in made), state=state)
        outs.append(out)
    pieces = torch.autograd.grad((torch.cat(outs, 2) * pull).sum(), made)
    for got, want in zip(whole, pieces, strict=True):
        assert relative(got, want) < (1e-5 if dtype == torch.float32 else 7e-3)


def test_logits_that_climb_far_within_a_chunk() -> None:
    """Chunks that need several references, in bfloat16, and tensors that begin at any address."""
    made, _, _ = inputs(Case(d=64, slots=64, length=192, groups=2, dtype=torch.bfloat16, device="cuda"))
    q, k, v, _ = (t.detach() for t in made)
    control = (8.0 * torch.arange(192, device="cuda"))[None, None, :, None].expand(1, 2, 192, 64)
    room = torch.empty(control.numel() + 1, device="cuda", dtype=torch.bfloat16)
    shifted = room[1:].view(control.shape).copy_(control)
    for logits in (control.to(torch.bfloat16), shifted):
        out, _ = abc_attention(q, k, v, logits)
        want, _ = dense(*(t.double() for t in (q, k, v, logits)), causal=True, seen=None, state=None)
        assert relative(out, want) < 5e-3


def test_a_run_repeats_bit_for_bit() -> None:
    made, _, _ = inputs(Case(d=64, slots=64, length=500, heads=4, groups=2, dtype=torch.bfloat16, device="cuda"))
    runs = []
    for _ in range(2):
        out, _ = abc_attention(*made)
        runs.append((out, *torch.autograd.grad(out.float().square().sum(), made)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_steps_in_a_cuda_graph_continue_a_prefill() -> None:
    made, _, _ = inputs(Case(d=64, slots=64, length=70, heads=4, groups=2, dtype=torch.bfloat16, device="cuda"))
    q, k, v, s = (t.detach() for t in made)
    whole, _ = abc_attention(q, k, v, s)
    _, state = abc_attention(*(t[:, :, :64] for t in (q, k, v, s)))
    now = [t[:, :, 64:65].clone() for t in (q, k, v, s)]
    abc_step(*now, tuple(t.clone() for t in state))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = abc_step(*now, state)
    got = []
    for t in range(64, 70):
        for buffer, source in zip(now, (q, k, v, s), strict=True):
            buffer.copy_(source[:, :, t : t + 1])
        graph.replay()
        got.append(out.clone())
    assert relative(torch.cat(got, 2), whole[:, :, 64:].double()) < 5e-3


def test_the_mechanism_takes_the_kernels_and_agrees_with_its_pytorch_path() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 100, 64, device="cuda", requires_grad=True) for _ in range(3))
    x = torch.randn(2, 100, 32, device="cuda")
    seen = torch.rand(2, 100, device="cuda") > 0.3
    mech = al.AbcMlp(slots=16)
    for causal in (True, False):
        call = al.AttentionCall(q, k, v, x=x, key_visible=seen, causal=causal)
        assert mech.fused(call, None) is not None
        with torch.no_grad():
            torch.testing.assert_close(mech(call), mech.weights(call) @ v, rtol=1e-4, atol=1e-4)


# The warnings are torch's own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_under_autocast() -> None:
    made, _, _ = inputs(Case(d=64, slots=64, length=130, heads=4, groups=2, dtype=torch.bfloat16, device="cuda"))

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return abc_attention(*tensors)[0].float().square().sum()

    eager = torch.autograd.grad(loss(*made), made)
    with torch.autocast("cuda", torch.bfloat16):
        compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*made), made)
    for got, want in zip(compiled, eager, strict=True):
        assert relative(got, want) < 5e-3


def outcomes(report: Path) -> list[dict[str, Any]]:
    """How often each test passed and did not, from pytest's own report."""
    counts: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        name = case.attrib["name"].split("[")[0].removeprefix("test_").replace("_", " ")
        count = counts.setdefault(name, {"passed": 0, "failed": 0})
        count["failed" if any(child.tag in ("failure", "error", "skipped") for child in case) else "passed"] += 1
    return [{"test": name, **count} for name, count in counts.items()]


def record(path: Path, seconds: float = 3600, processes: int = 16) -> bool:
    """Run all pairs, or as many as the time allows, and the other tests beside them; write a record.

    Returns whether all that ran was right.
    """
    from attnlab.provenance import provenance, write_json

    start, rows = time.perf_counter(), []
    report = path.with_suffix(".xml")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", "not every_pair", __file__]
    tests = subprocess.Popen([sys.executable, *command, f"--junitxml={report}"])

    def keep() -> None:
        config = {"lengths": [150, 192], "scales": list(SCALES), "pairs": len(pairs())}
        beyond = [row for row in rows if row["beyond"]]
        tables = {"passed": outcomes(report), "by_slots": by_slots(rows), "errors": rows, "beyond": beyond}
        made = {**provenance(), "command": f"python -m tests.kernels.abc.test_abc_gpu {path.name}"}
        write_json(path, {"name": "test_gpu", "config": config, "seed": None, **made, "tables": tables})
        spent = time.perf_counter() - start
        print(f"{len(rows)} pairs, {len(beyond)} beyond a bound, {spent:.0f} s", flush=True)

    for row in all_pairs(min(processes, os.cpu_count() or 1)):
        rows.append(row)
        if len(rows) % 8 == 0:
            keep()
        if time.perf_counter() - start > seconds:
            break
    try:
        tests.wait(timeout=max(1.0, seconds - (time.perf_counter() - start)))
    except subprocess.TimeoutExpired:
        tests.kill()
    keep()
    report.unlink(missing_ok=True)
    return tests.returncode == 0 and not any(row["beyond"] for row in rows)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("the kernels' record needs a CUDA device")
    sys.exit(not record(Path(sys.argv[1]), *map(int, sys.argv[2:])))
