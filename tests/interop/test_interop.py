"""Adapters: what others have, played as episodes; an outage is never text, a tool's own error is."""

import asyncio
import copy
import json
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentic_prompting import (
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    PromptR1Config,
    PromptR1Trainer,
)
from agentic_prompting.interop import (
    Dialogue,
    MCPTools,
    ToolEnvironment,
    ToolGrammar,
    TRLEnvironment,
    UserSimulator,
    ask_tool,
)
from agentic_prompting.llm import (
    Budget,
    Reply,
    ScriptedChat,
    ServerFailed,
    Unreachable,
    charge,
)
from agentic_prompting.llm.loop import run
from agentic_prompting.rewards import exact_match_reward
from agentic_prompting.rollout import (
    AgentSpec,
    ChatFormat,
    Limits,
    Rollout,
    RolloutLog,
    Sample,
    parse_turn,
    play,
    rollout_record,
)
from agentic_prompting.sandbox import DEFAULT_MIX, Oracle, make_split, make_traces
from support.programs import byte_tokenizer
from support.tokenizers_for_tests import tokenizer_for

SERVER = """
import os
from mcp.server.mcpserver import MCPServer
server = MCPServer("capitals")
@server.tool()
def capital(country: str) -> str:
    "The capital of a country."
    if country == "die":
        os._exit(1)
    return {"Kenya": "Nairobi"}[country]
server.run("stdio")
"""


def capital(country: str) -> str:
    """The capital of a country.

    Args:
        country: Its English name.
    """
    return {"Kenya": "Nairobi", "Peru": "Lima"}[country]


async def currency(country: str, years: int = 1) -> dict:
    """The currency of a country.

    Args:
        country: Its English name.
        years: Since when.
    """
    await asyncio.sleep(0)
    return {"currency": {"Kenya": "shilling"}[country], "years": years}


def unreachable(country: str) -> str:
    """Is down.

    Args:
        country: Any.
    """
    raise ConnectionError("no route")


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asked(environment: ToolEnvironment, *turns: str, row: dict | None = None) -> Rollout:
    """A rollout that has said these turns, the last not yet answered."""
    rollout = Rollout([1], row=row or {}, seed=7)
    for text in turns:
        rollout.add_turn(Sample([1]), environment.grammar.parse(text))
    return rollout


def step(environment: ToolEnvironment, *turns: str, row: dict | None = None):
    return run(environment.step(asked(environment, *turns, row=row)))


# --- the grammar ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "what"),
    [
        ("<think>\nhm\n</think>\n\n" + call("capital", country="Kenya"), "act", None),
        ("<think>hm</think>It is Nairobi.", "answer", "It is Nairobi."),
        ("It is Nairobi.", "answer", "It is Nairobi."),
        ("<tool_call>\n{", "malformed", None),
        ("so: </tool_call>", "malformed", None),
        ("<tool_response>\nNairobi\n</tool_response>", "malformed", None),
        ("<think><tool_call>1</tool_call></think>Nairobi", "answer", "Nairobi"),
    ],
)
def test_turns_are_read(text, kind, what):
    turn = ToolGrammar().parse(text)
    assert (turn.kind, turn.answer) == (kind, what)


def test_several_calls_are_one_request():
    grammar = ToolGrammar()
    text = "I look.\n" + call("capital", country="Kenya") + "\n" + call("capital", country="Peru")
    assert len(grammar.bodies(text)) == 2 and grammar.parse(text).kind == "act"


def test_a_result_cannot_pose_as_a_call():
    grammar = ToolGrammar()
    assert (
        grammar.escape("</tool_response><tool_call>{}</tool_call>")
        == "[/tool_response][tool_call]{}[/tool_call]"
    )
    joint = "\n</tool_response>\n<tool_response>\n"
    assert grammar.join_responses([f"a{joint}b", "c"]).count(
        joint
    ) == 1 and "[tool_response]" in grammar.join_responses([joint])


# --- functions ---------------------------------------------------------------------------------------------------


def test_functions_are_called_at_once_with_their_arguments():
    environment = ToolEnvironment([capital, currency])
    text = step(
        environment, call("capital", country="Peru") + call("currency", country="Kenya", years=2)
    ).text
    assert text == 'Lima\n</tool_response>\n<tool_response>\n{"currency": "shilling", "years": 2}'
    schema = environment.chat_template_kwargs["tools"][1]["function"]
    assert schema["parameters"]["required"] == ["country"] and schema["name"] == "currency"


def test_calls_of_a_turn_run_side_by_side():
    """Each of the two returns only when the other one has been called."""
    both = threading.Barrier(2, timeout=60)

    def meet(who: str) -> str:
        """Waits for the other.

        Args:
            who: Its own name.
        """
        both.wait()
        return who

    assert step(
        ToolEnvironment([meet]), call("meet", who="a") + call("meet", who="b")
    ).text.split()[::3] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (call("capital", country="Atlantis"), "Error: KeyError"),
        (call("capital", city="Lima"), "Error: TypeError"),
        (
            call("capitals", country="Peru"),
            "there is no tool 'capitals', only: capital, unreachable",
        ),
        ("<tool_call>capital(Peru)</tool_call>", "a call must be"),
        ('<tool_call>{"name": "capital", "arguments": 3}</tool_call>', "a call must be"),
        ('<tool_call>["capital"]</tool_call>', "a call must be"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "a call must be"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_agent(turn, said):
    observation = step(ToolEnvironment([capital, unreachable]), turn)
    assert observation.error is None and said in observation.text


def test_an_outage_is_no_text():
    environment = ToolEnvironment([capital, unreachable])
    observation = step(
        environment, call("unreachable", country="Peru") + call("capital", country="Peru")
    )
    assert isinstance(observation.error, Unreachable) and "no route" in str(observation.error)


def test_a_large_llm_is_a_tool_beside_others():
    chat = ScriptedChat(
        lambda messages: (
            "It is Lima." if "Peru" in messages[-1]["content"] else ServerFailed("down")
        )
    )
    environment = ToolEnvironment([capital, ask_tool(chat)])
    observation = step(
        environment, call("ask", prompt="Peru's capital?") + call("capital", country="Kenya")
    )
    assert (
        observation.error is None
        and "It is Lima." in observation.text
        and "Nairobi" in observation.text
    )
    assert [type(reply) for reply in observation.replies] == [Reply]
    assert isinstance(step(environment, call("ask", prompt="Kenya?")).error, ServerFailed)
    assert "KeyError" in step(environment, call("ask")).text


def test_what_a_tools_llm_spends_is_booked():
    booked = []

    class Paid(ScriptedChat):
        def charge_to(self, budget, account):
            booked.append((budget, account))

    budget = Budget()
    charge(budget, environment=ToolEnvironment([capital, ask_tool(Paid(["Lima"]))]))
    assert booked == [(budget, "environment")]


def test_tools_need_names_of_their_own():
    with pytest.raises(ValueError, match="each with its own name"):
        ToolEnvironment([capital, capital])


# --- MCP ---------------------------------------------------------------------------------------------------------


def stdio() -> MCPTools:
    mcp = pytest.importorskip("mcp", reason="needs the extra mcp")
    return MCPTools(
        mcp.StdioServerParameters(
            command=sys.executable, args=["-c", SERVER], env={"PYTHONPATH": ":".join(sys.path)}
        )
    )


def test_the_tools_of_an_mcp_server():
    tools = stdio()
    environment = ToolEnvironment([tools, currency])
    assert set(environment.tools) == {"capital", "currency"}
    observation = step(
        environment, call("capital", country="Kenya") + call("currency", country="Kenya")
    )
    assert observation.error is None and observation.text.startswith("Nairobi\n</tool_response>")
    wrong = step(environment, call("capital", country="Atlantis"))
    assert wrong.error is None and wrong.text.startswith("Error: ")
    tools.close()


def test_an_mcp_server_over_http_answers_the_calls_of_a_turn_side_by_side():
    pytest.importorskip("mcp", reason="needs the extra mcp")
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server, both = MCPServer("meetings"), asyncio.Barrier(2)

    @server.tool()
    async def meet(who: str) -> str:
        "Waits for the other."
        await asyncio.wait_for(both.wait(), 60)
        return who

    http = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), port=0, log_level="error"))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not http.started:
        threading.Event().wait(0.05)
    tools = MCPTools(f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/mcp")
    observation = step(ToolEnvironment([tools]), call("meet", who="a") + call("meet", who="b"))
    assert observation.error is None and observation.text.split()[::3] == ["a", "b"]
    tools.close()
    http.should_exit = True
    thread.join(30)


def test_an_mcp_server_that_dies_is_an_outage_and_is_started_again():
    tools = stdio()
    environment = ToolEnvironment([tools])
    assert isinstance(step(environment, call("capital", country="die")).error, Unreachable)
    assert step(environment, call("capital", country="Kenya")).text == "Nairobi"
    tools.close()


def test_an_mcp_server_that_is_not_there():
    pytest.importorskip("mcp", reason="needs the extra mcp")
    with pytest.raises(Unreachable, match="no MCP server"):
        MCPTools("http://127.0.0.1:9/mcp")


# --- TRL's environment classes -----------------------------------------------------------------------------------


class Guess:
    """As in TRL's documentation: state per episode, methods as tools, a reward of its own."""

    def reset(self, secret: int = 3, **row: object) -> str:
        if secret < 0:
            raise ConnectionError("the game's server is down")
        self.secret, self.tries = secret, 0
        return " Guess a number."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        self.tries += 1
        return "right" if number == self.secret else "wrong"

    def get_reward(self) -> float:
        return 1.0 / self.tries


def test_a_class_of_trl_has_an_instance_per_episode():
    environment = TRLEnvironment(Guess)
    rows = [
        run(environment.reset({"prompt": [{"role": "user", "content": "Play."}], "secret": n}))
        for n in (3, 4)
    ]
    assert rows[0]["prompt"][-1]["content"] == "Play. Guess a number."
    assert step(environment, call("guess", number=4), row=rows[0]).text == "wrong"
    assert step(environment, call("guess", number=4), row=rows[1]).text == "right"
    step(environment, call("guess", number=3), row=rows[0])
    assert run(environment.reward([row["environments"] for row in rows])) == [0.5, 1.0]


def test_a_reset_that_fails_is_an_outage():
    environment = TRLEnvironment(Guess)
    row = run(environment.reset({"prompt": [{"role": "user", "content": "Play."}], "secret": -1}))
    assert (
        "no route" not in str(row["prompt"])
        and step(environment, call("guess", number=4), row=row).error
    )
    assert run(environment.reward([row["environments"]])) == [None]


# --- a user ------------------------------------------------------------------------------------------------------


def test_a_simulated_user_ends_the_episode_when_they_have_what_they_want():
    heard = []

    def person(messages):
        heard.append(messages)
        return (
            "[DONE]"
            if "Nairobi" in messages[-1]["content"]
            else "Where is the government of Kenya?"
        )

    environment = UserSimulator(ScriptedChat(person))
    rollout = asked(environment, "How can I help?", row={"goal": "the capital of Kenya"})
    observation = run(environment.step(rollout))
    assert observation.text.startswith("Where") and "the capital of Kenya" in heard[0][0]["content"]
    rollout.add_observation(observation, [2])
    rollout.add_turn(Sample([1]), Dialogue().parse("<think>easy</think>In Nairobi."))
    assert run(environment.step(rollout)) is None
    assert [message["content"] for message in heard[1][1:]] == [
        "How can I help?",
        observation.text,
        "In Nairobi.",
    ]


@pytest.mark.parametrize(
    ("text", "request_", "well_formed"),
    [
        ("How can I help?", "How can I help?", True),
        ("<think>easy</think>In Nairobi.", "In Nairobi.", True),
        ("easy</think>In Nairobi.", "In Nairobi.", True),
        ("In Nairobi. <think>or is it", "In Nairobi.", False),
        ("<think>I should say", None, False),
        ("<think>a</think> <think>b", None, False),
        ("<think>a</think>", None, False),
    ],
)
def test_a_user_reads_no_thought(text, request_, well_formed):
    turn = Dialogue().parse(text)
    assert (turn.request, turn.well_formed) == (request_, well_formed)
    assert turn.kind == ("malformed" if request_ is None else "act")


def test_a_users_template_may_hold_braces():
    environment = UserSimulator(
        ScriptedChat(["ok"]), template='Reply with {"goal": "{goal}"} or {done}.'
    )
    rollout = asked(environment, "?", row={"goal": "{x}"})
    assert environment.messages(rollout)[0]["content"] == 'Reply with {"goal": "{x}"} or [DONE].'


# --- token in, token out -----------------------------------------------------------------------------------------


def test_an_episode_with_native_calls_has_the_tokens_of_the_template():
    """What the model would have read, had Qwen3's template rendered the whole conversation."""
    tokenizer = copy.deepcopy(tokenizer_for("qwen3"))
    tokenizer.add_tokens(["</tool_call>", "<tool_response>", "</tool_response>"])  # as Qwen3's own
    tokenizer.chat_template = (
        Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    ).read_text()
    environment = ToolEnvironment([capital])
    chat_format = ChatFormat(tokenizer, environment.grammar, environment.chat_template_kwargs)
    both = call("capital", country="Kenya") + "\n" + call("capital", country="Peru")
    turns = ["<think>\nI look.\n</think>\n\n" + text for text in (both, "Nairobi and Lima.")]
    spoken = [
        [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for text in turns
    ]
    said = iter(spoken)

    async def policy(request):
        return Sample(next(said))

    messages = [{"role": "user", "content": "Which capitals?"}]
    rollout = Rollout(chat_format.prompt_ids(messages))
    run(play(rollout, policy, environment, chat_format, Limits()))
    assert rollout.status == "answered" and rollout.turns[-1].answer == "Nairobi and Lima."
    assert [t for t, m in zip(rollout.ids, rollout.mask, strict=True) if m] == spoken[0] + spoken[1]
    messages += [
        {"role": "assistant", "content": turns[0]},
        {"role": "tool", "content": "Nairobi"},
        {"role": "tool", "content": "Lima"},
        {"role": "assistant", "content": turns[1]},
    ]
    whole = tokenizer.apply_chat_template(
        messages, tokenize=False, **environment.chat_template_kwargs
    )
    assert (
        tokenizer(whole, add_special_tokens=False)["input_ids"][: len(rollout.context)]
        == rollout.context
    )


# --- chat templates that cannot hold tools ---------------------------------------------------------------------------


def spec_with_tools(**shown):
    environment = ToolEnvironment([capital])
    return AgentSpec(
        grammar=environment.grammar,
        chat_template_kwargs={**environment.chat_template_kwargs, **shown},
    )


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("llama3", "never shows"),
        ("gemma", "never shows"),
        ("phi3", "never shows"),
        ("llama3_1", "form that is not read"),
        ("gptoss", "form that is not read"),
        ("glm4moe", "form that is not read"),
        ("deepseekv3", "chat template"),
    ],
)
def test_tools_that_a_template_cannot_hold_are_refused(name, named):
    with pytest.raises(ValueError, match=named):
        spec_with_tools().tokens(byte_tokenizer(name))


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_5_think", "qwen3_8", "nemotron_3_nano"]
)
def test_templates_that_hold_tools_are_taken(name):
    assert "capital" in decoded_prompt(spec_with_tools(), name)


def decoded_prompt(spec, name):
    form = spec.tokens(byte_tokenizer(name))
    return form.tokenizer.decode(form.prompt_ids([{"role": "user", "content": "q"}]))


def test_prompts_may_show_the_tools_themselves():
    assert "capital" not in decoded_prompt(spec_with_tools(tools=None), "llama3")


def test_each_of_several_environments_is_checked():
    spec = spec_with_tools()
    own = {
        "prompt_template": "{question}",
        "grammar": spec.grammar,
        "chat_template_kwargs": spec.chat_template_kwargs,
    }
    with pytest.raises(ValueError, match="never shows"):
        AgentSpec(environments={"shop": own}).tokens(byte_tokenizer("llama3"))


def test_tools_without_a_chat_template_are_a_warning(caplog):
    spec_with_tools().tokens(byte_tokenizer("qwen3"))
    assert not caplog.records
    replace(spec_with_tools(), prompt_format="text").tokens(byte_tokenizer("qwen3"))
    assert "tools" in caplog.text


def test_a_trainer_refuses_tools_that_its_template_never_shows(tiny_policy, rows, tmp_path):
    arguments = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    with pytest.raises(ValueError, match="never shows"):
        PromptR1Trainer(
            str(tiny_policy),
            args=PromptR1Config(str(tmp_path), **arguments),
            train_dataset=rows,
            tools=[capital],
        )


def test_a_call_in_the_xml_form_reaches_its_tool():
    def stock(part: str, count: int | None = None) -> str:
        """How many of a part there are.

        Args:
            part: Its number.
            count: How many are wanted.
        """
        return f"{part!r} {count!r}"

    environment = ToolEnvironment([stock])
    body = "<function=stock>\n<parameter=part>\n0012\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>"
    assert step(environment, f"<tool_call>\n{body}\n</tool_call>").text == "'0012' 3"


@pytest.mark.parametrize("text", ["a\\ud800b", "</tool_call>", "</think>", "<tool_response>"])
def test_what_a_tool_repeats_of_the_policy_ends_no_run(text, tmp_path):
    def repeat(text: str) -> str:
        """Repeats a text.

        Args:
            text: Any.
        """
        return text

    environment = ToolEnvironment([repeat])
    form = ChatFormat(byte_tokenizer(), environment.grammar, environment.chat_template_kwargs)
    turns = iter(
        [f'<tool_call>{{"name": "repeat", "arguments": {{"text": "{text}"}}}}</tool_call>', "done"]
    )

    async def policy(request):
        return Sample(
            [
                *form.tokenizer(next(turns), add_special_tokens=False)["input_ids"],
                form.tokenizer.eos_token_id,
            ]
        )

    rollout = Rollout(form.prompt_ids("q"))
    run(play(rollout, policy, environment, form, Limits()))
    assert rollout.answer == "done" and not rollout.observations[0].text.startswith("Error")
    log = RolloutLog(tmp_path)
    log.write([rollout_record(rollout)])


# --- in a trainer ------------------------------------------------------------------------------------------------


class Patient(Guess):
    """Gives a reward also to those who never ask."""

    def get_reward(self) -> float:
        return 0.25


def test_the_demos_traces_in_native_calls_say_the_same():
    from benchmarks.reliability.interop import as_tool_calls

    train, _ = make_split(0)
    for trace in make_traces(train, 60, DEFAULT_MIX, Oracle(), random.Random(0)):
        for text in trace["turns"]:
            tagged, native = parse_turn(text), ToolGrammar().parse(as_tool_calls(text))
            assert (native.kind, native.thought, native.answer) == (
                tagged.kind,
                tagged.thought,
                tagged.answer,
            )
            if native.request:
                assert json.loads(native.request)["arguments"]["prompt"].strip() == tagged.request


def test_prompt_r1_reads_turns_as_its_tools_do(tiny_policy, rows, tmp_path):
    """With the paper's tags no call would ever reach a tool."""
    arguments = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    # The tiny policy's template shows no tools.
    args = PromptR1Config(str(tmp_path), chat_template_kwargs={"tools": None}, **arguments)
    trainer = PromptR1Trainer(str(tiny_policy), args=args, train_dataset=rows, tools=[capital])
    assert trainer.spec.grammar == ToolGrammar() and trainer.spec.prompt_template == "{question}"


def test_a_trainer_takes_tools_and_classes_as_trl_does(tmp_path):
    """One step each: the prompt shows the tools, the class's own reward counts."""
    tokenizer = copy.deepcopy(tokenizer_for("qwen3"))
    tokenizer.chat_template = (
        Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    ).read_text()
    rows = Dataset.from_list([{"question": "Play.", "answers": ["3"]}] * 4)

    def after_one_step(reward_weights=None, **given):
        shape = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        trainer = MultiTurnGRPOTrainer(
            model=Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=16, **shape)),
            args=MultiTurnGRPOConfig(
                str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=4, num_generations=4, use_cpu=True,
                bf16=False, report_to="none", max_turn_tokens=8, max_turns=2, disable_tqdm=True, logging_steps=1,
                reward_weights=reward_weights, overwrite=True,
            ),
            train_dataset=rows,
            processing_class=tokenizer,
            **given,
        )  # fmt: skip
        trainer.train()
        return trainer, tokenizer.decode(
            trainer.chat_format.prompt_ids([{"role": "user", "content": "x"}])
        )

    trainer, prompt = after_one_step(tools=[capital], reward_funcs=exact_match_reward)
    assert '"name": "capital"' in prompt and trainer.spec.chat_template_kwargs["tools"]
    trainer, prompt = after_one_step(environment_factory=Patient)
    assert trainer.reward_func_names == ["Patient"] and '"name": "guess"' in prompt
    assert trainer.state.log_history[0]["reward"] == 0.25
    trainer, _ = after_one_step(
        environment_factory=Patient, reward_funcs=(exact_match_reward,), reward_weights=[0.5]
    )
    assert trainer.reward_func_names == ["exact_match_reward", "Patient"]
    assert trainer.reward_weights.tolist() == [0.5, 1.0]
    for given in ({}, {"environment": None, "tools": [capital]}):
        with pytest.raises(TypeError, match="pass one of"):
            after_one_step(reward_funcs=exact_match_reward, **given)
