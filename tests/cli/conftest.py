"""What several tests of the commands share."""

import json

import pytest


@pytest.fixture
def sums(tmp_path):
    rows = [
        {"question": f"What is {number} + {number}?", "answers": [str(2 * number)]}
        for number in range(200)
    ]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
