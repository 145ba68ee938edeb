"""``attnlab convert``: a pretrained language model with another attention, distilled on the user's text."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._output import Answer
from attnlab.commands._shared import (
    check_mechanisms,
    mechanism_argument,
    model_argument,
    on_gpu,
    own_folder,
    token_count,
)

if TYPE_CHECKING:
    from attnlab.adapters import LoadedModel, Plan
    from attnlab.adapters.distillation import Distillation
    from attnlab.pretraining.conversion import ConversionConfig

__all__ = ["arguments", "run"]

STAGES = "heads=0.05,logits=0.95"
# The rate of a student that begins far from its teacher.
LR = 3e-4
RATE = f"(default: {LR:g}, less for a student near its teacher and for fewer tokens in a step)"
LENGTHS = "512=0.4,1024=0.4,2048=0.2"
# Tokens in a step: a GPU is full with the first, two cores take minutes for it.
GPU_BATCH, CPU_BATCH = 32768, 4096
FITTING = f"(default: {LENGTHS}, or what the model can take)"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    model_argument(parser)
    way = parser.add_argument_group("what it is to attend by: one of these")
    mechanism_argument(way, "one mechanism in every layer", action="store")
    way.add_argument("--plan", type=Path, metavar="FILE", help="a plan: a mechanism for each layer or head")
    way.add_argument(
        "--budget", type=float, metavar="SHARE", help="make a plan whose cache takes this share of softmax's"
    )
    way.add_argument(
        "--softmax-control",
        action="store_true",
        help="no other attention: the same training on the same tokens, to compare with",
    )
    parser.add_argument(
        "--text", action="append", default=[], metavar="PATH", help="a text file or a folder of them; repeat for more"
    )
    parser.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="FILE",
        help="leave out paragraphs that share 13 words in a row with this text; repeat for more",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        required=True,
        help="the folder to write; the same command goes on with what is there",
    )
    _training_arguments(parser)


def _training_arguments(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("how it learns")
    for name, kind, metavar, default, explanation in (
        ("tokens", str, "N", "10M", "tokens to learn from, such as 500k or 10M"),
        ("minutes", float, "NUMBER", None, "train so long at most; the steps that fit are measured first"),
        ("lengths", str, "LIST", None, f"lengths of rows and the share of the tokens at each, in this order {FITTING}"),
        ("stages", str, "LIST", STAGES, "the share of the tokens for heads, hidden and logits"),
        ("batch", int, "N", None, f"tokens in a step (default: {GPU_BATCH}, on a CPU {CPU_BATCH})"),
        ("lr", float, "NUMBER", None, "the highest learning rate of hidden and logits " + RATE),
        ("heads-lr", float, "NUMBER", 1e-2, "the highest learning rate of heads"),
        ("hard", float, "NUMBER", 0.0, "weight of the text's own next tokens beside the teacher's predictions"),
        ("repeats", float, "SHARE", 0.1, "rows in which a passage is repeated, so that the memory is asked for it"),
        ("lora", int, "N", 0, "train a change of this rank beside the attention's projections, not all weights"),
        ("seed", int, "N", 0, "seed of new parameters and batches"),
        ("device", str, "DEVICE", "auto", "auto (a GPU if there is one), cpu or cuda"),
    ):
        shown = "" if default is None else " (default: %(default)s)"
        training.add_argument(f"--{name}", type=kind, metavar=metavar, default=default, help=explanation + shown)
    training.add_argument(
        "--train",
        choices=("all", "attention"),
        default="all",
        help="what hidden and logits train: all weights, or those of the attention (default: %(default)s)",
    )
    training.add_argument(
        "--precision",
        choices=("auto", "bf16", "no"),
        default="auto",
        help="products of bfloat16, or not; auto is bf16 on a GPU (default: %(default)s)",
    )
    training.add_argument(
        "--no-compile", action="store_true", help="do not compile layers (they are compiled on a GPU only)"
    )
    training.add_argument(
        "--checkpointing", action="store_true", help="compute layers twice instead of keeping what they computed"
    )


def run(options: argparse.Namespace) -> Answer:
    """Convert, or go on with what is there."""
    from attnlab.pretraining.conversion import convert_model, fitted_lengths
    from attnlab.training import Interrupted

    ways = (options.mechanism, options.plan, options.budget, options.softmax_control or None)
    if sum(way is not None for way in ways) != 1:
        raise ValueError("give one of --mechanism, --plan, --budget and --softmax-control: what it is to attend by")
    if not options.text:
        raise ValueError("name the text to learn from: --text FILE, or a folder of files")
    if options.mechanism is not None:
        check_mechanisms([options.mechanism])
    config, out = _config(options), own_folder(options.out)

    def make_plan(loaded: LoadedModel, texts: Any) -> Plan:
        from attnlab.adapters.load import max_length
        from attnlab.evaluation.plan_conversion import plan_conversion

        return plan_conversion(
            loaded.model,
            texts,
            tokenizer=loaded.tokenizer,
            budget=config.budget,
            length=fitted_lengths(config, max_length(loaded.model)).longest,
            seed=config.settings.seed,
        )

    try:
        result = convert_model(config, run_dir=out, make_plan=make_plan)
    except Interrupted as stopped:
        # The words of the command line, in the one line that it prints.
        stopped.args = (f"interrupted at step {stopped.step}; a checkpoint is saved; the same command goes on",)
        raise
    model = (out / "model").resolve()
    return Answer({**result, "model": str(model)}, [*_lines(result), f"the model is in {model}"], [out])


def _lines(result: dict[str, Any]) -> list[str]:
    """Losses on the held-out text, and the cache of one sequence."""
    losses = result["metrics"]
    saved = result["saved"]
    lines = [
        _saved_line(**saved),
        f"loss on held-out text: teacher {losses['held-out/teacher']:.4f}  student {losses['held-out/loss']:.4f}  "
        f"above the teacher {losses['held-out/above teacher']:+.4f}",
        f"learned from {result['tokens']:,} tokens"
        + "".join(f"  {stage} {rate:,.0f} tokens/s" for stage, rate in result["tokens_per_second"].items()),
    ]
    for row in result["cache"]:
        share = 100 * row["bytes"] / max(1, row["softmax_bytes"])
        lines.append(f"cache at {row['length']:,} tokens: {row['bytes']:,} bytes, {share:.1f} % of softmax's")
    return lines


def _saved_line(stage: str, step: int, of: int, kl: float, kl_at_start: float) -> str:
    """Which student is saved."""
    if step == 0:
        return f"no step brought the student nearer to its teacher than it began: KL {kl:.4f}; it is saved as it began"
    return (
        f"the student nearest to its teacher on held-out text is saved: {stage}, step {step} of {of}, KL {kl:.4f} "
        f"({kl_at_start:.4f} at the start)"
    )


def _config(options: argparse.Namespace) -> ConversionConfig:
    from attnlab.adapters import Plan
    from attnlab.pretraining.conversion import ConversionConfig

    return ConversionConfig(
        model=options.model,
        text=tuple(options.text),
        mechanism=options.mechanism,
        plan=None if options.plan is None else Plan.load(options.plan).to_json(),
        budget=options.budget,
        softmax_control=options.softmax_control,
        leave_out=tuple(options.leave_out),
        tokens=token_count("--tokens", options.tokens),
        minutes=options.minutes,
        stages=_shares("--stages", options.stages),
        device="cpu" if options.device == "cpu" else "auto",
        fit_lengths=options.lengths is None,
        settings=_settings(options, gpu=on_gpu(options.device)),
    )


def _settings(options: argparse.Namespace, *, gpu: bool) -> Distillation:
    """How the student learns."""
    from attnlab.adapters.distillation import Distillation

    asked = LENGTHS if options.lengths is None else options.lengths
    lengths = tuple((_whole("--lengths", length), share) for length, share in _shares("--lengths", asked))
    longest = max((length for length, _ in lengths), default=0)
    batch = options.batch
    if batch is None:
        batch = GPU_BATCH if gpu else max(CPU_BATCH, longest)
    if not 2 <= longest <= batch:
        raise ValueError(f"--batch has {batch} tokens and --lengths rows of {longest}: one row must fit")
    first = lengths[0][0]
    lr = LR if options.lr is None else options.lr
    return Distillation(
        heads_lr=options.heads_lr,
        hidden_lr=lr,
        logits_lr=lr,
        scale_lr=options.lr is None,
        hard=options.hard,
        repeats=options.repeats,
        train=options.train,
        lora=options.lora,
        batch=batch // first,
        length=first,
        lengths=lengths,
        seed=options.seed,
        precision=options.precision,
        compile=gpu and not options.no_compile,
        checkpointing=options.checkpointing,
    )


def _shares(option: str, text: str) -> tuple[tuple[str, float], ...]:
    """Pairs out of "512=0.4,1024=0.6"; a name alone has the share 1."""
    pairs = []
    for part in text.split(","):
        name, given, share = part.strip().partition("=")
        try:
            value = float(share) if given else 1.0
        except ValueError:
            raise ValueError(f"{option}: {share!r} is no share, in {part!r}") from None
        pairs.append((name.strip(), value))
    return tuple(pairs)


def _whole(option: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"{option}: {text!r} is no number of tokens")
    return int(text)
