"""Token types and the tagger, on sentences made by hand."""

from __future__ import annotations

import lzma
import math

import pytest
import torch

from attnlab.reading.token_types import TOKEN_TYPES, attention_to, token_type_weights, token_types
from papers.effective.tagger import PerceptronTagger, read_conllu, spacy_tags, train_tagger

CONLLU = """# sent_id = 1
1\tShe\tshe\tPRON\tPRP\t_\t2\tnsubj\t_\t_
2-3\tcannot\t_\t_\t_\t_\t_\t_\t_\t_
2\tcan\tcan\tAUX\tMD\t_\t0\troot\t_\t_
3\tnot\tnot\tPART\tRB\t_\t2\tadvmod\t_\t_
3.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t_\t_
4\t.\t.\tPUNCT\t.\t_\t2\tpunct\t_\t_

# sent_id = 2
1\tRain\train\tNOUN\tNN\t_\t0\troot\t_\t_
"""


def test_conllu_gives_words_without_ranges_and_empty_nodes(tmp_path) -> None:
    plain, packed = tmp_path / "a.conllu", tmp_path / "a.conllu.xz"
    plain.write_text(CONLLU, encoding="utf-8")
    packed.write_bytes(lzma.compress(CONLLU.encode()))
    expected = [[("She", "PRON"), ("can", "AUX"), ("not", "PART"), (".", "PUNCT")], [("Rain", "NOUN")]]
    assert list(read_conllu(plain)) == list(read_conllu(packed)) == expected
    plain.write_text("1\tShe\tPRON\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: CoNLL-U has 10 fields"):
        list(read_conllu(plain))


def _made_up(n: int, seed: int) -> list:
    """Sentences of a small language: endings tell verbs from nouns, and "it" is a pronoun only after a verb."""
    chosen = torch.Generator().manual_seed(seed)

    def stem() -> str:
        return "".join("bdfgklmnprstv"[i] + "aeiou"[i % 5] for i in torch.randint(13, (2,), generator=chosen).tolist())

    return [
        [("the", "DET"), (stem() + "on", "NOUN"), (stem() + "ix", "VERB"), ("it", "PRON"), (",", "PUNCT"), ("it", "PART"), ("!", "PUNCT")]
        for _ in range(n)
    ]  # fmt: skip


def test_the_tagger_learns_endings_and_context_and_survives_its_file(tmp_path) -> None:
    tagger = train_tagger(_made_up(60, seed=0), epochs=3)
    unseen = _made_up(20, seed=1)
    assert tagger.accuracy(unseen) == 1.0
    again = PerceptronTagger.load(tagger.save(tmp_path / "tagger.json"))
    words = ["the", "zuzuon", "zazaix", "it", ",", "it", "!"]
    assert again.tag(words) == ["DET", "NOUN", "VERB", "PRON", "PUNCT", "PART", "PUNCT"]
    with pytest.raises(ValueError, match="at least one"):
        train_tagger([])


def test_spacy_is_asked_for_by_name_when_it_is_missing() -> None:
    pytest.importorskip("torch")
    try:
        import spacy  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="pip install spacy"):
            spacy_tags([["She", "sleeps"]])


def test_types_stand_at_first_subtokens() -> None:
    # [CLS] un ##believ ##able rain fell . [SEP] she
    ids = torch.tensor([1, 10, 11, 12, 13, 14, 15, 2, 16])
    words = [None, 0, 0, 0, 1, 2, 3, None, 4]
    tags = ["ADJ", "NOUN", "VERB", "PUNCT", "PRON"]
    types = token_types(ids, words, tags, cls_id=1, sep_id=2)
    named = [TOKEN_TYPES[i] if i >= 0 else None for i in types.tolist()]
    assert named == ["[CLS]", None, None, None, "noun", "verb", "punctuation", "[SEP]", "pronoun"]
    with pytest.raises(ValueError, match="there are 2 tags"):
        token_types(ids, words, tags[:2], cls_id=1, sep_id=2)
    with pytest.raises(ValueError, match="one word per token"):
        token_types(ids, words[:3], tags, cls_id=1, sep_id=2)


def test_a_type_s_weight_is_its_largest_averaged_over_the_inputs_that_have_it() -> None:
    maps = torch.zeros(2, 1, 3, 3)
    maps[0, 0, 0] = torch.tensor([0.2, -0.3, 0.5])
    maps[1, 0, 0] = torch.tensor([0.4, 0.1, 0.5])
    types = torch.tensor([[4, 0, 0], [4, 2, -1]])
    weights = token_type_weights(maps, types)[0].tolist()
    assert weights[0] == pytest.approx(0.5)
    assert weights[2] == pytest.approx(0.1)
    assert weights[4] == pytest.approx(0.3)
    assert all(math.isnan(weights[i]) for i in (1, 3, 5))


def test_attention_to_delimiters_is_a_mean_over_real_other_tokens() -> None:
    maps = torch.tensor([[[[0.5, 0.2, 0.3, 0.0], [0.1, 0.6, 0.3, 0.0], [0.7, 0.1, 0.2, 0.0], [9.0, 9.0, 9.0, 9.0]]]])
    sep, real = torch.tensor([[False, False, True, False]]), torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(attention_to(maps, sep, queries=real), torch.tensor([0.3]))
    # Two delimiters together: query 0 gives 0.5 + 0.3 to them but is one itself, so only query 1 is asked.
    both = torch.tensor([[True, False, True, False]])
    torch.testing.assert_close(attention_to(maps, both, queries=real), torch.tensor([0.4]))
