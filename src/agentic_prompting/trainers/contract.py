"""The undocumented parts of TRL that the trainers depend on, checked when a trainer is created.

They change between TRL's releases. [`CONTRACT`] lists every such part that this folder overrides,
reads or sets, with the parameters that it relies on. tests/trainers/test_contract.py compares the
table with the source of the folder, and tests what each part does on the versions in [`TESTED`].
Another version of TRL is compared with the table: a difference is an error that names the part;
without one there is a single warning.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import warnings
from dataclasses import dataclass
from functools import cache

import trl
from trl import GRPOTrainer

TESTED = ("1.16.0",)
"""Versions of TRL that the contract tests were run on."""


class TRLChanged(ImportError):
    """The installed TRL differs from the tested versions in a part that the trainers depend on."""


@dataclass(frozen=True)
class TRLPart:
    """One undocumented part of TRL.

    Args:
        name (`str`): A method or attribute of [`~trl.GRPOTrainer`], or the dotted path of an
            import.
        parameters (`str`, *optional*): The parameters that a method or function must at least take,
            in this order, without `self`. An attribute has none.
    """

    name: str
    parameters: str | None = None

    def find_difference(self, trainer_class: type = GRPOTrainer) -> str:
        """Return how the installed part differs from the expected one, or an empty text."""
        # Does the part exist?
        if "." in self.name:
            try:
                part = pkgutil.resolve_name(self.name)
            except (ImportError, AttributeError):
                return f"{self.name} does not exist"
        else:
            part = getattr(trainer_class, self.name, None)
            is_attribute = self.parameters is None and self.name in _attributes(trainer_class)
            if part is None and not is_attribute:
                return f"GRPOTrainer.{self.name} does not exist"
        if self.parameters is None:
            return ""

        # Does it take the parameters?
        expected = self.parameters.split()
        names = [name for name in inspect.signature(part).parameters if name != "self"]
        if [name for name in names if name in expected] == expected:
            return ""
        return f"{self.name} takes ({', '.join(names)}), but ({', '.join(expected)}) was expected"


CONTRACT = (
    # Hooks that are overridden.
    TRLPart("_generate_and_score_completions", "inputs"),
    TRLPart("_calculate_rewards", "inputs prompts completions completion_ids_list"),
    TRLPart("_compute_loss", "model inputs"),
    TRLPart("_get_per_token_logps_and_entropies", "model input_ids attention_mask logits_to_keep"),
    TRLPart("_get_train_sampler", "dataset"),
    TRLPart("_save_checkpoint", "model trial"),
    TRLPart("_get_output_dir", "trial"),
    TRLPart("_run_epoch"),
    TRLPart("_push_from_checkpoint", "checkpoint_folder"),
    # The state of a run, for an exact resume.
    TRLPart("_step"),
    TRLPart("_buffered_inputs"),
    TRLPart("_metrics"),
    TRLPart("_tr_loss"),
    TRLPart("_globalstep_last_logged"),
    TRLPart("control"),
    # What TRL derives from a trainer's arguments.
    TRLPart("num_generations"),
    TRLPart("loss_type"),
    TRLPart("eos_token_ids"),
    TRLPart("reward_func_names"),
    TRLPart("callback_handler"),
    TRLPart("hub_model_id"),
    TRLPart("generation_config"),
    TRLPart("continuous_batching_config"),
    # vLLM.
    TRLPart("use_vllm"),
    TRLPart("vllm_generation"),
    TRLPart("_last_loaded_step"),
    TRLPart(
        "trl.generation.vllm_generation.VLLMGeneration", "model accelerator processing_class mode"
    ),
    TRLPart(
        "trl.generation.vllm_generation.VLLMGeneration.generate", "prompts images num_generations"
    ),
    TRLPart("trl.trainer.grpo_trainer"),
    # Functions.
    TRLPart("trl.models.unwrap_model_for_generation", "model accelerator gather_deepspeed3_params"),
)
"""Every undocumented part of TRL, and of transformers' `Trainer`, that this folder uses."""


@cache
def check_trl() -> None:
    """Compare the installed TRL with [`CONTRACT`], once, unless its version is one of [`TESTED`].

    Raises:
        [`TRLChanged`]: If a part differs. The message names each, and the tested versions.
    """
    if trl.__version__ not in TESTED:
        compare_trl(trl.__version__, GRPOTrainer)


def compare_trl(version: str, trainer_class: type) -> None:
    """Raise [`TRLChanged`] if a part of a version differs; else warn that it is not tested."""
    tested = ", ".join(TESTED)
    differences = [part.find_difference(trainer_class) for part in CONTRACT]
    differences = [difference for difference in differences if difference]
    if differences:
        raise TRLChanged(
            f"TRL {version} is not among the tested versions ({tested}), and differs: "
            f"{'; '.join(differences)}. Install a tested version (pip install trl=={TESTED[-1]}) "
            "or a newer agentic-prompting"
        )
    # The parts exist and take the same parameters, but what they do was not tested.
    warnings.warn(
        f"TRL {version} is not among the tested versions ({tested}); it has every part that the "
        "trainers depend on",
        stacklevel=4,
    )


@cache
def _attributes(trainer_class: type) -> frozenset[str]:
    """Return every name that a class or one of its bases sets or reads on itself."""
    names: set[str] = set()
    for base in trainer_class.__mro__:
        if base is not object:
            names.update(re.findall(r"\bself\.(\w+)", inspect.getsource(base)))
    return frozenset(names)
