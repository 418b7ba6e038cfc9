"""A conversation in the chat template of each model family: what is between turns, thoughts, system
messages.
"""

import copy

import pytest

from agentic_prompting.rollout import AgentSpec, ChatFormat
from support.families import INTO_USER, TEMPLATES
from support.tokenizers_for_tests import tokenizer_for

REPLY = "It is Kenya."
ANSWER = "<answer> shilling </answer>"


def format_of(name):
    """A template's format, with every token that may end a turn."""
    tokenizer = tokenizer_for(name)
    ends = [
        tokenizer.eos_token_id,
        *tokenizer.convert_tokens_to_ids(["<|call|>"] if name == "trl/gptoss" else []),
    ]
    return ChatFormat(tokenizer, end_of_turn_ids=ends)


def rendered(form, *said):
    """What the template itself makes of user, agent, user, ... up to the next turn of the agent."""
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return form.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.fixture(params=[family for family, (name, *_) in TEMPLATES.items() if name])
def in_its_template(request):
    """Those of tokenizers that have one: Mamba's has none, and its prompts are text."""
    return TEMPLATES[request.param]


def test_conversation_equals_the_rendered_template(in_its_template):
    """Two turns, ended by the agent itself and stopped at their tags; the thought of the first turn
    stays.
    """
    name, _, thoughts = in_its_template
    form = format_of(name)
    decode = form.tokenizer.decode
    header = {"trl/gptoss": "<|channel|>final<|message|>", "mistral": " "}.get(
        name, ""
    )  # written by the agent itself
    ask = "<interaction_prompt> which ? </interaction_prompt>"
    observed = form.grammar.frame[0] + REPLY + form.grammar.frame[1]
    expected = rendered(form, "Which currency?", "QTURNQ", observed)
    thought = {
        "plain text": "<think> a </think> ",
        "kept": "<think> a </think> ",
        "opened, kept": "a </think> ",
        "kept, a channel": "<|channel|>analysis<|message|>a<|end|><|start|>assistant",
    }[thoughts]
    turn = thought + header + ask
    stopped = form.tokenizer(turn, add_special_tokens=False)["input_ids"]
    eos = form.tokenizer.eos_token_id
    opening = form.prompt_ids("Which currency?")
    expected = expected.replace(header + "QTURNQ", turn)
    if (
        form.turn_prefix
    ):  # opened by the template in front of a turn, but not in a turn of the history
        expected = expected.replace("assistant\n" + thought, f"assistant\n<think>\n{thought}")
    assert decode([*opening, *stopped, *form.observation_ids(REPLY, stopped)]) == expected
    # Ended by its own token, which in the history of gpt-oss is another one, a turn is not ended
    # twice.
    ended = [*stopped, eos]
    own = (
        expected.replace(ask + "<|end|>", ask + "<|return|>") if name == "trl/gptoss" else expected
    )
    assert decode([*opening, *ended, *form.observation_ids(REPLY, ended)]) == own
    assert form.turn_ids(ANSWER)[-1] == eos
    assert form.parse(
        [*form.tokenizer(thought + header + ANSWER, add_special_tokens=False)["input_ids"], eos]
    ).answer


def test_a_system_message_is_there(in_its_template):
    name, system, _ = in_its_template
    spec = AgentSpec(system_prompt="Be brief.")
    tokenizer = tokenizer_for(name)
    text = tokenizer.decode(
        spec.create_format(tokenizer).prompt_ids(spec.messages({"question": "Which currency?"}))
    )
    between = text.partition("Be brief.")[2].partition("Which currency?")[0]
    assert "Which currency?" in text and (between == "\n\n") == (system == INTO_USER)


def test_template_without_system_message_is_refused():
    says = "system messages .System role not supported.: leave the system prompt out"
    with pytest.raises(ValueError, match=says):
        AgentSpec(system_prompt="Be brief.").create_format(tokenizer_for("trl/gemma"))
    drops = copy.deepcopy(tokenizer_for("chatml"))
    drops.chat_template = drops.chat_template.replace(
        "messages %}", "messages if m.role != 'system' %}"
    )
    with pytest.raises(ValueError, match="it leaves them out"):
        AgentSpec(system_prompt="Be brief.").create_format(drops)
    AgentSpec().create_format(tokenizer_for("trl/gemma"))
