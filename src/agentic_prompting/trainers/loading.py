"""Loads and checks the policy and its tokenizer, where TRL would load or train something else.

TRL takes a folder with an adapter for a broken model, reads image processors for a trainer without
images, and trains a frozen adapter without a warning. A policy that cannot be trained is refused
before anything is paid for.
"""

from __future__ import annotations

import inspect
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import cached_file
from trl import GRPOConfig

from ..local.gguf import as_dense_model, is_from_gguf, warn_of_copied_head
from .config import Args, copy_args

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_config.json"
# Files of vision models. Training does not read them, but serving the trained model does.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


# --- before the model is loaded ----------------------------------------------------------------


def check_policy(
    model: str | Path | PreTrainedModel | PeftModel,
    args: GRPOConfig,
    peft_config: PeftConfig | None,
    trains_weights: bool,
) -> None:
    """Refuse a policy that would train nothing, or could not be loaded.

    Args:
        model (`str` or `PreTrainedModel`): The trainer's argument.
        args (`GRPOConfig`): The training arguments.
        peft_config (`PeftConfig`, *optional*): The trainer's argument: a new adapter.
        trains_weights (`bool`): Whether the run trains weights at all.

    Raises:
        `ValueError`: If the policy cannot be trained. The message says what to do instead.
    """
    # A model that is not loaded yet can only be checked by its name.
    if isinstance(model, str | Path):
        _check_name(str(model), args, peft_config)
        return
    # A model from a GGUF file is dense, but has no folder from which it can be loaded again.
    if is_from_gguf(model):
        as_dense_model(model)
        warn_of_copied_head(model)
        if peft_config is not None or (args.beta and trains_weights):
            raise ValueError(
                "the model comes from a GGUF file, and an adapter (peft_config) or a KL term "
                "(beta) needs a folder that it can be loaded from again: load model and tokenizer "
                "with agentic_prompting.local.load_gguf, call save_pretrained on both, and pass "
                "that folder as model="
            )
    if peft_config is None and trains_weights:
        _check_weights(model)


def _check_name(name: str, args: GRPOConfig, peft_config: PeftConfig | None) -> None:
    if "gguf_file" in (args.model_init_kwargs or {}):
        raise ValueError(
            "gguf_file is not supported in model_init_kwargs, because a GGUF file is converted "
            "once, before training: model, tokenizer = agentic_prompting.local.load_gguf(file), "
            "then save_pretrained(folder) of both, then model=folder"
        )
    if peft_config is not None and is_adapter(name, args):
        raise ValueError(
            f"{name} is an adapter, which is itself trained: leave peft_config (--use_peft) out; "
            "or merge the adapter into its base model first, and train a new one on that"
        )


def _check_weights(model: PreTrainedModel | PeftModel) -> None:
    """Raise `ValueError` if no weight that contributes to the model's output would be trained."""
    # Frozen weights.
    if not any(parameter.requires_grad for parameter in model.parameters()):
        if isinstance(model, PeftModel):
            advice = (
                "load the adapter with PeftModel.from_pretrained(..., is_trainable=True), or pass "
                "its folder as model="
            )
        else:
            advice = "call model.requires_grad_(True), or pass a peft_config to train an adapter"
        raise ValueError(
            f"every weight of the model is frozen, so nothing would be trained: {advice}"
        )

    # Adapters whose weights have no part in the forward pass.
    adapter_layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if any(layer.merged for layer in adapter_layers):
        raise ValueError(
            "the model's adapter is merged into its base weights: call model.unmerge_adapter() "
            "first"
        )
    if adapter_layers and all(layer.disable_adapters for layer in adapter_layers):
        raise ValueError(
            "the model's adapter is disabled: call model.base_model.enable_adapter_layers() first"
        )


def is_adapter(name: str, args: GRPOConfig) -> bool:
    """Return whether a folder, or a repository on the Hub, holds an adapter."""
    revision = (args.model_init_kwargs or {}).get("revision")
    return _find_file(name, ADAPTER_FILE, revision) is not None


# --- loading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyArguments(Generic[Args]):
    """The arguments of TRL's trainer that depend on the policy.

    Args:
        model (`str` or `PreTrainedModel`): The policy, or the name under which TRL loads it.
        processing_class (`PreTrainedTokenizerBase`, *optional*): Its tokenizer.
        args (`GRPOConfig`): The training arguments.
    """

    model: str | PreTrainedModel | PeftModel
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None
    args: Args


def load_policy(
    model: str | Path | PreTrainedModel | PeftModel,
    args: Args,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
) -> PolicyArguments[Args]:
    """Load the policy if TRL would not load it, or would load it wrongly.

    Args:
        model (`str` or `PreTrainedModel`): The trainer's argument. From an adapter's folder the
            base model and the adapter are loaded, to train the adapter.
        args (`GRPOConfig`): The training arguments, which are not changed.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The trainer's argument. Without it
            the tokenizer is loaded, never an image processor, which needs packages that training
            on text does not.
    """
    revision = (args.model_init_kwargs or {}).get("revision")
    if isinstance(model, Path):
        model = str(model)
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")

    # The folder of an adapter stands for its base model with that adapter.
    if isinstance(model, str) and is_adapter(model, args):
        model = _load_adapter(model, args)
        # They belong to the base model, which is loaded now; TRL would warn that they are ignored.
        args = copy_args(args, model_init_kwargs=None)
    # Load the tokenizer alone, where TRL would load an image processor, too.
    if processing_class is None:
        processing_class = _load_tokenizer(name, args, revision)

    # Text reaches no vision or audio part, so DDP must look for weights without gradients. TRL
    # decides this by the processor.
    is_reentrant = bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
    is_unset = args.ddp_find_unused_parameters is None
    if is_unset and not is_reentrant and _is_multimodal(model, args):
        args = copy_args(args, ddp_find_unused_parameters=True)
    return PolicyArguments(model, processing_class, args)


def _load_adapter(folder: str, args: GRPOConfig) -> PeftModel:
    """Load the adapter of a folder and its base model, ready to be trained."""
    model_kwargs: dict[str, Any] = dict(args.model_init_kwargs or {})
    # This revision is the adapter's; its config names the one of the base model.
    adapter_revision = model_kwargs.pop("revision", None)
    config = PeftConfig.from_pretrained(folder, revision=adapter_revision)
    model_kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    model_kwargs.setdefault("dtype", "float32")  # as TRL loads models

    # The trainer moves the model to its device, unless a device map spreads it over several.
    base_model = AutoModelForCausalLM.from_pretrained(
        config.base_model_name_or_path, revision=config.revision, **model_kwargs
    )
    return PeftModel.from_pretrained(
        base_model, folder, is_trainable=True, revision=adapter_revision
    )


def _load_tokenizer(
    name: str, args: GRPOConfig, revision: str | None
) -> PreTrainedTokenizerBase | None:
    """Load a model's tokenizer, set up as by TRL; `None` if it has none, which TRL reports."""
    try:
        return AutoTokenizer.from_pretrained(
            name,
            revision=revision,
            trust_remote_code=args.trust_remote_code,
            truncation_side="left",
            padding_side="left",
        )
    except (OSError, ValueError, ImportError, KeyError):
        return None


def _is_multimodal(model: str | PreTrainedModel | PeftModel, args: GRPOConfig) -> bool:
    """Return whether a model has parts for images or sound."""
    config = getattr(model, "config", None)
    if config is None:
        revision = (args.model_init_kwargs or {}).get("revision")
        try:
            config = AutoConfig.from_pretrained(
                model, revision=revision, trust_remote_code=args.trust_remote_code
            )
        except (OSError, ValueError):  # TRL reports a model that cannot be loaded
            return False
    return hasattr(config, "vision_config") or hasattr(config, "audio_config")


# --- after the model is loaded -----------------------------------------------------------------


def has_aux_loss(model: PreTrainedModel | PeftModel, weight: float | None) -> bool:
    """Return whether TRL adds the auxiliary loss of a mixture of experts.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The policy.
        weight (`float`, *optional*): The weight of that loss, `router_aux_loss_coef`. Defaults to
            the model's own.
    """
    config = model.config.get_text_config()
    if weight is None:
        weight = getattr(config, "router_aux_loss_coef", 0.0)
    return bool(weight) and hasattr(config, "output_router_logits")


def check_experts(model: PreTrainedModel | PeftModel, weight: float | None) -> None:
    """Refuse a mixture of experts whose auxiliary loss TRL cannot compute.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The policy.
        weight (`float`, *optional*): As in [`has_aux_loss`].

    Raises:
        `ValueError`: If TRL does not find the number of experts.
    """
    config = model.config.get_text_config()
    if has_aux_loss(model, weight) and not hasattr(config, "num_experts"):
        raise ValueError(
            f"TRL cannot compute the auxiliary loss of {type(model).__name__}, whose configuration "
            "has no `num_experts`: set router_aux_loss_coef=0 to train without that loss"
        )


def check_quantization(model: PreTrainedModel | PeftModel) -> None:
    """Refuse a model whose code multiplies by quantized weights instead of calling their layers.

    A model with such code is refused if a forward pass over two tokens fails. Others are not run.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The policy.

    Raises:
        `ValueError`: If the forward pass fails. The message names the layers that must not be
            quantized.
    """
    # Find quantized layers whose weights are read by the code of the module that holds them.
    layer_names: set[str] = set()
    for module in model.modules():
        quantized = {name for name, child in module.named_children() if _is_quantized(child)}
        if quantized:
            layer_names |= quantized & _layers_read_by(type(module))
    if not layer_names:
        return

    # Try a forward pass over two tokens, which leaves the random state as it was.
    input_ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            model(input_ids=input_ids, use_cache=False)
    except Exception as error:  # of any type: quantized weights have another shape and type
        base_model = model.get_base_model() if isinstance(model, PeftModel) else model
        # A list of modules replaces the default one, which has the head.
        excluded = [*sorted(layer_names), "lm_head"]
        reason = " ".join(str(error).split())[:100]
        raise ValueError(
            f"the code of {type(base_model).__name__} multiplies by the weights of "
            f"{' and '.join(sorted(layer_names))} itself, which fails if they are quantized "
            f"({reason}): set llm_int8_skip_modules={excluded} in the BitsAndBytesConfig"
        ) from error


def _is_quantized(layer: torch.nn.Module) -> bool:
    """Return whether a linear layer's weights have another shape or type than its sizes imply.

    Sharded weights are not checked.
    """
    weight = getattr(layer, "weight", None)
    shape = [getattr(layer, "out_features", None), getattr(layer, "in_features", None)]
    if not isinstance(weight, torch.Tensor) or None in shape:
        return False
    if weight.is_meta or hasattr(weight, "ds_id"):
        return False
    return not weight.is_floating_point() or list(weight.shape) != shape


def _layers_read_by(module_class: type) -> set[str]:
    """Return the names of the layers whose weights the code of a module reads."""
    try:
        source = inspect.getsource(module_class)
    except (OSError, TypeError):  # a class without a source file
        return set()
    return set(re.findall(r"self\.(\w+)\.weight\b", source))


# --- saving ------------------------------------------------------------------------------------


def copy_processor(name: str, folder: Path) -> None:
    """Copy the image processor's files beside the trained weights, which servers need.

    Args:
        name (`str`): The model that was trained: a folder or its name on the Hub.
        folder (`Path`): Where the trained weights are.
    """
    if not (folder / "config.json").is_file():  # an adapter: its base model has them
        return
    for file_name in PROCESSOR_FILES:
        file = _find_file(name, file_name)
        if file is not None and not (folder / file_name).exists():
            shutil.copyfile(file, folder / file_name)


def _find_file(name: str, file_name: str, revision: str | None = None) -> Path | None:
    """Return the path of a file of a folder or of a repository on the Hub.

    `None` if it does not exist, or the Hub cannot be reached.
    """
    if not name:
        return None
    if Path(name).is_dir():
        file = Path(name) / file_name
        return file if file.is_file() else None
    # Errors of the Hub are ignored: the file is optional, or TRL reports the missing model.
    try:
        cached = cached_file(
            name,
            file_name,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):
        return None
    return Path(cached) if cached else None
