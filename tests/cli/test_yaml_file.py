"""Configuration files that are no configuration: every command that reads one ends in a line, not
in a traceback.
"""

import json
import os
import subprocess
import sys

import pytest

HOSTILE = {
    "no YAML": "a: [1, 2\nb: }",
    "a list": "- 1\n- 2\n",
    "a number": "3\n",
    "nothing": "",
    "a tab": "a:\n\t- b\n",
    "not UTF-8": b"task: \xff\xfe\n",
    "a zero byte": b"task: a\x00b\n",
    "an object of Python": "task: !!python/object/apply:os.system ['touch owned']\n",
    "an unknown tag": "task: !secret x\n",
    "an unknown name": "learning_ratte: 1.0\n",
    "no text for a name": "1: 2\nnull: 3\n",
    "an alias to itself": "a: &a [*a]\n",
    "nested without end": "a: " + "[" * 5000 + "]" * 5000 + "\n",
    "a billion laughs": "a0: &a0 [lol]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
    "the wrong kind": "max_steps: {a: [1]}\nlearning_rate: fast\n",
}
COMMANDS = {
    "train prompt-r1": ("agentic_prompting.cli.train_program", ["prompt-r1", "--config"], (1, 2)),
    "train espl": ("agentic_prompting.cli.train_program", ["espl", "--config"], (1, 2)),
    "evaluate": (None, ["evaluate", "--config"], (2,)),
    "doctor": (None, ["doctor", "--config"], (1, 2)),
}

SCRIPT = """
import contextlib, io, json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
commands, folder = json.loads(sys.argv[1])
def command(module, words, file):
    if module:
        from agentic_prompting.cli.train_program import main
        from agentic_prompting.cli.script import run_script
        run_script(lambda: main(words[0], [*words[1:], file]))
    else:
        from agentic_prompting.cli import main
        main([*words, file])
found = {name: {} for name in commands}
for name, file in [(name, file) for name in commands for file in sorted(Path(folder).glob("*.yaml"))]:
    module, words, _ = commands[name]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            command(module, words, str(file))
            status = 0
        except SystemExit as error:
            status = error.code
        except BaseException as error:
            status = f"raised {type(error).__name__}: {error}"[:300]
    found[name][file.stem] = [status, out.getvalue()[-1500:]]
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each command said of each file; all of them in one process, whose imports take longest."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, text in HOSTILE.items():
        (folder / f"{name}.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([COMMANDS, str(folder)])],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert "FOUND" in done.stdout, done.stderr[-2000:]
    assert not (folder / "owned").exists()
    return json.loads(done.stdout.split("FOUND")[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_hostile_configuration_ends_in_a_line(found, command):
    statuses = COMMANDS[command][2]
    wrong = {}
    for name, (status, said) in found[command].items():
        message = status if isinstance(status, str) else said
        is_line = isinstance(status, str) and not status.startswith(
            "raised"
        )  # `SystemExit` with a line: status 1
        if not is_line and status not in (*statuses, *([0] if command == "doctor" else [])):
            wrong[name] = message[-400:]
        if "Traceback" in message:
            wrong[name] = message[-400:]
    assert len(found[command]) == len(HOSTILE)
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
