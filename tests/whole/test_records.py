"""Records on disk: whatever a kill leaves of the last one, all before it are read, and the file
grows on.
"""

import logging

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.records import RecordFile, atomic_write


def numbers(path):
    return [record["n"] for record in RecordFile(path)]


def test_wherever_a_file_ends_what_was_written_whole_is_read_and_it_grows_on(tmp_path, caplog):
    path = tmp_path / "folder" / "records.jsonl"
    ends = [0]
    for n in range(3):
        RecordFile(path).append([{"n": n, "text": "half a pair \ud800, another line\u2028"}])
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(0 < end <= cut for end in ends)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert numbers(path) == list(range(whole)), cut
        assert ("skipped the last" in caplog.text) == (cut not in ends), cut
        RecordFile(path).append([{"n": 9}])
        assert numbers(path) == [*range(whole), 9], cut


def test_what_is_not_wanted_is_taken_away(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl", sync=True)
    assert file.keep(bool) == [] and not file.path.exists()
    file.append({"n": n} for n in range(5))
    file.append([])
    before = file.path.stat().st_ino
    assert [record["n"] for record in file.keep(lambda record: True)] == list(range(5))
    assert file.path.stat().st_ino == before  # nothing to do: not written anew
    assert [record["n"] for record in file.keep(lambda record: record["n"] % 2)] == [1, 3]
    file.append([{"n": 5}])
    assert numbers(file.path) == [1, 3, 5] and list(tmp_path.iterdir()) == [file.path]


@given(
    st.lists(
        st.dictionaries(st.text(), st.text() | st.integers() | st.none() | st.lists(st.booleans()))
    )
)
def test_records_come_back_as_they_were(tmp_path_factory, records):
    file = RecordFile(tmp_path_factory.mktemp("records") / "x.jsonl")
    file.append(records)
    assert list(file) == records


def test_a_full_disk_spoils_only_the_record_it_cut(tmp_path, monkeypatch):
    file = RecordFile(tmp_path / "x.jsonl")
    file.append([{"n": 0}])
    monkeypatch.setattr(
        "pathlib.Path.open", lambda *_: (_ for _ in ()).throw(OSError("no space left"))
    )
    with pytest.raises(OSError, match="no space"):
        file.append([{"n": 1}])
    monkeypatch.undo()
    with file.path.open("ab") as torn:
        torn.write(b'{"n": 1')
    file.append([{"n": 2}])
    assert numbers(file.path) == [0, 2]


@pytest.mark.parametrize(("line", "what"), [("what", "is no record: "), ("[1]", "it holds a list")])
def test_a_line_that_is_no_record_is_named(line, what, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"n": 0}}\n{line}\n{{"n": 2}}\n')
    with pytest.raises(ValueError, match=f"x.jsonl, line 2 .*{what}"):
        list(RecordFile(path))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "b.txt"
    atomic_write(path, "é")
    with pytest.raises(UnicodeEncodeError):
        atomic_write(path, "\ud800")
    assert path.read_bytes() == "é".encode() and list(path.parent.iterdir()) == [path]
