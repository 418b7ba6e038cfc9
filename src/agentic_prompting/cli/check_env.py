"""`agentic-prompting check-env`: a few episodes with an environment of your own, without training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import isfunction, signature
from typing import TYPE_CHECKING, Any

from ..llm.numbers import count_in_words
from .hub import check_agent, find_model
from .loader import load_environment, load_object, load_part, make_untrained_spec
from .option_parser import OptionParser
from .options import JSON_HELP, list_option, option, refuse_options
from .script import print_error
from .task_rows import ROW_OPTIONS, TaskRows
from .terminal import REQUEST_LABEL, print_answer, print_json, print_styled, print_turns

if TYPE_CHECKING:
    from ..rollout import AgentSpec, Observation, Rollout

EPISODES = 3
AGENT_PARAMETERS = {"row", "task", "question", "prompt", "messages", "example"}
"""Names by which a function of one parameter is an agent: an environment's is a rollout."""


@dataclass
class CheckEnvOptions(TaskRows):
    """The options of `check-env`."""

    harness: str | None = option(
        "A command-line agent instead of NAME, such as codex, or mine:my_harness."
    )
    dialect: str = option("API dialect, for a harness with several.", "")
    isolation: str = option(
        "Isolation of a harness: bwrap, or none, which gives it all rights of this user.", "bwrap"
    )
    request: list[str] | None = list_option(
        "What the agent asks, a tool call as it is printed; several times for several turns."
    )
    model: str | None = option("A model that plays the agent, instead of a script.")
    json: bool = option(JSON_HELP, False)

    @property
    def reads_whole_rows(self) -> bool:
        return True  # NAME is an environment or a program of the user's own


SETTINGS = (CheckEnvOptions,)  # the parser returns an object of each


def check_env(arguments: Sequence[str]) -> int:
    """Play three episodes with an environment of your own, without training, and show them.

    NAME is module:name of an environment, its class, or a function of the rollout. By default a
    script plays the agent: it sends each --request, or the question, or calls of tools with made-up
    arguments, and then answers. With --harness it writes a file, reads it and says done, inside the
    real program. Exit status 1 if the environment fails, if every call fails, or if there are tools
    and none is called.
    """
    parser = OptionParser("check-env", SETTINGS, check_env.__doc__, words="NAME")
    options, words = parser.parse_with_words(arguments)
    # Either an environment or a harness, not both.
    if len(words) + (options.harness is not None) != 1:
        raise ValueError("name an environment as module:name, or an agent with --harness NAME")
    _check_options(options)
    if options.harness is not None:
        return _check_harness(options)

    from ..environments.scripted_agent import play_script
    from ..rollout import rollout_record

    # Load the environment, and make sure that a script or a model can play in it.
    environment: Any = load_environment(words[0])
    _refuse_agent(words[0])
    if environment.plays_whole_episodes and options.model is None:
        raise ValueError(
            "a program calls the policy by itself, so no script can play it: name a model with "
            "--model"
        )
    environment.check()

    spec = make_untrained_spec(environment)
    tools = [tool["function"] for tool in spec.chat_template_kwargs.get("tools") or ()]

    # Without rows of your own every episode has the same made-up question.
    rows = [{"question": "what is 2 plus 2 ?", "answers": ["4"]}]
    if options.dataset:
        if options.model is not None:
            options.add_trained_columns(options.model)
        environment.hide_columns(options.column_names())
        rows = options.rows_for(environment, options.load("", 0))
    rows = [rows[episode % len(rows)] for episode in range(EPISODES)]
    # A model plays the agent, or else a script.
    if options.model is not None:
        from ..agent import PromptAgent

        model = find_model(options.model)
        check_agent(model)
        agent = PromptAgent.from_pretrained(model, environment, spec)
        rollouts = agent.answer_all(rows, progress=False)
    else:
        # A request may be copied from what this command has printed.
        requests = [
            request.strip().removeprefix(REQUEST_LABEL) for request in options.request or ()
        ]
        rollouts = play_script(environment, spec, rows, requests, tools)

    # Show the episodes, then what went wrong.
    if options.json:
        records = [rollout_record(rollout) for rollout in rollouts]
        print_json({"episodes": records})
    else:
        _print_episodes(rollouts, spec, tools)
        print_styled(_summarize(rollouts, bool(tools), options.model is not None))
    return _report_failures(rollouts, bool(tools))


def _check_options(options: CheckEnvOptions) -> None:
    """Raise `ValueError` for options that would have no effect."""
    if options.harness is not None:
        refuse_options(
            options,
            ("request", "model", *ROW_OPTIONS),
            "--harness plays one task of its own by a script",
        )
        if ":" in options.harness:
            refuse_options(
                options, ("dialect",), f"{options.harness} names its own, Harness(..., dialect=...)"
            )
        return
    refuse_options(
        options, ("dialect", "isolation"), "it is for --harness; NAME is played in this process"
    )
    if options.model is not None:
        refuse_options(options, ("request",), "--model writes its own requests; leave one out")
    if not options.dataset:
        refuse_options(options, ROW_OPTIONS, "it is for the rows of --dataset, which is not given")


def _refuse_agent(name: str) -> None:
    """Raise `ValueError` for a function that is an agent, by the name of its only parameter."""
    function = load_part(name, "environment")
    if not isfunction(function):
        return
    parameters = list(signature(function).parameters)
    if len(parameters) == 1 and parameters[0] in AGENT_PARAMETERS:
        raise ValueError(
            f"{name} would be played as an environment, a function of the rollout, but its "
            f"parameter is called {parameters[0]}: an agent program is a function of (row, "
            "base_url, api_key); if it is an environment, call the parameter rollout"
        )


def _check_harness(options: CheckEnvOptions) -> int:
    """Play one task in a harness, and show what was seen: calls, token sequences, seconds, names
    that it looked up.

    The exit status is 0 if the harness did the task.
    """
    from ..harnesses import Harness, get_harness
    from ..harnesses.check_harness import check_harness

    # Your own is named as module:name, a known one by a word.
    name = str(options.harness)
    if ":" in name:
        harness = load_object(name, "harness")
    else:
        harness = get_harness(name, options.dialect)
    if not isinstance(harness, Harness):
        raise ValueError(f"{name} is a {type(harness).__name__}, and not a Harness")
    report = check_harness(harness, options.isolation)  # type: ignore[arg-type]  # Workspace checks it
    if options.json:
        print_json(report)
    else:
        for label, value in report.items():
            print_styled(f"{label:22}{value}")
    return int(not report["wrote_the_file"])


def _print_episodes(rollouts: Sequence[Rollout], spec: AgentSpec, tools: Sequence[Any]) -> None:
    """Print the tools, the prompt and every turn."""
    for tool in tools:
        print_styled(f"tool           {json.dumps(tool, ensure_ascii=False)}", "dim")
    # The user message, before which a system message may stand. A program writes its own.
    is_program = "program/calls" in rollouts[0].counts
    if not is_program:
        prompt = spec.messages(rollouts[0].row)[-1]["content"]
        print_styled(f"what training would show the agent by default:\n{prompt}\n", "dim")
    # Each turn, followed by the reply to it.
    for number, rollout in enumerate(rollouts, start=1):
        print_styled(f"episode {number}: {rollout.row['question']}", "bold")
        print_turns(rollout)
        if is_program:
            print_answer(rollout)
        # The program's own reward, if it has one.
        reward = (rollout.returned or {}).get("reward")
        if is_program and reward is not None:
            print_styled(f"reward         {reward:g}")


def _failed_observations(rollouts: Sequence[Rollout], has_tools: bool) -> list[Observation]:
    """The observations that hold an error: of the environment, or of a tool."""
    failed = []
    for rollout in rollouts:
        for observation in rollout.observations:
            # Tools report their errors as text.
            is_tool_error = has_tools and observation.text.startswith("Error: ")
            if observation.error is not None or is_tool_error:
                failed.append(observation)
    return failed


def _summarize(rollouts: Sequence[Rollout], has_tools: bool, is_played_by_model: bool) -> str:
    """One line about the replies, errors and seconds of the episodes."""
    # A program has no replies of its own, but counts its calls of the policy.
    is_program = any("program/calls" in rollout.counts for rollout in rollouts)
    observations = [observation for rollout in rollouts for observation in rollout.observations]
    failed = _failed_observations(rollouts, has_tools)
    replies = len(observations) - len(failed)
    if is_program:
        calls = sum(int(rollout.counts.get("program/calls", 0)) for rollout in rollouts)
        sequences = sum(int(rollout.counts.get("program/sequences", 0)) for rollout in rollouts)
        summary = f"calls of the policy: {calls} in {count_in_words(sequences, 'sequence')}"
    elif replies:
        summary = count_in_words(replies, "reply", "replies")
    else:
        summary = "no reply"
    # A failed episode may have no failed observation, so the larger of both numbers counts.
    failed_rollouts = sum(rollout.error is not None for rollout in rollouts)
    errors = max(len(failed), failed_rollouts)
    if errors:
        summary += f", {count_in_words(errors, 'error')}"
    if observations and not is_program:
        slowest = max(observation.seconds for observation in observations)
        summary += f", the slowest took {slowest:.2f} s"

    # Why there was neither a reply nor an error.
    has_requests = any(turn.kind == "act" for rollout in rollouts for turn in rollout.turns)
    was_asked = has_requests or (observations and not is_program)
    if not was_asked and not errors:
        summary += f": {_reason_for_silence(has_tools, is_played_by_model)}"
    # A model may end an episode in several ways, a script only in one.
    if is_played_by_model:
        statuses = Counter(rollout.status.replace("_", " ") for rollout in rollouts)
        endings = [f"{count} {status}" for status, count in statuses.items()]
        summary += f"; {', '.join(endings)}"
    return f"{count_in_words(len(rollouts), 'episode')}: {summary}"


def _reason_for_silence(has_tools: bool, is_played_by_model: bool) -> str:
    """Why the environment was not asked, and what to do."""
    reason = "no tool was called" if has_tools else "it was never asked"
    # A model writes its own requests. An agent that calls one itself may be taken for an
    # environment.
    if not is_played_by_model:
        return f"{reason}, see --request"
    if has_tools:
        return reason
    return (
        f"{reason} (an agent that calls the model itself is a function of row, base_url, api_key)"
    )


def _report_failures(rollouts: Sequence[Rollout], has_tools: bool) -> int:
    """Print why the environment failed, or that no call worked; the exit status."""
    errors = [str(rollout.error) for rollout in rollouts if rollout.error is not None]
    observations = sum(len(rollout.observations) for rollout in rollouts)
    failed = _failed_observations(rollouts, has_tools)
    if errors:
        message = f"the environment failed: {' '.join(errors[0].split())}"
    elif failed and len(failed) == observations:
        # If no call works, the made-up arguments may be to blame.
        text = " ".join(failed[0].text.split())
        fix = 'give one that works: --request \'{"name": "...", "arguments": {...}}\''
        message = f"every call failed: {text}; {fix}"
    elif has_tools and not observations:
        message = (
            "no tool was called, so none was tried; send a call with "
            '--request \'{"name": "...", "arguments": {...}}\''
        )
    else:
        return 0
    print_error(message)
    return 1
