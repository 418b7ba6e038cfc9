"""What leaves the run's folder: each saved model with its card and `agentic_prompting.json`; to the hub nothing else.

transformers uploads a trainer's whole output folder. Ours also holds every rollout, what was spent, recordings of
replies and reports, none of which belong to a model that is shared.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import trainer as transformers_trainer

from ..records import atomic_write
from ..rollout import SPEC_FILE, AgentSpec
from .empty_steps import EmptyStepsGRPOTrainer
from .model_card import model_card

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


class PublishingGRPOTrainer(EmptyStepsGRPOTrainer):
    """[`EmptyStepsGRPOTrainer`] that writes model cards and uploads only what belongs to a model."""

    spec: AgentSpec

    def saved_spec(self) -> AgentSpec:
        """How an agent that is loaded later is asked. For subclasses to change."""
        return self.spec

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card, `output_dir/README.md`, with what the run's folder knows now.

        Args:
            model_name (`str`, *optional*): Name of the model.
            dataset_name (`str`, *optional*): Hub id of the training data.
            tags (`str` or `list[str]`, *optional*): Further tags.
        """
        if self.is_world_process_zero():
            more = (tags,) if isinstance(tags, str) else tuple(tags or ())
            self._write_card(Path(self.args.output_dir), model_name, dataset_name, more)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s, of the model alone: no rollouts, no records of spending, no recorded replies, no
        checkpoints."""
        with only_the_model(Path(self.args.output_dir), vocabulary_of(self._tokenizer)):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with only_the_model(Path(self.args.output_dir), vocabulary_of(self._tokenizer)):
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        self.saved_spec().save(folder)
        self._write_card(folder)

    def _write_card(self, folder: Path, *said: Any) -> None:
        """A card that cannot be made is a warning: it is no reason to lose a checkpoint."""
        try:
            atomic_write(folder / CARD_FILE, str(model_card(self, *said)))
        except Exception as error:
            logger.warning("no model card in %s: %r", folder, error)


def vocabulary_of(tokenizer: Any) -> tuple[str, ...]:
    """The files of a vocabulary, by the names that its tokenizer gives them."""
    return tuple(glob.escape(name) for name in getattr(tokenizer, "vocab_files_names", {}).values())


@contextmanager
def only_the_model(folder: Path, vocabulary: Sequence[str] = ()) -> Iterator[None]:
    """Within it transformers uploads of this folder what [`SHARED`] and `vocabulary` name. A checkpoint goes up whole,
    where `hub_strategy` asks for it."""
    uploads = transformers_trainer.hf_api
    transformers_trainer.hf_api = lambda: _Selective(uploads(), folder, [*SHARED, *vocabulary])
    try:
        yield
    finally:
        transformers_trainer.hf_api = uploads


class _Selective:
    """An `HfApi` whose `upload_folder` leaves out what is not the model's."""

    def __init__(self, api: Any, folder: Path, shared: Sequence[str]):
        self._api, self._folder, self._shared = api, folder, shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: Any, **options: Any) -> Any:
        if Path(folder_path) == self._folder:
            options["allow_patterns"] = list(self._shared)
        return self._api.upload_folder(folder_path=folder_path, **options)
