"""Files are read exactly as they are written, and errors name the line."""

import json
import subprocess
import sys

import pytest
from datasets import Dataset

from agentic_prompting.data import (
    load_task,
)
from support.data_rows import written


def test_tab_separated_files(tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text(
        'id\tquestion\tpossible_answers\n1\tWhere?\t"[""Rome"", ""Roma""]"\n', encoding="utf-8"
    )
    assert load_task("popqa", split="test", data_files=str(path))["answers"][:] == [
        ["Rome", "Roma"]
    ]


def test_a_csv_cell_is_the_text_it_is(tmp_path):
    answers = ["1", "", "007", "NA", "null", "None", "true", "1.50", "1e5", "nan"]
    path = tmp_path / "rows.csv"
    path.write_text(
        "question,answer\n" + "".join(f"q{i},{a}\n" for i, a in enumerate(answers)),
        encoding="utf-8",
    )
    loaded = load_task("hotpotqa", data_files=path)
    assert loaded["answers"][:] == [[answer] for answer in answers if answer]
    assert loaded["question"][:] == [f"q{i}" for i, answer in enumerate(answers) if answer]


def test_a_csv_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "rows.csv"
    long = "x" * 200_000  # the csv module's own limit is 128 KiB
    path.write_bytes(
        f'\ufeffid,question,answer\r\n7,"Two\nlines, ""quoted""","é"\r\n\r\n8,{long},b\r\n'.encode()
    )
    loaded = load_task("hotpotqa", data_files=path)
    assert loaded["id"][:] == ["7", "8"] and loaded["answers"][:] == [["é"], ["b"]]
    assert loaded["question"][:] == ['Two\nlines, "quoted"', long]


def test_names_of_files_are_no_patterns(tmp_path):
    for name, answer in (("a1.jsonl", "wrong"), ("a[1].jsonl", "right")):
        (tmp_path / name).write_text(json.dumps({"question": "q", "answer": answer}) + "\n")
    assert load_task("hotpotqa", data_files=tmp_path / "a[1].jsonl")["answers"][:] == [["right"]]
    Dataset.from_list([{"question": "q", "answer": "also"}]).to_parquet(tmp_path / "b[1]=x.parquet")
    assert load_task("hotpotqa", data_files=tmp_path / "b[1]=x.parquet")["answers"][:] == [["also"]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_not_a_number_is_no_answer(suffix, tmp_path):
    rows = [
        {"question": f"q{i}", "answer": answer} for i, answer in enumerate([1.5, float("nan"), 2.0])
    ]
    assert load_task("hotpotqa", data_files=written(tmp_path, rows, suffix))["answers"][:] == [
        ["1.5"],
        ["2"],
    ]
    problems = [
        {"problem": f"p{i}", "answer": answer} for i, answer in enumerate([1.0, float("nan")])
    ]
    assert load_task("aimo_amc", data_files=written(tmp_path, problems, suffix))["answers"][:] == [
        ["1"]
    ]


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "l.csv",
            "question,answer\nq,a\nOù ?,é\n".encode("latin-1"),
            "row 1 .line 3. of .*l.csv.* UTF-8",
        ),
        (
            "l.jsonl",
            '{"question": "Où ?", "answer": "é"}\n'.encode("latin-1"),
            "row 0 .line 1. of .*l.jsonl.* UTF-8",
        ),
        ("l.json", '[{"question": "Où ?", "answer": "é"}]'.encode("latin-1"), "l.json.* UTF-8"),
        (
            "d.jsonl",
            b'{"question": "q", "answer": "a"}\n\n{"a": ' + DEEP + b"}",
            "row 1 .line 3. of .*nested too deep",
        ),
        ("d.json", DEEP, "d.json.*nested too deep"),
        (
            "j.jsonl",
            b'{"question": "q", "answer": "a"}\n{"question"\n',
            "row 1 .line 2. of .*j.jsonl",
        ),
        (
            "k.jsonl",
            b'{"question": "q", "answer": "a"}\n{"question": "q"\n',
            "row 1 .line 2. of .*column 17$",
        ),
        ("t.json", b'[\n{"question": "q"', "t.json.* line 2 column"),
        ("o.jsonl", b'["q", "a"]\n', "row 0 .line 1. of .*an object .* got list"),
        ("s.jsonl", b'{"question": "\\ud800", "answer": "a"}\n', "row 0 .*s.jsonl.*surrogate"),
        ("e.jsonl", b"", "e.jsonl has no rows"),
        ("e.json", b"", "e.json has no rows"),
        ("e.csv", b"", "e.csv has no rows"),
        ("e.parquet", b"", "e.parquet cannot be read as .parquet"),
        ("h.csv", b"question,answer\n", "h.csv has no rows"),
        ("b.json", b"[]", "b.json has no rows"),
        (
            "w.csv",
            b"question,answer\nq,a\nq,a,b\n",
            "row 1 .line 3. of .*w.csv .*3 cells where there are 2 columns",
        ),
        ("n.csv", b"question,answer\nq\n", "row 0 .line 2. of .*n.csv .*it has 1 cell where"),
        ("q.csv", b'question,answer\nq,"a\nr,b\n', "row 0 .*q.csv"),
        (
            "two.csv",
            b"question,answer,answer\nq,a,b\n",
            "two.csv .*has several columns called 'answer'",
        ),
        (
            "none.csv",
            b"question,answer\nq,\nr, \n",
            "no row of .*none.csv has an accepted answer",
        ),
    ],
)
def test_a_file_that_is_damaged_is_named_with_its_row(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_task("hotpotqa", data_files=tmp_path / name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert caught.value.__context__ is None or caught.value.__suppress_context__, (
        "no traceback of a library's"
    )


def test_of_several_files_the_one_is_named(tmp_path):
    for name, row in (
        ("a.jsonl", {"question": "q", "answer": "a"}),
        ("b.jsonl", {"question": None, "answer": "a"}),
    ):
        (tmp_path / name).write_text(
            (json.dumps({"question": "x", "answer": "y"}) + "\n") + json.dumps(row) + "\n"
        )
    with pytest.raises(ValueError, match=r"b\.jsonl.*row 1 \(line 2\)"):
        load_task("hotpotqa", data_files=[tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def test_a_damaged_file_is_refused_before_anything_heavy_is_imported(tmp_path):
    """Within a second: the libraries that tables need take longer than that to import."""
    (tmp_path / "bad.jsonl").write_text('{"question"')
    code = (
        "import sys\nfrom agentic_prompting.data import load_task\n"
        "try: load_task('hotpotqa', data_files='bad.jsonl')\n"
        "except ValueError: print(sorted({'datasets', 'pandas', 'pyarrow'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    assert (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60).stdout
        == "[]\n"
    )


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity"])
def test_a_number_beyond_all_bounds_names_its_line(tmp_path, number):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        f'{{"question": "q", "answer": "a"}}\n{{"question": "r", "answer": {number}}}\n'
    )
    with pytest.raises(ValueError, match=rf"row 1 .line 2. of .*rows.jsonl .*{number[:5]}"):
        load_task(path)


@pytest.mark.parametrize(
    "text",
    [
        "question, answer\nWhat is 2, 2?, 4\n".replace("2, 2", "2 2"),
        '"question", "answer"\n"What is 2 2?", "4"\n',
        "question,\tanswer\n".replace("\t", " ") + "\nWhat is 2 2?, 4\n",
    ],
)
def test_a_header_with_blanks_behind_its_commas_is_read(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    (row,) = load_task(path)
    assert (row["question"], row["answers"]) == ("What is 2 2?", ["4"])


def test_a_cell_keeps_its_blanks_where_the_header_has_none(tmp_path):
    from agentic_prompting.data.file_formats import read_file

    path = tmp_path / "rows.csv"
    path.write_text("question,answer\nq, a\n")
    assert read_file(str(path), ["question", "answer"]).rows == [{"question": "q", "answer": " a"}]


DAMAGED = """
import io, random, sys
import pyarrow as pa, pyarrow.parquet as pq
from pathlib import Path
from agentic_prompting.data.file_formats import read_file

folder, rng, outcomes = Path(sys.argv[1]), random.Random(0), {"read": 0, "refused": 0}
rows = {"question": [f"question {i} " + "x" * (i % 50) for i in range(2000)], "answer": [str(i) for i in range(2000)]}
for compression in ("NONE", "SNAPPY", "GZIP", "ZSTD"):
    whole = io.BytesIO()
    pq.write_table(pa.table(rows), whole, compression=compression, row_group_size=500)
    whole = whole.getvalue()
    for number in range(60):
        data, path = bytearray(whole), folder / "damaged.parquet"
        place = rng.randrange(4, len(data) - 1)
        if number % 3 == 0:
            data[place : place + 200] = rng.randbytes(min(200, len(data) - place))
        elif number % 3 == 1:
            del data[place : place + 50]
        else:
            data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            found = read_file(str(path), ["question", "answer"]).rows
            assert all(isinstance(row["question"], str | None) for row in found)
            outcomes["read"] += 1
        except ValueError as error:
            assert "damaged.parquet" in str(error) and "\\n" not in str(error) and len(str(error)) < 600, error
            outcomes["refused"] += 1
print(outcomes)
"""


@pytest.mark.timeout(120)
def test_parquet_files_damaged_in_the_middle_end_in_one_line(tmp_path):
    """In a process of its own: what reads them is not Python."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", DAMAGED, tmp_path], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused" in done.stdout
