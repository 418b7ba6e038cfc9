"""Loads the policy and its tokenizer where TRL would load something else, or nothing.

TRL takes a folder with an adapter for a broken model, reads image processors for a trainer without images, and trains a
frozen adapter without a word. Whatever cannot be trained is refused before anything is paid for.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file
from trl import GRPOConfig

from ..local.gguf import as_dense_model, is_from_gguf, warn_of_copied_head

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_config.json"
# Files of models that also see. Training does not read them, but serving the trained model does.
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def check_policy(model: Any, args: GRPOConfig, peft_config: Any, trains_weights: bool) -> None:
    """Refuse a policy that would train nothing, or could not be loaded, before anything is paid for.

    Args:
        model (`str` or `PreTrainedModel`): The trainer's argument.
        args (`GRPOConfig`): The training arguments.
        peft_config (`PeftConfig`, *optional*): The trainer's argument: a new adapter.
        trains_weights (`bool`): Whether the run trains weights at all.

    Raises:
        `ValueError`: In one line, with what to do instead.
    """
    if isinstance(model, str | Path):
        _check_name(str(model), args, peft_config)
        return
    if is_from_gguf(model):
        as_dense_model(model)
        warn_of_copied_head(model)
        if peft_config is not None or (args.beta and trains_weights):
            raise ValueError(
                "the model comes from a GGUF file, and an adapter (peft_config) or a KL term (beta) needs a folder "
                "that it can be loaded from again: load model and tokenizer with agentic_prompting.local.load_gguf, "
                "save_pretrained both, and pass that folder as model="
            )
    if peft_config is None and trains_weights:
        _check_weights(model)


def _check_name(name: str, args: GRPOConfig, peft_config: Any) -> None:
    if "gguf_file" in (args.model_init_kwargs or {}):
        raise ValueError(
            "a GGUF file is converted once, before training: model, tokenizer = "
            "agentic_prompting.local.load_gguf(file), then save_pretrained(folder) of both, then model=folder"
        )
    if peft_config is not None and is_adapter(name, args):
        raise ValueError(
            f"{name} is an adapter, which is trained on as it is: leave peft_config (--use_peft) out; or merge the "
            "adapter into its base model first, and train a new one on that"
        )


def _check_weights(model: Any) -> None:
    """Raise an error if no weight that has a part in the model's output is trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        how = (
            "load the adapter with PeftModel.from_pretrained(..., is_trainable=True), or pass its folder as model="
            if isinstance(model, PeftModel)
            else "call model.requires_grad_(True), or pass a peft_config to train an adapter"
        )
        raise ValueError(f"every weight of the model is frozen, so nothing would be trained: {how}")
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if any(layer.merged for layer in layers):
        raise ValueError(
            "the model's adapter is merged into its base weights: call model.unmerge_adapter() first"
        )
    if layers and all(layer.disable_adapters for layer in layers):
        raise ValueError(
            "the model's adapter is disabled: call model.base_model.enable_adapter_layers() first"
        )


def is_adapter(name: str, args: GRPOConfig) -> bool:
    """Whether a folder, or a repository on the Hub, holds an adapter."""
    return _file_of(name, ADAPTER_FILE, (args.model_init_kwargs or {}).get("revision")) is not None


def load_policy(model: Any, args: GRPOConfig, processing_class: Any) -> tuple[Any, Any, GRPOConfig]:
    """Load what TRL would not load, or would load wrongly; the rest is left to TRL.

    Args:
        model (`str` or `PreTrainedModel`): The trainer's argument. Of an adapter's folder the base model and the
            adapter are loaded, to train on.
        args (`GRPOConfig`): The training arguments. Not changed.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The trainer's argument. Without it the tokenizer is
            read, never an image processor, which needs packages that training on text does not.

    Returns:
        `tuple`: The three arguments for TRL.
    """
    name = str(model) if isinstance(model, str | Path) else getattr(model, "name_or_path", "")
    revision = (args.model_init_kwargs or {}).get("revision")
    if isinstance(model, str | Path):
        model = str(model)
        if is_adapter(model, args):
            model = _load_adapter(model, args)
            # They belong to the base model, which is loaded now; TRL would warn that they are ignored.
            args = _changed(args, model_init_kwargs=None)
    if processing_class is None:
        processing_class = _load_tokenizer(name, args, revision)
    # Text reaches no part that sees, so DDP must look for weights without gradients. TRL decides this by the processor.
    is_reentrant = bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
    if args.ddp_find_unused_parameters is None and not is_reentrant and _also_sees(model, args):
        args = _changed(args, ddp_find_unused_parameters=True)
    return model, processing_class, args


def _load_adapter(folder: str, args: GRPOConfig) -> PeftModel:
    """The adapter of a folder on its base model, ready to be trained on."""
    loading: dict[str, Any] = dict(args.model_init_kwargs or {})
    revision = loading.pop("revision", None)  # of the adapter
    config = PeftConfig.from_pretrained(folder, revision=revision)
    loading.setdefault("trust_remote_code", args.trust_remote_code)
    loading.setdefault("dtype", "float32")  # as TRL loads models

    # The trainer moves the model to its device, except where the caller has spread it over several.
    base = AutoModelForCausalLM.from_pretrained(
        config.base_model_name_or_path, revision=config.revision, **loading
    )
    return PeftModel.from_pretrained(base, folder, is_trainable=True, revision=revision)


def _load_tokenizer(name: str, args: GRPOConfig, revision: str | None) -> Any:
    """The tokenizer of a model, set up as TRL does; `None` if it has none, which TRL reports."""
    sides = {"truncation_side": "left", "padding_side": "left"}
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=args.trust_remote_code, **sides
        )
    except (OSError, ValueError, ImportError, KeyError):
        return None


def _also_sees(model: Any, args: GRPOConfig) -> bool:
    """Whether a model has parts that no text reaches."""
    config = getattr(model, "config", None)
    if config is None:
        loading = args.model_init_kwargs or {}
        try:
            config = AutoConfig.from_pretrained(
                model, revision=loading.get("revision"), trust_remote_code=args.trust_remote_code
            )
        except (OSError, ValueError):  # TRL reports a model that cannot be loaded
            return False
    return hasattr(config, "vision_config") or hasattr(config, "audio_config")


def copy_processor(name: str, folder: Path) -> None:
    """Copy the files of a model's image processor beside the trained weights, so that servers of such models take it.

    Args:
        name (`str`): The model that was trained: a folder or its name on the Hub.
        folder (`Path`): Where the trained weights are.
    """
    if not (folder / "config.json").is_file():  # an adapter: its base model has them
        return
    for file_name in _PROCESSOR_FILES:
        file = _file_of(name, file_name)
        if file is not None and not (folder / file_name).exists():
            shutil.copyfile(file, folder / file_name)


def _file_of(name: str, file_name: str, revision: str | None = None) -> Path | None:
    """A file of a folder or of a repository on the Hub; `None` if it does not exist or the Hub cannot be reached."""
    if not name:
        return None
    if Path(name).is_dir():
        file = Path(name) / file_name
        return file if file.is_file() else None
    try:
        found = cached_file(
            name,
            file_name,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):
        return None
    return Path(found) if found else None


def _changed(args: GRPOConfig, **values: Any) -> GRPOConfig:
    changed = copy(args)
    settings: Mapping[str, Any] = {"hub_token": args.hub_token, **values}
    for name, value in settings.items():
        setattr(changed, name, value)
    return changed
