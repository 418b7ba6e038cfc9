"""What leaves the run's folder: each saved model with its card and `agentic_prompting.json`; to the hub nothing else.

transformers uploads a trainer's whole output folder. Ours also holds every rollout, what was spent, recordings of
replies and reports, none of which belong to a model that is shared.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import trainer as transformers_trainer

from ..llm.files import write_whole
from ..rollout import AgentSpec
from .empty_steps import EmptyStepsGRPOTrainer
from .model_card import model_card

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
# Of the output folder itself; of its sub-folders nothing but chat templates.
SHARED = (
    "*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.md", "*.jinja", "*.model", "*.tiktoken", "*.png",
    "adapter_model.bin",
)  # fmt: skip
KEPT_BACK = (".*", "_*", "*key*", "*secret*", "*credential*", "trainer_state.json")
SHARED_FOLDERS = ("additional_chat_templates",)


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
        with only_the_model(Path(self.args.output_dir)):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with only_the_model(Path(self.args.output_dir)):
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        self.saved_spec().save(folder)
        self._write_card(folder)

    def _write_card(self, folder: Path, *said: Any) -> None:
        """A card that cannot be made is a warning: it is no reason to lose a checkpoint."""
        try:
            write_whole(folder / CARD_FILE, str(model_card(self, *said)))
        except Exception as error:
            logger.warning("no model card in %s: %r", folder, error)


@contextmanager
def only_the_model(folder: Path) -> Iterator[None]:
    """Within it transformers uploads of this folder what [`SHARED`] names. A checkpoint goes up whole, where
    `hub_strategy` asks for it."""
    uploads = transformers_trainer.hf_api
    transformers_trainer.hf_api = lambda: _Selective(uploads(), folder)
    try:
        yield
    finally:
        transformers_trainer.hf_api = uploads


class _Selective:
    """An `HfApi` whose `upload_folder` leaves out what is not the model's."""

    def __init__(self, api: Any, folder: Path):
        self._api, self._folder = api, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: Any, ignore_patterns: Any = None, **options: Any) -> Any:
        if Path(folder_path) != self._folder:
            return self._api.upload_folder(folder_path=folder_path, ignore_patterns=ignore_patterns, **options)
        # The hub's `*` also matches `/`: sub-folders have to be named.
        below = [f"{glob.escape(path.name)}/*" for path in self._folder.iterdir() if _stays(path)]
        theirs = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or ())
        return self._api.upload_folder(
            folder_path=folder_path,
            allow_patterns=list(SHARED),
            ignore_patterns=[*theirs, *KEPT_BACK, *below],
            **options,
        )


def _stays(path: Path) -> bool:
    return path.is_dir() and path.name not in SHARED_FOLDERS
