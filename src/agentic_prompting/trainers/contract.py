"""The undocumented parts of TRL that the trainers depend on: one table, checked when a trainer is made.

TRL's undocumented parts change between its releases. [`CONTRACT`] lists every such part that this room overrides, reads
or sets, with the parameters that it relies on. tests/trainers/test_trl_contract.py compares the table with the source
of the room and tests what each part does, on the versions in [`TESTED`]. With another version of TRL the table is
compared with what is installed: a difference is an error that names the part; without one there is a single warning.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import trl
from trl import GRPOTrainer

TESTED = ("1.16.0",)
"""Versions of TRL that the contract tests were run on."""


class TRLChanged(ImportError):
    """The installed TRL differs from the tested versions in a part that the trainers depend on."""


@dataclass(frozen=True)
class Part:
    """One undocumented part of TRL.

    Args:
        name (`str`): A method or attribute of [`~trl.GRPOTrainer`], or the dotted path of an import.
        parameters (`str`, *optional*): The parameters that a method or function must at least take, in this order,
            without `self`. An attribute has none.
    """

    name: str
    parameters: str | None = None

    def difference(self, trainer: type = GRPOTrainer) -> str:
        """The difference from what is expected, or an empty text."""
        expected = None if self.parameters is None else self.parameters.split()
        found: Any
        if "." in self.name:
            try:
                found = pkgutil.resolve_name(self.name)
            except (ImportError, AttributeError):
                return f"{self.name} does not exist"
        else:
            found = getattr(trainer, self.name, None)
            if found is None and (expected is not None or self.name not in _attributes(trainer)):
                return f"GRPOTrainer.{self.name} does not exist"
        if expected is None:
            return ""
        named = [name for name in inspect.signature(found).parameters if name != "self"]
        if [name for name in named if name in expected] == expected:
            return ""
        return f"{self.name} takes ({', '.join(named)}), and ({', '.join(expected)}) was expected"


_SCORE = "model input_ids attention_mask logits_to_keep"
CONTRACT = (
    # Hooks that are overridden.
    Part("_generate_and_score_completions", "inputs"),
    Part("_calculate_rewards", "inputs prompts completions completion_ids_list"),
    Part("_compute_loss", "model inputs"),
    Part("_get_per_token_logps_and_entropies", _SCORE),
    Part("_get_train_sampler", "dataset"),
    Part("_save_checkpoint", "model trial"),
    Part("_get_output_dir", "trial"),
    Part("_run_epoch"),
    Part("_push_from_checkpoint", "checkpoint_folder"),
    # The state of a run, for an exact resume.
    Part("_step"),
    Part("_buffered_inputs"),
    Part("_metrics"),
    Part("_tr_loss"),
    Part("_globalstep_last_logged"),
    Part("control"),
    # What TRL derives from a trainer's arguments.
    Part("num_generations"),
    Part("loss_type"),
    Part("eos_token_ids"),
    Part("reward_func_names"),
    Part("callback_handler"),
    Part("hub_model_id"),
    Part("generation_config"),
    Part("continuous_batching_config"),
    # vLLM.
    Part("use_vllm"),
    Part("vllm_generation"),
    Part("_last_loaded_step"),
    Part(
        "trl.generation.vllm_generation.VLLMGeneration", "model accelerator processing_class mode"
    ),
    Part(
        "trl.generation.vllm_generation.VLLMGeneration.generate", "prompts images num_generations"
    ),
    Part("trl.trainer.grpo_trainer"),
    # Functions.
    Part("trl.models.unwrap_model_for_generation", "model accelerator gather_deepspeed3_params"),
)
"""Every undocumented part of TRL (and of transformers' `Trainer` under it) that this room uses."""


@cache
def check_trl() -> None:
    """Compare the installed TRL with [`CONTRACT`], once, unless its version is one of [`TESTED`].

    Raises:
        [`TRLChanged`]: A part differs. The message names each, and the tested versions.
    """
    if trl.__version__ not in TESTED:
        compare(trl.__version__, GRPOTrainer)


def compare(version: str, trainer: type) -> None:
    """Raise [`TRLChanged`] if a part of this version differs; warn that it is not a tested one if none does."""
    tested = ", ".join(TESTED)
    if differences := [difference for part in CONTRACT if (difference := part.difference(trainer))]:
        raise TRLChanged(
            f"TRL {version} is not among the tested versions ({tested}), and differs: {'; '.join(differences)}. "
            f"Install a tested version (pip install trl=={TESTED[-1]}) or a newer agentic-prompting"
        )
    warnings.warn(
        f"TRL {version} is not among the tested versions ({tested}); every part that the trainers stand on is there",
        stacklevel=4,
    )


@cache
def _attributes(trainer: type) -> frozenset[str]:
    """Every name that a class or one of its bases sets or reads on itself."""
    sources = [inspect.getsource(kind) for kind in trainer.__mro__ if kind is not object]
    return frozenset(name for source in sources for name in re.findall(r"\bself\.(\w+)", source))
