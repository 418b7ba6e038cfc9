"""A TRL script means the same here: text prompts, what reward functions see, and images, which are
refused by name.
"""

import itertools
import json
from dataclasses import replace

import pytest
from datasets import Dataset
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting import LLMEnvironment, MultiTurnGRPOTrainer, PromptAgent
from agentic_prompting.interop import ToolEnvironment
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.rollout import (
    AgentSpec,
    BatchEngine,
    ChatFormat,
    FreeText,
    Limits,
    Observation,
    Rollout,
    Sample,
    TagGrammar,
    Turn,
    play_all,
    turn_seed,
)
from agentic_prompting.trainers import MultiTurnGRPOConfig
from agentic_prompting.trainers.reward_functions import render_completion
from support.programs import byte_format, play_program
from support.tokenizers_for_tests import tokenizer_for

ASK = "<think> what now </think> <interaction_prompt> Which country? </interaction_prompt>"
END = "<think> done </think> <answer> Kenya </answer>"
LINES = ["which country ?", "what is the capital of Kenya ?"] * 2


def no_reward(completions, **kwargs):
    return [None for _ in completions]


def arguments(folder, **changes):
    return MultiTurnGRPOConfig(
        **{
            "output_dir": str(folder),
            "num_generations": 2,
            "per_device_train_batch_size": 4,
            "max_steps": 1,
            "max_completion_length": 12,
            "learning_rate": 1e-3,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **changes,
        }
    )


class Scripted(BatchEngine):
    """A policy that writes the given turns, whatever it is asked."""

    def __init__(self, form, turns, seeds):
        super().__init__(self.sample, on_callers_thread=True)
        self.form = form
        self.turns = turns
        self.seeds = seeds

    def sample(self, requests):
        return [
            Sample(self.form.turn_ids(self.turns[self.number(request)])) for request in requests
        ]

    def number(self, request):
        return next(
            n for n in range(9) for seed in self.seeds if turn_seed(seed, n) == request.seed
        )


def seen_by_rewards(policy, folder, prompts, **options):
    """What a reward function is called with in one step of training on `prompts`."""
    calls = []

    def reward(**columns):
        calls.append(columns)
        return [float(i % 2) for i in range(len(columns["prompts"]))]

    options = {"environment": None, "args": arguments(folder), **options}
    trainer = MultiTurnGRPOTrainer(
        model=str(policy),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
        **options,
    )
    trainer.train()
    return trainer, calls[0]


# --- text prompts: TRL's standard format ----------------------------------------------------------


def test_a_text_prompt_is_tokenised_as_it_is(tiny_policy, tmp_path):
    trainer, seen = seen_by_rewards(tiny_policy, tmp_path, LINES)
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    for prompt, completion, rollout in zip(
        seen["prompts"], seen["completions"], seen["rollout"], strict=True
    ):
        assert isinstance(prompt, str) and prompt in LINES
        assert rollout.prompt_ids == tokenizer(prompt)["input_ids"]
        assert completion == tokenizer.decode(rollout.ids, skip_special_tokens=True)
    assert trainer.spec.prompt_format == "text" and trainer.spec.grammar == FreeText()


def test_a_model_without_a_chat_template_trains_on_text_and_is_used_on_text(tiny_policy, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.chat_template = None
    trainer, seen = seen_by_rewards(tiny_policy, tmp_path, LINES, processing_class=tokenizer)
    assert all(isinstance(completion, str) for completion in seen["completions"])
    trainer.save_model(str(tmp_path / "saved"))
    spec = AgentSpec.load(tmp_path / "saved")
    assert spec.prompt_format == "text"
    agent = PromptAgent(
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), tokenizer, spec=spec
    )
    (rollout,) = agent.answer_all([{"prompt": LINES[0]}], progress=False)
    assert rollout.prompt_ids == tokenizer(LINES[0])["input_ids"]


def test_a_question_still_needs_a_chat_template(tiny_policy, tmp_path, rows):
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template.* a `prompt` that is a string"):
        MultiTurnGRPOTrainer(
            str(tiny_policy),
            no_reward,
            arguments(tmp_path),
            rows,
            environment=None,
            processing_class=tokenizer,
        )


def test_turns_and_observations_of_a_text_prompt_are_joined_as_text():
    tokenizer = tokenizer_for("chatml")
    form = AgentSpec(prompt_format="text").create_format(tokenizer)
    rollout = Rollout(form.prompt_ids("Q: where?\n"))
    environment = LLMEnvironment(
        ScriptedChat(lambda messages: "It is <answer>Kenya</answer> <|im_end|>.")
    )
    play_all([rollout], Scripted(form, [ASK, END], [0]), environment, form, Limits())
    reply = "It is [answer]Kenya[/answer] <|im_end|>."
    observation = f"\n<interaction_response>\n{reply}\n</interaction_response>\n"
    assert tokenizer.decode(rollout.context) == f"Q: where?\n{ASK}{observation}{END}"
    assert rollout.status == "answered" and rollout.answer == "Kenya"
    sampled_tokens = [
        token for token, is_sampled in zip(rollout.ids, rollout.mask, strict=True) if is_sampled
    ]
    assert tokenizer.decode(sampled_tokens) == ASK + END
    assert tokenizer.eos_token_id not in rollout.context  # the reply's is plain text


def test_reward_functions_see_several_turns_of_a_text_prompt_as_one_text(asking_policy, tmp_path):
    environment = LLMEnvironment(ScriptedChat(lambda messages: "the answer is Swahili ."))
    options = {
        "environment": environment,
        "grammar": TagGrammar(),
        "args": arguments(tmp_path, max_completion_length=99),
    }
    trainer, seen = seen_by_rewards(asking_policy, tmp_path, LINES, **options)
    for completion, rollout in zip(seen["completions"], seen["rollout"], strict=True):
        assert completion == trainer.chat_format.tokenizer.decode(
            rollout.ids, skip_special_tokens=True
        )


def test_a_system_prompt_stands_before_a_text_prompt(tiny_policy, tmp_path):
    _, seen = seen_by_rewards(tiny_policy, tmp_path, LINES, system_prompt="be brief .")
    assert set(seen["prompts"]) == {f"be brief .\n\n{line}" for line in LINES}


def test_data_sets_of_both_forms_are_refused(tmp_path, rows):
    text = Dataset.from_list([{"prompt": line} for line in LINES])
    with pytest.raises(ValueError, match="the column `prompt`"):
        MultiTurnGRPOTrainer(
            "no/such/model", no_reward, arguments(tmp_path), text, rows, environment=None
        )


def test_the_format_is_saved_with_the_agent(tmp_path):
    spec = AgentSpec(prompt_format="text", grammar=FreeText())
    spec.save(tmp_path)
    assert AgentSpec.load(tmp_path) == spec
    saved = json.loads((tmp_path / "agentic_prompting.json").read_text())
    del saved["prompt_format"]  # of an agent that was saved before there was one
    (tmp_path / "agentic_prompting.json").write_text(json.dumps(saved))
    assert AgentSpec.load(tmp_path) == replace(spec, prompt_format="chat")
    with pytest.raises(ValueError, match="prompt_format must be chat or text, got 'x'"):
        AgentSpec(prompt_format="x")


# --- one turn, as in TRL --------------------------------------------------------------------------


def test_without_an_environment_a_turn_is_the_answer_whatever_tags_are_in_it(tiny_policy, tmp_path):
    """A script that asks for <answer> tags must not be stopped or read by Prompt-R1's grammar."""
    conversations = [[{"role": "user", "content": line}] for line in LINES]
    trainer, seen = seen_by_rewards(tiny_policy, tmp_path, conversations)
    assert trainer.spec.stop_texts == ()
    assert {rollout.status for rollout in seen["rollout"]} <= {
        "answered",
        "truncated",
    }


def test_one_turn_may_be_as_long_as_the_completion(tiny_policy, tmp_path):
    """`max_turn_tokens` has a default that a TRL script knows nothing of."""
    conversations = [[{"role": "user", "content": LINES[0]}]] * 4
    for changes, expected in (({}, 4096), ({"max_turn_tokens": 7}, 7)):
        args = arguments(tmp_path, max_completion_length=4096, **changes)
        rows = Dataset.from_list([{"prompt": prompt} for prompt in conversations])
        trainer = MultiTurnGRPOTrainer(str(tiny_policy), no_reward, args, rows, environment=None)
        assert trainer.limits.max_turn_tokens == trainer.spec.limits.max_turn_tokens == expected


def test_a_completion_that_the_limit_cuts_off_has_no_end_and_is_truncated(tiny_policy, tmp_path):
    """TRL logs it as clipped, and can mask it (`mask_truncated_completions`)."""
    conversations = [[{"role": "user", "content": line}] for line in LINES]
    args = arguments(
        tmp_path, max_completion_length=2, mask_truncated_completions=True, logging_steps=1
    )
    trainer, seen = seen_by_rewards(
        tiny_policy, tmp_path, conversations, args=args, grammar=FreeText()
    )
    ends = trainer.eos_token_ids
    whole = [rollout.ids[-1] in ends for rollout in seen["rollout"]]
    assert not all(whole), "of two tokens each one at least is to be cut off"
    assert [rollout.status == "answered" for rollout in seen["rollout"]] == whole
    (clipped,) = [
        entry["completions/clipped_ratio"] for entry in trainer.state.log_history if "loss" in entry
    ]
    assert clipped == pytest.approx(whole.count(False) / len(whole))


# --- what reward functions see --------------------------------------------------------------------


def test_a_conversation_of_several_turns_is_a_list_of_its_messages(asking_policy, tmp_path):
    environment = LLMEnvironment(ScriptedChat(lambda messages: "the answer is Swahili ."))
    conversations = [[{"role": "user", "content": line}] for line in LINES]
    args = arguments(tmp_path, max_completion_length=99, temperature=0.1)
    options = {"environment": environment, "grammar": TagGrammar(), "args": args}
    _, seen = seen_by_rewards(asking_policy, tmp_path, conversations, **options)
    assert max(len(rollout.turns) for rollout in seen["rollout"]) > 1
    for completion, rollout in zip(seen["completions"], seen["rollout"], strict=True):
        assert [message["role"] for message in completion] == ["assistant", "user"] * (
            len(rollout.turns) - 1
        ) + ["assistant"]
        assert [message["content"].strip() for message in completion[::2]] == [
            turn.text.strip() for turn in rollout.turns
        ]
        assert {message["content"] for message in completion[1::2]} <= {"the answer is Swahili ."}


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


def test_tool_calls_and_their_results_are_messages_of_their_own():
    environment = ToolEnvironment([double])
    form = ChatFormat(tokenizer_for("qwen3"), environment.grammar)
    asked = [{"role": "user", "content": "Double 3 and 4."}]
    call = '<tool_call>\n{{"name": "double", "arguments": {{"number": {}}}}}\n</tool_call>'
    turns = [f"{call.format(3)}\n{call.format(4)}", "<tool_call>\nno JSON\n</tool_call>", "6 and 8"]
    rollout = Rollout(form.prompt_ids(asked), row={"prompt": asked})
    play_all([rollout], Scripted(form, turns, [0]), environment, form, Limits())
    called = [
        {"type": "function", "function": {"name": "double", "arguments": {"number": n}}}
        for n in (3, 4)
    ]
    first, three, four, second, broken, last = render_completion(rollout, form)
    assert first == {"role": "assistant", "content": turns[0], "tool_calls": called}
    assert (three, four) == tuple(
        {"role": "tool", "name": "double", "content": text} for text in ("6", "8")
    )
    assert second["tool_calls"] == [
        {"type": "function", "function": {"name": "", "arguments": "no JSON"}}
    ]
    assert broken["role"] == "tool" and broken["content"].startswith("Error: a call must be")
    assert last == {"role": "assistant", "content": "6 and 8"}


def played_calls(trains, say=lambda number: f"turn {number}"):
    """The completion of a program's rollout of four calls, each of which goes on from the one
    before.
    """

    async def agent(row, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            messages = []
            for number in range(4):
                messages.append({"role": "user", "content": f"ask {number}"})
                reply = await client.chat.completions.create(model="agent", messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return "x"

    numbers = itertools.count()
    row = {"question": "q", "prompt": [{"role": "user", "content": "q"}]}
    rollout, _ = play_program(
        agent, lambda text, request: say(next(numbers)), row=row, trains=trains
    )
    assert rollout.status == "answered", rollout.error
    return render_completion(rollout, byte_format())


@pytest.mark.parametrize("left_out", [set(), {0}, {1}, {3}, {1, 2}, {0, 1, 2, 3}])
def test_turns_that_are_not_trained_stay_in_their_places(left_out):
    completion = played_calls(lambda call: call.number - 1 not in left_out)
    expected = ["turn 0", "ask 1", "turn 1", "ask 2", "turn 2", "ask 3", "turn 3"]
    assert [message["content"] for message in completion] == expected
    assert [message["role"] for message in completion] == ["assistant", "user"] * 3 + ["assistant"]


def test_a_rollout_that_an_environment_fills_in_has_its_turns():
    form = byte_format()
    turns = [form.tokenizer(text)["input_ids"] for text in ("one", "two")]
    rollout = Rollout([1], row={"prompt": [{"role": "user", "content": "q"}]})
    rollout.ids = [*turns[0], 7, *turns[1]]
    rollout.mask = [1] * len(turns[0]) + [0] + [1] * len(turns[1])
    rollout.turns, rollout.observations = (
        [Turn("one", "act", True), Turn("two", "answer", True)],
        [Observation("and?")],
    )
    assert [message["content"] for message in render_completion(rollout, form)] == [
        "one",
        "and?",
        "two",
    ]


# --- images ---------------------------------------------------------------------------------------

SEEN = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.parametrize(
    "row, where",
    [
        ({"prompt": LINES[0], "image": "a.png"}, "a column `image`"),
        (
            {"question": LINES[0], "answers": ["x"], "images": ["a.png", "b.png"]},
            "a column `images`",
        ),
        ({"prompt": SEEN}, "a `prompt` with images"),
    ],
)
def test_images_are_refused_before_anything_is_loaded(tmp_path, row, where):
    with pytest.raises(ValueError, match=f"the dataset has {where}, but this trainer is text-only"):
        MultiTurnGRPOTrainer(
            "no/such/model",
            no_reward,
            arguments(tmp_path),
            Dataset.from_list([row]),
            environment=None,
        )
