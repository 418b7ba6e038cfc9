"""The checks of `doctor`: functions that yield findings, none where there is nothing to look at.

They are done in the order of this file, and shown by the names of their functions.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata as metadata
import io
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .doctor import SECONDS, Check, Finding, Role, Setup, read_yaml

if TYPE_CHECKING:
    from ..llm import LLMError, OpenAIChat

PACKAGE = "agentic-prompting"
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "deepspeed": (("deepspeed",), "DeepSpeed (ZeRO) with accelerate"),
    "vllm": (("vllm",), "use_vllm (faster rollouts on GPUs)"),
    "math": (("math-verify",), "the reward `math`"),
    "similarity": (("sentence-transformers",), "the metric semantic_similarity"),
    "optimizers": (("gepa", "textgrad"), "GEPA and TextGrad as baselines in tables"),
    "search": (("bm25s", "requests"), "agentic search with BM25 or over HTTP"),
    "serve": (("fastapi", "uvicorn", "prometheus-client"), "agentic-prompting serve"),
    "tracking": (("tensorboard",), "report_to: tensorboard"),
    "report": (("matplotlib",), "pictures (PNG) of runs and reports"),
}
"""By extra: its distributions, and what needs them."""

_CORE = ("torch", "trl", "transformers", "accelerate", "peft", "datasets", "openai")
_BESIDE = ("vllm", "deepspeed")  # asked for by extras, and looked at where they are installed
_SCARCE, _TOO_LITTLE = 20 * 2**30, 2**30  # bytes: a checkpoint of Qwen3-4B with optimizer is 24 GB in bf16


CHECKS: dict[str, Check] = {}
"""By name, in the order of the findings."""

ok, warning, problem = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "problem")


def check(function: Check) -> Check:
    """Puts a check into the table."""
    return CHECKS.setdefault(function.__name__.replace("_", " "), function)


# --- what is installed -----------------------------------------------------------------------------------------------


@check
def python(setup: Setup) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    asked = str(metadata.metadata(PACKAGE).json.get("requires_python", ""))
    running = platform.python_version()
    fits = SpecifierSet(asked).contains(running, prereleases=True)
    fix = f"python{asked.lstrip('>=~')} -m venv .venv"
    yield ok(f"python {running}") if fits else problem(f"python {running}, but {asked} is needed", fix)


@check
def versions(setup: Setup) -> Iterator[Finding]:
    """The packages that matter against the ranges of pyproject.toml; vLLM's is TRL's."""
    from packaging.requirements import Requirement

    trls = metadata.requires("trl") if _version("trl") else ()
    asked = [Requirement(line) for line in (*(trls or ()), *(metadata.requires(PACKAGE) or ()))]  # extras', too
    ranges = {one.name: one.specifier for one in asked if str(one.specifier)}
    for name in (*_CORE, *_BESIDE):
        installed, wanted = _version(name), ranges.get(name)
        if installed is None and name in _CORE:
            yield problem(f"{name} is not installed", f"pip install '{name}{wanted or ''}'")
        elif installed and wanted is not None and not wanted.contains(installed, prereleases=True):
            yield problem(f"{name} {installed} is not supported: {wanted} is needed", f"pip install '{name}{wanted}'")
        elif installed:
            yield ok(f"{name} {installed}")


@check
def extras(setup: Setup) -> Iterator[Finding]:
    """One that is missing is a problem where the configuration needs it, else a warning."""
    needed = {
        "vllm": bool(setup.values.get("use_vllm")),
        "math": setup.values.get("reward") == "math",
        "search": setup.values.get("environment") == "search",
        "deepspeed": bool(setup.values.get("deepspeed")),
        "tracking": "tensorboard" in str(setup.values.get("report_to")),
    }
    for extra, (distributions, purpose) in EXTRAS.items():
        missing = [name for name in distributions if _version(name) is None]
        if missing:
            says = f"extra [{extra}] is missing ({', '.join(missing)}), needed for {purpose}"
            yield (problem if needed.get(extra) else warning)(says, f"pip install '{PACKAGE}[{extra}]'")


def _version(name: str) -> str | None:
    for one in (name, f"{name}-cpu"):  # so vLLM's build for a CPU is called
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(one)
    return None


# --- the machine -----------------------------------------------------------------------------------------------------


@check
def devices(setup: Setup) -> Iterator[Finding]:
    import torch

    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        yield ok(f"GPU {i}: {torch.cuda.get_device_name(i)}, {memory:.0f} GiB")
    if torch.cuda.is_available():
        return
    if setup.values.get("use_vllm"):
        yield problem("use_vllm, but torch sees no GPU", "use_vllm: false")
    else:
        yield ok(f"no GPU, {os.cpu_count()} CPU cores: enough for the sandbox, not for a model of billions")


@check
def bf16(setup: Setup) -> Iterator[Finding]:
    """bfloat16, which TRL trains in unless it is told otherwise."""
    import torch

    trains_in_it = setup.trains and setup.values.get("bf16", not setup.values.get("fp16", False))
    if not torch.cuda.is_available():
        if trains_in_it and not setup.values.get("use_cpu"):
            fix = f"bf16: false and use_cpu: true in {setup.config}, or run it on a machine with a GPU"
            yield problem("training in bf16 (TRL's default) needs a GPU, and there is none", fix)
    elif torch.cuda.is_bf16_supported(including_emulation=False):
        yield ok("the GPU computes in bf16")
    elif trains_in_it:
        yield problem("the GPU does not compute in bf16", "bf16: false and fp16: true")
    else:
        yield warning("the GPU does not compute in bf16", "--bf16 false in training")


@check
def output_folder(setup: Setup) -> Iterator[Finding]:
    """Whether what the run writes can be written, and has room."""
    folder = Path(setup.value("output_dir") or "runs")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    elsewhere = "another folder with --output-dir"
    if not there.is_dir():
        yield problem(f"{folder} cannot be made: {there} is a file", f"rm {there}, or {elsewhere}")
        return
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        yield problem(f"{folder} cannot be written: {error.strerror or error}", f"chmod u+w {there}, or {elsewhere}")
        return
    free = shutil.disk_usage(there).free
    room = f"{free / 2**30:.0f} GiB free"
    if free >= _SCARCE:
        yield ok(f"{folder} can be written, {room}")
    else:
        fix = "make room, keep fewer checkpoints (save_total_limit: 1), or another disk with --output-dir"
        yield (problem if free < _TOO_LITTLE else warning)(f"only {room} for {folder}", fix)


@check
def replay_cache(setup: Setup) -> Iterator[Finding]:
    """Whether the recording can be opened. Nothing is made or written here."""
    from ..llm import ReplayCache

    path = Path(setup.value("replay_cache") or "")
    if not path.name:
        return
    if not path.exists():
        yield ok(f"replay cache {path} is not there yet; it will be made")
        return
    try:
        cache = ReplayCache(path, mode="replay")
        yield ok(f"replay cache {path}: {len(cache)} replies")
        cache.close()
    except (ValueError, OSError) as error:
        yield problem(str(error), f"mv {path} {path}.broken, or another file with --replay-cache")


# --- the configuration -----------------------------------------------------------------------------------------------


@check
def config(setup: Setup) -> Iterator[Finding]:
    """Whether the file is there and holds options by name."""
    if setup.config is None:
        return
    try:
        if not isinstance(read_yaml(setup.config), Mapping):
            says = f"{setup.config} holds no options by name"
            yield problem(says, "name: value on each line, such as max_steps: 100")
    except OSError as error:
        yield problem(f"{setup.config}: {error.strerror}", "--config FILE, such as examples/configs/sandbox.yaml")
    except ValueError as error:
        yield problem(str(error), "name: value on each line, and a space after the colon")


@check
def options(setup: Setup) -> Iterator[Finding]:
    """Whether every name is an option of the program. A table of `agentic-prompting evaluate` checks itself."""
    if not setup.trains:
        if setup.values and setup.config:
            from .commands import paper_tables

            try:
                paper_tables().load_config(setup.config)
                yield ok(f"{setup.config}: a table for `agentic-prompting evaluate`")
            except FileNotFoundError as error:
                yield warning(f"{setup.config} is no configuration of a training run", str(error))
            except ValueError as error:
                yield problem(str(error), f"correct it in {setup.config}")
        return
    program, _, fields = setup.program
    unknown = [name for name in setup.values if name not in fields]
    for name in unknown:
        near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.6)
        fix = f"{near[0]}: {setup.values[name]}" if near else f"delete the line; `{program} --help` shows every option"
        yield problem(f"{setup.config}: {name!r} is no option of `{program}`", fix)
    if not unknown:
        yield ok(f"{setup.config}: {len(setup.values)} options, all of them of `{program}`")


@check
def batch(setup: Setup) -> Iterator[Finding]:
    """Whether the rollouts of a problem divide the generation batch."""
    if not setup.trains:
        return
    fields = setup.program[2]
    numbers = {name: one.default for name, one in fields.items() if one is not None} | dict(setup.values)
    group = int(numbers["num_generations"])
    of = f"num_generations = {group}"
    if "prompts_per_step" in fields:
        factors = f"{numbers['prompts_per_step']} x {group}"
        group *= int(numbers["prompts_per_step"])
        of = f"prompts_per_step x num_generations = {factors} = {group}"
    processes = setup.processes
    per_device, whole = int(numbers["per_device_train_batch_size"]), numbers["generation_batch_size"]
    repeats = processes * int(numbers["steps_per_generation"] or numbers["gradient_accumulation_steps"])
    size = int(whole) if whole else per_device * repeats
    on = f"{processes} process{'es' if processes > 1 else ''}"
    if size % group == 0:
        yield ok(f"generation batch of {size} rollouts on {on}: {size // group} problems x {group}")
        return
    if whole:
        fix = f"generation_batch_size: {_nearest(size, math.lcm(group, per_device * processes))}"
    else:
        fix = f"per_device_train_batch_size: {_nearest(per_device, group // math.gcd(group, repeats))}"
    says = f"{setup.config}: a problem takes {of} rollouts, which does not divide the generation batch of {size} ({on})"
    yield problem(says, fix)


def _nearest(size: int, unit: int) -> int:
    return max(1, round(size / unit)) * unit


@check
def values(setup: Setup) -> Iterator[Finding]:
    """Whether the program's own checks take the values, on a CPU and as if on all processes."""
    if not setup.trains or any(one.level != "ok" for one in [*options(setup), *batch(setup)]):
        return  # said already
    program = setup.program[0]
    try:
        _parse(setup)
    except ValueError as error:
        said = " ".join(str(error).split())
        if said.startswith("say "):  # what is named on the command line, where it can be
            yield warning(f"{setup.config}: {said}", f"{said.partition(': ')[2]}, there or with `{program}`")
        else:
            fix = f"correct it there; `{program} --help` shows every option"
            yield problem(f"{setup.config}: {said}", fix)
    else:
        yield ok(f"{setup.config}: `{program}` takes its values")


def _parse(setup: Setup) -> None:
    """Make the program's arguments of file and command line. Raises `ValueError` for what it would refuse."""
    from trl import TrlParser

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    module, processes = setup.program[1], setup.processes
    script, config, model = module.ARGUMENTS
    # How many processes there will be is asked of the machine: told here.
    sized = type(config.__name__, (config,), {"world_size": property(lambda self: processes)})
    parser = TrlParser((script, sized, model))
    parser.error = refuse  # type: ignore[method-assign,assignment]
    plain = ["--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--report_to", "none"]
    file = {name: value for name, value in setup.values.items() if name not in ("bf16", "fp16", "use_cpu", "env")}
    ours = ("run", "config", "accelerate_config")
    given = {name: str(getattr(setup, name)) for name in setup.__dataclass_fields__ if name not in ours}
    parser.set_defaults_with_config(**file | {name: value for name, value in given.items() if value != "None"})
    with contextlib.redirect_stderr(io.StringIO()):
        parsed = parser.parse_args_into_dataclasses(args=plain)
    module.check(*parsed[:2])


# --- the large LLMs --------------------------------------------------------------------------------------------------


@check
def key(setup: Setup) -> Iterator[Finding]:
    """Whether there is a key where one is needed. It is never shown."""
    for role in setup.roles:
        with role.client() as chat:
            endpoint = chat
        if endpoint.find_key():
            yield ok(f"{role.name}: key found in {endpoint.key_variable}")
        elif endpoint.needs_key:
            says = f"{role.name}: no key for {role.model}, and no address of an endpoint that does without"
            fix = f"export {endpoint.key_variable}=YOUR_KEY, or --{role.name}-base-url http://HOST:PORT/v1"
            yield problem(says, fix)
        else:
            yield ok(f"{role.name}: no key; an endpoint given by its address may do without")


@check
def endpoint(setup: Setup) -> Iterator[Finding]:
    """Asks each model for one word, as training does before it starts."""
    from ..llm import LLMError

    for role in setup.roles:
        started = time.perf_counter()
        with role.client() as chat:
            if chat.needs_key and not chat.find_key():
                continue  # said above
            try:
                chat.check()
                seconds = time.perf_counter() - started
                yield ok(f"{role.name}: {chat.where} answers ({seconds:.1f} s)")
            except LLMError as error:
                yield problem(f"{role.name}: {error}", _fix(role, chat, error))


def _fix(role: Role, chat: OpenAIChat, error: LLMError) -> str:
    """What to type for what a first call met."""
    url = chat.base_url.rstrip("/")
    if error.status in (401, 403):
        return f"export {chat.key_variable}=YOUR_KEY with a key that this endpoint knows"
    known = _models_at(url, chat)
    if known and role.model not in known:
        near = (difflib.get_close_matches(role.model, known, n=1, cutoff=0.3) or known)[0]
        return f"--{role.name}-model {near}  (there: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''})"
    if known is None and not url.endswith("/v1") and _models_at(f"{url}/v1", chat) is not None:
        return f"--{role.name}-base-url {url}/v1"
    if error.kind in ("Unreachable", "TimedOut", "ServerFailed"):
        return f"start the server, or correct its address: --{role.name}-base-url http://HOST:PORT/v1"
    if error.kind == "RateLimited":
        return "wait and run this again; in training fewer calls at once help: OpenAIChat(max_concurrency=8)"
    if error.status == 402 or "credit" in error.what:
        return f"add credit, or export {chat.key_variable}=ANOTHER_KEY"
    return f"check the address and the name: --{role.name}-base-url http://HOST:PORT/v1 --{role.name}-model NAME"


def _models_at(url: str, chat: OpenAIChat) -> list[str] | None:
    """The names of the models at an address; `None` if it does not say. An endpoint that asks for a key is one."""
    import openai

    key = chat.find_key() or "none"
    with openai.OpenAI(api_key=key, base_url=url, max_retries=0, timeout=SECONDS) as client:
        try:
            return sorted(model.id for model in client.models.list())
        except openai.AuthenticationError:
            return []
        except (openai.OpenAIError, AttributeError, ValueError, TypeError):  # no such list, or a page of something else
            return None


@check
def price(setup: Setup) -> Iterator[Finding]:
    """Whether dollars can be counted."""
    for role in setup.roles:
        with role.client() as chat:
            price = chat.price
        unknown = f"the price of {role.model!r} is not known"
        if price is not None:
            costs = f"${price[0]:g} in, ${price[1]:g} out per million tokens (our table)"
            yield ok(f"{role.name}: {role.model} costs {costs}")
        elif setup.value("budget_usd") is not None and setup.value("budget_tokens") is None:
            fix = "leave out --budget-usd; training and the Python API take budget_tokens"
            if setup.config:
                fix = f"in {setup.config}: budget_tokens: 2000000 instead of budget_usd"
            yield problem(f"{role.name}: budget_usd can never be reached, {unknown}", fix)
        elif role.base_url is None:
            fix = "--budget_tokens 2000000 limits what training spends all the same"
            yield warning(f"{role.name}: {unknown}: costs are shown as $0", fix)
        else:
            yield ok(f"{role.name}: {role.model!r} has no known price: costs are shown as $0")


# --- the model in a folder -------------------------------------------------------------------------------------------


@check
def run(setup: Setup) -> Iterator[Finding]:
    """Whether its folder holds a trained agent, or at least a model."""
    from ..rollout import SPEC_FILE, AgentSpec

    run = setup.run
    if run is None:
        return
    checkpoints = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not run.is_dir():
        yield problem(f"{run} does not exist", f"agentic-prompting demo --output-dir {run}")
    elif any((run / name).exists() for name in ("config.json", "adapter_config.json")):
        if (run / SPEC_FILE).exists():
            AgentSpec.load(run)
            yield ok(f"{run} holds a trained agent")
            return
        says = f"{run} holds a model that was not trained here (no {SPEC_FILE}): to train from, not to ask or serve"
        yield warning(says, f"agentic-prompting train prompt-r1 --model_name_or_path {run} --config FILE")
    elif checkpoints:
        says = f"{run} holds checkpoints but no trained agent: its training has not finished"
        yield warning(says, f"the command of that run with --resume_from_checkpoint {checkpoints[-1]}")
    else:
        yield problem(f"{run} holds no model (no config.json)", "--run FOLDER that a trainer has saved")


@check
def chat_template(setup: Setup) -> Iterator[Finding]:
    """Whether it can render several turns, and whether it leaves earlier ones as they were."""
    from ..rollout import ChatFormat

    named = [Path(one) for one in (setup.run, setup.values.get("model_name_or_path")) if one]
    for path in dict.fromkeys(path for path in named if (path / "tokenizer_config.json").exists()):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        try:
            ChatFormat(tokenizer)
        except ValueError as error:
            fix = f"an instruct model instead, or put its template into {path}/chat_template.jinja"
            yield problem(f"{path}: {error}", fix)
            continue
        if _prefix_preserving(tokenizer):
            yield ok(f"{path}: its chat template leaves earlier turns as they were")
        else:
            says = (
                f"{path}: its chat template is not prefix-preserving, it rewrites earlier turns (drops their thoughts, "
                "say). Training and PromptAgent keep the sampled tokens; a server that renders the conversation anew "
                "shows the model another one"
            )
            yield warning(says, f"agentic-prompting serve {path}, rather than a chat server over the weights")


def _prefix_preserving(tokenizer: Any) -> bool:
    """Whether a conversation that goes on begins, rendered, with what it was before."""
    talk = [("user", "QUSERQ"), ("assistant", "<think> QTHOUGHTQ </think> QAGENTQ"), ("user", "QREPLYQ")]
    messages = [{"role": role, "content": content} for role, content in talk]
    before = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=False)
    after = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return after.startswith(before.rstrip())
