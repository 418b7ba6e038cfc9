"""A trained agent without this library: `merge`, and the example that needs the form's file and a
model alone.
"""

import json
import runpy
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting import LLMEnvironment, PromptAgent
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.local import Sampling
from agentic_prompting.rollout import AgentSpec, QuestionGrammar
from agentic_prompting.rollout.spec import SPEC_FILE

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_without_library.py"
REPLY = "the answer is Swahili ."


@pytest.fixture
def example(monkeypatch):
    """The example's functions, with an environment that always gives the same reply."""
    functions = runpy.run_path(str(EXAMPLE))
    functions["talk"].__globals__["reply_to"] = lambda request: REPLY
    return functions


@pytest.fixture
def adapter(tiny_policy, tmp_path):
    """A trained adapter's folder, as a trainer saves it."""
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_policy), config)
    folder = tmp_path / "run"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_policy).save_pretrained(folder)
    AgentSpec.load(tiny_policy).save(folder)
    return folder


def test_merge_writes_an_ordinary_model(run, adapter, tmp_path):
    status, out, _ = run("merge", adapter, "--output-dir", tmp_path / "agent", "--json")
    assert status == 0 and json.loads(out)["merged_adapter"]
    assert not (tmp_path / "agent" / "adapter_config.json").exists()
    ids = torch.tensor([[5, 6, 7, 8]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "agent").eval()
    unmerged = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    torch.testing.assert_close(merged(ids).logits, unmerged(ids).logits)


def test_merge_keeps_form_and_precision(run, adapter, tmp_path):
    assert run("merge", adapter, "--dtype", "bfloat16")[0] == 0
    folder = adapter / "merged"
    assert AgentSpec.load(folder) == AgentSpec.load(adapter)
    assert (folder / SPEC_FILE).exists()
    assert AutoModelForCausalLM.from_pretrained(folder).dtype is torch.bfloat16


def test_merge_overwrites_nothing(run, adapter, tmp_path):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "mine.txt").write_text("mine")
    status, _, err = run("merge", adapter, "--output-dir", tmp_path / "agent")
    assert status == 2 and "not empty" in err
    assert [path.name for path in (tmp_path / "agent").iterdir()] == ["mine.txt"]


def test_merge_without_an_adapter_copies(run, tiny_policy, tmp_path):
    status, out, _ = run("merge", tiny_policy, "--output-dir", tmp_path / "agent", "--json")
    assert status == 0 and not json.loads(out)["merged_adapter"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "agent").num_parameters() > 0


def test_the_example_plays_as_the_agent_does(asking_policy, example):
    environment = LLMEnvironment(ScriptedChat([REPLY] * 8))
    agent = PromptAgent.from_pretrained(
        asking_policy, environment, sampling=Sampling(temperature=0)
    )
    form = json.loads((asking_policy / SPEC_FILE).read_text())
    complete = example["with_transformers"](str(asking_policy), form, True)
    for question in ("what is the language of Kenya ?", "unheard of 3"):
        expected = agent.answer(question)
        assert expected.observations, "the policy asks"
        assert example["talk"](question, form, complete) == expected.answer


def test_the_example_reads_questions(example, tmp_path):
    grammar = QuestionGrammar(frame=("The expert says: ", "\nAnswer briefly."))
    AgentSpec("About: {question}", grammar=grammar).save(tmp_path)
    form = json.loads((tmp_path / SPEC_FILE).read_text())
    seen = []
    texts = iter(["Who is it? And then", "Bel"])

    def complete(messages):
        seen.append([message["content"] for message in messages])
        return next(texts)

    assert example["talk"]("it", form, complete) == "Bel"
    assert seen == [
        ["About: it"],
        ["About: it", "Who is it?", f"The expert says: {REPLY}\nAnswer briefly."],
    ]
