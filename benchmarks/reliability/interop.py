"""Adapters, each end to end with the real package: an episode or a call, its tokens, an injected
outage, its lines.

    python -m benchmarks.reliability.interop --json
    python -m benchmarks.reliability.interop --train  # the demo in native tool calls, and over MCP; minutes

A row is green if the episode ended as it should, its tokens are the sampled ones (where there are
tokens), and an outage was counted as one: neither text for the agent nor a score of 0. A row that
is not green gives the reason. OpenEnv and verifiers cannot be installed beside this library and
need `make foreign` (or FOREIGN=folder with an environment for each). Three rows are of files in
`examples/contrib/`, outside the package.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from transformers import AddedToken, PreTrainedTokenizerFast

from agentic_prompting import (
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    PromptAgent,
    PromptR1Config,
    PromptR1Trainer,
)
from agentic_prompting.interop import (
    NOT_GIVEN,
    MCPTools,
    OpenEnv,
    ToolEnvironment,
    ToolGrammar,
    TRLEnvironment,
    UserSimulator,
    ask_tool,
    resolve_environment,
)
from agentic_prompting.llm import LLMError, Message, ScriptedChat, ServerFailed, complete, run
from agentic_prompting.rewards import exact_match_reward
from agentic_prompting.rollout import (
    AgentSpec,
    ChatFormat,
    Environment,
    Limits,
    Observation,
    Rollout,
    Sample,
    SampleRequest,
    play,
    read_rollouts,
)
from agentic_prompting.sandbox import DEFAULT_MIX, Oracle, load_world, make_split, make_traces
from agentic_prompting.sandbox.policy import sandbox_spec, world_tokenizer
from agentic_prompting.sandbox.recipe import Recipe, warm_started
from agentic_prompting.sandbox.results import exact_match_of
from agentic_prompting.sandbox.setup import as_dataset
from agentic_prompting.sandbox.world import world_of
from benchmarks.lab import DEMO, DEMO_STEPS, settings

if TYPE_CHECKING:
    import uvicorn
    from mcp import StdioServerParameters

    from agentic_prompting.refine import RefinedChat

ROOT = Path(__file__).parents[2]
INTEROP = "src/agentic_prompting/interop"
CONTRIB = "examples/contrib"
sys.path.append(
    str(ROOT / CONTRIB)
)  # its files are imported where they are used, as their users do
WARM_START_STEPS = 450  # as the demo
# A call's beginning and end are a token each, as frequent strings are in large vocabularies.
ASKED = "which country has the capital Nairobi ?"
DOWN = "currency"  # a word of the sandbox: asked about it, each tool and model is down
CALL = '{"name": "ask", "arguments": {"prompt": "'
END = '"}}'
ORACLE = """
import sys
from mcp.server.mcpserver import MCPServer
from agentic_prompting.llm import complete
from agentic_prompting.sandbox import Oracle
oracle, server = Oracle(seed=int(sys.argv[1])), MCPServer("oracle")
@server.tool()
def ask(prompt: str) -> str:
    "Asks an oracle that knows one fact at a time."
    return complete(oracle, [{"role": "user", "content": prompt.strip()}]).text
server.run("stdio")
"""


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """The sandbox's tokenizer, with the tags of native calls."""
    tokenizer = world_tokenizer()
    grammar = ToolGrammar()
    texts = []
    for tag in (grammar.call, grammar.response):
        texts += [f"<{tag}>", f"</{tag}>"]
    texts += [CALL, END]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return tokenizer


def call(request: str) -> str:
    return f"<tool_call> {CALL} {request} {END} </tool_call>"


def written(
    tokenizer: PreTrainedTokenizerFast,
    environment: Environment,
    *turns: str,
    row: dict[str, Any] | None = None,
) -> tuple[Rollout, bool]:
    """An episode in which these turns are sampled, and whether its tokens equal theirs, one by one."""
    chat_format = ChatFormat(tokenizer, environment.grammar)
    turn_ids = [chat_format.turn_ids(turn) for turn in turns]
    next_turn = iter(turn_ids)

    async def policy(request: SampleRequest) -> Sample:
        return Sample(next(next_turn))

    messages = (row or {}).get("prompt") or [{"role": "user", "content": "question : what ?"}]
    rollout = Rollout(chat_format.prompt_ids(messages), row=row or {})
    run(play(rollout, policy, environment, chat_format, Limits(max_turns=len(turns))))
    sampled_ids = [token for token, scored in zip(rollout.ids, rollout.mask, strict=True) if scored]
    return rollout, sampled_ids == list(chain.from_iterable(turn_ids[: len(rollout.turns)]))


# --- rows: each returns (worked, token_exact or None, outage_counted) -----------------------------


def ask(prompt: str) -> str:
    """Asks.

    Args:
        prompt: What.
    """
    if DOWN in prompt:
        raise ConnectionError("no route")
    return "it is Kenya ."


def played(environment: Environment, row: dict[str, Any] | None = None) -> tuple[bool, bool, bool]:
    tokenizer = tool_tokenizer()
    rollout, exact = written(tokenizer, environment, call(ASKED), "Nairobi", row=row)
    down, _ = written(tokenizer, environment, call(DOWN), "Nairobi", row=row)
    return (
        "Kenya" in rollout.observations[0].text and rollout.answer == "Nairobi",
        exact,
        down.status == "failed",
    )


def functions() -> tuple[bool, bool, bool]:
    return played(ToolEnvironment([ask]))


def trl_tools() -> tuple[bool, bool, bool]:
    return played(resolve_environment(NOT_GIVEN, [ask], None)[0])


def tools_and_llm() -> tuple[bool, bool, bool]:
    chat = ScriptedChat(
        lambda messages: ServerFailed("down") if DOWN in messages[-1]["content"] else "Nairobi"
    )
    environment = ToolEnvironment([ask, ask_tool(chat, name="llm")])
    both = call("Kenya ?") + call("Kenya ?").replace('"name": "ask"', '"name": "llm"')
    rollout = Rollout([1])
    rollout.add_turn(Sample([1]), environment.grammar.parse(both))
    observation = run(environment.step(rollout))
    rollout.turns[-1] = environment.grammar.parse(
        call(DOWN).replace('"name": "ask"', '"name": "llm"')
    )
    exact = played(environment)[1]
    return (
        "Kenya" in observation.text
        and "Nairobi" in observation.text
        and len(observation.replies) == 1,
        exact,
        bool(run(environment.step(rollout)).error),
    )


def mcp(server: StdioServerParameters | str) -> tuple[bool, bool, bool]:
    """A call through a connection; then one to a server that is gone."""
    tools = MCPTools(server)
    tokenizer = tool_tokenizer()
    environment = ToolEnvironment([tools])
    rollout, exact = written(tokenizer, environment, call(ASKED), "Nairobi")
    tools.close()
    tools.server = "http://127.0.0.1:9/mcp"
    while tools._keeper is not None and not tools._keeper.done():
        threading.Event().wait(0.05)
    down, _ = written(tokenizer, environment, call(ASKED), "Nairobi")
    return "Kenya" in rollout.observations[0].text, exact, down.status == "failed"


def mcp_stdio() -> tuple[bool, bool, bool]:
    return mcp(oracle_server(0))


def mcp_http() -> tuple[bool, bool, bool]:
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("oracle")
    server.tool()(ask)
    with served(
        uvicorn.Server(uvicorn.Config(server.streamable_http_app(), port=0, log_level="error"))
    ) as port:
        return mcp(f"http://127.0.0.1:{port}/mcp")


@contextmanager
def served(http: uvicorn.Server) -> Iterator[int]:
    """The port of a uvicorn server while it runs."""
    threading.Thread(target=http.run, daemon=True).start()
    while not http.started:
        threading.Event().wait(0.05)
    try:
        yield http.servers[0].sockets[0].getsockname()[1]
    finally:
        http.should_exit = True


class Game:
    """An environment class as in TRL's documentation."""

    def reset(self, **row: Any) -> str:
        self.asked = 0
        return " go ."

    def ask(self, prompt: str) -> str:
        """Asks.

        Args:
            prompt: What.
        """
        self.asked += 1
        return ask(prompt)

    def get_reward(self) -> float:
        return 1.0 / self.asked


def trl_class() -> tuple[bool, bool, bool]:
    environment = TRLEnvironment(Game)
    row = run(environment.reset({"prompt": [{"role": "user", "content": "question : what ?"}]}))
    worked, exact, counted = played(environment, row)
    assert environment.reward is not None
    return worked and run(environment.reward([row["environments"]])) == [0.5], exact, counted


def simulated_user() -> tuple[bool, bool, bool]:
    def person(messages: Sequence[Message]) -> str | ServerFailed:
        turn = messages[-1]["content"]
        if DOWN in turn:
            return ServerFailed("down")
        return "[DONE]" if "Nairobi" in turn else "what is the capital ?"

    environment = UserSimulator(ScriptedChat(person))
    row = {"goal": "the capital of Kenya"}
    rollout, exact = written(tool_tokenizer(), environment, "Kenya ?", "Nairobi .", row=row)
    down, _ = written(tool_tokenizer(), environment, DOWN, "Nairobi .", row=row)
    return len(rollout.turns) == 2, exact, down.status == "failed"


class Agent:
    """A stand-in for `PromptAgent`: it answers under its system prompt, or its environment fails."""

    spec = AgentSpec("{question}")

    def __init__(self, text: str, error: LLMError | None = None):
        self.text = text
        self.error = error

    def answer(self, question: str, seed: int = 0) -> Rollout:
        return self.answer_all([{"question": question}])[0]

    def answer_all(self, rows: Iterable[Mapping[str, Any]], progress: bool = True) -> list[Rollout]:
        rollouts = [Rollout([1], row=dict(row)) for row in rows]
        for rollout in rollouts:
            if self.error:
                rollout.fail(Observation(error=self.error))
                continue

            # The last word of the system prompt, if there is one.
            text = self.text
            for message in rollout.row.get("prompt", ()):
                if message["role"] == "system":
                    text = message["content"].split()[-1]
                    break
            rollout.add_turn(Sample([1]), ToolGrammar().parse(text))
            rollout.finish("answered")
        return rollouts


DSPY = "[[ ## answer ## ]]\nNairobi\n\n[[ ## completed ## ]]"


def dspy_calls(model: Agent | RefinedChat, down: Agent | RefinedChat) -> tuple[bool, None, bool]:
    import dspy

    from agentic_prompting.interop.dspy import DSPyEngine

    predict = dspy.Predict("question -> answer")
    with dspy.context(lm=dspy.LM("ours", engine=DSPyEngine(model), cache=False)):
        worked = predict(question="Kenya's capital?").answer == "Nairobi"
    try:
        with dspy.context(lm=dspy.LM("ours", engine=DSPyEngine(down), cache=False, num_retries=0)):
            predict(question="Kenya's capital?")
    except Exception as error:
        return worked, None, "down" in str(error)
    return worked, None, False


def dspy_agent() -> tuple[bool, None, bool]:
    return dspy_calls(Agent(DSPY), Agent("", ServerFailed("down")))


def dspy_module() -> tuple[bool, None, bool]:
    from agentic_prompting.interop.dspy import AgentModule

    worked = AgentModule(Agent("Nairobi"))(question="Kenya's capital?").answer == "Nairobi"
    try:
        AgentModule(Agent("", ServerFailed("down")))(question="Kenya's capital?")
    except ServerFailed:
        return worked, None, True
    return worked, None, False


def dspy_refined() -> tuple[bool, None, bool]:
    """ProRefine around any chat model, as DSPy's language model."""
    from agentic_prompting.refine import ProRefiner, RefinedChat

    def refined(task: ScriptedChat) -> RefinedChat:
        helper = ScriptedChat(lambda messages: "Be brief.")
        return RefinedChat(
            ProRefiner(task, helper, helper, tokens_per_step=8, max_steps=1), "Answer."
        )

    return dspy_calls(
        refined(ScriptedChat(lambda messages: DSPY)),
        refined(ScriptedChat(lambda messages: ServerFailed("down"))),
    )


class Quiet:
    """A logger for GEPA that logs nothing."""

    def log(self, message: str) -> None: ...


def gepa_adapter() -> tuple[bool, None, bool]:
    import gepa

    from agentic_prompting.interop.gepa import AgentAdapter

    rows = [{"question": f"Capital {n}?", "answers": ["Nairobi"]} for n in range(4)]
    optimised = gepa.optimize(
        {"system_prompt": "Say Lima"},
        trainset=rows[:2],
        valset=rows[2:],
        adapter=AgentAdapter(Agent(""), exact_match_reward),
        reflection_lm=lambda prompt: "```\nSay Nairobi\n```",
        reflection_minibatch_size=2,
        max_metric_calls=12,
        logger=Quiet(),
    )
    try:
        down = AgentAdapter(Agent("", ServerFailed("down")), exact_match_reward)
        down.evaluate(rows, {"system_prompt": "Say Nairobi"})
    except ServerFailed:
        return optimised.best_candidate["system_prompt"] == "Say Nairobi", None, True
    return False, None, False


def gepa_engine() -> tuple[bool, None, bool]:
    """E-SPL by GEPA's call, with one of GEPA's evaluators; one evaluation fails."""
    import gepa.optimize_anything as oa
    from optimize_anything import optimize_anything

    def evaluate(candidate: str, example: int) -> tuple[float, dict[str, Any]]:
        if "Lima" in candidate and example == 1:
            raise ConnectionError("no route")
        oa.log("read by the reference")
        return float("Nairobi" in candidate), {"example": example}

    block = "<<<<<<< SEARCH\nSay Lima\n=======\nSay Nairobi\n>>>>>>> REPLACE"
    requests: list[str] = []

    def reference(messages: Sequence[Message]) -> str:
        requests.append(messages[-1]["content"])
        return block

    optimised = optimize_anything("Say Lima", evaluate, [0, 1, 2], reference=reference)
    return (
        optimised.best.text == "Say Nairobi" and "read by the" in requests[0],
        None,
        optimised.steps[0].failed == 1 / 3,
    )


def prorefine_served() -> tuple[bool, None, bool]:
    """ProRefine behind an OpenAI endpoint, called by the official client."""
    import openai

    from agentic_prompting.refine import ProRefiner, RefinedChat
    from agentic_prompting.serve import ChatAnswers, Metrics, ServeConfig, Server, Service

    def refined(task: ScriptedChat) -> ChatAnswers:
        helper = ScriptedChat(lambda messages: "Be brief.")
        refiner = ProRefiner(task, helper, helper, max_steps=1)
        return ChatAnswers(RefinedChat(refiner, "Answer."))

    models = {
        "prorefine": refined(ScriptedChat(lambda messages: "Nairobi")),
        "down": refined(ScriptedChat(lambda messages: ServerFailed("down"))),
    }
    server = Server(Service(models, ServeConfig(port=0), Metrics()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=server.run, args=[listener], daemon=True).start()
        server.has_started.wait(10)
        port = listener.getsockname()[1]
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        )
        messages = [{"role": "user", "content": "Kenya's capital?"}]
        completion = client.chat.completions.create(model="prorefine", messages=messages)
        worked = completion.choices[0].message.content == "Nairobi"
        try:
            client.chat.completions.create(model="down", messages=messages)
        except openai.APIStatusError as error:
            return worked, None, error.status_code in (502, 503)
    return False, None, False


def dspy_grpo() -> tuple[bool, bool, bool]:
    """Two steps of DSPy's `GRPO` through our trainer; a metric that fails once adds no score."""
    import dspy
    import torch
    from dspy.teleprompt.grpo import GRPO
    from dspy_provider import TrainerProvider
    from transformers import Qwen3Config, Qwen3ForCausalLM

    class Plain(dspy.ChatAdapter):
        """Takes the whole completion as the answer, because an untrained model writes no fields."""

        def parse(self, signature: Any, completion: str) -> dict[str, str]:
            return {"answer": completion}

        def format_assistant_message_content(
            self, signature: Any, outputs: Any, missing_field_message: Any = None
        ) -> str:
            return outputs["answer"]

    torch.manual_seed(0)
    tokenizer = world_tokenizer()
    judged = iter(range(1000))
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=16, **shape)
    )
    before = torch.cat([weight.flatten().clone() for weight in model.parameters()])

    def metric(example: Any, predicted: Any, trace: Any = None) -> float:
        if next(judged) == 1:
            raise ServerFailed("the judge is down")
        return 1.0 + len(predicted.answer) % 5

    with tempfile.TemporaryDirectory() as folder:
        settings = MultiTurnGRPOConfig(
            folder,
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            use_cpu=True,
            bf16=False,
            report_to="none",
            max_turn_tokens=8,
            disable_tqdm=True,
            learning_rate=1e-2,
            save_strategy="no",
        )
        provider = TrainerProvider(
            lambda **arguments: MultiTurnGRPOTrainer(
                model=model, processing_class=tokenizer, args=settings, **arguments
            )
        )
        program = dspy.Predict("question -> answer")
        adapter = Plain()
        program.set_lm(provider.lm)
        with dspy.context(adapter=adapter):
            GRPO(
                metric,
                adapter=adapter,
                exclude_demos=True,
                num_train_steps=2,
                num_rollouts_per_grpo_step=4,
            ).compile(
                program,
                [dspy.Example(question="Kenya ?", answer="Nairobi").with_inputs("question")],
            )
        rewards = [record["reward"] for record in read_rollouts(Path(folder) / "rollouts")]
    moved = bool((before != torch.cat([weight.flatten() for weight in model.parameters()])).any())
    return moved and len(rewards) == 8, provider.retokenized == 0, min(rewards) >= 1


def foreign(package: str) -> Path:
    """The interpreter of a package's own environment, which `make foreign` creates."""
    python = Path(os.environ.get("FOREIGN", ROOT / ".venv-foreign")) / package / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(
            f"{package} is not installed in an environment of its own: make foreign"
        )
    return python


def openenv() -> tuple[bool, bool, bool]:
    """A game on the package's own server, played with native calls; then the server dies."""
    command = [
        str(foreign("openenv")),
        str(ROOT / "tests" / "interop" / "foreign" / "openenv_server.py"),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        environment = OpenEnv(f"http://127.0.0.1:{server.stdout.readline().strip()}")
        tokenizer = tool_tokenizer()
        guesses = {n: json.dumps({"name": "act", "arguments": {"number": n}}) for n in (1, 3, 99)}
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in guesses.values()])

        def episode(*numbers: int) -> tuple[Rollout, bool]:
            row = run(
                environment.reset(
                    {"prompt": [{"role": "user", "content": "question : what ?"}], "secret": 3}
                )
            )
            turns = [f"<tool_call> {guesses[number]} </tool_call>" for number in numbers]
            return written(tokenizer, environment, *turns, row=row)

        rollout, exact = episode(1, 3, 3)  # over after the second
        earned = run(environment.reward([rollout.row["environments"]]))
        down, _ = episode(99, 99)
    finally:
        server.kill()
        server.wait()
    return (
        rollout.observations[0].text == "wrong" and earned == [0.75],
        exact,
        down.status == "failed",
    )


def verifiers() -> tuple[bool, bool, bool]:
    """An environment of the package that talks with the agent, in its own process; then the process
    ends.
    """
    from verifiers_tasks import VerifiersTasks

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests" / "interop" / "foreign"), os.environ.get("PYTHONPATH", "")]
    )
    tasks = VerifiersTasks("talk", foreign("verifiers"))
    tokenizer = tool_tokenizer()
    tokenizer.add_tokens(["die"])
    try:
        row = tasks.rows()[0]
        rollout, exact = written(tokenizer, tasks, "Kenya .", "Nairobi", row=run(tasks.reset(row)))
        earned = run(tasks.reward([rollout]))
        down, _ = written(tokenizer, tasks, "Nairobi die", row=run(tasks.reset(row)))
        counted = run(tasks.reward([down])) == [None]
    finally:
        tasks.close()
    return "You said Kenya" in rollout.observations[0].text and earned == [1.5], exact, counted


ROWS: dict[str, tuple[Callable[[], tuple[bool, bool | None, bool]], str]] = {
    "Python functions as tools": (functions, f"{INTEROP}/tools.py"),
    "TRL's tools=": (trl_tools, f"{INTEROP}/tools.py"),
    "several tools and a large LLM, called in parallel": (tools_and_llm, f"{INTEROP}/tools.py"),
    "MCP over stdio": (mcp_stdio, f"{INTEROP}/mcp.py"),
    "MCP over HTTP": (mcp_http, f"{INTEROP}/mcp.py"),
    "TRL's environment_factory=": (trl_class, f"{INTEROP}/trl.py"),
    "simulated user": (simulated_user, f"{INTEROP}/user.py"),
    "DSPy language model: an agent": (dspy_agent, f"{INTEROP}/dspy.py"),
    "DSPy language model: ProRefine around any chat model": (dspy_refined, f"{INTEROP}/dspy.py"),
    "DSPy module: an agent": (dspy_module, f"{INTEROP}/dspy.py"),
    "DSPy's GRPO through our trainer": (dspy_grpo, f"{CONTRIB}/dspy_provider.py"),
    "GEPA's adapter over our environments": (gepa_adapter, f"{INTEROP}/gepa.py"),
    "GEPA's optimize_anything by E-SPL": (gepa_engine, f"{CONTRIB}/optimize_anything.py"),
    "ProRefine behind an OpenAI endpoint": (
        prorefine_served,
        "src/agentic_prompting/serve/answering.py",
    ),
    "OpenEnv's servers": (openenv, f"{INTEROP}/openenv.py"),
    "verifiers' task sets": (verifiers, f"{CONTRIB}/verifiers_tasks.py"),
}


def matrix() -> dict[str, Any]:
    rows = []
    for name, (check, file) in ROWS.items():
        try:
            with redirect_stdout(sys.stderr):  # packages and the trainer print
                worked, exact, counted = check()
            reason = ""
        except Exception as error:
            worked = False
            exact = None
            counted = False
            reason = f"{type(error).__name__}: {str(error)[:200]}"
        lines = len((ROOT / file).read_text().splitlines())
        green = worked and exact is not False and counted
        rows.append(
            {
                "adapter": name,
                "green": green,
                "worked": worked,
                "token_exact": exact,
                "outage_counted": counted,
                "lines": lines,
                "reason": reason,
            }
        )
    return {"green": sum(row["green"] for row in rows), "of": len(rows), "rows": rows}


# --- the demo's world through native tool calls ---------------------------------------------------


def oracle_server(seed: int) -> StdioServerParameters:
    from mcp import StdioServerParameters

    path = ":".join(filter(None, sys.path))
    return StdioServerParameters(
        command=sys.executable, args=["-c", ORACLE, str(seed)], env={"PYTHONPATH": path}
    )


def as_tool_calls(text: str) -> str:
    """A turn of the sandbox's traces in native form: the same thought, the request as a call, a
    bare answer.
    """
    text = re.sub(
        r"<interaction_prompt> (.*?) </interaction_prompt>", lambda match: call(match[1]), text
    )
    return re.sub(r"<answer> (.*?) </answer>", r"\1", text)


def warm(folder: Path, seed: int) -> Path:
    """The demo's warm start, its traces in native form."""
    questions = make_split(seed, 256)[0]
    spec = replace(sandbox_spec(), grammar=ToolGrammar())
    seen_world = world_of(questions)

    def traces(n: int, rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        oracle = Oracle(seen_world, seed=seed)
        native = []
        for trace in make_traces(questions, n, DEFAULT_MIX, oracle, rng, world=seen_world):
            turns = [as_tool_calls(turn) for turn in trace["turns"]]
            native.append({**trace, "turns": turns})
        return native, native[: len(native) // 2]

    steps = WARM_START_STEPS, WARM_START_STEPS // 2
    with redirect_stdout(sys.stderr):
        return warm_started(
            folder, Recipe(spec, tool_tokenizer(), load_world(), traces, *steps, seed, seed)
        )


def train(through: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train with the demo's questions, traces, reward and settings, but native turns and the oracle
    as a tool.
    """
    questions, held_out = make_split(seed, 256)
    model = warm(folder, seed)
    if through == "MCP":
        tools: MCPTools | Callable[[str], str] = MCPTools(oracle_server(seed))
    else:
        oracle = Oracle(seed=seed)

        def tools(prompt: str) -> str:
            """Asks an oracle that knows one fact at a time.

            Args:
                prompt: The question.
            """
            return complete(oracle, [{"role": "user", "content": prompt.strip()}]).text

        tools.__name__ = "ask"
    environment = ToolEnvironment([tools])
    test = as_dataset(held_out)
    run = folder / through
    before = share_right(model, environment, test, seed)
    trainer = PromptR1Trainer(
        model=str(model),
        args=PromptR1Config(
            **settings(
                DEMO,
                output_dir=str(run),
                seed=seed,
                max_steps=DEMO_STEPS,
                chat_template_kwargs={
                    "tools": None
                },  # the sandbox's chat template cannot show tools
            )
        ),
        train_dataset=as_dataset(questions),
        environment=environment,
        prompt_template=sandbox_spec().prompt_template,
    )
    started = time.perf_counter()
    with redirect_stdout(sys.stderr):
        trainer.train()
    seconds = time.perf_counter() - started
    trainer.save_model()
    after = share_right(run, environment, test, seed)
    if through == "MCP":
        tools.close()
    return {
        "through": through,
        "seed": seed,
        "seconds": round(seconds),
        "before": before,
        "after": after,
    }


def share_right(model: Path, environment: Environment, test: Dataset, seed: int) -> dict[str, Any]:
    """The number of held-out questions that are answered right."""
    agent = PromptAgent.from_pretrained(model, environment)
    estimate = exact_match_of(agent.answer_all(list(test), seed=seed, progress=False))
    return {"right": round(estimate.mean * estimate.n), "n": estimate.n}


def trainings(seeds: list[int], records: Path | None) -> Iterator[dict[str, Any]]:
    """Train each way with each seed; append each result to `records` as it comes."""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            for way in ("functions", "MCP"):
                result = train(way, Path(folder), seed)
                append_record(records, result)
                yield result


def append_record(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        with gzip.open(path, "at", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument(
        "--train", action="store_true", help="Instead, train through native calls and through MCP."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument(
        "--records",
        type=Path,
        help="With --train: append each training, as records/tools.jsonl.gz.",
    )
    arguments = parser.parse_args()
    result: dict[str, Any] = {"trained": []} if arguments.train else matrix()
    for training in trainings(arguments.seeds, arguments.records) if arguments.train else ():
        result["trained"].append(training)
        print(training, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(result))
    elif not arguments.train:
        for row in result["rows"]:
            print(f"{'green' if row['green'] else 'no   '}  {row['adapter']}  {row['reason']}")
        print(f"{result['green']} of {result['of']} green")


if __name__ == "__main__":
    main()
