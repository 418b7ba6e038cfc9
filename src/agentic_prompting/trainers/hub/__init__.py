"""What leaves a run's folder: each saved model with its card and `agentic_prompting.json`; to the hub nothing else.

transformers uploads a trainer's whole output folder. Ours also holds every rollout, what was spent, recordings of
replies and reports, none of which belong to a model that is shared.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import trainer as transformers_trainer

from ...records import atomic_write
from ...rollout import SPEC_FILE
from .card import model_card

if TYPE_CHECKING:
    from ..multi_turn_grpo import MultiTurnGRPOTrainer

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
# By name, as anything else may lie in a run's folder: what we write about a model, what `save_pretrained` writes of
# models and adapters, and what it writes of tokenizers and processors, beside the files that a tokenizer names itself.
SHARED = (
    CARD_FILE, SPEC_FILE, "system_prompt.txt", "population.json", "summary.json", "table.md",
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
    "model-?????-of-?????.safetensors", "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip


def write_card(
    trainer: MultiTurnGRPOTrainer,
    folder: Path,
    name: str | None = None,
    dataset: str | None = None,
    tags: Sequence[str] = (),
) -> None:
    """Write the [`model_card`] into a folder. One that cannot be made is a warning: no reason to lose a checkpoint."""
    try:
        atomic_write(folder / CARD_FILE, str(model_card(trainer, name, dataset, tags)))
    except Exception as error:
        logger.warning("no model card in %s: %r", folder, error)


@contextmanager
def only_the_model(folder: Path, tokenizer: Any) -> Iterator[None]:
    """Within it transformers uploads of this folder what [`SHARED`] and the tokenizer's own file names say. A
    checkpoint goes up whole, where `hub_strategy` asks for it."""
    vocabulary = [glob.escape(name) for name in getattr(tokenizer, "vocab_files_names", {}).values()]
    uploads = transformers_trainer.hf_api
    transformers_trainer.hf_api = lambda: _Selective(uploads(), folder, [*SHARED, *vocabulary])
    try:
        yield
    finally:
        transformers_trainer.hf_api = uploads


class _Selective:
    """An `HfApi` whose `upload_folder` leaves out what is not the model's."""

    def __init__(self, api: Any, folder: Path, shared: list[str]):
        self._api, self._folder, self._shared = api, folder, shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: Any, **options: Any) -> Any:
        if Path(folder_path) == self._folder:
            options["allow_patterns"] = self._shared
        return self._api.upload_folder(folder_path=folder_path, **options)
