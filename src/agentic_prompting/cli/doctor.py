"""`agentic-prompting doctor`: what would go wrong, and what to type against it.

The checks are the functions with `@check`, done in their order here and shown by their names: they yield findings, none
where there is nothing to look at.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata as metadata
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from .findings import PACKAGE, Finding, missing_extras, ok, problem, read_yaml, version_of, warning
from .options import AsJson, busy, check_model
from .plan import PlanSetup, planned
from .setup import SECONDS, Setup, parsed

if TYPE_CHECKING:
    from ..llm import LLMError, OpenAIChat

_CORE = ("torch", "trl", "transformers", "accelerate", "peft", "datasets", "openai")
_SCARCE, _TOO_LITTLE = (
    20 * 2**30,
    2**30,
)  # bytes: a checkpoint of Qwen3-4B with optimizer is 24 GB in bf16
_PLANNING = 40.0  # for a training step on fake tensors
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
Check = Callable[[Setup], Iterable[Finding]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Puts a check into the table."""
    return CHECKS.setdefault(function.__name__.replace("_", " "), function)


def doctor(setup: Setup, as_json: AsJson = False) -> int:
    """Check the installation, and whatever a run needs; each warning and problem comes with its fix.

    Asks a model that is named for one word. Exit status 1 if there is a problem.
    """
    from .train import example

    setup.config, setup.accelerate_config = example(setup.config), example(setup.accelerate_config)
    with busy("looking"):
        findings = [(name, finding) for name, one in CHECKS.items() for finding in look(one, setup)]
    counts = {level: sum(finding.level == level for _, finding in findings) for level in _STYLES}
    worst = next(level for level in ("problem", "warning", "ok") if counts[level])
    if as_json:
        listed = [{"check": name, **finding._asdict()} for name, finding in findings]
        print(json.dumps({"status": worst, "findings": listed}, ensure_ascii=False))
        return int(worst == "problem")
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for name, finding in findings:
        line = Text.assemble(
            (f"{finding.level:8}", _STYLES[finding.level]), f" {name:14} {finding.says}"
        )
        console.print(line.append(f"  -> {finding.fix}", style="bold") if finding.fix else line)
    console.print(
        ", ".join(f"{n} {level}{'s' * (level != 'ok' and n != 1)}" for level, n in counts.items())
    )
    return int(worst == "problem")


def look(check: Check, setup: Setup) -> list[Finding]:
    """Run a check and return its findings. A check that raises is a finding, too."""
    try:
        return list(check(setup))
    except Exception as error:  # any error of a broken package, which is what the checks look for
        says = f"could not be checked: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [problem(says, "mend what the message names")]


@check
def python(setup: Setup) -> Iterator[Finding]:
    """The version of Python."""
    yield ok(
        f"python {platform.python_version()}"
    )  # pip has checked that this version is supported


@check
def versions(setup: Setup) -> Iterator[Finding]:
    """The packages that matter against the ranges of pyproject.toml; vLLM's is TRL's."""
    from packaging.requirements import Requirement

    trls = metadata.requires("trl") if version_of("trl") else ()
    asked = [
        Requirement(line) for line in (*(trls or ()), *(metadata.requires(PACKAGE) or ()))
    ]  # extras', too
    ranges = {one.name: one.specifier for one in asked if str(one.specifier)}
    for name in (*_CORE, "vllm", "deepspeed"):
        installed, wanted = version_of(name), ranges.get(name)
        if installed is None and name in _CORE:
            yield problem(f"{name} is not installed", f"pip install '{name}{wanted or ''}'")
        elif installed and wanted is not None and not wanted.contains(installed, prereleases=True):
            yield problem(
                f"{name} {installed} is not supported: {wanted} is needed",
                f"pip install '{name}{wanted}'",
            )
        elif installed:
            yield ok(f"{name} {installed}")


@check
def extras(setup: Setup) -> Iterator[Finding]:
    """The extras that are not installed."""
    return missing_extras(setup.values)


@check
def devices(setup: Setup) -> Iterator[Finding]:
    """The GPUs or the CPU, and whether they support bfloat16, which is TRL's default."""
    import torch

    of = setup.values.get
    wanted = setup.trains and of("bf16", not of("fp16")) and not of("use_cpu")
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        yield ok(f"GPU {i}: {torch.cuda.get_device_name(i)}, {memory:.0f} GiB")
    if not torch.cuda.is_available():
        yield ok(
            f"no GPU, {os.cpu_count()} CPU cores: enough for the sandbox, not for a model of billions"
        )
        if of("use_vllm"):
            yield problem("use_vllm, but torch sees no GPU", "use_vllm: false")
        if wanted:
            fix = f"bf16: false and use_cpu: true in {setup.config}, or run it on a machine with a GPU"
            yield problem("training in bf16 (TRL's default) needs a GPU, and there is none", fix)
    elif not torch.cuda.is_bf16_supported(including_emulation=False):
        yield (problem if wanted else warning)(
            "the GPU does not compute in bf16", "bf16: false and fp16: true"
        )


@check
def output_folder(setup: Setup) -> Iterator[Finding]:
    """Whether what the run writes can be written, and has room."""
    folder = Path(setup.value("output_dir") or "runs")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        why = f"{there} is a file" if there.is_file() else error.strerror or error
        yield problem(f"{folder} cannot be written: {why}", "another folder with --output-dir")
        return
    free = shutil.disk_usage(there).free
    if free >= _SCARCE:
        yield ok(f"{folder} can be written, {free / 2**30:.0f} GiB free")
    else:
        fix = "make room, keep fewer checkpoints (save_total_limit: 1), or another disk with --output-dir"
        yield (problem if free < _TOO_LITTLE else warning)(
            f"only {free / 2**30:.0f} GiB free for {folder}", fix
        )


@check
def replay_cache(setup: Setup) -> Iterator[Finding]:
    """Whether the recording can be opened. Nothing is made or written here."""
    from ..llm import ReplayCache

    path = setup.value("replay_cache")
    if path and not Path(path).exists():
        yield ok(f"replay cache {path} is not there yet; it will be made")
    elif path:
        try:
            with contextlib.closing(ReplayCache(path, mode="replay")) as cache:
                yield ok(f"replay cache {path}: {len(cache)} replies")
        except (ValueError, OSError) as error:
            yield problem(
                str(error), f"mv {path} {path}.broken, or another file with --replay-cache"
            )


# --- the configuration -----------------------------------------------------------------------------------------------


@check
def config(setup: Setup) -> Iterator[Finding]:
    """Whether the file is there and holds options by name."""
    fix = "name: value on each line, with a space after the colon, such as max_steps: 100"
    try:
        if setup.config is not None and not isinstance(read_yaml(setup.config), Mapping):
            yield problem(f"{setup.config} holds no options by name", fix)
    except OSError as error:
        yield problem(
            f"{setup.config}: {error.strerror}",
            "--config FILE, such as examples/configs/sandbox.yaml",
        )
    except ValueError as error:
        yield problem(str(error), fix)


@check
def options(setup: Setup) -> Iterator[Finding]:
    """Whether every name is an option of the program, with a value of its kind: what the JSON schema says."""
    from .parser import wrong_in_file

    if not setup.trains:
        if setup.values:
            yield ok(
                f"{setup.config}: a table, which `agentic-prompting evaluate` checks before it asks anything"
            )
        return
    program, kinds, _ = setup.program
    wrong = list(wrong_in_file(setup.values, kinds, f"{setup.config}: ", f"`{program}`"))
    yield from wrong
    if not wrong:
        yield ok(f"{setup.config}: {len(setup.values)} options, all of them of `{program}`")


@check
def batch(setup: Setup) -> Iterator[Finding]:
    """Whether the rollouts of a problem divide the generation batch."""
    if not setup.trains:
        return
    fields, processes = setup.program[2], setup.processes
    of = {name: one.default for name, one in fields.items() if one is not None} | dict(setup.values)
    factors = {
        name: int(of[name]) for name in ("prompts_per_step", "num_generations") if name in fields
    }
    group, per_device = math.prod(factors.values()), int(of["per_device_train_batch_size"])
    repeats = processes * int(of["steps_per_generation"] or of["gradient_accumulation_steps"])
    whole = int(of["generation_batch_size"] or 0)
    size = whole or per_device * repeats
    on = f"generation batch of {size} rollouts on {processes} process{'es' * (processes > 1)}"
    if size % group == 0:
        yield ok(f"{on}: {size // group} problems x {group}")
        return
    if whole:
        fix = f"generation_batch_size: {_nearest(size, math.lcm(group, per_device * processes))}"
    else:
        fix = f"per_device_train_batch_size: {_nearest(per_device, group // math.gcd(group, repeats))}"
    product = f"{' x '.join(factors)} = {' x '.join(map(str, factors.values()))} = {group}"
    yield problem(
        f"{setup.config}: a problem takes {product} rollouts, which does not divide the {on}", fix
    )


def _nearest(size: int, unit: int) -> int:
    return max(1, round(size / unit)) * unit


@check
def values(setup: Setup) -> Iterator[Finding]:
    """Whether the program's own checks take the values, on a CPU and as if on all processes."""
    if not setup.trains or any(one.fix for one in [*options(setup), *batch(setup)]):
        return  # said already
    program = setup.program[0]
    try:
        parsed(setup)
        yield ok(f"{setup.config}: `{program}` takes its values")
    except ValueError as error:
        said = " ".join(str(error).split())
        if said.startswith("say "):  # what is named on the command line, where it can be
            yield warning(
                f"{setup.config}: {said}", f"{said.partition(': ')[2]}, there or with `{program}`"
            )
        else:
            yield problem(
                f"{setup.config}: {said}",
                f"correct it there; `{program} --help` shows every option",
            )


# --- the large LLMs --------------------------------------------------------------------------------------------------


@check
def key(setup: Setup) -> Iterator[Finding]:
    """Whether there is a key where one is needed. It is never shown."""
    for role, chat in setup.models.items():
        if chat.find_key():
            yield ok(f"{role}: key found in {chat.key_variable}")
        elif chat.needs_key:
            says = (
                f"{role}: no key for {chat.model}, and no address of an endpoint that does without"
            )
            yield problem(
                says,
                f"export {chat.key_variable}=YOUR_KEY, or --{role}-base-url http://HOST:PORT/v1",
            )
        else:
            yield ok(f"{role}: no key; an endpoint given by its address may do without")


@check
def endpoint(setup: Setup) -> Iterator[Finding]:
    """Asks each model for one word, as training does before it starts."""
    from ..llm import LLMError

    for role, chat in setup.models.items():
        if chat.needs_key and not chat.find_key():
            continue  # said above
        started = time.perf_counter()
        with chat:
            try:
                chat.check()
                yield ok(f"{role}: {chat.where} answers ({time.perf_counter() - started:.1f} s)")
            except LLMError as error:
                yield problem(f"{role}: {error}", _fix(role, chat, error))


def _fix(role: str, chat: OpenAIChat, error: LLMError) -> str:
    """The remedy for the error of a first call, as a command where there is one."""
    url = chat.base_url.rstrip("/")
    if error.status in (401, 403):
        return f"export {chat.key_variable}=YOUR_KEY with a key that this endpoint knows"
    known = _models_at(url, chat)
    if known and chat.model not in known:
        near = (difflib.get_close_matches(chat.model, known, n=1, cutoff=0.3) or known)[0]
        return f"--{role}-model {near}  (there: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''})"
    if known is None and not url.endswith("/v1") and _models_at(f"{url}/v1", chat) is not None:
        return f"--{role}-base-url {url}/v1"
    if error.kind == "RateLimited":
        return "wait and run this again; in training fewer calls at once help: OpenAIChat(max_concurrency=8)"
    if error.status == 402 or "credit" in error.message:
        return f"add credit, or export {chat.key_variable}=ANOTHER_KEY"
    return f"start the server, or correct its address: --{role}-base-url http://HOST:PORT/v1 --{role}-model NAME"


def _models_at(url: str, chat: OpenAIChat) -> list[str] | None:
    """The names of the models at an address; `None` if it does not say. An endpoint that asks for a key is one."""
    import openai

    with openai.OpenAI(
        api_key=chat.find_key() or "none", base_url=url, max_retries=0, timeout=SECONDS
    ) as client:
        try:
            return sorted(model.id for model in client.models.list())
        except openai.AuthenticationError:
            return []
        except (
            openai.OpenAIError,
            AttributeError,
            ValueError,
            TypeError,
        ):  # no such list, or a page of something else
            return None


@check
def price(setup: Setup) -> Iterator[Finding]:
    """Whether dollars can be counted."""
    for role, chat in setup.models.items():
        unknown = f"the price of {chat.model!r} is not known"
        if chat.price is not None:
            costs = "${:g} in, ${:g} out per million tokens (our table)".format(*chat.price)
            yield ok(f"{role}: {chat.model} costs {costs}")
        elif setup.value("budget_usd") is not None and setup.value("budget_tokens") is None:
            fix = f"budget_tokens: 2000000 instead of budget_usd in {setup.config or 'a training configuration'}"
            yield problem(f"{role}: budget_usd can never be reached, {unknown}", fix)
        else:
            yield ok(
                f"{role}: {unknown}: costs are shown as $0; budget_tokens limits them all the same"
            )


# --- the model to be trained -----------------------------------------------------------------------------------------


@check
def model(setup: Setup) -> Iterator[Finding]:
    """Whether the one that the configuration names is here or on the hub."""
    if name := setup.values.get("model_name_or_path"):
        try:
            check_model(name)
            yield ok(f"{name} is there")
        except ValueError as error:
            yield problem(str(error), f"model_name_or_path: FOLDER_OR_NAME in {setup.config}")


@check
def memory(setup: Setup) -> Iterator[Finding]:
    """The memory needed on a GPU: measured by `plan` if an accelerate configuration describes the layout; else a plain
    estimate, which takes no time."""
    name = str(setup.value("model_name_or_path") or "")
    if not setup.trains or not name:
        return
    launched = f" --accelerate-config {setup.accelerate_config}" if setup.accelerate_config else ""
    measures = f"`agentic-prompting plan --config {setup.config}{launched}`"
    from ..planning.model_shape import load_shape, rough_estimate

    if (
        setup.accelerate_config is None and not Path(name).is_dir()
    ):  # a name on the hub, which may be out of reach
        yield ok(f"{measures} says what {name} needs")
        return
    try:
        if setup.accelerate_config is None:
            trained_share = 0.0 if setup.values.get("use_peft") else 1.0
            says = rough_estimate(load_shape(name).to_dict(), trained_share)
            yield ok(f"{says} {measures} measures a step, as --accelerate-config does here")
            return
        given = {one.name: getattr(setup, one.name) for one in fields(setup)}
        made, _ = planned(
            PlanSetup(**given, seconds=0.0), wait=_PLANNING
        )  # without a look at what would fit better
        says = f"{name} on {made.layout}: {made.verdict}"
        yield ok(says) if made.fits else problem(says, f"{measures} says what to turn on")
    except ValueError as error:  # of the model, the layout or the options
        yield warning(
            str(error), f"{measures}, which takes its time; or a model that transformers knows"
        )


# --- the model in a folder -------------------------------------------------------------------------------------------


@check
def run(setup: Setup) -> Iterator[Finding]:
    """Whether its folder holds a trained agent, or at least a model."""
    from ..rollout import SPEC_FILE, AgentSpec

    if (run := setup.run) is None:
        return
    checkpoints = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not run.is_dir():
        yield problem(f"{run} does not exist", f"agentic-prompting demo --output-dir {run}")
    elif any((run / name).exists() for name in ("config.json", "adapter_config.json")):
        if (run / SPEC_FILE).exists():
            AgentSpec.load(run)
            yield ok(f"{run} holds a trained agent")
        else:
            says = f"{run} holds a model that was not trained here (no {SPEC_FILE}): to train from, not to ask or serve"
            yield warning(
                says, f"agentic-prompting train prompt-r1 --model_name_or_path {run} --config FILE"
            )
    elif checkpoints:
        says = f"{run} holds checkpoints but no trained agent: its training has not finished"
        yield warning(
            says, f"the command of that run with --resume_from_checkpoint {checkpoints[-1]}"
        )
    else:
        yield problem(
            f"{run} holds no model (no config.json)", "--run FOLDER that a trainer has saved"
        )


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
        talk = [
            ("user", "QUSERQ"),
            ("assistant", "<think> QTHOUGHTQ </think> QAGENTQ"),
            ("user", "QREPLYQ"),
        ]
        messages = [{"role": role, "content": content} for role, content in talk]
        before = tokenizer.apply_chat_template(messages[:2], tokenize=False)
        if tokenizer.apply_chat_template(messages, tokenize=False).startswith(before.rstrip()):
            yield ok(f"{path}: its chat template leaves earlier turns as they were")
        else:
            says = "is not prefix-preserving: a chat server over the weights shows them another conversation than training"
            yield warning(f"{path}: its chat template {says}", f"agentic-prompting serve {path}")
