"""Tools in prompts, in traces and in trainers."""

import copy
import json
import random
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
    ToolEnvironment,
    ToolGrammar,
)
from agentic_prompting.llm.loop import run
from agentic_prompting.rewards import exact_match_reward
from agentic_prompting.rollout import (
    AgentSpec,
    ChatFormat,
    Limits,
    Rollout,
    Sample,
    parse_turn,
    play,
)
from agentic_prompting.sandbox import DEFAULT_MIX, Oracle, make_split, make_traces
from support.programs import byte_tokenizer
from support.tokenizers_for_tests import tokenizer_for
from support.tool_episodes import Guess, call, capital


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
        ("llama3_1", "<tool_call>"),
        ("gptoss", "<tool_call>"),
        ("glm4moe", "<tool_call>"),
        ("deepseekv3", "chat template"),
    ],
)
def test_tools_that_a_template_cannot_hold_are_refused(name, named):
    with pytest.raises(ValueError, match=named):
        spec_with_tools().create_format(byte_tokenizer(name))


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_5_think", "qwen3_8", "nemotron_3_nano"]
)
def test_templates_that_hold_tools_are_taken(name):
    assert "capital" in decoded_prompt(spec_with_tools(), name)


def decoded_prompt(spec, name):
    form = spec.create_format(byte_tokenizer(name))
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
        AgentSpec(environments={"shop": own}).create_format(byte_tokenizer("llama3"))


def test_tools_without_a_chat_template_are_a_warning(caplog):
    spec_with_tools().create_format(byte_tokenizer("qwen3"))
    assert not caplog.records
    replace(spec_with_tools(), prompt_format="text").create_format(byte_tokenizer("qwen3"))
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


class Patient(Guess):
    """Gives a reward also to those who never ask."""

    def get_reward(self) -> float:
        return 0.25


def test_the_demos_traces_in_native_calls_say_the_same():
    from benchmarks.reliability.interop import as_tool_calls

    train, _ = make_split(0)
    for trace in make_traces(train, 60, DEFAULT_MIX, Oracle(), random.Random(0)):
        for text in trace["turns"]:
            tagged = parse_turn(text)
            native = ToolGrammar().parse(as_tool_calls(text))
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
            model=Qwen3ForCausalLM(
                Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=16, **shape)
            ),
            args=MultiTurnGRPOConfig(
                str(tmp_path / "run"),
                max_steps=1,
                per_device_train_batch_size=4,
                num_generations=4,
                use_cpu=True,
                bf16=False,
                report_to="none",
                max_turn_tokens=8,
                max_turns=2,
                disable_tqdm=True,
                logging_steps=1,
                reward_weights=reward_weights,
                overwrite=True,
            ),
            train_dataset=rows,
            processing_class=tokenizer,
            **given,
        )
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
