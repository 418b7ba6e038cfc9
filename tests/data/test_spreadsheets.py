"""Tables as spreadsheets save them."""

import datetime
import sys

import numpy
import pandas
import pytest
from datasets import Dataset, Features, List, Value

from agentic_prompting.data import load_task
from agentic_prompting.data.file_formats import read_file

EXPECTED = [("Where is Rome?", ["Italy"]), ("Where is Oslo?", ["Norway"])]


def read(path):
    return [(row["question"], row["answers"]) for row in load_task(str(path))]


CSV = {
    "empty columns": "question,answer,,\nWhere is Rome?,Italy,,\nWhere is Oslo?,Norway,,\n",
    "an empty column in front": ",question,answer\n,Where is Rome?,Italy\n,Where is Oslo?,Norway\n",
    "an empty column between": "question,,answer\nWhere is Rome?,,Italy\nWhere is Oslo?,,Norway\n",
    "a note in a column without a name": (
        "question,answer,\nWhere is Rome?,Italy,checked\nWhere is Oslo?,Norway,\n"
    ),
    "rows without the empty columns": (
        "question,answer,,\nWhere is Rome?,Italy\nWhere is Oslo?,Norway,\n"
    ),
    "rows with more of them": (
        "question,answer\nWhere is Rome?,Italy,,,\nWhere is Oslo?,Norway, ,\n"
    ),
    "empty rows": (
        ",,\n\nquestion,answer,\n,,\nWhere is Rome?,Italy,\n , ,\nWhere is Oslo?,Norway,\n,,\n"
    ),
    "semicolons": "question;answer\nWhere is Rome?;Italy\nWhere is Oslo?;Norway\n",
    "semicolons, quoted": (
        '"question";"answer";\n"Where is Rome?";"Italy";\n"Where is Oslo?";"Norway";\n'
    ),
    "semicolons and commas": (
        "question;answer;source, year\nWhere is Rome?;Italy;x\nWhere is Oslo?;Norway;y\n"
    ),
    "a separator line": "sep=;\nquestion;answer\nWhere is Rome?;Italy\nWhere is Oslo?;Norway\n",
    "tabs": "question\tanswer\nWhere is Rome?\tItaly\nWhere is Oslo?\tNorway\n",
    "blanks around names": "question ,answer \nWhere is Rome?,Italy\nWhere is Oslo?,Norway\n",
    "commas and a semicolon": (
        "question,answer,a; b; c\nWhere is Rome?,Italy,x\nWhere is Oslo?,Norway,y\n"
    ),
}


@pytest.mark.parametrize("text", CSV.values(), ids=CSV)
def test_csv_of_spreadsheets(text, tmp_path):
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8-sig")
    assert read(tmp_path / "rows.csv") == EXPECTED


@pytest.mark.parametrize(
    "text", ["question,answer\nq,a,b\n", "question,answer,\nq\n", "question;answer\nq;a;b\n"]
)
def test_cells_that_fit_no_column_are_named(text, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError, match="row 0 .line 2. of .*rows.csv .*cells? where there are"):
        load_task(str(tmp_path / "rows.csv"))


def test_empty_rows_of_a_frame_are_dropped():
    frame = pandas.DataFrame(
        {"question": ["q", None, "r"], "answer": ["a", None, "b"], "Unnamed: 2": [None] * 3}
    )
    assert load_task(frame)["answers"][:] == [["a"], ["b"]]


@pytest.fixture
def workbook(tmp_path):
    openpyxl = pytest.importorskip("openpyxl", reason="openpyxl is not installed")

    def write(*rows):
        book = openpyxl.Workbook()
        for row in rows:
            book.active.append(list(row))
        book.save(tmp_path / "rows.xlsx")
        return tmp_path / "rows.xlsx"

    return write


def test_an_excel_sheet_is_read(workbook):
    path = workbook(
        (None, None, None),
        ("question", "answer", None),
        ("Where is Rome?", "Italy", None),
        (None, None, None),
        ("2 + 2?", 4.0, "a note"),
        ("5 / 2?", 2.5, None),
        ("When?", datetime.datetime(2024, 5, 1), None),
        ("Is it?", True, None),
    )
    assert [answers for _, answers in read(path)] == [
        ["Italy"],
        ["4"],
        ["2.5"],
        ["2024-05-01"],
        ["TRUE"],
    ]


def test_sheets_that_are_not_read_are_named(workbook, caplog):
    path = workbook(("question", "answer"), ("q", "a"))
    assert read(path) == [("q", ["a"])] and not caplog.messages
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.load_workbook(path)
    book.create_sheet("more rows")
    book.save(path)
    read(path)
    (message,) = caplog.messages
    assert "'more rows'" in message


def test_an_error_in_a_cell_is_named(workbook):
    with pytest.raises(ValueError, match="rows.xlsx .*B2"):
        load_task(str(workbook(("question", "answer"), ("q", "#N/A"))))


def test_a_damaged_excel_file_is_refused(workbook, tmp_path):
    (tmp_path / "rows.xlsx").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="rows.xlsx cannot be read as .xlsx: .*CSV"):
        load_task(str(tmp_path / "rows.xlsx"))


def test_without_openpyxl_csv_is_advised(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    with pytest.raises(
        ValueError, match="rows.xlsx cannot be read as .xlsx: .*openpyxl.*save the sheet as CSV"
    ):
        load_task(str(tmp_path / "rows.xlsx"))


@pytest.mark.parametrize("suffix", [".xls", ".ods", ".XLSM"])
def test_other_spreadsheets_are_refused(suffix, tmp_path):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=f"save it as CSV: .*rows{suffix}"):
        load_task(str(path))


@pytest.mark.parametrize("suffix", [".parquet", "frame", "Dataset"])
def test_short_floats_keep_their_digits(suffix, tmp_path):
    """As 64 bits, 0.1 of 32 bits is 0.10000000149."""
    numbers = numpy.array([0.1, 4.0, 2.5], dtype="float32")
    frame = pandas.DataFrame({"question": ["a", "b", "c"], "answer": numbers})
    features = Features({"question": Value("string"), "answers": List(Value("float32"))})
    lists = Dataset.from_dict(
        {"question": ["a", "b"], "answers": [[0.1, 4.0], [2.5]]}, features=features
    )
    if suffix == ".parquet":
        frame.to_parquet(tmp_path / "rows.parquet")
        lists.to_parquet(tmp_path / "lists.parquet")
        assert load_task(tmp_path / "rows.parquet")["answers"][:] == [["0.1"], ["4"], ["2.5"]]
        assert load_task(tmp_path / "lists.parquet")["answers"][:] == [["0.1", "4"], ["2.5"]]
    elif suffix == "frame":
        assert load_task(frame)["answers"][:] == [["0.1"], ["4"], ["2.5"]]
    else:
        assert load_task(lists)["answers"][:] == [["0.1", "4"], ["2.5"]]


def test_the_delimiter_is_found_in_quoted_headers(tmp_path):
    (tmp_path / "rows.csv").write_text('"question","answer; or none"\nq,a\n')
    table = read_file(str(tmp_path / "rows.csv"), ["question", "answer"])
    assert table.column_names == ["question", "answer; or none"]
    assert table.rows == [{"question": "q"}]
