"""Archives of labelled texts as they are published, packed (.tar.gz) or unpacked: IMDB, 20 Newsgroups, Amazon."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from attnlab.data import Labelled

__all__ = ["read_imdb", "read_newsgroups", "read_reviews"]

REVIEW = re.compile(r"<review>(.*?)</review>", re.DOTALL)


def read_imdb(folder: Path, split: str) -> Labelled:
    """aclImdb/<split>/pos and neg, a review a file."""
    return _by_folder(folder, rf"aclImdb/{split}/(neg|pos)/[^/]+\.txt", ("neg", "pos"))


def read_newsgroups(folder: Path, split: str) -> Labelled:
    """20news-bydate-<split>, baseball against hockey, a message a file with its headers."""
    groups = ("rec.sport.baseball", "rec.sport.hockey")
    return _by_folder(folder, rf"20news-bydate-{split}/(rec\.sport\.(?:baseball|hockey))/[^/]+", groups)


def read_reviews(folder: Path) -> Labelled:
    """sorted_data_acl/<domain>/positive.review and negative.review: the titles and texts of the reviews."""
    texts, labels = [], []
    for label, content in _members(folder, r"sorted_data_acl/[^/]+/(negative|positive)\.review"):
        for review in REVIEW.findall(content):
            parts = [re.search(rf"<{tag}>(.*?)</{tag}>", review, re.DOTALL) for tag in ("title", "review_text")]
            texts.append("\n".join(part[1].strip() for part in parts if part is not None))
            labels.append(int(label == "positive"))
    return Labelled(texts, labels, ("negative", "positive"))


def _by_folder(folder: Path, pattern: str, names: tuple[str, ...]) -> Labelled:
    """A text for each file; its label is the place of the matched folder in ``names``."""
    members = list(_members(folder, pattern))
    return Labelled([text for _, text in members], [names.index(label) for label, _ in members], names)


def _members(folder: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """(what the pattern's group matched, the text) of the files that match, by name; of the archive where one is."""
    wanted = re.compile(rf"(?:.*/)?{pattern}")
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    unpacked = {name: path for name, path in paths.items() if wanted.fullmatch(name)}
    archives = [path for name, path in paths.items() if name.endswith((".tar.gz", ".tgz"))]
    if not unpacked and not archives:
        raise ValueError(f"{folder} holds neither the published archive nor its files; papers/DATA.md has its address")
    contents = {name: path.read_bytes() for name, path in unpacked.items()} or _in_archive(archives[0], wanted)
    if not contents:
        raise ValueError(f"{archives[0]} is another archive than the published one; papers/DATA.md has its address")
    for name in sorted(contents):
        match = wanted.fullmatch(name)
        assert match is not None
        yield match[1], _decoded(contents[name])


def _in_archive(path: Path, wanted: re.Pattern[str]) -> dict[str, bytes]:
    """The files of an archive whose names match; nothing is written to the disk."""
    contents = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() and wanted.fullmatch(member.name) else None
            if file is not None:
                contents[member.name] = file.read()
    return contents


def _decoded(content: bytes) -> str:
    """UTF-8 as IMDB has it, or else Latin-1, as messages of 1993 are."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")
