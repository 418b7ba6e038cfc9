"""TRL's own tests of `GRPOTrainer`, run with our trainer in its place: a script that trains there
trains here.

    python -m benchmarks.fidelity.trl_suite --checkout FOLDER --json  # FOLDER: a checkout of github.com/huggingface/trl
    python -m benchmarks.fidelity.trl_suite --checkout FOLDER --bf16 off --keyword reward_func

The checkout's `tests/test_grpo_trainer.py` runs against the installed TRL, once with TRL's class
and once with ours (`environment=None`: one turn, no reply), with bfloat16 autocast on, TRL's
default, and off. Models and data are tiny and made here (`trl_tiny.py`); nothing is downloaded, so
tests of other models fail with both classes and do not count. TRL's tests import peft, psutil,
jmespath and pillow; without one of them its tests do not count either. The last line of `--json`
holds, for each setting of bf16, `trl_passes`, `ours_passes` and `differences`: by name, each test
that TRL's class passes and ours does not, with the error and, if the difference is intended, the
reason. The exit status is 1 if there is any other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = "test_grpo_trainer.py"
# Tests that ours is not to pass, by a pattern of the name: what the test is about is different on
# purpose. These are words of docs/howto/trl_script.md, which says each of them to the user.
INTENDED: dict[str, str] = {
    r"RolloutDispatch|rollout_func": "`rollout_func=` is refused",
    r"VLM|multimodal": "Images (`image` and `images` columns, or messages with images) are refused",
    r"multiple_environments|mixed_environments|unknown_environment": (
        "Several environments in one `environment_factory=` (a dict) are refused"
    ),
    r"environment_owned_(data|reward)": "Every row needs a `prompt` or a `question`",
    r"dataset_required": (
        "A data set that is missing or empty, or that lacks the column, is an error"
    ),
    # They put token ids in the place of what `generate` returns.
    r"with_mask_truncated_completions$|test_train_with_tools|with_environment_factory|malformed_tool_calls": (
        "Sampling does not call `model.generate`"
    ),
}

Outcomes = Mapping[str, tuple[str, str]]


def intended(name: str) -> str | None:
    """Why a test is not passed on purpose; `None` if it is to be passed."""
    for pattern, reason in INTENDED.items():
        if re.search(pattern, name):
            return reason
    return None


def compare(theirs: Outcomes, ours: Outcomes) -> dict[str, Any]:
    """How many tests TRL's class passes, how many of these ours passes, and where it does not.

    Args:
        theirs, ours (`Mapping`): By test, how it ended (`passed`, `failed`, `skipped`) and with
            which message.
    """
    passed = [name for name, (outcome, _) in theirs.items() if outcome == "passed"]
    differences = {}
    for name in passed:
        outcome, message = ours.get(name, ("not run", ""))
        if outcome != "passed":
            differences[name] = {"error": message or outcome, "intended": intended(name)}
    return {
        "trl_passes": len(passed),
        "ours_passes": len(passed) - len(differences),
        "differences": differences,
    }


def run_tests(
    folder: Path, trainer: str, bf16: bool, keyword: str = ""
) -> dict[str, tuple[str, str]]:
    """Run the tests in `folder`, which holds the models under their names, with one of the two
    classes.
    """
    outcomes = folder / f"outcomes_{trainer}_{'bf16' if bf16 else 'float32'}.json"

    # The plugin, where it is and what it is to do; nothing is downloaded.
    settings = {"trainer": trainer, "bf16": bf16, "outcomes": str(outcomes)}
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "PYTHONPATH": path,
        "TRL_SUITE": json.dumps(settings),
    }
    command = [sys.executable, "-m", "pytest", f"tests/{TESTS}"]
    command += ["-p", "trl_plugin", "-p", "no:cacheprovider", "-q"]
    command += ["-m", "not slow", "--tb=short", f"--basetemp={folder / 'scratch'}"]
    if keyword:
        command += ["-k", keyword]

    run = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    summary = json.loads(outcomes.read_text(encoding="utf-8")) if outcomes.exists() else {}
    if not summary:
        raise SystemExit(f"no test was run:\n{run.stdout[-3000:]}")
    return {name: (outcome, message) for name, (outcome, message) in summary.items()}


def lay_out(checkout: Path, folder: Path) -> None:
    """The checkout's tests and the models in one folder.

    A copy, so that `trl` is the installed one.
    """
    from benchmarks.fidelity.trl_tiny import make_all

    if not (checkout / "tests" / TESTS).exists():
        raise SystemExit(f"{checkout} is no checkout of TRL: there is no tests/{TESTS}")
    shutil.copytree(checkout / "tests", folder / "tests")
    shutil.copy(checkout / "pyproject.toml", folder)  # pytest's markers
    for missing in make_all(folder, (checkout / "tests" / TESTS).read_text(encoding="utf-8")):
        print("not made:", missing, file=sys.stderr)


def show(setting: str, result: Mapping[str, Any]) -> None:
    """One setting's result as text."""
    print(f"{setting}: TRL's class passes {result['trl_passes']}, ours {result['ours_passes']}")
    for name, difference in result["differences"].items():
        if difference["intended"]:
            print(f"  {name}: intended: {difference['intended']}")
        else:
            print(f"  {name}: NOT INTENDED: {difference['error']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--checkout", type=Path, required=True, help="a checkout of TRL's repository"
    )
    parser.add_argument(
        "--bf16",
        choices=("on", "off", "both"),
        default="both",
        help="train under bfloat16 autocast",
    )
    parser.add_argument("--keyword", default="", help="only tests that match, as pytest's -k")
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON, last")
    options = parser.parse_args()
    settings = ("on", "off") if options.bf16 == "both" else (options.bf16,)
    results = {}
    is_explained = True
    with tempfile.TemporaryDirectory(prefix="trl_suite_") as name:
        folder = Path(name)
        lay_out(options.checkout, folder)
        for setting in settings:
            theirs = run_tests(folder, "trl", setting == "on", options.keyword)
            ours = run_tests(folder, "ours", setting == "on", options.keyword)
            result = compare(theirs, ours)
            for difference in result["differences"].values():
                is_explained &= difference["intended"] is not None
            results[f"bf16={setting}"] = result
            show(f"bf16={setting}", result)
    if options.json:
        print(json.dumps(results))
    return 0 if is_explained else 1


if __name__ == "__main__":
    sys.exit(main())
