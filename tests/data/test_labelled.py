from pathlib import Path

import numpy as np
import pytest

from attnlab.data import LabelledSource, Malformed, read_labelled, read_trees

SHARED = Path(__file__).parents[3] / "shared" / "data"


def test_classes_are_the_labels_found_in_order(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("review,stars\ngood,10\nbad,2\nfine,9\n")
    labelled = read_labelled(path, text="review", label="stars")
    assert (labelled.texts, labelled.labels, labelled.names) == (["good", "bad", "fine"], [2, 0, 1], ("2", "9", "10"))


def test_classes_by_a_map_or_a_function_may_leave_examples_out(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("good\t4.5\nbad\t1\nso so\t3\n")
    header = ["text", "label"]
    labelled = read_labelled(path, header=header, classes={"1": 0, "4.5": 1}, names=["negative", "positive"])
    assert (labelled.texts, labelled.labels, labelled.names) == (["good", "bad"], [1, 0], ("negative", "positive"))

    def polarity(stars):
        return None if float(stars) == 3 else int(float(stars) > 3)

    assert read_labelled(path, header=header, classes=polarity).labels == [1, 0]
    with pytest.raises(
        ValueError, match=r"holds no example of the classes asked for; its labels are \['1', '3', '4.5'\]"
    ):
        read_labelled(path, header=header, classes={"x": 0})


def test_empty_texts_are_malformed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "label": 1}\n{"text": " ", "label": 0}\n')
    with pytest.raises(ValueError, match="line 2: the text is empty"):
        read_labelled(path)
    bad = Malformed("skip")
    assert read_labelled(path, malformed=bad).names == ("1",)
    assert bad.count == 1


def test_trees_lose_their_brackets_and_the_neutral_ones(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text(
        "(3 (2 The) (4 (3 good) (2 (2 -LRB-) (2 film))))\n(2 (2 so) (2 so))\n\n(0 (1 bad) (2 .))\nnot a tree\n"
    )
    bad = Malformed("skip")
    labelled = read_trees(path, malformed=bad)
    assert (labelled.texts, labelled.labels) == (["The good ( film", "bad ."], [1, 0])
    assert bad.lines[0][1] == 5


def test_a_batch_by_hand_and_errors():
    inputs = [np.array([5, 6, 7]), np.array([8])]
    batch = LabelledSource(inputs, [1, 0], pad=9, batch_size=2, shuffle=False).batch(0)
    assert batch["input_ids"].tolist() == [[8, 9, 9], [5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="2 texts but 1 labels"):
        LabelledSource(inputs, [1], pad=9)
    with pytest.raises(ValueError, match="example 1 has no tokens"):
        LabelledSource([*inputs[:1], np.array([])], [1, 0], pad=9)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")
def test_counts_of_the_papers_corpora():
    assert len(read_trees(SHARED / "sst-trees" / "train.txt.xz").labels) == 6920
    groups = read_labelled(SHARED / "20newsgroups" / "train.jsonl.xz")
    assert (len(groups.texts), len(groups.names)) == (1197, 2)
    news = read_labelled(
        SHARED / "ag-news" / "test.csv.xz",
        text="description",
        header=["label", "title", "description"],
        classes={"1": 0, "3": 1},
    )
    assert len(news.texts) == 3800
    yelp = read_labelled(
        SHARED / "yelp" / "test.csv.xz",
        label="label2",
        classes=lambda stars: None if "3" in stars else int(stars.removeprefix("Review Stars: ") > "3"),
    )
    assert set(yelp.labels) == {0, 1}
