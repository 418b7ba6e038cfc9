"""A trained agent as a folder and on the Hub: what is saved beside the weights, and published.

transformers uploads a trainer's whole output folder. Ours also holds every rollout, records of
spending, recorded replies and reports, which do not belong to a published model. Errors of a Hub
that cannot be reached are made readable.
"""

from __future__ import annotations

import glob
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..evolution.run_files import POPULATION_FILE, PROMPT_FILE
from ..records import only_a_folder
from ..rollout import SPEC_FILE, AgentSpec
from .checkpointing.resumable_trainer import ResumableGRPOTrainer
from .loading import copy_processor
from .model_card import CARD_FILE, TrainedAgent, write_card
from .patches import publish_only
from .policies import tokenizer_of

PUBLISHED_FILES = (
    # Ours about a model.
    CARD_FILE,
    SPEC_FILE,
    PROMPT_FILE,
    POPULATION_FILE,
    "summary.json",
    "table.md",
    # Those that `save_pretrained` writes for models and adapters.
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-?????-of-?????.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    # Those of tokenizers and processors, besides the ones that a tokenizer names.
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""The files of a run's folder that may be published. All others stay, because it may hold any."""


def published_files(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the patterns of the files to publish: [`PUBLISHED_FILES`] and the tokenizer's own."""
    vocabulary = getattr(tokenizer, "vocab_files_names", {}).values()
    return [*PUBLISHED_FILES, *(glob.escape(name) for name in vocabulary)]


class HubGRPOTrainer(ResumableGRPOTrainer):
    """A [`ResumableGRPOTrainer`] whose models are complete agents, and that publishes only these.

    An agent is the weights, its form ([`AgentSpec`]) and a model card.
    """

    # --- for subclasses ------------------------------------------------------------------------

    def saved_spec(self) -> AgentSpec:
        """Return the form of the agent that is saved with the weights."""
        raise NotImplementedError

    def describe_agent(self) -> TrainedAgent:
        """Return the facts about the trained agent that its model card states."""
        raise NotImplementedError

    # --- saving --------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As [`~trl.GRPOTrainer`]'s; also writes the agent's form and a model card."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            self._save_beside(Path(output_dir or self.args.output_dir))

    def _save_beside(self, folder: Path) -> None:
        """Write the files that belong to the weights. Called on one process."""
        self.saved_spec().save(folder)
        copy_processor(self.model.name_or_path, folder)
        write_card(self.describe_agent(), folder)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the model card, `output_dir/README.md`, from the files in the run's folder.

        Args:
            model_name (`str`, *optional*): Name of the model.
            dataset_name (`str`, *optional*): Hub id of the training data.
            tags (`str` or `list[str]`, *optional*): Further tags.
        """
        if not self.is_world_process_zero():
            return
        if isinstance(tags, str):
            tags = [tags]
        folder = Path(self.args.output_dir)
        write_card(self.describe_agent(), folder, model_name, dataset_name, tags or [])

    # --- publishing ----------------------------------------------------------------------------

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As [`~trl.GRPOTrainer`]'s, but uploads only the model.

        Rollouts, spending, recorded replies and checkpoints stay local.
        """
        with publish_only(Path(self.args.output_dir), published_files(tokenizer_of(self))):
            return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with publish_only(Path(self.args.output_dir), published_files(tokenizer_of(self))):
            super()._push_from_checkpoint(checkpoint_folder)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As [`~trl.GRPOTrainer`]'s.

        Raises:
            `ConnectionError`: If the Hub cannot be written to.
        """
        try:
            super().init_hf_repo(token, private)
        except Exception as error:
            # An error of the Hub has several lines, the first of which names the reason.
            reason = str(error).strip().split("\n")[0]
            raise ConnectionError(
                f"push_to_hub=True, but the Hub cannot be written to: {reason}. Train with "
                "push_to_hub=False, or check the network and the token"
            ) from None


@contextmanager
def explain_missing_model(model: str | Path | PreTrainedModel | PeftModel) -> Iterator[None]:
    """Within this context, a model that cannot be loaded raises an error of one line.

    Args:
        model (`str` or `PreTrainedModel`): The trainer's argument.

    Raises:
        `FileNotFoundError`: If `model` is the name of a model, and it cannot be loaded.
    """
    # A model that is already loaded cannot be missing.
    if not isinstance(model, str):
        yield
        return
    # A path is never asked for on the Hub.
    if only_a_folder(model) and not Path(model).exists():
        raise FileNotFoundError(
            f"{model} does not exist: pass the folder of a model, or its name on the Hub"
        )
    try:
        yield
    except (OSError, ValueError) as error:
        # Other errors of the trainer's constructor are passed on.
        frames = traceback.walk_tb(error.__traceback__)
        if "from_pretrained" not in {frame.f_code.co_name for frame, _ in frames}:
            raise
        reason = str(error).strip().split("\n")[0]
        if Path(model).exists():
            problem = "holds no model that can be loaded"
        else:
            problem = (
                "is neither a local folder nor a model on the Hub, where a private one needs "
                "HF_TOKEN"
            )
        raise FileNotFoundError(f"{model} {problem}: {reason}") from None
