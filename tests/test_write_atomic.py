"""Files that are never half-written: whatever stands at the path, and wherever the process is killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from attnlab import provenance
from attnlab.provenance import check_writable, write_atomic

CALLS = ("chmod", "fsync", "link", "replace")


def test_a_link_stays_a_link_and_its_file_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "real" / "page.html", tmp_path / "page.html"
    target.parent.mkdir()
    link.symlink_to(target)
    for content in ("first", "second"):
        check_writable(link)
        assert write_atomic(link, content) == link
        assert link.is_symlink()
        assert target.read_text() == content


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    page.chmod(mode)
    write_atomic(page, "new")
    assert (stat.S_IMODE(page.stat().st_mode), page.read_text()) == (mode, "new")


def test_a_new_file_is_as_readable_as_the_mask_says(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_atomic(tmp_path / "page.html", "new")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    check_writable(pipe)
    write_atomic(pipe, "content")
    reader.join(10)
    assert read == [b"content"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_stays_a_device() -> None:
    check_writable("/dev/null")
    write_atomic("/dev/null", "content")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


PROGRAM = """
import sys
from attnlab.provenance import check_writable, write_atomic
print("before")
check_writable(sys.argv[1])
write_atomic(sys.argv[1], "content\\n")
print("after")
"""


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("redirected", ["pipe", "file"])
def test_standard_output_is_written_in_its_place(tmp_path: Path, path: str, redirected: str) -> None:
    if redirected == "pipe":
        done = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, check=True)
        assert done.stdout == "before\ncontent\nafter\n"
        return
    output = tmp_path / "page.html"
    with open(output, "w") as file:
        subprocess.run([sys.executable, "-c", PROGRAM, path], stdout=file, check=True)
    assert output.read_text() == "before\ncontent\nafter\n"


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_killed_at_any_call_the_old_file_or_the_new_is_there(tmp_path: Path, call: str, existing: bool) -> None:
    """A child is killed in the middle of each call; nothing but the page is in the folder then, old or new."""
    page = tmp_path / "page.html"
    if existing:
        page.write_text("old")
    child = os.fork()
    if child == 0:
        whole = getattr(os, call)

        def killed(*arguments: object, **options: object) -> None:
            whole(*arguments, **options)
            os._exit(9)

        try:
            setattr(provenance.os, call, killed)
            write_atomic(page, "new")
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 9
    after = {path.name: path.read_text() for path in tmp_path.iterdir()}
    linked = {name: text for name, text in after.items() if name != "page.html"}
    # Between its temporary name and its own the file is whole; that lasts one call.
    assert all(call == "link" and text == "new" for text in linked.values())
    assert after.get("page.html") in (("old", "new") if existing else (None, "new"))


def test_an_error_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    page = tmp_path / "page.html"
    page.write_text("old")
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(provenance.os, call, full)
            with pytest.raises(OSError, match="No space left"):
                write_atomic(page, "new")
        assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "old"


def test_the_folder_is_synced_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    replace, fsync = os.replace, os.fsync

    def note_replace(source: str, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    def note_fsync(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    monkeypatch.setattr(provenance.os, "replace", note_replace)
    monkeypatch.setattr(provenance.os, "fsync", note_fsync)
    write_atomic(tmp_path / "run.json", "{}")
    assert calls == ["file", "replace", "folder"]
