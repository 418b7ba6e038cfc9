"""Programs in the trainer, with the real engine: weights move, records hold every sequence, the
agent answers.
"""

import asyncio
import json
import shutil

import openai
import pytest
from openai import AsyncOpenAI
from transformers import TrainerCallback

from agentic_prompting import (
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    Program,
    PromptAgent,
    PromptR1Config,
    PromptR1Trainer,
    exact_match_reward,
)
from agentic_prompting.cli import main
from agentic_prompting.harnesses import CommandProgram, Workspace
from agentic_prompting.llm import run
from agentic_prompting.rollout import AgentSpec, FreeText, read_rollouts
from agentic_prompting.serve.answering import AgentAnswers
from agentic_prompting.trainers import TrainingStopped
from support import killed_runs
from support.isolation import ISOLATION
from support.marks import LONG
from support.programs import play_program
from support.training import vars_for

ROWS = [{"question": f"which currency number {i} ?", "answers": ["x"]} for i in range(4)]


async def two_chats(row, base_url, api_key):
    """Two questions, the second time with a history that was rewritten; the reward is the share of
    some words.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        reply_text = ""
        for ask in ("the capital", f"{row['question']} of"):
            messages = [{"role": "user", "content": f"{ask} {reply_text}"}]
            reply_text = (
                (await client.chat.completions.create(model="agent", messages=messages))
                .choices[0]
                .message.content
            )
    words = reply_text.split()
    return {
        "answer": reply_text or "nothing",
        "reward": sum(word < "n" for word in words) / max(len(words), 1),
    }


def trainer_of(tiny_policy, folder, program, rows=ROWS, **changes):
    settings = {
        **vars_for(folder),
        "max_turn_tokens": 12,
        "max_completion_length": 60,
        "max_steps": 2,
    }
    settings |= {
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        **changes,
    }
    args = MultiTurnGRPOConfig(**settings)
    return MultiTurnGRPOTrainer(str(tiny_policy), None, args, rows, rows[:2], environment=program)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_program_trains_is_recorded_evaluated_and_answers(tiny_policy, tmp_path, loss_type):
    trainer = trainer_of(
        tiny_policy, tmp_path, Program(two_chats), loss_type=loss_type, num_generations_eval=2
    )
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert any((before[name] != value).any() for name, value in trainer.model.named_parameters())
    logged = [entry for entry in trainer.state.log_history if "program/sequences" in entry]
    assert len(logged) == 2
    assert all(entry["program/sequences"] == entry["program/calls"] == 2 for entry in logged)
    assert all(entry["rollout/answered"] == 1 for entry in logged)
    records = list(read_rollouts(tmp_path / "rollouts"))
    assert len(records) == 8
    assert all(len(record["sequences"]) == len(record["turns"]) == 2 for record in records)
    assert all(
        record["tokens"]["agent"] == sum(s["in_loss"] for s in record["sequences"])
        for record in records
    )
    assert "eval_reward" in trainer.evaluate()
    trainer.save_model(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert f"from {two_chats.__module__} import two_chats" in card
    assert ", Program(two_chats))" in card
    agent = PromptAgent.from_pretrained(tmp_path / "saved", Program(two_chats))
    with pytest.raises(TypeError, match="answer_all"):
        agent.answer({"question": "which currency ?", "hint": "it is a coin"})
    played = agent.answer("which currency ?", seed=3)
    assert played.status == "answered" and len(played.sequences) == 2
    assert agent.answer("which currency ?", seed=3).ids == played.ids


def test_ahead_of_the_weights_a_killed_run_feeds_its_programs_from_the_log(tiny_policy, tmp_path):
    options = {
        "async_lead": 1,
        "max_staleness": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 4,
    }

    async def uneven(row, base_url, api_key):
        """Every other row takes long, so that groups are in flight with some of their turns."""
        answer = await two_chats(row, base_url, api_key)
        for i in range(6 * (int(row["question"].split()[3]) % 2)):
            answer = await two_chats({"question": f"{row['question']} {i}"}, base_url, api_key)
        return answer

    class Killed(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                begun.update(group.number for group in first.batch_source.groups_in_flight)
                raise KeyboardInterrupt

    begun = set()
    first = trainer_of(tiny_policy, tmp_path, Program(uneven), **options)
    first.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    entries = [
        json.loads(line)
        for line in (tmp_path / "in_flight" / "00000.jsonl").read_text().splitlines()
    ]
    second = trainer_of(tiny_policy, tmp_path, Program(uneven), **options)
    asked = []
    policy = second.policy

    class Counted(type(policy)):
        async def __call__(self, request):
            asked.append(request.seed)
            return await super().__call__(request)

    policy.__class__ = Counted
    second.train(resume_from_checkpoint=True)
    logged = [
        record["turn"]["seed"]
        for record in entries
        if "turn" in record and record["group"] in begun
    ]
    assert logged and not {*logged} & {*asked}, (
        "no logged turn of a group in flight is sampled again"
    )
    *_, resumed, last = [entry for entry in second.state.log_history if "async/clipped" in entry]
    assert resumed["async/played_anew"] >= 2 and resumed["async/played_anew"] % 2 == 0, (
        "whole groups, counted once"
    )
    assert last["async/played_anew"] == 0
    assert last["program/sequences"] >= 2
    assert last["async/token_age_max"] >= 1
    assert last["async/clipped"] <= 1
    assert second.state.global_step == 4
    assert all(record["status"] == "answered" for record in read_rollouts(tmp_path / "rollouts"))


def test_rollouts_that_fail_move_nothing_and_are_counted(tiny_policy, tmp_path):
    async def breaks(row, base_url, api_key):
        await two_chats(row, base_url, api_key)
        raise RuntimeError("the program has a bug")

    trainer = trainer_of(tiny_policy, tmp_path, Program(breaks), max_steps=1, max_failed_share=1.0)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    with pytest.raises(
        TrainingStopped,
        match=r"RuntimeError.*has a bug.*:\d+ in breaks",
    ):
        trainer.train()  # not one rollout was played
    assert all((before[name] == value).all() for name, value in trainer.model.named_parameters())
    assert {record["error"]["kind"] for record in read_rollouts(tmp_path / "rollouts")} == {
        "ProgramFailed"
    }


MANY = pytest.param(10, marks=LONG)


@pytest.mark.parametrize("kills", [1, MANY])
def test_killed_in_the_middle_a_program_that_repeats_pays_nothing_twice(
    asking_policy, tmp_path, kills
):
    outcome = killed_runs.killed_and_resumed(
        asking_policy, tmp_path, kills, steps=4, program="repeats"
    )
    assert outcome["tried"] == outcome["resumed"] == kills, outcome
    assert outcome["paid_twice"] == 0 and abs(outcome["paid_in_vain"]) <= 2 * kills, (
        outcome
    )  # a token in 10^5 may be another


@pytest.mark.parametrize("kills", [1, MANY])
def test_killed_in_the_middle_a_program_that_differs_is_counted(asking_policy, tmp_path, kills):
    outcome = killed_runs.killed_and_resumed(
        asking_policy, tmp_path, kills, steps=4, program="differs"
    )
    assert outcome["tried"] == outcome["resumed"] == kills, outcome
    assert outcome["uncounted"] == 0, outcome


@pytest.mark.parametrize("kills", [1, MANY])
def test_killed_in_the_middle_a_harness_leaves_nothing_at_the_next_start(
    asking_policy, tmp_path, kills
):
    """No process, no folder, and the port is free; and the resumed run goes on as after any other
    kill.
    """
    outcome = killed_runs.killed_and_resumed(
        asking_policy, tmp_path, kills, steps=3, program="stand_in"
    )
    assert outcome["tried"] == outcome["resumed"] == kills and outcome["left"] == 0, outcome
    assert outcome["paid_twice"] == 0 and abs(outcome["paid_in_vain"]) <= 2 * kills, outcome


def test_ahead_of_the_weights_programs_without_a_call_are_failures(tiny_policy, tmp_path):
    def breaks(row, base_url, api_key):
        raise RuntimeError("before the first call")

    trainer = trainer_of(
        tiny_policy, tmp_path, Program(breaks), max_steps=1, max_failed_share=1.0, async_lead=1
    )
    with pytest.raises(TrainingStopped, match="before the first call"):
        trainer.train()


def test_other_numbers_of_sequences_in_each_rollout_with_accumulation(tiny_policy, tmp_path):
    async def some_chats(row, base_url, api_key):
        answer = await two_chats(row, base_url, api_key)
        for _ in range(len(answer["answer"]) % 3):
            answer = await two_chats(row, base_url, api_key)
        return answer

    trainer = trainer_of(
        tiny_policy,
        tmp_path,
        Program(some_chats),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert trainer.state.global_step == 2


CURL = """set -e
reply=$(curl -sS --fail "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" -d '{"model": "agent", "messages": [{"role": "user", "content": "capital"}]}')
echo "{\\"answer\\": \\"${#reply}\\"}"
"""


def answer_length(rollout, folder):
    return float(int(rollout.answer) % 7)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_shell_command_with_curl_trains_three_steps(tiny_policy, tmp_path):
    workspace = Workspace(isolation=ISOLATION)
    program = CommandProgram(["bash", "-c", CURL], workspace=workspace, reward=answer_length)
    trainer = trainer_of(tiny_policy, tmp_path, program, max_steps=3)
    trainer.train()
    records = list(read_rollouts(tmp_path / "rollouts"))
    assert len(records) == 12 and {record["status"] for record in records} == {"answered"}
    assert all(len(record["sequences"]) == 1 and record["answer"].isdigit() for record in records)


def test_a_program_of_dspy_trains_three_steps(tiny_policy, tmp_path):
    dspy = pytest.importorskip("dspy")
    from dspy.utils.exceptions import AdapterParseError

    async def agent(row, base_url, api_key):
        lm = dspy.LM("openai/agent", api_base=base_url, api_key=api_key, cache=False, num_retries=0)
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
            return (await dspy.Predict("question -> answer").acall(question=row["question"])).answer

    program = Program(agent, mistakes=(AdapterParseError,))
    args = MultiTurnGRPOConfig(**{**vars_for(tmp_path), "max_turn_tokens": 12, "max_steps": 3})
    MultiTurnGRPOTrainer(
        str(tiny_policy), exact_match_reward, args, ROWS, environment=program
    ).train()
    records = list(read_rollouts(tmp_path / "rollouts"))
    # The tiny policy never writes DSPy's fields: that is its own fault, and counted as such.
    assert len(records) == 12 and {record["status"] for record in records} == {"malformed"}
    assert all(len(record["sequences"]) == 1 for record in records)

    fields = "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"
    rollout, policy = play_program(
        agent, lambda text, request: fields, row={"question": "the capital of France?"}
    )
    assert rollout.answer == "Paris" and "the capital of France?" in policy.contexts()[0]


def test_the_system_prompt_of_the_trainer_reaches_the_policy(tiny_policy, tmp_path):
    prompts = []

    async def agent(row, base_url, api_key, system_prompt):
        prompts.append(system_prompt)
        return await two_chats(row, base_url, api_key)

    prompt = [{"role": "system", "content": "EVOLVED"}, {"role": "user", "content": "q"}]
    rows = [{**row, "prompt": prompt} for row in ROWS]
    trainer = trainer_of(tiny_policy, tmp_path, Program(agent), rows, max_steps=1)
    trainer.train()
    assert prompts and set(prompts) == {"EVOLVED"}


@pytest.mark.parametrize("awaited", [False, True])
def test_an_agent_hands_its_system_prompt_to_its_program(tiny_policy, awaited):
    async def agent(row, base_url, api_key, system_prompt):
        await two_chats(row, base_url, api_key)
        return system_prompt

    spec = AgentSpec(system_prompt="EVOLVED", grammar=FreeText())
    agent_with_prompt = PromptAgent.from_pretrained(tiny_policy, Program(agent), spec)
    played = (
        asyncio.run(agent_with_prompt.aanswer("which ?"))
        if awaited
        else agent_with_prompt.answer("which ?")
    )
    assert played.answer == "EVOLVED" and len(played.sequences) == 2


def test_a_program_may_ignore_errors(tiny_policy, tmp_path):
    async def stubborn(row, base_url, api_key):
        answer = await two_chats(row, base_url, api_key)
        for _ in range(3):
            try:
                await two_chats(row, base_url, api_key)
            except openai.BadRequestError:
                await asyncio.sleep(0)
        return answer

    trainer = trainer_of(tiny_policy, tmp_path, Program(stubborn, max_calls=3), max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["program/limits_reached"] == 1


def test_what_does_not_go_with_a_program_is_refused_by_name(tiny_policy, tmp_path):
    with pytest.raises(ValueError, match="MultiTurnGRPOTrainer"):
        args = PromptR1Config(**vars_for(tmp_path))
        PromptR1Trainer(
            str(tiny_policy), args=args, train_dataset=ROWS, environment=Program(two_chats)
        )
    with pytest.raises(ValueError, match="greedy_answer"):
        PromptAgent.from_pretrained(tiny_policy, Program(two_chats), greedy_answer=True)
    with pytest.raises(ValueError, match="max_cost_usd"):
        AgentAnswers(PromptAgent.from_pretrained(tiny_policy, Program(two_chats)), max_cost_usd=1.0)


def test_a_program_is_served_as_one_model(tiny_policy):
    async def agent(row, base_url, api_key):
        await two_chats(row, base_url, api_key)
        return row["question"].upper()

    answers = AgentAnswers(PromptAgent.from_pretrained(tiny_policy, Program(agent)))
    reply = run(answers([{"role": "user", "content": "which ?"}], 0, None))
    assert reply.text == "WHICH ?" and reply.usage.completion_tokens > 0
    assert len(reply.trajectory["sequences"]) == 2


@pytest.mark.parametrize("name", ["program", "agent"])
def test_check_env_plays_a_program_with_a_model_only(tiny_policy, tmp_path, capsys, name):
    (tmp_path / "own.py").write_text(
        "from agentic_prompting import Program\n\n\ndef agent(row, base_url, api_key):\n"
        "    import json, urllib.request\n"
        "    body = json.dumps({'model': 'agent', 'messages': [{'role': 'user', 'content': row['question']}]})\n"
        "    headers = {'Authorization': f'Bearer {api_key}', 'Content-Type': 'application/json'}\n"
        "    asked = urllib.request.Request(f'{base_url}/chat/completions', body.encode(), headers)\n"
        "    return 'heard ' + json.load(urllib.request.urlopen(asked))['choices'][0]['message']['content']\n\n\n"
        "program = Program(agent)\n"
    )
    asked = ["check-env", f"{tmp_path / 'own.py'}:{name}"]
    made = "3 episodes: calls of the policy: 3 in 3 sequences; 3 answered"
    for more, status, said in (
        ([], 2, "name a model with --model"),
        (["--model", str(tiny_policy)], 0, made),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*asked, *more])
        out, err = capsys.readouterr()
        assert ended.value.code == status and said in out + err
    assert "model writes   None" not in out and out.count("model writes") == 3, (
        "the turn itself is shown"
    )
