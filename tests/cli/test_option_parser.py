"""The parser of options that are the fields of dataclasses."""

from dataclasses import dataclass, field

import pytest

from agentic_prompting.cli.option_parser import OptionParser


def test_a_list_that_is_typed_twice_is_refused():
    """Only the last one would count; that of a YAML file is replaced."""

    @dataclass
    class Options:
        reward: list[str] = field(default_factory=list)
        name: str = ""

    parser = OptionParser("test", (Options,))
    with pytest.raises(ValueError, match="--reward") as refused:
        parser.parse(["--reward", "a", "--name", "x", "--reward=b"])
    assert "2 times" in str(refused.value)
    parser.set_config({"reward": ["a", "b"]}, "file.yaml")
    assert parser.parse([])[0].reward == ["a", "b"]
    assert parser.parse(["--reward", "c"])[0].reward == ["c"]
    with pytest.raises(ValueError, match="--reward"):
        parser.parse(["--reward", "c", "--reward", "d"])
