"""Bad input for the command line, as tables: options, model folders, run folders and texts."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.commands.table import COMMANDS, parser_of

HUGE = 1_000_000_000
DEEP = "[" * 200_000 + "]" * 200_000


@dataclass(frozen=True)
class Case:
    """One call: ``arguments(folder)`` makes its files in a folder of its own and gives the words of the command."""

    name: str
    arguments: Callable[[Path, Path], list[str]]
    # Whether the call must be refused; else it may also succeed.
    refused: bool = False


# Words that make a call of each command quick and good; {files} is the folder of good files.
GOOD: dict[str, list[str]] = {
    "demo": ["--tokens", "40", "--length", "20", "-m", "softmax", "--lengths", "32", "--out", "{own}/demo"],
    "compare": ["{files}/llama", "--text", "{files}/text.txt", "-m", "softmax", "--tokens", "30", "-o", "{own}/p.html"],
    "evaluate": [
        *["{files}/llama", "--text", "{files}/text.txt", "--tasks", "loss", "--window", "16", "--windows", "1"],
        *["-o", "{own}/p.html"],
    ],
    "judge": [
        *["{files}/llama", "--text", "{files}/long.txt", "--tasks", "loss", "--lengths", "40", "--cases", "1"],
        *["--policies", "tova", "--budgets", "0.5", "-o", "{own}/p.html"],
    ],
    "explore": ["{files}/llama", "a b a b", "-o", "{own}/p.html"],
    "audit": ["{files}/llama", "--text", "{files}/text.txt", "--length", "16", "-o", "{own}/audit"],
    "train": [
        *["--text", "{files}/text.txt", "--model", "attnlab-lm", "--task", "causal", "--vocab", "20", "--length", "8"],
        *["--batch", "2", "--steps", "1", "--warmup", "0", "--out", "{own}/run"],
    ],
    "convert": [
        *["{files}/llama", "-m", "window:r=4", "--text", "{files}/text.txt", "--lengths", "8", "--batch", "16"],
        *["--tokens", "32", "--stages", "logits", "--device", "cpu", "--out", "{own}/run"],
    ],
    "sample": ["{files}/llama", "--tokens", "20", "--length", "12", "--batch", "24", "--out", "{own}/own"],
    "report": ["{files}/run", "-o", "{own}/p.html"],
    "bench": ["-m", "kernel:elu", "--lengths", "8", "--heads", "2", "--repeats", "1"],
    "diagnose": ["{files}/text.txt", "{files}/text.txt"],
    "doctor": [],
    "fetch": [],
    "completion": ["bash"],
}


def good_call(command: str, files: Path, own: Path) -> list[str]:
    """The words of a good call, with files in a folder of its own."""
    own.mkdir(exist_ok=True)
    return [command, *(word.format(files=files, own=own) for word in GOOD[command])]


INTS = ("x", "1.5", "", "-1", "0", str(HUGE), str(10**20), "9" * 5000)
FLOATS = ("x", "", "nan", "inf", "-1", "1e309", "1e300")
PATHS = ("", "{own}", "{own}/no/such", "/dev/null/x", "x" * 300, "nul\0byte", "\udcff")
NAMES = ("", "x", "\udcff", "bert-1x1000000", "bert-10000000x32", "llama-x", "bert-0x0", "../..", "nobody/nothing")
SPECS = (
    *["", ":", "softmax:", "nope", "top-r:r=x", "top-r:r=-1", "top-r:r=1e400", f"top-r:r={'9' * 5000}", "\udcff"],
    *[f"orf:features={HUGE}", f"abc-random:slots={HUGE}", "lsh:r=4,rounds=100000000", "./no.py:X", "no.py", "a:b:c:d"],
    *["per-head:heads=nope/softmax", "kernel:poly,degree=64", f"window:r={HUGE}", f"kernel:poly,degree={HUGE}"],
)
DEVICES = ("", "x", "cuda:99", "cpu:99", "mps", "\udcff")
LAYERS = ("", "x", "0-99999999999", "5-2", "-1", "99", "0,,1", "²")

KINDS = {
    "mechanism": SPECS,
    "attention": SPECS,
    "compare_mechanism": SPECS,
    "device": DEVICES,
    "layers": LAYERS,
    "model": NAMES,
    "compare": NAMES,
}


def option_cases() -> Iterator[Case]:
    """Every option of every command with every kind of bad value."""
    for command in COMMANDS:
        for action in parser_of(command)._actions:
            # --track and an empty --out of train and demo write where the user is.
            if action.nargs == 0 or action.dest in ("help", "track") or action.choices:
                continue
            # They are those of compare, on a larger model.
            if command == "demo" and action.dest != "out":
                continue
            for value in _bad_values(action):
                # A training of so many steps is long, and no mistake.
                if action.dest == "steps" and value.startswith("1000"):
                    continue
                yield Case(f"{command} {action.dest} {value[:24]!r}", _call(command, action, value))


def _bad_values(action: argparse.Action) -> tuple[str, ...]:
    if action.dest in KINDS:
        return KINDS[action.dest]
    values = {int: INTS, float: FLOATS}.get(action.type, PATHS)  # type: ignore[call-overload]
    # An empty or relative name of a file to write would be written to where the tests run.
    return tuple(v for v in values if v or action.dest not in ("out", "plans", "resume"))


# The tasks of evaluate that options are for; without them they are refused before they are read.
TASKS = {"lambada": "lambada", "passages": "lambada", "haystack": "needle", "cases": "needle", "lengths": "needle"}


def _call(command: str, action: argparse.Action, value: str) -> Callable[[Path, Path], list[str]]:
    def arguments(files: Path, own: Path) -> list[str]:
        task = TASKS.get(action.dest, "loss") if command == "evaluate" else "loss"
        good = [task if word == "loss" else word for word in GOOD[command]]
        filled = value.replace("{own}", str(own))
        if action.option_strings:
            words = (
                [*good, f"{action.option_strings[-1]}={filled}"]
                if filled[:1] == "-"
                else [*good, action.option_strings[-1], filled]
            )
        else:
            place = {"target": 1, "text": 1}.get(action.dest, 0)
            words = [*good[:place], filled, *good[place + 1 :]]
        return [command, *(word.format(files=files, own=own) if word in good else word for word in words)]

    return arguments


CONFIG_VALUES: tuple[Any, ...] = ("x", float("nan"), 1e308, None, [], {}, -1, 0, True, HUGE, 10**30)
CONFIG_FIELDS = (
    *["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"],
    *["vocab_size", "max_position_embeddings", "head_dim", "rope_theta", "architectures", "model_type", "dtype"],
    *["hidden_act", "attnlab", "rope_scaling", "tie_word_embeddings", "rms_norm_eps", "pad_token_id"],
)


def model_cases() -> Iterator[Case]:
    """Model folders with a config, an index, weights or a tokenizer that are damaged."""
    for field in CONFIG_FIELDS:
        for value in CONFIG_VALUES:
            yield _model(
                f"config {field} {str(value)[:12]}", lambda f, k=field, v=value: edit(f / "config.json", **{k: v})
            )
    for name, content in SHAPES.items():
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"):
            yield _model(
                f"{file} {name}",
                lambda f, n=file, c=content: (f / n).write_text(c, errors="surrogateescape"),
                refused=file[0] == "c",
            )
    for name, weight_map in (
        ("list", []), ("list of names", ["a"]), ("numbers", {"a": 1}), ("outside", {"a": "../x"}), ("absent", {"a": "b"}),
    ):  # fmt: skip
        content = json.dumps({"weight_map": weight_map})
        yield _model(
            f"index {name}", lambda f, c=content: (f / "model.safetensors.index.json").write_text(c), refused=True
        )
    for name, damage in WEIGHTS.items():
        yield _model(f"weights {name}", damage, refused=True)
    yield _model("tokenizer beyond the vocabulary", ids_beyond, refused=True)
    yield _model("end of texts beyond the vocabulary", end_beyond)
    yield _model("config.json is a folder", lambda f: replace_by_folder(f / "config.json"), refused=True)
    yield _model("model.safetensors is a folder", lambda f: replace_by_folder(f / "model.safetensors"), refused=True)


def _model(name: str, damage: Callable[[Path], object], *, refused: bool = False) -> Case:
    def arguments(files: Path, own: Path) -> list[str]:
        folder = Path(shutil.copytree(files / "llama", own / "damaged"))
        damage(folder)
        return ["explore", str(folder), "a b a b", "-o", str(own / "p.html")]

    return Case(f"model: {name}", arguments, refused)


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def with_value(value: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def fewer_layers(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=1)


def ids_beyond(folder: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["model"]["vocab"]["b"] = 99_999
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def end_beyond(folder: Path) -> None:
    """The token that ends texts, which no text holds."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["model"]["vocab"]["[EOS]"] = 99_999
    for token in saved["added_tokens"]:
        token["id"] = 99_999 if token["content"] == "[EOS]" else token["id"]
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def first_bytes(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


WEIGHTS: dict[str, Callable[[Path], object]] = {
    "NaN": with_value(torch.nan),
    "infinity": with_value(torch.inf),
    "empty": first_bytes(b""),
    "a huge header": first_bytes(b"\xff" * 8 + b"{}"),
    "a header that is no JSON": first_bytes(b"\x08" + b"\0" * 7 + b"[[[[[[[["),
    "no tensors": first_bytes(b"\x02" + b"\0" * 7 + b"{}"),
    "zeros": first_bytes(b"\0" * 4096),
    "fewer layers in the config": fewer_layers,
}

SHAPES = {
    "list": "[]",
    "null": "null",
    "string": '"x"',
    "number": "1",
    "nested": DEEP,
    "empty": "",
    "empty object": "{}",
    "half": '{"a": ',
    "long number": '{"a": ' + "9" * 5000 + "}",
    "not UTF-8": '{"a": "\udcff"}',
}


def run_cases() -> Iterator[Case]:
    """Run folders whose files have another shape, or numbers that no page can draw."""
    values: tuple[Any, ...] = ("x", 1, None, [], [[]], {"a": {"b": [1]}}, 10**400, float("inf"), float("nan"), True)
    for file, fields in {
        "run.json": ("config", "seed", "versions", "name", "commit", "device", "python"),
        "result.json": ("metrics", "tables", "name"),
    }.items():
        for field in fields:
            for value in values:
                yield _run(f"{file} {field} {str(value)[:12]}", file, json.dumps({field: value}))
        for name, content in SHAPES.items():
            yield _run(f"{file} {name}", file, content)
    for rows in (
        "x",
        1,
        [1],
        [[1]],
        [{"a": 10**400}],
        [{"a": float("inf")}, {"a": {"b": 1}}],
        {"a": 1},
        [{"a": [[1]]}],
    ):
        yield _run(f"table {str(rows)[:12]}", "result.json", json.dumps({"tables": {"t": rows}}))
        yield _run(f"named table {str(rows)[:12]}", "result.json", json.dumps({"tables": [{"name": 1, "rows": rows}]}))
    good = {"step": 1, "kind": "eval", "values": {"loss": 1.0}, "seconds": 1.0}
    for field in good:
        for value in values:
            yield _run(f"metrics {field} {str(value)[:12]}", "metrics.jsonl", json.dumps(good | {field: value}))
    for value in (*values, 1e308, -1e308, 5e-324):
        line = json.dumps(good | {"values": {"loss": value}})
        more = json.dumps(good | {"step": 2, "values": {"loss": -1e308}})
        yield _run(f"metrics loss {str(value)[:12]}", "metrics.jsonl", f"{line}\n{more}")
    for name, content in SHAPES.items():
        yield _run(f"metrics {name}", "metrics.jsonl", content)


def _run(name: str, file: str, content: str) -> Case:
    def arguments(files: Path, own: Path) -> list[str]:
        folder = Path(shutil.copytree(files / "run", own / "damaged"))
        (folder / file).write_text(content, errors="surrogateescape")
        return ["report", str(folder), "-o", str(own / "p.html")]

    return Case(f"run: {name}", arguments)


def bomb(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(64):
            file.write(b"a" * (1 << 20))


TEXTS: dict[str, Callable[[Path], object]] = {
    "empty.txt": lambda p: p.write_bytes(b""),
    "blank.txt": lambda p: p.write_bytes(b" \n\t\n"),
    "binary.txt": lambda p: p.write_bytes(bytes(range(256))),
    "latin.txt": lambda p: p.write_bytes(b"caf\xe9 " * 30),
    "utf16.txt": lambda p: p.write_bytes("a b a b\n".encode("utf-16")),
    "surrogate.txt": lambda p: p.write_bytes(b"a \xed\xa0\x80 b\n" * 9),
    "word.txt": lambda p: p.write_bytes(b"a"),
    "not.gz": lambda p: p.write_bytes(b"not gzip"),
    "cut.txt.gz": lambda p: p.write_bytes(gzip.compress(b"a b " * 99)[:-9]),
    "bomb.txt.gz": bomb,
    "not.zip": lambda p: p.write_bytes(b"PK\x03\x04"),
    "not.xz": lambda p: p.write_bytes(b"\xfd7zXZ\0"),
    "not.bz2": lambda p: p.write_bytes(b"BZh9"),
    "a.jsonl": lambda p: p.write_bytes(b'{"text": "a b"}\n[1]\n'),
    "surrogate.jsonl": lambda p: p.write_bytes(b'{"text": "a \\ud800"}\n'),
    "deep.jsonl": lambda p: p.write_text(DEEP),
    "number.jsonl": lambda p: p.write_text('{"text": ' + "9" * 5000 + "}"),
    "column.csv": lambda p: p.write_bytes(b"x,y\n1,2\n"),
    "quote.csv": lambda p: p.write_bytes(b'text\n"a\n'),
    "wide.csv": lambda p: p.write_bytes(b"text\n" + b"a" * 200_000 + b"\n"),
    "a.tsv": lambda p: p.write_bytes(b"text\ta\nb\n"),
    "folder": lambda p: p.mkdir(),
    "pipe": os.mkfifo,
    "zero": lambda p: p.symlink_to("/dev/zero"),
    "null": lambda p: p.symlink_to("/dev/null"),
    "loop": lambda p: p.symlink_to(p),
}


def text_cases() -> Iterator[Case]:
    """Texts that are none, through every command that reads one."""
    for name, write in TEXTS.items():
        for command, words in {
            "compare": ["{files}/llama", "-m", "softmax", "-o", "{own}/p.html", "--text"],
            "explore": ["{files}/llama", "-o", "{own}/p.html", "--file"],
            "audit": ["{files}/llama", "--length", "16", "--text"],
            "train": [*GOOD["train"], "--text"],
            "convert": [*GOOD["convert"], "--text"],
            "convert without": [*GOOD["convert"], "--leave-out"],
            "diagnose": ["{files}/text.txt"],
            "diagnose alone": [],
        }.items():
            yield Case(f"text: {command} {name}", _text(command.split()[0], words, name, write))


def _text(command: str, words: list[str], name: str, write: Callable[[Path], object]) -> Callable[..., list[str]]:
    def arguments(files: Path, own: Path) -> list[str]:
        write(own / name)
        return [command, *(word.format(files=files, own=own) for word in words), str(own / name)]

    return arguments


CASES: list[Case] = [*option_cases(), *model_cases(), *run_cases(), *text_cases()]
