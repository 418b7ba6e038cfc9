"""What counts as a change of a user's code: its file, but neither comments nor the library's own
code.
"""

import sys
from functools import partial, wraps

import pytest

from agentic_prompting.cli.loader import load_part
from agentic_prompting.records import digest
from agentic_prompting.rewards import exact_match
from agentic_prompting.versions import code_version, file_version, weights_version

SCORE = (
    "def score(answer, answers):\n    return helper(answer)\n\n\ndef helper(answer):\n    return "
    "1.0\n"
)


@pytest.fixture
def score(tmp_path):
    file = tmp_path / "my_versioned_score.py"
    file.write_text(SCORE)
    return file, load_part(f"{file}:score", "score")


def test_an_edited_helper_is_another_version(score):
    file, function = score
    first = code_version(function)
    assert first is not None
    file.write_text(SCORE.replace("1.0", "0.5"))
    assert code_version(function) not in (None, first)


def test_comments_and_formatting_do_not_count(score):
    file, function = score
    first = code_version(function)
    file.write_text("# Scores.\n" + SCORE.replace("return 1.0", "return (1.0)  # always"))
    assert code_version(function) == first


def test_wrappers_and_objects_stand_for_their_code(score):
    _, function = score

    @wraps(function)
    def guarded(*arguments):
        return function(*arguments)

    assert code_version(guarded) == code_version(function) == code_version(partial(function, "x"))

    class Judge:
        def __call__(self):
            return 1.0

    assert code_version(Judge()) == code_version(Judge) == code_version(Judge().__call__)


@pytest.mark.parametrize("part", [exact_match, len, digest, pytest.raises, None, "text", 3])
def test_code_of_libraries_has_no_version(part):
    assert code_version(part) is None


def test_weights_are_known_by_size_and_time(tmp_path):
    assert weights_version("some/model-on-the-hub") == []
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = weights_version(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert weights_version(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert weights_version(tmp_path) != first


def test_a_file_that_is_no_python_has_a_version(tmp_path):
    (tmp_path / "agent.sh").write_text("echo 'a\n")
    assert file_version(tmp_path / "agent.sh")
    assert file_version(tmp_path / "missing.py") is None


def test_files_beside_it_that_it_imports_count(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import json\n\ndef score():\n    from helper import h\n    return h()\n"
    )
    alone = file_version(tmp_path / "mine.py")
    # The helper imports a third file, and that one the first again.
    (tmp_path / "helper.py").write_text("from third import t\n\ndef h():\n    return t()\n")
    (tmp_path / "third.py").write_text("import mine\n\ndef t():\n    return 1\n")
    first = file_version(tmp_path / "mine.py")
    assert first not in (None, alone)
    (tmp_path / "third.py").write_text("import mine  # again\n\ndef t():\n    return 1\n")
    assert file_version(tmp_path / "mine.py") == first
    (tmp_path / "third.py").write_text("import mine\n\ndef t():\n    return 2\n")
    assert file_version(tmp_path / "mine.py") != first
    (tmp_path / "other.py").write_text("unrelated = 1\n")
    changed = file_version(tmp_path / "mine.py")
    (tmp_path / "other.py").write_text("unrelated = 2\n")
    assert file_version(tmp_path / "mine.py") == changed


def test_code_whose_file_is_no_python_has_no_version(tmp_path, monkeypatch):
    """A page whose code is run, or a script that was replaced while it runs: identifying code ends
    no run.
    """
    page = tmp_path / "page.md"
    page.write_text("An environment answers the agent's requests.\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(page), raising=False)
    names = {"__name__": "__main__"}
    exec(compile("class Mine:\n    def step(self, rollout): ...\n", str(page), "exec"), names)
    assert code_version(names["Mine"]()) is None
