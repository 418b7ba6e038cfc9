"""`agentic-prompting doctor`: what would go wrong, and what to type against it.

The checks are the functions with `@check`, called in their order here and shown by their names:
they yield findings, or none if there is nothing to look at.
"""

from __future__ import annotations

import difflib
import importlib.metadata as metadata
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..llm.numbers import count_in_words
from .extras import PACKAGE, find_missing_extras, version_of
from .hub import (
    USE_OF_EVOLVED_PROMPT,
    check_model,
    find_model,
    holds_evolved_prompt,
    holds_model,
    list_checkpoints,
)
from .option_parser import OptionParser
from .options import JSON_HELP, MissingOption, option, refuse_options
from .plan import PlanOptions, plan_run
from .run_configuration import LLM_TIMEOUT, RunConfiguration, option_defaults
from .terminal import print_json, show_progress
from .yaml_file import read_options

if TYPE_CHECKING:
    from ..llm import LLMError, OpenAIChat

CORE_PACKAGES = ("torch", "trl", "transformers", "accelerate", "peft", "datasets", "openai")
SCARCE_BYTES = 20 * 2**30  # a checkpoint of Qwen3-4B with optimizer is 24 GB in bf16
TOO_FEW_BYTES = 2**30
PLAN_TIMEOUT = 40.0  # seconds for a training step on fake tensors

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass
class DoctorOptions(RunConfiguration):
    """The options of `doctor`."""

    json: bool = option(JSON_HELP, False)


SETTINGS = (DoctorOptions,)  # the parser returns an object of each


@dataclass(frozen=True)
class Finding:
    """One line: `ok`, `warning` (something will not work) or `problem` (the run will fail), and
    what to type then.
    """

    level: Literal["ok", "warning", "problem"]
    says: str
    fix: str = ""


def ok(says: str) -> Finding:
    """A finding that needs nothing."""
    return Finding("ok", says)


def warning(says: str, fix: str) -> Finding:
    """A finding about something that will not work."""
    return Finding("warning", says, fix)


def problem(says: str, fix: str) -> Finding:
    """A finding because of which the run will fail."""
    return Finding("problem", says, fix)


def problem_if(run_will_fail: bool, says: str, fix: str) -> Finding:
    """A problem if the run will fail because of it, otherwise a warning."""
    return problem(says, fix) if run_will_fail else warning(says, fix)


Check = Callable[[RunConfiguration], Iterable[Finding]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Put a check into the table."""
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def doctor(arguments: Sequence[str]) -> int:
    """Check the installation, and whatever a run needs; each warning and problem comes with its
    fix.

    Asks a model that is named for one word. Exit status 1 if there is a problem.
    """
    (options,) = OptionParser("doctor", SETTINGS, doctor.__doc__).parse(arguments)
    check_options(options)
    findings: list[tuple[str, Finding]] = []
    with show_progress("checking"):
        for name, function in CHECKS.items():
            findings += [(name, finding) for finding in run_check(function, options)]

    # The worst level decides the exit status.
    levels = [finding.level for _, finding in findings]
    worst = next(level for level in ("problem", "warning", "ok") if level in levels)
    # One JSON object for programs, a line for each finding for people.
    if options.json:
        records = [{"check": name, **asdict(finding)} for name, finding in findings]
        print_json({"status": worst, "findings": records})
    else:
        _print_findings(findings)
    return 1 if worst == "problem" else 0


def check_options(options: DoctorOptions) -> None:
    """Raise `ValueError` for options that no check would look at."""
    for role in ("environment", "reference"):
        if not options.value(f"{role}_model"):
            refuse_options(
                options,
                (f"{role}_base_url", f"{role}_client"),
                f"name the model that is asked there with --{role}-model",
            )
    if options.config is None:
        refuse_options(
            options,
            ("accelerate_config", "environment_max_tokens"),
            "it is for the training run of --config FILE, which is not given",
        )
        if not options.environment_model and not options.reference_model:
            refuse_options(
                options,
                ("budget_usd", "budget_tokens"),
                "name the model that spends it with --environment-model",
            )


def _print_findings(findings: Sequence[tuple[str, Finding]]) -> None:
    """Print a line for each finding, then how many there are of each level."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    # The level, the check, what it found, and what to type against it.
    for name, finding in findings:
        style = _STYLES[finding.level]
        line = Text.assemble((f"{finding.level:8}", style), f" {name:14} {finding.says}")
        if finding.fix:
            line.append(f"  -> {finding.fix}", style="bold")
        console.print(line)
    # The last line counts the findings of each level.
    counts = []
    for level in _STYLES:
        count = sum(finding.level == level for _, finding in findings)
        plural = "s" if level != "ok" and count != 1 else ""
        counts.append(f"{count} {level}{plural}")
    console.print(", ".join(counts))


def run_check(function: Check, run: RunConfiguration) -> list[Finding]:
    """Run a check and return its findings. A check that raises is a finding, too."""
    try:
        return list(function(run))
    except Exception as error:  # any error of a broken package, which is what the checks look for
        message = " ".join(str(error).split())[:300]
        says = f"could not be checked: {type(error).__name__}: {message}"
        return [problem(says, "correct what the message names")]


# --- the installation and the machine -------------------------------------------------------------


@check
def python(run: RunConfiguration) -> Iterator[Finding]:
    """The version of Python, which pip has checked."""
    yield ok(f"python {platform.python_version()}")


@check
def versions(run: RunConfiguration) -> Iterator[Finding]:
    """The packages that matter against the ranges of pyproject.toml; vLLM's is TRL's."""
    from packaging.requirements import Requirement

    # The supported ranges: ours, and those of TRL for its own extras.
    requirements = list(metadata.requires("trl") or ()) if version_of("trl") else []
    requirements += metadata.requires(PACKAGE) or ()
    ranges = {}
    for line in requirements:
        requirement = Requirement(line)
        if str(requirement.specifier):
            ranges[requirement.name] = requirement.specifier
    # vLLM and DeepSpeed are optional: only a missing core package is a problem.
    for name in (*CORE_PACKAGES, "vllm", "deepspeed"):
        installed = version_of(name)
        supported = ranges.get(name)
        if installed is None:
            if name in CORE_PACKAGES:
                yield problem(f"{name} is not installed", f"pip install '{name}{supported or ''}'")
        elif supported is not None and not supported.contains(installed, prereleases=True):
            yield problem(
                f"{name} {installed} is not supported: {supported} is needed",
                f"pip install '{name}{supported}'",
            )
        else:
            yield ok(f"{name} {installed}")


@check
def extras(run: RunConfiguration) -> Iterator[Finding]:
    """The extras that are not installed: a problem if the configuration needs one."""
    for extra in find_missing_extras(run.values):
        yield problem_if(extra.is_needed, extra.message, extra.fix)


@check
def devices(run: RunConfiguration) -> Iterator[Finding]:
    """The GPUs or the CPU, and whether they support bfloat16, which is TRL's default."""
    import torch

    values = run.values
    # bf16 is the default, unless the configuration turns it off, or asks for fp16 or the CPU.
    uses_bf16 = values.get("bf16", not values.get("fp16")) and not values.get("use_cpu")
    needs_bf16 = run.is_training and uses_bf16
    for number in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(number).total_memory / 2**30
        yield ok(f"GPU {number}: {torch.cuda.get_device_name(number)}, {memory:.0f} GiB")
    # Whatever needs a GPU is a problem where there is none.
    if not torch.cuda.is_available():
        yield ok(
            f"no GPU, {os.cpu_count()} CPU cores: enough for the sandbox, not for a model of "
            "billions"
        )
        if values.get("use_vllm"):
            yield problem("use_vllm, but torch sees no GPU", "use_vllm: false")
        if needs_bf16:
            yield problem(
                "training in bf16 (TRL's default) needs a GPU, and there is none",
                f"bf16: false and use_cpu: true in {run.config}, or run it on a machine with a GPU",
            )
    elif not torch.cuda.is_bf16_supported(including_emulation=False):
        # A GPU without bf16 makes only training in bf16 fail.
        yield problem_if(
            needs_bf16, "the GPU does not compute in bf16", "bf16: false and fp16: true"
        )


@check
def output_folder(run: RunConfiguration) -> Iterator[Finding]:
    """Whether the output folder can be written and has enough space."""
    folder = Path(run.value("output_dir") or "runs")
    # The folder may not exist yet: its nearest existing parent decides.
    paths = (folder.absolute(), *folder.absolute().parents)
    existing = next(path for path in paths if path.exists())
    # Whether a file can be made there.
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = f"{existing} is a file" if existing.is_file() else error.strerror or error
        yield problem(f"{folder} cannot be written: {reason}", "another folder with --output-dir")
        return
    # Whether there is space for checkpoints.
    free = shutil.disk_usage(existing).free
    if free >= SCARCE_BYTES:
        yield ok(f"{folder} can be written, {free / 2**30:.0f} GiB free")
    else:
        yield problem_if(
            free < TOO_FEW_BYTES,
            f"only {free / 2**30:.0f} GiB free for {folder}",
            "free some space, keep fewer checkpoints (save_total_limit: 1), or another disk with "
            "--output-dir",
        )


@check
def replay_cache(run: RunConfiguration) -> Iterator[Finding]:
    """Whether the recording can be opened. Nothing is made or written here."""
    from ..llm import ReplayCache

    path = run.value("replay_cache")
    if not path:
        return
    # The run makes a recording that does not exist yet.
    if not Path(path).exists():
        yield ok(f"replay cache {path} does not exist yet; it will be made")
        return
    # In the mode `replay` nothing is written.
    try:
        with closing(ReplayCache(path, mode="replay")) as cache:
            yield ok(f"replay cache {path}: {count_in_words(len(cache), 'reply', 'replies')}")
    except (ValueError, OSError) as error:
        yield problem(str(error), f"mv {path} {path}.broken, or another file with --replay-cache")


# --- the configuration ----------------------------------------------------------------------------


@check
def config(run: RunConfiguration) -> Iterator[Finding]:
    """Whether the file exists and contains options by name."""
    fix = "name: value on each line, with a space after the colon, such as max_steps: 100"
    if run.config is None:
        return
    try:
        read_options(run.config)
    except OSError as error:
        yield problem(
            f"{run.config}: {error.strerror}",
            "--config FILE, such as examples/configs/sandbox.yaml",
        )
    except ValueError as error:
        yield problem(str(error), fix)


@check
def options(run: RunConfiguration) -> Iterator[Finding]:
    """Whether every name is an option of the method."""
    from .train_program import method_parser

    # The options of a table are checked by `evaluate`.
    if not run.is_training:
        if run.values:
            yield ok(
                f"{run.config}: a table, which `agentic-prompting evaluate` checks before it asks "
                "anything"
            )
        return
    parser = method_parser(run.method)
    # `env` holds environment variables and is not an option.
    unknown = [name for name in run.values if name != "env" and not parser.is_option(name)]
    for name in unknown:
        nearest = parser.nearest_option(str(name))
        value = str(run.values[name])
        fix = f"delete the line; `{run.command} --help-all` shows every option"
        if nearest:
            # A long value would hide the name.
            fix = f"{nearest}: {value}" if len(value) < 40 else f"did you mean {nearest}?"
        yield problem(f"{run.config}: {name!r} is not an option of `{run.command}`", fix)
    if not unknown:
        yield ok(f"{run.config}: {len(run.values)} options, all of them of `{run.command}`")


@check
def batch(run: RunConfiguration) -> Iterator[Finding]:
    """Whether the rollouts of a problem divide the generation batch."""
    if not run.is_training:
        return
    # The configuration's values take precedence over the method's defaults.
    defaults = option_defaults(run.method)
    values = {**defaults, **run.values}

    # E-SPL plays each problem under several prompts.
    factors = {}
    for name in ("prompts_per_step", "num_generations"):
        if name in defaults:
            factors[name] = int(values[name])
    group_size = math.prod(factors.values())
    # The size of the generation batch is set outright, or follows from these factors.
    processes = run.processes
    per_device = int(values["per_device_train_batch_size"])
    steps = int(values["steps_per_generation"] or values["gradient_accumulation_steps"])
    set_size = int(values["generation_batch_size"] or 0)
    # TRL splits the generation batch into groups of rollouts.
    batch_size = set_size or per_device * processes * steps
    description = (
        f"generation batch of {batch_size} rollouts on {processes} process{'es' * (processes > 1)}"
    )
    if batch_size % group_size == 0:
        yield ok(f"{description}: {batch_size // group_size} problems x {group_size}")
        return

    # Propose the nearest value with which whole groups fill the batch.
    if set_size:
        unit = math.lcm(group_size, per_device * processes)
        fix = f"generation_batch_size: {_nearest_multiple(batch_size, unit)}"
    else:
        unit = group_size // math.gcd(group_size, processes * steps)
        fix = f"per_device_train_batch_size: {_nearest_multiple(per_device, unit)}"
    names = " x ".join(factors)
    sizes = " x ".join(str(size) for size in factors.values())
    yield problem(
        f"{run.config}: a problem takes {names} = {sizes} = {group_size} rollouts, which does not "
        f"divide the {description}",
        fix,
    )


def _nearest_multiple(size: int, unit: int) -> int:
    return max(1, round(size / unit)) * unit


@check
def values(run: RunConfiguration) -> Iterator[Finding]:
    """Whether the method's own checks accept the values, on a CPU and as if on all processes."""
    if not run.is_training:
        return
    # A mistake that another check has reported is not reported again.
    earlier = [*options(run), *batch(run)]
    if any(finding.fix for finding in earlier):
        return
    # The checks that training makes before it loads anything.
    try:
        arguments, trainer_config, _ = run.parse()
        arguments.check(trainer_config)
        yield ok(f"{run.config}: `{run.command}` accepts its values")
    except MissingOption as error:
        # Which LLM takes part is often left to the command line.
        yield warning(f"{run.config}: {error}", f"{error.fix}, there or with `{run.command}`")
    except (ValueError, TypeError) as error:
        yield problem(
            f"{run.config}: {' '.join(str(error).split())}",
            f"correct it there; `{run.command} --help` shows every option",
        )


# --- the large LLMs -------------------------------------------------------------------------------


@check
def key(run: RunConfiguration) -> Iterator[Finding]:
    """Whether there is a key where one is needed. It is never shown."""
    for role, chat in run.models.items():
        if chat.find_key():
            yield ok(f"{role}: key found in {chat.key_variable}")
        elif chat.needs_key:
            yield problem(
                f"{role}: no key for {chat.model}, and no address of an endpoint that needs none",
                f"export {chat.key_variable}=YOUR_KEY, or --{role}-base-url http://HOST:PORT/v1",
            )
        else:
            yield ok(f"{role}: no key; an endpoint given by its address may not need one")


@check
def endpoint(run: RunConfiguration) -> Iterator[Finding]:
    """Asks each model for one word, as training does before it starts."""
    from ..llm import LLMError

    for role, chat in run.models.items():
        if chat.needs_key and not chat.find_key():
            continue  # the check `key` has found it
        # A call of one word, and the seconds that it took.
        started = time.perf_counter()
        with chat:
            try:
                chat.check()
                yield ok(f"{role}: {chat.where} answers ({time.perf_counter() - started:.1f} s)")
            except LLMError as error:
                yield problem(f"{role}: {error}", _endpoint_fix(role, chat, error))


def _endpoint_fix(role: str, chat: OpenAIChat, error: LLMError) -> str:
    """The remedy for the error of a first call, as options where there are some."""
    url = chat.base_url.rstrip("/")
    # There is no key, or it is not accepted.
    if error.status in (401, 403):
        return f"export {chat.key_variable}=YOUR_KEY with a key that this endpoint knows"
    # The endpoint has no model of this name: propose the one most like it.
    models = _list_models(url, chat)
    if models and chat.model not in models:
        matches = difflib.get_close_matches(chat.model, models, n=1, cutoff=0.3)
        nearest = matches[0] if matches else models[0]
        names = ", ".join(models[:8] + ["..."] * (len(models) > 8))
        return f"--{role}-model {nearest}  (available: {names})"
    # The address lacks `/v1`, under which there is a list of models.
    if models is None and not url.endswith("/v1") and _list_models(f"{url}/v1", chat) is not None:
        return f"--{role}-base-url {url}/v1"
    # Too many calls, or no credit left.
    if error.kind == "RateLimited":
        return (
            "wait and run this again; in training fewer calls at once help: "
            "OpenAIChat(max_concurrency=8)"
        )
    if error.status == 402 or "credit" in error.message:
        return f"add credit, or export {chat.key_variable}=ANOTHER_KEY"
    # No known cause: the server may not run, or may have another address.
    return (
        f"start the server, or correct its address: --{role}-base-url http://HOST:PORT/v1 "
        f"--{role}-model NAME"
    )


def _list_models(url: str, chat: OpenAIChat) -> list[str] | None:
    """The names of the models at an address; `None` if it has no list.

    An endpoint that asks for a key has one.
    """
    import openai

    with openai.OpenAI(
        api_key=chat.find_key() or "none", base_url=url, max_retries=0, timeout=LLM_TIMEOUT
    ) as client:
        try:
            return sorted(model.id for model in client.models.list())
        except openai.AuthenticationError:
            return []
        except (openai.OpenAIError, AttributeError, ValueError, TypeError):
            return None  # not an endpoint, or a page of something else


@check
def price(run: RunConfiguration) -> Iterator[Finding]:
    """Whether dollars can be counted."""
    for role, chat in run.models.items():
        unknown = f"the price of {chat.model!r} is not known"
        has_budget = run.value("budget_usd") is not None
        if chat.price is not None:
            input_price, output_price = chat.price
            yield ok(
                f"{role}: {chat.model} costs ${input_price:g} in, ${output_price:g} out per "
                "million tokens (our table)"
            )
        elif has_budget and run.value("budget_tokens") is None:
            # A limit in dollars alone would never stop the run.
            file = run.config or "a training configuration"
            yield problem(
                f"{role}: budget_usd can never be reached, {unknown}",
                f"budget_tokens: 2000000 instead of budget_usd in {file}",
            )
        else:
            yield ok(
                f"{role}: {unknown}: costs are shown as $0; budget_tokens limits them all the same"
            )


# --- the model to be trained ----------------------------------------------------------------------


@check
def model(run: RunConfiguration) -> Iterator[Finding]:
    """Whether the model that the configuration names is a local folder or on the hub."""
    name = run.values.get("model_name_or_path")
    if not name:
        return
    try:
        check_model(find_model(name))
        yield ok(f"{name} exists")
    except ValueError as error:
        yield problem(str(error), f"model_name_or_path: FOLDER_OR_NAME in {run.config}")


@check
def memory(run: RunConfiguration) -> Iterator[Finding]:
    """The memory needed on a GPU: measured by `plan` if an accelerate configuration describes the
    layout; else a plain estimate, which takes no time.
    """
    name = str(run.value("model_name_or_path") or "")
    if not run.is_training or not name:
        return
    # The command that measures what is only estimated here.
    command = f"agentic-prompting plan --config {run.config}"
    if run.accelerate_config:
        command += f" --accelerate-config {run.accelerate_config}"
    from ..planning.model_shape import load_shape, rough_estimate

    # The hub may be out of reach, and its models take long to read.
    has_plan = not run.uses_cpu or run.accelerate_config is not None  # which is for GPUs
    if run.accelerate_config is None and not Path(name).is_dir():
        if has_plan:
            yield ok(f"`{command}` says what {name} needs")
        return
    try:
        if run.accelerate_config is None:
            # With adapters (PEFT) hardly any weights are trained.
            trained_share = 0.0 if run.values.get("use_peft") else 1.0
            estimate = rough_estimate(load_shape(name).to_dict(), trained_share)
            if has_plan:
                estimate += f" `{command}` measures a step, as --accelerate-config does here"
            yield ok(estimate)
            return
        # The same run, as options of `plan`.
        run_options = {field.name: getattr(run, field.name) for field in fields(RunConfiguration)}
        # Without a search for what would fit better, which takes longer.
        memory, _ = plan_run(PlanOptions(**run_options, seconds=0.0), max_wait=PLAN_TIMEOUT)
        says = f"{name} on {memory.layout}: {memory.verdict}"
        yield ok(says) if memory.fits else problem(says, f"`{command}` says what to turn on")
    except ValueError as error:  # of the model, the layout or the options
        yield warning(
            str(error),
            f"`{command}`, which takes its time; or a model that transformers knows",
        )


# --- the model in a folder ------------------------------------------------------------------------


@check
def run(run: RunConfiguration) -> Iterator[Finding]:
    """Whether the folder of `--run` contains a trained agent, or at least a model."""
    from ..rollout import SPEC_FILE, AgentSpec

    folder = run.run
    if folder is None:
        return
    if not folder.is_dir():
        yield problem(f"{folder} does not exist", f"agentic-prompting demo --output-dir {folder}")
        return
    # A trained agent has its spec beside the model.
    if holds_model(folder):
        if (folder / SPEC_FILE).exists():
            # `run_check` reports an error in reading the spec.
            AgentSpec.load(folder)
            yield ok(f"{folder} holds a trained agent")
        else:
            yield warning(
                f"{folder} holds a model that was not trained here (no {SPEC_FILE}): to train "
                "from, not to ask or serve",
                f"agentic-prompting train prompt-r1 --model_name_or_path {folder} --config FILE",
            )
        return
    # Without a model, name the newest checkpoint, from which the run can go on.
    checkpoints = list_checkpoints(folder)
    if checkpoints:
        yield warning(
            f"{folder} holds checkpoints but no trained agent: its training has not finished",
            f"the command of that run with --resume_from_checkpoint {checkpoints[-1]}",
        )
    elif holds_evolved_prompt(folder):
        yield problem(
            f"{folder} holds no model but a prompt of `evolve`: nothing to ask or serve",
            USE_OF_EVOLVED_PROMPT,
        )
    else:
        yield problem(
            f"{folder} holds no model (no config.json)", "--run FOLDER that a trainer has saved"
        )


@check
def chat_template(run: RunConfiguration) -> Iterator[Finding]:
    """Whether the chat template can render several turns, and leaves earlier turns unchanged."""
    from ..rollout import ChatFormat

    # Local folders only: no tokenizer is downloaded from the hub.
    folders = []
    for folder in (run.run, run.values.get("model_name_or_path")):
        if folder and (Path(folder) / "tokenizer_config.json").exists():
            folders.append(Path(folder))
    for path in dict.fromkeys(folders):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        # Whether the template can render several turns at all.
        try:
            ChatFormat(tokenizer)
        except ValueError as error:
            yield problem(
                f"{path}: {error}",
                f"an instruct model instead, or put its template into {path}/chat_template.jinja",
            )
            continue

        # A template such as Qwen3's drops thoughts before the last user message.
        messages = [
            {"role": "user", "content": "QUSERQ"},
            {"role": "assistant", "content": "<think> QTHOUGHTQ </think> QAGENTQ"},
            {"role": "user", "content": "QREPLYQ"},
        ]
        # The text of the first two messages has to be the beginning of the text of all three.
        earlier = tokenizer.apply_chat_template(messages[:2], tokenize=False)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        if whole.startswith(earlier.rstrip()):
            yield ok(f"{path}: its chat template leaves earlier turns as they were")
        else:
            yield warning(
                f"{path}: its chat template is not prefix-preserving: a chat server over the "
                "weights shows them another conversation than training",
                f"agentic-prompting serve {path}",
            )
