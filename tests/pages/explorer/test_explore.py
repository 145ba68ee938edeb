"""From a trace to the page: readings and statistics agree with attnlab.reading; the command and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import attnlab as al
from attnlab.adapters.load import SHIPPED, shipped_model
from attnlab.cli import main
from attnlab.evaluation.explore_models import parse_layers, subject
from attnlab.pages.explorer import Exploration
from attnlab.reading import attention_distance, attention_entropy, norm_based, rollout

from .test_payload import unpacked

TEXT = "The old ferry stayed in the harbour. Spring came slowly."


@pytest.fixture(scope="module")
def traced() -> tuple[al.Trace, list[str]]:
    model, tokenizer, _ = shipped_model()
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad(), al.record(model) as trace:
        model(**inputs)
    return trace, tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())


def stack(shown: Exploration, item: int = 0) -> dict[str, Any]:
    return shown.packed.meta["items"][item]["stacks"][0]


def test_maps_are_the_readings(traced: tuple[al.Trace, list[str]]) -> None:
    trace, tokens = traced
    shown = al.explore(trace, tokens=tokens, readings=("standard", "effective", "norm", "rollout"), precise=True)
    wanted = {
        "standard": trace[4].weights(),
        "effective": al.effective_attention(trace[4]).weights,
        "norm": norm_based(trace[4]),
        "rollout": rollout(trace)[4],
    }
    for i, reading in enumerate(stack(shown)["readings"]):
        w = wanted[reading["name"]][0, 0].numpy()
        np.testing.assert_allclose(unpacked(shown.packed, i, layer=4), w, atol=1e-3 * abs(w).max())
    assert stack(shown)["readings"][3]["name"] == "rollout"
    assert len(stack(shown)["readings"][3]["layers"][0]["small"]["scales"]) == 1


def test_statistics_are_the_readings(traced: tuple[al.Trace, list[str]]) -> None:
    trace, tokens = traced
    statistics = stack(al.explore(trace, tokens=tokens))["statistics"]
    np.testing.assert_allclose(statistics["entropy"][2], attention_entropy(trace[2])[0].mean(-1), rtol=1e-4)
    np.testing.assert_allclose(statistics["distance"][2], attention_distance(trace[2])[0].mean(-1), rtol=1e-4)
    np.testing.assert_allclose(
        statistics["removed"][2], al.effective_attention(trace[2]).removed[0], rtol=1e-4, atol=1e-6
    )
    assert set(statistics["class"][3]) <= {"vertical", "diagonal", "vertical+diagonal", "block", "heterogeneous"}
    assert "follows" not in statistics


def test_heads_are_audited_for_the_patterns_of_guidance() -> None:
    one = subject(shipped_model(), TEXT)
    statistics = stack(al.explore(one, readings=("standard",)))["statistics"]
    table = al.pattern_audit(one.trace, one.input_ids["source"], tokens=one.special)
    best = max((row for row in table if row["layer"] == 3 and row["head"] == 5), key=lambda row: row["closeness"])
    assert statistics["follows"][3][5] == best["pattern"]
    assert statistics["closeness"][3][5] == pytest.approx(best["closeness"], rel=1e-4)


def test_an_approximation_brings_its_map_its_loss_and_its_errors(traced: tuple[al.Trace, list[str]]) -> None:
    trace, tokens = traced
    shown = al.explore(trace, tokens=tokens, readings=("standard",), mechanisms=["top-r:r=3"], precise=True)
    names = [reading["name"] for reading in stack(shown)["readings"]]
    assert names == ["standard", "top-r:r=3", "(W - Ŵ) v, top-r:r=3"]
    layer = trace[1]
    approx = al.mechanism("top-r:r=3").weights(layer.call)
    np.testing.assert_allclose(unpacked(shown.packed, 1, layer=1, head=2), approx[0, 2], atol=1e-3)
    lost = ((layer.weights() - approx) @ layer.values)[0, 2]
    np.testing.assert_allclose(unpacked(shown.packed, 2, layer=1, head=2), lost, atol=2e-3)
    errors = al.approximation_error(trace, "top-r:r=3").layers[1]
    np.testing.assert_allclose(stack(shown)["statistics"]["output top-r:r=3"][1], errors.output, rtol=1e-4)
    assert shown.packed.meta["panes"] == [[0, name] for name in names]


def decoder_trace(q: torch.Tensor) -> al.Trace:
    trace = al.Trace()
    call = al.AttentionCall(q, q, q, causal=True)
    trace.add(al.LayerTrace(call, al.Softmax(), al.Softmax()(call), None, "decoder", 0, "layer"))
    return trace


def test_one_token_and_nan() -> None:
    ids = {"target": torch.tensor([[7]])}
    one = al.explore(al.Subject(decoder_trace(torch.randn(1, 2, 1, 3)), ["hm"], input_ids=ids))
    assert unpacked(one.packed).tolist() == [[pytest.approx(1)]]
    q = torch.randn(1, 2, 5, 3)
    q[0, 1, 2] = torch.nan
    broken = al.Subject(decoder_trace(q), list("abcde"), input_ids={"target": torch.arange(5)[None]})
    shown = al.explore(broken, readings=("standard", "norm", "rollout"))
    assert shown.packed.meta["notes"][0].endswith("weights are not numbers (NaN or infinity); they are drawn hatched.")
    assert stack(shown)["statistics"]["entropy"][0][1] is None
    with pytest.raises(ValueError, match=r"not finite|NaN"):
        al.explore(broken, readings=("effective",))


def test_padding_is_cut_away() -> None:
    torch.manual_seed(0)
    model = tf.BertModel(
        tf.BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=7)
    ).eval()
    ids, mask = torch.randint(5, 31, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    with torch.no_grad(), al.record(model) as trace:
        model(input_ids=ids, attention_mask=mask)
    one = al.Subject(trace, list("abcdefg"), item=1, input_ids={"source": ids})
    shown = al.explore(one, precise=True)
    assert shown.packed.meta["texts"][0]["source"]["tokens"] == list("abcd")
    np.testing.assert_allclose(unpacked(shown.packed, head=2), trace[0].weights()[1, 2, :4, :4], atol=1e-3)
    assert stack(shown)["statistics"]["entropy"][0] == pytest.approx(
        attention_entropy(trace[0])[1, :, :4].mean(-1).tolist(), rel=1e-4
    )


def test_encoder_decoder_and_cross_are_recorded_together() -> None:
    torch.manual_seed(0)
    config = tf.BartConfig(vocab_size=61, d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=3, decoder_attention_heads=4, encoder_ffn_dim=7, decoder_ffn_dim=7, max_position_embeddings=32)  # fmt: skip
    model = tf.BartForConditionalGeneration(config).eval()
    with torch.no_grad(), al.record(model) as trace:
        model(input_ids=torch.randint(5, 61, (1, 5)), decoder_input_ids=torch.randint(5, 61, (1, 3)))
    shown = al.explore(trace, tokens={"source": list("abcde"), "target": list("xyz")}, readings=("standard", "rollout"))
    stacks = {one["kind"]: one for one in shown.packed.meta["items"][0]["stacks"]}
    assert {kind: len(one["layers"]) for kind, one in stacks.items()} == {"encoder": 2, "decoder": 3, "cross": 3}
    assert stacks["cross"]["readings"][0]["size"] == [3, 5]
    assert [reading["name"] for reading in stacks["cross"]["readings"]] == ["standard"]


def test_two_subjects_and_half_precision_models(traced: tuple[al.Trace, list[str]]) -> None:
    model, tokenizer, _ = shipped_model()
    inputs = tokenizer("Winter.", return_tensors="pt")
    with torch.no_grad(), al.record(model.bfloat16()) as trace:
        model(**inputs)
    names = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    shown = al.explore([al.Subject(*traced, name="long"), al.Subject(trace, names, name="short")])
    assert [item["name"] for item in shown.packed.meta["items"]] == ["long", "short"]
    assert shown.packed.meta["panes"] == [[0, "standard"], [1, "standard"]]
    assert "2 items" in repr(shown)


def test_it_shows_itself_in_a_notebook(traced: tuple[al.Trace, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = al.explore(traced[0], tokens=traced[1])
    pytest.importorskip("anywidget")
    widget = shown.widget()
    places = json.loads(widget.places)
    start, length = places["0.encoder.0.standard.small"]
    assert widget.blobs[start : start + length] == shown.packed.blobs["0.encoder.0.standard.small"]
    monkeypatch.setattr("attnlab.pages.explorer.exploration.LARGEST_FRAME", 1000)
    assert "application/vnd.jupyter.widget-view+json" in shown._repr_mimebundle_()[0]
    monkeypatch.setitem(__import__("sys").modules, "anywidget", None)
    with pytest.raises(ValueError, match=r'pip install "attnlab\[notebook\]"'):
        shown.widget()


def test_a_notebook_without_anywidget_shows_a_frame(
    traced: tuple[al.Trace, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = al.explore(traced[0], tokens=traced[1])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("attnlab.pages.explorer.exploration.LARGEST_FRAME", 1000)
    frame = shown._repr_mimebundle_()["text/html"]
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert 'sandbox="allow-scripts allow-downloads"' in frame
    assert "allow-same-origin" not in frame


def test_a_cached_step_is_refused(traced: tuple[al.Trace, list[str]]) -> None:
    trace = al.Trace()
    call = al.AttentionCall(
        torch.randn(1, 2, 1, 3), torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 3), causal=True, offset=4
    )
    trace.add(al.LayerTrace(call, al.Softmax(), al.Softmax()(call), None, "decoder", 0, "layer"))
    with pytest.raises(ValueError, match=r"1 queries over 5 keys.* record one forward pass over the whole text"):
        al.explore(trace, tokens=list("abcde"))


def test_mistakes_in_python_are_sentences(traced: tuple[al.Trace, list[str]]) -> None:
    trace, tokens = traced
    for call, message in (
        (lambda: al.explore(trace, tokens=tokens[:-1]), r"read \d+ source tokens, but \d+ token strings"),
        (lambda: al.explore(trace, tokens="a text"), "tokenize it first"),
        (lambda: al.explore(trace, tokens=tokens, readings=("standart",)), "did you mean 'standard'"),
        (lambda: al.explore(trace, tokens=tokens, readings=("gradient",)), "explains one number"),
        (lambda: al.explore(trace, tokens=tokens, readings=("entropy",)), "name a reading that has them"),
        (lambda: al.explore(trace, tokens=tokens, mechanisms=["sofmax"]), "softmax"),
        (lambda: al.explore(al.Trace(), tokens=tokens), "trace is empty"),
        (lambda: al.explore(al.Subject(trace, tokens, item=3)), "item 3 is not in a batch of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["explore", str(SHIPPED), TEXT, "--effective", "--layers", "0-1", "-o", str(page), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["bytes"] == page.stat().st_size
    assert summary["shown"][0]["kinds"]["encoder"] == {"layers": 6, "heads": 8, "readings": ["standard", "effective"]}
    # The text is short, so that thumbnails are the maps themselves.
    assert summary["notes"] == []
    assert main(["explore", str(SHIPPED), TEXT, "Another.", "--compare-mechanism", "top-r:r=2", "-o", str(page)]) == 0
    assert "open it in a browser" in capsys.readouterr().out


def test_two_models_read_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    argv = ["explore", str(SHIPPED), "--file", str(file), "--compare", str(SHIPPED), "-o", str(page), "--json"]
    assert main(argv) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["shown"]] == ["mlm", "mlm (2)"]


def saved(folder: Path, model: Any) -> str:
    """A tiny model with the shipped tokenizer beside it."""
    model.save_pretrained(folder)
    shipped_model().tokenizer.save_pretrained(folder)
    return str(folder)


def test_translators_and_language_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    size = len(shipped_model().tokenizer)
    bart = tf.BartConfig(vocab_size=size, d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=3, decoder_attention_heads=4, encoder_ffn_dim=7, decoder_ffn_dim=7, max_position_embeddings=80, forced_eos_token_id=None)  # fmt: skip
    translator = saved(tmp_path / "bart", tf.BartForConditionalGeneration(bart))
    page = str(tmp_path / "page.html")
    for more in ([], ["--target", "Die alte Fähre."]):
        assert main(["explore", translator, TEXT, "-o", page, "--rollout", "--json", *more]) == 0
        kinds = json.loads(capsys.readouterr().out)["shown"][0]["kinds"]
        assert {kind: (one["layers"], one["heads"]) for kind, one in kinds.items()} == {
            "encoder": (2, 3),
            "decoder": (3, 4),
            "cross": (3, 4),
        }
    gpt = tf.GPT2Config(vocab_size=size, n_embd=24, n_layer=2, n_head=4, n_positions=64)
    language_model = saved(tmp_path / "gpt", tf.GPT2LMHeadModel(gpt))
    assert main(["explore", language_model, TEXT, "-o", page, "--all", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["shown"][0]["kinds"]) == ["decoder"]


def test_a_mechanism_that_learns_is_shown_untrained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(tmp_path / "page.html")
    argv = ["explore", str(SHIPPED), TEXT, "--compare-mechanism", "abc-mlp:slots=5", "-o", page, "--json"]
    assert main(argv) == 0
    summary = json.loads(capsys.readouterr().out)
    (shown,) = summary["shown"]
    assert summary["notes"][0].startswith("abc-mlp:slots=5 has parameters of its own, which no training has touched")
    assert shown["kinds"]["encoder"]["readings"][1] == "abc-mlp:slots=5"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([str(SHIPPED)], "there is no text to read"),
        ([str(SHIPPED), "  "], "there is no text to read"),
        ([str(SHIPPED), "word " * 600], "reads at most"),
        ([str(SHIPPED), "a", "--layers", "one"], "ranges such as 0,3,5-7"),
        ([str(SHIPPED), "a", "--compare-mechanism", "sofmax"], "softmax"),
        (["./nowhere", "a"], "no such folder"),
        ([str(SHIPPED), "a", "-o", "nowhere/page.html"], "is no folder"),
        ([str(SHIPPED), "--file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_run_is_explored_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from attnlab.reading.timeline import record_step

    for step in (0, 5):
        record_step(tmp_path, step, {("encoder", 0): torch.rand(1, 2, 3, 3).softmax(-1)}, tokens=list("abc"))
    page = tmp_path / "page.html"
    assert main(["explore", str(tmp_path), "-o", str(page)]) == 0
    assert page.stat().st_size > 10_000
    capsys.readouterr()
    assert main(["explore", str(tmp_path), "a text", "-o", str(page)]) == 2
    assert "leave out text" in capsys.readouterr().err


def test_tokens_of_every_kind_are_readable() -> None:
    loaded = shipped_model()
    one = subject(loaded, "Привет שלום 🎉 naïve")
    assert one.tokens["source"][0] == "[CLS]"
    page = al.explore(one, readings=("standard",)).html()
    assert b"</html>" in page
    assert parse_layers("2") == (2,)
