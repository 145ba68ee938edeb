import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from attnlab.data import (
    FastTokeniser,
    SentencePieceTokeniser,
    Specials,
    WordTokeniser,
    as_tokeniser,
    bundled_text,
    load_tokeniser,
    train_bpe,
    train_sentencepiece,
    train_wordpiece,
    train_words,
)
from attnlab.data.store import write_store

LINES = [line for line in bundled_text().split("\n") if line]
TRAINERS = {
    "wordpiece": lambda: train_wordpiece(LINES, vocab_size=331),
    "bpe": lambda: train_bpe(LINES, vocab_size=331),
    "unigram": lambda: train_sentencepiece(LINES, vocab_size=331),
    "words": lambda: train_words(LINES, min_count=2),
}


@pytest.fixture(scope="module", params=list(TRAINERS))
def tokeniser(request):
    return TRAINERS[request.param]()


def test_a_tokeniser_is_the_same_after_saving_and_loading(tokeniser, tmp_path):
    tokeniser.save(tmp_path / "t")
    back = load_tokeniser(tmp_path / "t")
    assert back.fingerprint() == tokeniser.fingerprint()
    assert (back.vocab_size, back.specials) == (tokeniser.vocab_size, tokeniser.specials)
    assert back.encode_batch(LINES) == tokeniser.encode_batch(LINES)


def test_ids_hold_no_special_tokens_and_stay_below_the_vocabulary(tokeniser):
    special = set(tokeniser.specials.ids()) - {tokeniser.specials.unk}
    for ids in tokeniser.encode_batch(LINES):
        assert not special & set(ids)
        assert all(0 <= i < tokeniser.vocab_size for i in ids)


def test_sizes_and_specials():
    made = {name: train() for name, train in TRAINERS.items()}
    assert made["wordpiece"].specials == Specials(pad=0, unk=1, bos=2, eos=3, mask=4)
    assert made["bpe"].specials == Specials(bos=0, pad=1, eos=2, unk=3, mask=4)
    assert made["unigram"].specials == Specials(pad=0, unk=1, bos=2, eos=3)
    assert made["words"].specials == Specials(pad=0, unk=1, bos=2, eos=3)
    assert [made[name].vocab_size for name in ("wordpiece", "bpe", "unigram")] == [331] * 3


def test_bytes_and_sentencepiece_give_the_text_back():
    line = "Now is the winter of our discontent"
    for name in ("bpe", "unigram"):
        t = TRAINERS[name]()
        assert t.decode(t.encode_batch([line])[0]) == line
    bpe = TRAINERS["bpe"]()
    assert bpe.decode(bpe.encode_batch(["naïve 北京\t"])[0]) == "naïve 北京\t"


def test_wordpiece_loads_as_a_fast_hugging_face_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    ours = TRAINERS["wordpiece"]()
    ours.save(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path)
    assert hf.is_fast
    text = "Now is the Winter [MASK] of our discontent"
    ids = hf(text)["input_ids"]
    assert (ids[0], ids[-1], ids.count(4)) == (hf.cls_token_id, hf.sep_token_id, 1)
    assert ids[1:-1] == ours.encode_batch([text])[0]
    assert (hf.pad_token_id, hf.unk_token_id, hf.mask_token_id) == (0, 1, 4)
    assert as_tokeniser(hf).specials == ours.specials
    assert ours.hf()(text)["input_ids"] == ids


def test_wordpiece_lower_cases_and_leaves_rare_characters_unknown():
    t = train_wordpiece(["aaa bbb aaa ccc", "aaa bbb ζ"], vocab_size=101, alphabet=3)
    assert t.encode_batch(["AAA"]) == t.encode_batch(["aaa"])
    assert t.encode_batch(["ζ"]) == [[1]]
    assert 1 not in t.encode_batch(["abcab"])[0]


def test_wordpiece_reads_its_texts_twice():
    with pytest.raises(ValueError, match="read twice, so a generator will not do"):
        train_wordpiece(line for line in LINES)


def test_words_by_count_with_ties_in_alphabetical_order():
    t = train_words(["b b a a c", "C c d"], min_count=2)
    assert t.words == ("c", "a", "b")
    assert t.encode_batch(["c, d b"]) == [[4, 1, 1, 6]]
    assert t.decode([2, 4, 6, 3]) == "<s> c b </s>"
    assert train_words(["b b a a c"], min_count=1, max_size=2).words == ("a", "b")
    assert train_words(["7 1984 a3"], min_count=1, numbers=False).words == ("7", "a3")
    assert train_words(["A a"], min_count=1, lowercase=False).words == ("A", "a")


@pytest.mark.parametrize("train", [train_wordpiece, train_bpe])
@pytest.mark.parametrize("size", [-5, 0, 5])
def test_a_vocabulary_has_room_for_more_than_its_special_tokens(train, size: int) -> None:
    with pytest.raises(ValueError, match=f"5 special tokens and more, got vocab_size {size}"):
        train(["one two"], vocab_size=size)


def test_as_tokeniser_takes_ours_and_refuses_others():
    t = WordTokeniser(words=("a",))
    assert as_tokeniser(t) is t
    raw = TRAINERS["wordpiece"]().tokenizer
    assert as_tokeniser(raw).specials == Specials(pad=0, unk=1, bos=2, eos=3, mask=4)
    with pytest.raises(ValueError, match="cannot tokenise with str: pass a fast Hugging Face tokenizer"):
        as_tokeniser("bert-base-uncased")


def test_a_folder_without_tokeniser(tmp_path):
    with pytest.raises(ValueError, match=r"expected tokenizer.json, spiece.model or words.json"):
        load_tokeniser(tmp_path)


def test_fingerprints_tell_tokenisers_apart():
    prints = [train().fingerprint() for train in TRAINERS.values()]
    prints.append(WordTokeniser(words=("a",)).fingerprint())
    prints.append(WordTokeniser(words=("a",), lowercase=False).fingerprint())
    assert len(set(prints)) == len(prints)


def test_sentencepiece_can_have_a_mask():
    t = train_sentencepiece(LINES, vocab_size=331, kind="bpe", mask=True)
    assert isinstance(t, SentencePieceTokeniser)
    assert t.specials.mask == 4


PRINTS = """
from attnlab.data import bundled_text, train_bpe, train_sentencepiece, train_wordpiece
lines = bundled_text().split("\\n")
print([train(lines, vocab_size=397).fingerprint() for train in (train_wordpiece, train_bpe, train_sentencepiece)])
"""


def test_the_same_texts_give_the_same_ids_in_every_process():
    runs = [
        subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True) for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    tokenisers = [
        train(bundled_text().split("\n"), vocab_size=397) for train in (train_wordpiece, train_bpe, train_sentencepiece)
    ]
    assert str([t.fingerprint() for t in tokenisers]) == runs[0].stdout.strip()
    assert isinstance(tokenisers[0], FastTokeniser)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([], "words.json must hold a JSON object, got list"),
        ({"words": "ab", "pattern": "a", "lowercase": True}, "words must be a list of strings"),
        ({"words": ["a"], "pattern": 1, "lowercase": True}, "pattern must be a regular expression"),
        ({"words": ["a"], "pattern": "(", "lowercase": True}, "is no regular expression"),
        ({"words": ["a"], "pattern": r"(\w+)+!", "lowercase": True}, "may take forever on some text"),
    ],
)
def test_saved_words_that_are_damaged_or_never_end(saved, message, tmp_path):
    (tmp_path / "words.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=message):
        load_tokeniser(tmp_path)


def test_saved_words_with_hyphens_come_back(tmp_path):
    t = WordTokeniser(words=("well-known",), pattern=r"\w+(?:-\w+)*|[^\w\s]")
    t.save(tmp_path)
    assert load_tokeniser(tmp_path).encode_batch(["Well-known!"]) == [[4, 1]]


def test_ids_may_leave_numbers_out(tmp_path: Path) -> None:
    """The largest id counts, not how many there are: 70,000 does not fit into two bytes."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 70_000}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    gapped = as_tokeniser(words)
    assert gapped.vocab_size == 70_001
    assert write_store(tmp_path / "store", ["one two three"], gapped).tokens.tolist() == [1, 70_000, 0]
