import lzma
import re
from itertools import islice
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.data.overlap import Passages
from papers.common.enwik8 import articles, strip_markup, wikitext_titles

SHARED = Path(__file__).parents[3] / "shared" / "data"
LONG = "This sentence is here so that the page has words enough to be an article at all. " * 5


def dump(path, pages, tail=""):
    """A MediaWiki export with these (title, markup) pages; ``tail`` is what a cut at a byte count leaves."""
    parts = ["<mediawiki>\n  <siteinfo>\n    <base>x</base>\n  </siteinfo>\n"]
    for title, markup in pages:
        parts.append(
            f"  <page>\n    <title>{escape(title)}</title>\n    <revision>\n      <contributor><ip>1</ip></contributor>\n"
            f'      <text xml:space="preserve">{escape(markup, {chr(34): "&quot;"})}</text>\n    </revision>\n  </page>\n'
        )
    path.write_text("".join(parts) + tail)
    return path


@pytest.mark.parametrize(
    ("markup", "prose"),
    [
        ("'''Bold''' and ''slanted'' words stand in here.", "Bold and slanted words stand in here."),
        ("See the [[target]] and the [[target|label]] of a link.", "See the target and the label of a link."),
        ("A [[Ada (language)|]] pipe trick is quite rare.", "A Ada pipe trick is quite rare."),
        (
            "Some [http://x.org/a?b=c labelled site] and a bare one [http://x.org].",
            "Some labelled site and a bare one.",
        ),
        (
            "A ref<ref name=a>Smith, ''Book'' [[x]]</ref> and another<ref name=a /> go away.",
            "A ref and another go away.",
        ),
        ("Text {{cite|a={{nested|b}}|c}} with templates is left alone.", "Text with templates is left alone."),
        ("Seen <!-- not\nthis --> by nobody but the author.", "Seen by nobody but the author."),
        (
            "[[Image:a.jpg|thumb|A [[cat]] and a [http://x.org dog]]]The picture is now gone.",
            "The picture is now gone.",
        ),
        ("The end is now near.\n[[Category:Ends]]\n[[de:Ende]]\n[[zh-min-nan:X]]", "The end is now near."),
        ("Five &lt; six &amp;nbsp;&ndash; as every child knows.", "Five < six \u2013 as every child knows."),
        ("Water is H<sub>2</sub>O<br/>to every <b>chemist</b>.", "Water is H2O to every chemist."),
        (
            "Before the table we say so.\n{| class=x\n! head\n|-\n| cell || cell\n{|\n| inner\n|}\n|}\nAfter it we go on.",
            "Before the table we say so.\nAfter it we go on.",
        ),
        (
            "An open table comes first.\n{|\n| cell\n== Next part ==\nThe section is not lost.",
            "An open table comes first.\nNext part\nThe section is not lost.",
        ),
        (
            "== Kept ==\nThis section has a sentence.\n== Empty ==\n* short item\n== See also ==\n* [[Other]] is a long list item which would otherwise be kept for its many words.",
            "Kept\nThis section has a sentence.",
        ),
        (
            "== References ==\nGone is this whole sentence.\n=== Notes on ===\nGone is this one too.\n== Later ==\nBut this one stays here.",
            "Later\nBut this one stays here.",
        ),
        (
            "* An item of a list is kept when it is as long as a sentence, as this one is.\n* not this",
            "An item of a list is kept when it is as long as a sentence, as this one is.",
        ),
        (
            "We know that <math>x^2 = 1</math> has two roots.\nThis line has no formula in it.",
            "This line has no formula in it.",
        ),
        (
            "Born (, [[Greek language|Greek]]: {{polytonic|x}}) in a town ( ) far away .",
            "Born (Greek:) in a town far away.",
        ),
        ("Unclosed {{template and a line.\nThe line after it is fine.", "The line after it is fine."),
        ("__NOTOC__\nPlain words make up this line.", "Plain words make up this line."),
    ],
)
def test_markup_is_stripped(markup, prose):
    assert strip_markup(markup) == prose


PIECES = st.sampled_from(
    [
        *[
            "[[",
            "]]",
            "{{",
            "}}",
            "{|",
            "|}",
            "|",
            "[",
            "]",
            "<",
            ">",
            "<ref>",
            "</ref>",
            "<ref/>",
            "<!--",
            "-->",
            "'''",
            "==",
            "=",
            "*",
            "#",
            ":",
            ";",
            "Image:",
            "http://x",
            "[http://",
            "&amp;",
            "&lt;",
            "a",
            ".",
        ],
        "\nfive words of plain prose.",
        "\n",
    ]
)


@settings(max_examples=150, deadline=2000)
@given(st.lists(PIECES, max_size=60).map("".join))
def test_any_soup_of_markup_ends_as_text_without_brackets(soup):
    prose = strip_markup(soup)
    for mark in ("[[", "]]", "{{", "}}", "|", "''", "=="):
        assert mark not in prose
    assert all(line == line.strip() != "" for line in prose.split("\n") if prose)


def test_deep_nesting_takes_no_more_than_a_moment():
    words = "These are five plain words."
    assert strip_markup("{{a|" * 500 + "x" + "}}" * 500 + words) == words
    assert strip_markup("<ref>" * 500 + "\n" + words).endswith(words)


def test_pages_that_are_no_articles_are_left_out(tmp_path):
    path = dump(
        tmp_path / "wiki.xml",
        [
            ("AaA", "#REDIRECT [[AAA]]"),
            ("Wikipedia:Policy", LONG),
            ("User talk:Someone", LONG),
            ("Talk:Anarchism", LONG),
            ("Short", "Only these five words here."),
            ('R&D "quoted"', LONG),
            ("Portal (film)", LONG),
        ],
        tail='  <page>\n    <title>Cut</title>\n      <text xml:space="preserve">' + LONG,
    )
    read_articles = list(articles(path))
    assert [a.title for a in read_articles] == ['R&D "quoted"', "Portal (film)"]
    assert read_articles[0].text == LONG.strip()
    assert [a.title for a in articles(path, min_words=5)] == ["Short", 'R&D "quoted"', "Portal (film)"]


def test_a_dump_cut_inside_a_character_reads_to_its_last_whole_page(tmp_path):
    path = dump(tmp_path / "wiki.xml", [("Whole", LONG)])
    path.write_bytes(path.read_bytes() + b'<page>\n<title>Cut</title>\n<text xml:space="preserve">caf\xc3')
    assert [a.title for a in articles(path)] == ["Whole"]


def test_wikitext_titles_are_left_out_also_through_redirects(tmp_path):
    held = tmp_path / "wiki.valid.tokens.xz"
    held.write_bytes(
        lzma.compress(
            b" \n = Homarus gammarus = \n \n It is , in fact , a lobster . \n = = Description = = \n \n"
            b" = Kiss You ( 2012 song ) = \n \n = = = Reception = = = \n a = b = c \n"
        )
    )
    titles = wikitext_titles(held)
    assert titles == ["Homarus gammarus", "Kiss You ( 2012 song )"]
    path = dump(
        tmp_path / "wiki.xml",
        [
            ("European lobster", LONG),
            ("American lobster", LONG),
            ("Homarus Gammarus", "#redirect [[European lobster]]"),
            ("Kiss You (2012 song)", LONG),
        ],
    )
    assert [a.title for a in articles(path, leave_out=titles)] == ["American lobster"]


def test_an_article_that_shares_a_passage_is_left_out_under_any_title(tmp_path):
    passage = "one two three four five six seven eight nine ten eleven twelve thirteen"
    held_out = Passages([f"Some words , then {passage.replace(' five', ' @-@ five')} and others ."])
    path = dump(
        tmp_path / "wiki.xml",
        [("Renamed", f"{LONG} Here {passage}."), ("Other", f"{LONG} Here {passage.replace('seven', 'zero')}.")],
    )
    assert [a.title for a in articles(path, held_out=held_out)] == ["Other"]
    assert held_out.shared(passage + " and more") == 2
    assert held_out.shared("then " + passage) == 2


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")
def test_real_enwik8_reads_like_prose():
    titles = wikitext_titles(SHARED / "wikitext-103" / "wiki.valid.tokens.xz")
    assert len(titles) == pytest.approx(60, abs=2)
    read_articles = list(islice(articles(SHARED / "enwik8" / "enwik8.xz"), 300))
    assert read_articles[0].title == "Anarchism"
    assert read_articles[0].text.startswith(
        "Anarchism originated as a term of abuse first used against early working class radicals"
    )
    text = "\n".join(a.text for a in read_articles)
    for markup in (r"\[\[", r"\]\]", r"\{\{", r"\}\}", "''", "&[a-z]+;", r"</?(ref|math|br|table)\b", "==", r"\|"):
        assert not re.search(markup, text), markup
    sentences = sum(line[-1] in ".!?:;\"')\u201d\u2019" for line in text.split("\n"))
    assert sentences > 0.7 * text.count("\n")
