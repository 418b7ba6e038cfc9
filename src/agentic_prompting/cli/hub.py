"""Checks of models and their folders, and of the hub, before anything is loaded."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

from ..records import only_a_folder

_TIMEOUT = 5  # seconds
_MODEL_FILES = ("config.json", "adapter_config.json")
USE_OF_EVOLVED_PROMPT = (
    "send its system_prompt.txt as the system message to the model that it was evolved for"
)
SMALL_MODEL = "smollm2"
"""The word that stands for SmolLM2-135M-Instruct out of its package, wherever a command takes a
model.
"""


def find_model(name: str) -> str:
    """The argument of `from_pretrained` for a model that an option names.

    `smollm2` is that of the small model's package.

    Raises:
        `ValueError`: The small model is named, and its package is not installed.
    """
    if name != SMALL_MODEL:
        return name
    from ..local import SmallModelMissing, small_model

    try:
        return str(small_model())
    except SmallModelMissing as error:
        raise ValueError(str(error)) from None


def holds_evolved_prompt(folder: Path) -> bool:
    """Whether `evolve` has written its best prompt into a folder."""
    from ..evolution.run_files import PROMPT_FILE

    return (folder / "state.json").exists() and (folder / PROMPT_FILE).exists()


def check_agent(run: str | Path) -> None:
    """Raise `ValueError` for a folder that does not exist or holds no model.

    A hub id (`user/name`) passes.
    """
    # A local folder has to hold a model; a hub id is looked up below.
    folder = Path(run)
    is_hub_id = "/" in str(run) and not only_a_folder(str(run))
    if not folder.exists() and not is_hub_id:
        raise ValueError(
            f"{run} does not exist; `agentic-prompting demo --output-dir {run}` trains an agent "
            "there"
        )
    if folder.is_dir() and not holds_model(folder):
        problem = f"{run} holds no model (no config.json)"
        if holds_evolved_prompt(folder):
            raise ValueError(f"{problem}, but a prompt of `evolve`: {USE_OF_EVOLVED_PROMPT}")
        checkpoint = find_newest_checkpoint(folder)
        if checkpoint is not None:
            raise ValueError(
                f"{problem}: its training has not finished; take its newest checkpoint, "
                f"{checkpoint}, or go on with the command of that run and --resume_from_checkpoint "
                "true"
            )
        raise ValueError(f"{problem}; give the folder that a trainer saved")
    check_model(run)


def check_trained_agent(run: str | Path) -> None:
    """As [`check_agent`]; also raise `ValueError` for a folder of a model that no trainer of ours
    has saved.
    """
    from ..rollout import SPEC_FILE

    check_agent(run)
    if Path(run).is_dir() and not (Path(run) / SPEC_FILE).is_file():
        raise ValueError(
            f"{run} holds a model that was not trained here (no {SPEC_FILE}): train it with "
            f"`agentic-prompting train prompt-r1 --model {run} --config FILE`, or measure it as it "
            f"is with `agentic-prompting headroom --untrained {run}`"
        )


def read_trained_columns(run: str | Path) -> dict[str, str]:
    """The `--columns` with which an agent was trained: our name for each, and that of the data.

    Empty if unknown.
    """
    from ..rollout import SPEC_FILE

    run = find_model(str(run))
    file = Path(run) / SPEC_FILE
    if not Path(run).is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            file = Path(hf_hub_download(run, SPEC_FILE))
        except (HfHubHTTPError, HFValidationError, OSError, ValueError):
            return {}
    # A damaged file is reported where the agent is loaded.
    try:
        columns = json.loads(file.read_text(encoding="utf-8")).get("columns")
    except (OSError, ValueError, AttributeError):
        return {}
    return columns if isinstance(columns, dict) else {}


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, in the order of their steps."""
    checkpoints = {}
    for path in run.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            checkpoints[int(step)] = path
    return [checkpoints[step] for step in sorted(checkpoints)]


def find_newest_checkpoint(run: Path) -> Path | None:
    """Return the checkpoint of a run with the most steps and a model, if there is one."""
    checkpoints = [path for path in list_checkpoints(run) if holds_model(path)]
    return checkpoints[-1] if checkpoints else None


def holds_model(folder: Path) -> bool:
    """Whether a folder has the files of a model, or of an adapter of one."""
    return any((folder / name).exists() for name in _MODEL_FILES)


def check_model(name: str | Path) -> None:
    """Raise `ValueError` for a model that is neither a local folder nor on the hub, or an adapter
    without its base.
    """
    # A name that is not a local path may be one on the hub.
    if not Path(name).exists():
        _check_on_hub(str(name))
    adapter = Path(name) / "adapter_config.json"
    if not adapter.is_file():
        return

    # An adapter names its base model, often by a path relative to the folder that training started
    # in.
    adapter_settings = json.loads(adapter.read_text(encoding="utf-8"))
    base = str(adapter_settings.get("base_model_name_or_path") or "")
    if Path(base).exists():
        return
    # Name the folder in which the path of the base model is right.
    for folder in adapter.resolve().parents:
        if (folder / base).is_dir():
            raise ValueError(
                f"{name} is an adapter of the base model {base}: start the command in {folder}, or "
                f"write the full path into {adapter}"
            )
    # Any other name of the base model may be one on the hub.
    if only_a_folder(base):
        raise ValueError(
            f"{name} is an adapter of the base model {base}, which does not exist: write its full "
            f"path into {adapter}"
        )


def _check_on_hub(name: str) -> None:
    """Raise `ValueError`, at once, for a model that is neither in the cache nor on the hub."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    fix = "give the folder of a model, or its name on the hub"
    if only_a_folder(name):
        raise ValueError(f"{name} does not exist: {fix}")
    try:
        cached_files = [try_to_load_from_cache(name, file) for file in _MODEL_FILES]
        is_cached = any(isinstance(file, str) for file in cached_files)
        # Asked for a cached model, too, so that libraries do not retry in vain when it is loaded.
        is_reachable = probe_hub()
        if is_cached:
            return
        if not is_reachable:
            if name.lower().endswith("/smollm2-135m-instruct"):
                fix = f"the word {SMALL_MODEL} stands for the same model out of a package"
            raise ValueError(f"{name} is not a local folder, and the hub cannot be reached: {fix}")
        HfApi().model_info(name, timeout=_TIMEOUT)
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(
            f"{name} is neither a local folder nor a model on the hub that you may read (a private "
            f"one needs HF_TOKEN): {fix}"
        ) from None


@cache
def probe_hub() -> bool:
    """Ask the hub, once, whether it answers, and return that.

    If not, its libraries use their caches from now on, without 40 s of retries.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # the class depends on the HTTP package that huggingface_hub uses
        # `datasets` has a setting of its own, which it may have read already.
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        print(
            f"{constants.ENDPOINT} cannot be reached: only cached files are used", file=sys.stderr
        )
    return not constants.HF_HUB_OFFLINE
