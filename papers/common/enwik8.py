"""Article text out of a Wikipedia XML dump such as enwik8: no markup, no tables, no links' targets, no redirects."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from attnlab.data.overlap import Passages
from attnlab.data.readers import open_bytes

__all__ = ["Article", "articles", "strip_markup", "wikitext_titles"]


class Article(NamedTuple):
    """One page of the encyclopedia: its title and its text, one paragraph a line."""

    title: str
    text: str


def articles(
    path: Path | str, *, leave_out: Collection[str] = (), held_out: Passages | None = None, min_words: int = 50
) -> Iterator[Article]:
    """Stream the dump's articles as clean text, leaving out the titles in ``leave_out`` (see ``wikitext_titles``).

    With ``held_out``, articles that share a passage with those texts are left out under whatever title.
    Redirects, pages outside the article namespace, and what has fewer than ``min_words`` words once the markup is
    gone (disambiguation pages, bare lists) are left out as well; so is the target of a redirect whose own title is
    left out. Memory holds one page at a time.
    """
    keys = {title_key(title) for title in leave_out}
    if keys:
        keys |= {title_key(target) for title, target in _redirects(path) if title_key(title) in keys}
    for title, raw in _pages(path):
        if _OTHER_NAMESPACE.match(title) or _REDIRECT.match(raw) or title_key(title) in keys:
            continue
        text = strip_markup(raw)
        if text.count(" ") + text.count("\n") + 1 < min_words or (held_out and held_out.shared(text)):
            continue
        yield Article(title, text)


def strip_markup(raw: str) -> str:
    """The prose of one page of wiki markup, one paragraph or section heading a line.

    >>> strip_markup("'''Ada''' is a [[programming language|language]]{{fact}} of 1980.<ref>Ibid.</ref>")
    'Ada is a language of 1980.'
    """
    text = _COMMENT.sub("", raw)
    text = _BLOCK.sub("", text)
    text = _until_stable(_TEMPLATE, "", text)
    text = _without_tables(text)
    text = _EXTERNAL_LINK.sub(r"\1", text)
    text = _until_stable(_LINK, _label, text)
    text = _BREAK.sub(" ", text)
    text = _TAG.sub("", text)
    text = _QUOTES.sub("", text)
    # Entities last, or a decoded "<" would be read as a tag; twice, since some authors wrote &amp;nbsp;.
    text = html.unescape(html.unescape(text))
    return "\n".join(_prose(text))


def wikitext_titles(path: Path | str) -> list[str]:
    """The article titles of a WikiText file: its lines ``= Title =``, not the sections' ``= = Section = =``."""
    titles = []
    with open_bytes(path) as file:
        for line in file:
            title = _WIKITEXT_TITLE.match(line.decode("utf-8"))
            if title:
                titles.append(title[1])
    return titles


def title_key(title: str) -> str:
    """What titles are compared by: lower-case letters and digits, so WikiText's spaced punctuation does not matter.

    >>> title_key("Kiss You ( song )") == title_key("Kiss You (song)")
    True
    """
    return re.sub(r"[\W_]+", "", title.lower())


_OTHER_NAMESPACE = re.compile(
    r"(Media|Special|User|Wikipedia|Image|File|MediaWiki|Template|Help|Category|Portal)(| talk):|Talk:"
)
_REDIRECT = re.compile(r"\s*#redirect", re.IGNORECASE)
_REDIRECT_TARGET = re.compile(r"\s*#redirect\W*\[\[([^\]|#]+)", re.IGNORECASE)
_WIKITEXT_TITLE = re.compile(r" = ([^=].*?) = \s*$")

_COMMENT = re.compile(r"<!--.*?(-->|\Z)", re.DOTALL)
_NOT_PROSE = "ref|gallery|timeline|pre|table|imagemap|score|hiero|source|code|script|style|ul|ol"
_BLOCK = re.compile(rf"<({_NOT_PROSE})\b[^<>]*?(/>|>.*?</\1\s*>)", re.DOTALL | re.IGNORECASE)
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}|\{\{\{[^{}]*\}\}\}")
_EXTERNAL_LINK = re.compile(r"\[(?:(?:https?|ftp|news|irc)://|mailto:)[^\s\]\[]*\s*((?:\[\[[^\]\[]*\]\]|[^\]\[])*)\]")
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_NO_TEXT_LINK = re.compile(r"\s*(image|file|media|category)\s*:", re.IGNORECASE)
_INTERWIKI = re.compile(r"\s*([a-z]{2,3}|simple|zh-[a-z-]+|be-x-old|roa-[a-z]+|fiu-vro|map-bms|nds-nl|bat-smg)\s*:")
_BREAK = re.compile(r"<(br|p|/p)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?(?!math)[a-zA-Z][^<>]*>")
_QUOTES = re.compile(r"'{2,}")
_HEADING = re.compile(r"(={2,6})\s*(.*?)\s*=+\s*$")
# What no longer reads as a sentence: unbalanced markup, table cells, references, notes on which page this is.
_LEFTOVER = re.compile(r"\{\{|\}\}|\[\[|\]\]|\||==|ISBN|redirects here|\(disambiguation\)|<math", re.IGNORECASE)
_MAGIC = re.compile(r"__[A-Z]+__|~{3,}|https?://\S+")
_EMPTY_BRACKETS = re.compile(r"\s*(\(\s*[,;:.\s-]*\)|\[\s*\])")
_OPEN_BRACKET = re.compile(r"\(\s*[,;]\s*|\(\s+")
_SPACE_BEFORE = re.compile(r"\s+([,;)]|\.(?=\s|$))")
_SENTENCE_END = ".!?:;\"')\u201d\u2019"
_SPACES = re.compile(r"\s+")
_BACK_MATTER = {
    "bibliography",
    "books",
    "discography",
    "external link",
    "external links",
    "external links and references",
    "filmography",
    "footnotes",
    "further reading",
    "links",
    "literature",
    "notes",
    "notes and references",
    "publications",
    "reference",
    "references",
    "references and external links",
    "related topics",
    "see also",
    "selected bibliography",
    "sources",
    "works",
}


def _pages(path: Path | str) -> Iterator[tuple[str, str]]:
    """(title, markup) of each complete page; enwik8 is cut at a byte count, so its last page is not."""
    title, lines, inside = "", [], False
    with open_bytes(path) as file:
        for line in file:
            if inside:
                lines.append(line)
            elif b"<title>" in line:
                title = _xml_text(line.split(b"<title>", 1)[1].split(b"</title>", 1)[0])
                continue
            elif b"<text" in line and b"/>" not in line:
                lines, inside = [line.split(b"<text", 1)[1].split(b">", 1)[1]], True
            if inside and b"</text>" in line:
                lines[-1] = lines[-1].split(b"</text>", 1)[0]
                inside = False
                yield title, _xml_text(b"".join(lines))


def _redirects(path: Path | str) -> Iterator[tuple[str, str]]:
    for title, raw in _pages(path):
        target = _REDIRECT_TARGET.match(raw)
        if target:
            yield title, target[1]


def _xml_text(data: bytes) -> str:
    text = data.decode("utf-8")
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")


def _until_stable(pattern: re.Pattern[str], replacement: str | Callable[[re.Match[str]], str], text: str) -> str:
    """Substitute until nothing matches: innermost brackets first, so nesting needs no parser."""
    count = 1
    while count:
        text, count = pattern.subn(replacement, text)
    return text


def _label(match: re.Match[str]) -> str:
    target, bar, label = match[1].partition("|")
    if _NO_TEXT_LINK.match(target) or (not bar and _INTERWIKI.match(target)):
        return ""
    if not bar:
        return target.lstrip(":").replace("_", " ")
    # The pipe trick: [[Ada (language)|]] shows "Ada".
    return label.rpartition("|")[2] or re.sub(r"\s*\([^()]*\)$", "", target)


def _without_tables(text: str) -> str:
    """Drop what lies between lines that begin with ``{|`` and ``|}``; a table never closed ends at the next heading."""
    kept, depth = [], 0
    for line in text.split("\n"):
        start = line.lstrip(" :*")
        if start.startswith("{|"):
            depth += 1
        elif start.startswith("|}"):
            depth = max(0, depth - 1)
        elif depth and _HEADING.match(line):
            depth = 0
            kept.append(line)
        elif not depth and not start.startswith(("|", "!")):
            kept.append(line)
    return "\n".join(kept)


def _prose(text: str) -> Iterator[str]:
    """Lines worth reading, and each heading only when a line worth reading follows it."""
    heading, skip_level = "", 9
    for line in text.split("\n"):
        match = _HEADING.match(line)
        if match:
            level, name = len(match[1]), match[2].strip()
            if level <= skip_level:
                skip_level = level if name.lower().rstrip(":") in _BACK_MATTER else 9
            heading = "" if _LEFTOVER.search(name) else _tidy(name)
            continue
        if skip_level < 9 or _LEFTOVER.search(line):
            continue
        item = line[:1] in "*#:;" and line != ""
        line = _tidy(line.lstrip("*#:; "))
        # A list item is kept when it is a sentence or so; lists of names and links are not prose.
        if len(line.split()) < (12 if item else 5) or (not item and line[-1] not in _SENTENCE_END):
            continue
        if heading:
            yield heading
            heading = ""
        yield line


def _tidy(line: str) -> str:
    line = _MAGIC.sub("", line)
    line = _EMPTY_BRACKETS.sub("", line)
    line = _OPEN_BRACKET.sub("(", line)
    return _SPACE_BEFORE.sub(r"\1", _SPACES.sub(" ", line)).strip()
