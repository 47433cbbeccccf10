"""What the user wrote becomes a list of files: a file, a folder, a glob."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from equipment.processes import python, run
from penstock.errors import SourceError
from penstock.sources import Cursor, open_source
from sources.suite import events


def write(folder: Path, *names: str) -> None:
    """Files of one line each, which says their name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n", encoding="utf-8")


def names_in(spec: str | Path, exclude: Path | None = None) -> list[str]:
    """The files a source reads, in its order."""
    return [batch.file_name for batch in open_source(spec, exclude=exclude).batches(Cursor())]


def test_a_file_is_read_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "b.txt")
    assert names_in(tmp_path / "a.txt") == ["a.txt"]


def test_a_source_is_named_after_the_stem(tmp_path: Path) -> None:
    write(tmp_path, "corpus/wiki.en.txt")
    assert open_source(tmp_path / "corpus/wiki.en.txt").name == "wiki"
    assert open_source(tmp_path / "corpus").name == "corpus"
    assert open_source(f"{tmp_path}/corpus/*.txt").name == "corpus"


def test_the_spec_is_what_the_user_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "corpus/a.txt")
    monkeypatch.chdir(tmp_path)
    for spec in ("corpus", "./corpus/", "corpus/*.txt", "corpus/a.txt"):
        assert open_source(spec).spec == spec


def test_a_folder_is_read_recursively_in_the_order_of_its_paths(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "a/z.txt", "a/b/c.txt", "a-b.txt", "a.txt", "B.txt", "10.txt", "9.txt")
    assert names_in(tmp_path) == ["10.txt", "9.txt", "B.txt", "a-b.txt", "a.txt", "a/b/c.txt", "a/z.txt", "b.txt"]


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", ".b.txt", ".git/c.txt", "d/.e/f.txt", "d/.g.txt")
    assert names_in(tmp_path) == ["a.txt"]


def test_a_hidden_folder_can_be_named(tmp_path: Path) -> None:
    write(tmp_path, ".cache/a.txt")
    assert names_in(tmp_path / ".cache") == ["a.txt"]


def test_files_without_a_reader_are_left_out_of_a_folder_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "a.txt", "b.xyz", "c.xyz", "LICENSE")
    with caplog.at_level(logging.WARNING):
        assert names_in(tmp_path) == ["a.txt"]
    assert "2 x .xyz" in caplog.text
    assert "1 x no suffix" in caplog.text


def test_a_folder_with_nothing_to_read_says_what_could_be_read(tmp_path: Path) -> None:
    write(tmp_path, "b.xyz")
    with pytest.raises(SourceError, match=r"no files to read: expected one of .*\.jsonl"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["a.xyz", "a"])
def test_a_file_without_a_reader_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    for spec in (tmp_path / name, f"{tmp_path}/a*"):
        with pytest.raises(SourceError, match=rf"{name}: no reader for .*expected one of .*\.jsonl"):
            open_source(spec)


def test_the_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    write(tmp_path, "a.TXT")
    assert names_in(tmp_path) == ["a.TXT"]


def test_a_glob_reads_what_it_matches(tmp_path: Path) -> None:
    write(tmp_path, "b/2.txt", "b/1.txt", "a/1.txt", "c/d/1.txt", "a/1.md", "a/.1.txt")
    (tmp_path / "a" / "folder.txt").mkdir()
    assert names_in(f"{tmp_path}/[ab]/*.txt") == ["a/1.txt", "b/1.txt", "b/2.txt"]
    assert names_in(f"{tmp_path}/**/1.txt") == ["a/1.txt", "b/1.txt", "c/d/1.txt"]
    assert names_in(f"{tmp_path}/a/?.txt") == ["1.txt"]


def test_a_glob_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a/1.txt", "2.txt")
    monkeypatch.chdir(tmp_path / "a")
    assert names_in("*.txt") == ["1.txt"]
    assert names_in("../*.txt") == ["2.txt"]


def test_a_file_matched_twice_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, "a/b/1.txt")
    assert names_in(f"{tmp_path}/**/**/*.txt") == ["a/b/1.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    write(tmp_path, "[a].txt", "a.txt")
    assert names_in(tmp_path / "[a].txt") == ["[a].txt"]


def test_a_glob_without_a_match_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"\*\.txt: the pattern matches no file"):
        open_source(f"{tmp_path}/*.txt")


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="missing: no such file or folder"):
        open_source(tmp_path / "missing")
    with pytest.raises(SourceError, match="ftp:// is no source: expected a file"):
        open_source("ftp://server/x")


def test_a_tilde_is_the_home_folder_and_only_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.txt", "~b.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names_in("~/a.txt") == ["a.txt"]
    monkeypatch.chdir(tmp_path)
    assert names_in("~b.txt") == ["~b.txt"]


# The output folder


def test_the_output_inside_the_input_is_never_read(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "out/blocks/b.txt", "out/c.txt", "outer/d.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "out/c.txt")
    for spec in (tmp_path, f"{tmp_path}/**/*.txt"):
        assert names_in(spec, exclude=tmp_path / "out") == ["a.txt", "outer/d.txt"]
        assert names_in(spec, exclude=tmp_path / "outer" / ".." / "out") == ["a.txt", "outer/d.txt"]


def test_an_input_inside_the_output_is_refused_unless_it_is_a_file(tmp_path: Path) -> None:
    write(tmp_path, "raw/a.txt")
    for spec in (tmp_path, tmp_path / "raw", f"{tmp_path}/raw/*.txt"):
        with pytest.raises(SourceError, match=r"lies inside .*choose another folder for the output"):
            open_source(spec, exclude=tmp_path)
    assert names_in(tmp_path / "raw/a.txt", exclude=tmp_path) == ["a.txt"]


# What cannot be read is told, never left out


def test_a_linked_file_is_read_and_a_broken_link_is_told(tmp_path: Path) -> None:
    write(tmp_path, "elsewhere/a.txt")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/b.txt").symlink_to(tmp_path / "elsewhere/a.txt")
    assert names_in(tmp_path / "data") == ["b.txt"]
    (tmp_path / "elsewhere/a.txt").unlink()
    source = open_source(tmp_path / "data")
    for use in (source.revision, source.size_bytes, lambda: events(source)):
        with pytest.raises(SourceError, match=r"b\.txt does not exist"):
            use()


def test_a_linked_folder_is_not_followed_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "a.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert names_in(tmp_path) == ["a.txt"]
    assert "loop: left out" in caplog.text


def test_a_read_error_is_told_and_never_taken_for_the_end(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    (tmp_path / "b.txt").symlink_to("/proc/self/mem")  # opens like a file; reading its first byte is an I/O error
    with pytest.raises(SourceError, match=r"b\.txt: cannot be read: .*Input/output"):
        events(open_source(tmp_path))


def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "closed/b.txt")
    tmp_path.chmod(0o755)
    (tmp_path / "closed").chmod(0)
    code = """
import os
from penstock.errors import SourceError
from penstock.sources import open_source
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # permissions do not bind root
try:
    open_source(".")
except SourceError as error:
    print(error)
"""
    finished = run(python(code), cwd=tmp_path)  # from inside: the folders above are private
    (tmp_path / "closed").chmod(0o755)
    assert "closed: cannot be listed" in finished.output


def test_a_name_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "data")
    Path(os.fsdecode(folder)).mkdir()
    name = os.fsdecode(folder + b"/b\xff.txt")
    Path(name).write_bytes(b"x\n")
    for spec in (os.fsdecode(folder), name):
        with pytest.raises(SourceError, match=r"\\udcff\.txt': the name is not UTF-8: rename it"):
            open_source(spec)
