"""Real command-line agents train three steps as they are (`make foreign`), each in its own
dialects.

A script writes the turns of the policy, as a tiny one ends most agents with its first; it trains on
those tokens.
"""

from collections import Counter
from pathlib import Path

import pytest

from agentic_prompting import ESPLTrainer, MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agentic_prompting.harnesses import HARNESSES, CommandProgram, Workspace, get_harness
from agentic_prompting.harnesses.check_harness import (
    ROW,
    ScriptedAgent,
    format_call,
    play_scripted,
    wrote_the_file,
)
from support.espl_training import Reference, arguments as espl_arguments
from support.harnesses import FOREIGN, needs, policy_for
from support.programs import play_program
from support.training import rows_learned, samples_in, vars_for

# Token sequences of a rollout: opencode asks for a title first.
EXPECTED = {"opencode": (4, 2, 1)}
ALL = [(name, dialect) for name, one in HARNESSES.items() for dialect in one.dialects]


@pytest.mark.parametrize(("name", "dialect"), ALL)
def test_a_harness_plays_a_task_in_each_of_its_dialects(name, dialect, monkeypatch):
    needs(name, monkeypatch)
    space = Workspace()
    program = CommandProgram(
        get_harness(name, dialect), workspace=space, reward=wrote_the_file, timeout=300
    )
    rollout, agent = play_scripted(program)
    counts = rollout.counts
    assert rollout.answer == "done" and rollout.returned["reward"] == 1.0, rollout.error
    found = (
        counts["program/calls"],
        counts["program/sequences"],
        counts["program/auxiliary_calls"],
    )
    assert found == EXPECTED.get(name, (3, 1, 0))
    assert counts.get("program/witness_differences", 0) == counts["program/undelivered_tokens"] == 0
    assert not any("SECRET42" in text for text in agent.prompts), "the answer is in no prompt"


def test_the_clients_of_anthropic_and_google_read_our_replies():
    python = FOREIGN / "sdks" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs sdks in an environment of their own: make foreign")
    called = "<think>\nhm\n</think>\n\nI add.  " + format_call("add", '{"a":1}')
    script = [str(python), str(Path(__file__).with_name("foreign") / "ask_vendors.py")]
    rollout, _ = play_program(
        script, lambda text, _: "two" if "tool_response>\n2" in text else called, timeout=120
    )
    assert rollout.answer == "two two True", rollout.error
    assert len(rollout.sequences) == 2 and len(rollout.turns) == 4, "one for each client"


class Watched(CommandProgram):
    """In one rollout of each group the script does the task, in the other it says so and does
    nothing.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.samples = []
        self.played = []

    def does_it(self, rollout):
        return len(self.played) % 2 == 0

    async def play_episode(self, rollout, policy, chat_format, limits):
        scripted = ScriptedAgent(chat_format)
        if not self.does_it(rollout):
            scripted.turn = lambda text: "done"
        self.played.append(rollout)

        async def sample(request):
            made = await scripted(request)
            self.samples.append((tuple(request.context), tuple(made.ids)))
            return made

        return await super().play_episode(rollout, sample, chat_format, limits)


@pytest.mark.timeout(1800)  # up to 20,000 tokens of a prompt, on a CPU
@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_trains_three_steps(name, monkeypatch, tmp_path):
    needs(name, monkeypatch)
    program = Watched(get_harness(name), workspace=Workspace(), reward=wrote_the_file, timeout=300)
    _, agent = play_scripted(CommandProgram(get_harness(name)))
    # Claude Code compacts a conversation long before it fills the window.
    model, tokenizer = policy_for(agent.prompts, 2**17 if name == "claude-code" else 2**15)
    settings = {
        **vars_for(tmp_path),
        "max_turn_tokens": 400,
        "max_completion_length": 4000,
        "max_steps": 3,
    }
    args = MultiTurnGRPOConfig(
        **settings | {"per_device_train_batch_size": 2}, learning_rate=1e-3, logging_steps=1
    )
    trainer = MultiTurnGRPOTrainer(
        model, None, args, [ROW] * 3, processing_class=tokenizer, environment=program
    )
    learned_rows = rows_learned(trainer)
    program.close()
    # Without its command of submission mini-swe-agent has no answer.
    idle = "malformed" if name == "mini-swe-agent" else "answered"
    assert [one.status for one in program.played] == ["answered", idle] * 3
    assert [one.returned["reward"] for one in program.played] == [1.0, 0.0] * 3
    for rollout in program.played[::2]:
        found = (
            rollout.counts["program/calls"],
            rollout.counts["program/sequences"],
            rollout.counts["program/auxiliary_calls"],
        )
        assert found == EXPECTED.get(name, (3, 1, 0))
    # Every sample is in the loss, token for token and once; but titles.
    drawn = Counter(program.samples)
    in_loss = Counter(samples_in(learned_rows))
    auxiliary = sum(one.counts["program/auxiliary_calls"] for one in program.played)
    assert not in_loss - drawn and sum((drawn - in_loss).values()) == auxiliary


class FollowsPrinciples(Watched):
    """The script does the task where its prompt has a principle of a child, else in one rollout of
    four.
    """

    def does_it(self, rollout):
        return (
            "Principle number" in rollout.row["prompt"][0]["content"] or len(self.played) % 4 == 0
        )


@pytest.mark.timeout(1800)
def test_prompts_and_weights_evolve_inside_a_harness(monkeypatch, tmp_path):
    """The prompt is in the harness's own file, and so in what the policy reads; the better prompt
    is rated higher.
    """
    needs("pi", monkeypatch)
    program = FollowsPrinciples(
        get_harness("pi"), workspace=Workspace(), reward=wrote_the_file, timeout=300
    )
    _, agent = play_scripted(CommandProgram(get_harness("pi")))
    model, tokenizer = policy_for(agent.prompts)
    changes = {"per_device_train_batch_size": 4, "max_steps": 3, "evolution_lag": 0}
    args = espl_arguments(tmp_path, **changes, max_turn_tokens=400, max_completion_length=4000)
    trainer = ESPLTrainer(
        model,
        None,
        args,
        [ROW] * 3,
        processing_class=tokenizer,
        environment=program,
        reference=Reference(),
        initial_prompt="Work in small steps.\n[G0]. Look first.",
    )
    before = model.lm_head.weight.clone()
    trainer.train()
    program.close()
    assert (model.lm_head.weight != before).any() and len(program.played) == 12
    assert all(rollout.status == "answered" for rollout in program.played)
    ours, theirs = (
        ["Principle number" in text for text in texts]
        for texts in (
            (one.row["prompt"][0]["content"] for one in program.played),
            (tokenizer.decode(one.prompt_ids) for one in program.played),
        )
    )
    assert ours == theirs and {*ours} == {True, False} and not any(ours[:4])
    assert all("Look first." in tokenizer.decode(one.prompt_ids) for one in program.played)
    assert "Principle number" in trainer.final_prompt().text
