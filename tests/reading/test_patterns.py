"""The pattern classifier: pictures, features, and the shipped network on clear patterns."""

from __future__ import annotations

import pytest
import torch

from attnlab.reading.pattern_classifier import classify, load_classifier, pattern_shares, pattern_table
from attnlab.reading.pattern_data import CLASSES, SIZE, picture
from attnlab.reading.pattern_features import feature_count, pattern_features
from attnlab.reading.pattern_net import PatternNet


def test_a_picture_keeps_a_line_one_token_wide() -> None:
    maps = torch.zeros(2, 96, 96)
    maps[0, :, 31] = 1
    maps[1] = -torch.eye(96)
    shown = picture(maps)
    assert shown.shape == (2, SIZE, SIZE)
    assert torch.equal(shown[0].nonzero()[:, 1].unique(), torch.tensor([15]))
    assert torch.equal(shown[1], torch.eye(SIZE))
    # Shorter than the picture: every token becomes several dots.
    assert picture(torch.eye(24)[None])[0].sum() == 2 * SIZE


def test_a_table_stands_standard_beside_effective_for_every_head() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=6, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=50)
    attended = (torch.arange(17) < torch.tensor([[17], [11]])).long()
    batch = {"input_ids": torch.arange(34).view(2, 17), "attention_mask": attended}
    rows = pattern_table(BertModel(config).eval(), [batch], net=PatternNet())
    assert [row["attention"] for row in rows] == ["standard", "effective"]
    for row in rows:
        assert row["maps"] == 2 * 2 * 2
        assert sum(row[name] for name in CLASSES) == pytest.approx(100)
    with pytest.raises(ValueError, match="no batch"):
        pattern_table(BertModel(config), [])


def test_members_answer_for_themselves_and_their_probabilities_are_averaged() -> None:
    net, x = PatternNet(members=3).eval(), torch.rand(2, SIZE, SIZE)
    with torch.no_grad():
        alone = net.each(x.expand(3, 2, SIZE, SIZE)).softmax(-1)
        torch.testing.assert_close(net(x).exp(), alone.mean(1))
        # A member's answer has nothing to do with what the others are shown.
        shown = torch.stack([x, torch.rand_like(x), torch.rand_like(x)])
        torch.testing.assert_close(net.each(shown).softmax(-1)[:, 0], alone[:, 0])
    assert not torch.allclose(alone[:, 0], alone[:, 1])


def test_features_are_the_definitions_measured() -> None:
    x = torch.zeros(4, SIZE, SIZE)
    x[0, :, 7] = 1
    x[1] = torch.eye(SIZE)
    x[2, : SIZE // 2, : SIZE // 2] = x[2, SIZE // 2 :, SIZE // 2 :] = 1
    x[3, :, 0] = 1
    features = pattern_features(x)
    assert features.shape == (4, feature_count(SIZE))
    first, darkest = features[:, :3], features[:, 3:39].view(4, 3, 12)
    # The first column of the last; one dark column in the first and the last; none along a diagonal.
    assert first[:, 1].tolist() == [0, 0, 0.5, 1]
    assert darkest[[0, 1, 3], 1, 0].tolist() == [1, 0, 1]
    diagonals = features[:, 39 : 39 + 63].view(4, 3, 21)
    assert diagonals[:, 1, 10].tolist() == [0, 1, 1, 0]
    squares = features[:, -len(range(8, 41, 2)) * 2 :][:, :17]
    # A cut where the squares meet tells inside from outside.
    assert squares[2].argmax() == list(range(8, 41, 2)).index(SIZE // 2)
    assert squares[2].max() == 1


def test_a_causal_column_is_judged_by_the_rows_that_see_it() -> None:
    x = torch.zeros(1, SIZE, SIZE)
    x[0, :, 24] = 1
    darkest = pattern_features(x.tril())[:, 3:39].view(3, 12)
    assert darkest[1, 0] == 1


def test_the_shipped_network_knows_a_clear_pattern_and_ignores_padding() -> None:
    net = load_classifier()
    clear = torch.full((1, 2, 40, 40), 0.005)
    clear[0, 0, :, 0] = 0.9
    clear[0, 1] += 0.9 * torch.eye(40)
    answers = classify(clear, net=net)[0].tolist()
    assert [CLASSES[i] for i in answers] == ["vertical", "diagonal"]
    padded = torch.nn.functional.pad(clear, (0, 24, 0, 24), value=float("nan"))
    seen = (torch.arange(64) < 40)[None]
    assert classify(padded, key_visible=seen, net=net)[0].tolist() == answers
    assert sum(pattern_shares(classify(clear)).values()) == pytest.approx(100)
    with pytest.raises(ValueError, match="no pattern classifier"):
        load_classifier("nowhere.safetensors")
