"""`examples/contrib`: DSPy's `GRPO` through our trainers, and E-SPL by the call of GEPA's
`optimize_anything`.
"""

import ast
import itertools
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agentic_prompting.llm import ServerFailed
from agentic_prompting.rollout import read_rollouts
from support.tokenizers_for_tests import tokenizer_for

ROOT = Path(__file__).parents[2]
CONTRIB = sorted((ROOT / "examples" / "contrib").glob("*.py"))


def imported_by(path: Path) -> set[str]:
    """Every part of the name of every module that a file imports, and of what it imports from them."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
    return {part for name in names for part in name.split(".")}


@pytest.mark.parametrize("path", CONTRIB, ids=lambda path: path.stem)
def test_a_contributed_file_stands_alone_and_says_how_to_use_it(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"{path.name} " in docstring or f"from {path.stem} import" in docstring
    others = {other.stem for other in CONTRIB} - {path.stem}
    assert not others & imported_by(path)


def test_the_package_imports_nothing_that_is_contributed():
    contributed = {path.stem for path in CONTRIB}
    assert contributed
    assert not [path for path in (ROOT / "src").rglob("*.py") if contributed & imported_by(path)]


# --- DSPy's GRPO over our trainer -----------------------------------------------------------------


def reinforced(tmp_path, **wanted):
    """A program over a tiny policy whose turns count as answers as they are, DSPy's GRPO for it,
    and the provider.
    """
    dspy = pytest.importorskip("dspy", reason="needs the extra dspy")
    from dspy.teleprompt.grpo import GRPO
    from dspy_provider import TrainerProvider

    class Plain(dspy.ChatAdapter):
        def parse(self, signature, completion):
            return {"answer": completion}

        def format_assistant_message_content(self, signature, outputs, missing_field_message=None):
            return outputs["answer"]

    tokenizer = tokenizer_for("qwen3")
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=16, **shape)
    )
    settings = MultiTurnGRPOConfig(
        str(tmp_path / "run"),
        max_steps=5,
        per_device_train_batch_size=4,
        num_generations=4,
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_turn_tokens=8,
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=1e-2,
    )
    provider = TrainerProvider(
        lambda **given: MultiTurnGRPOTrainer(
            model=model, processing_class=tokenizer, args=settings, **given
        )
    )
    program = dspy.Predict("question -> answer")
    program.set_lm(provider.lm)
    optimizer = GRPO(
        **{
            "metric": lambda example, predicted, trace=None: float(len(predicted.answer) % 7),
            "num_train_steps": 2,
            "num_rollouts_per_grpo_step": 4,
            **wanted,
        },
        exclude_demos=True,
        adapter=Plain(),
    )
    rows = [
        dspy.Example(question=f"Capital {n}?", answer="x").with_inputs("question") for n in range(2)
    ]

    def compile(with_another_adapter=False):
        with dspy.context(adapter=dspy.XMLAdapter() if with_another_adapter else Plain()):
            optimizer.compile(program, rows)

    return provider, compile


def test_dspys_grpo_trains_through_our_trainer_on_the_tokens_that_were_sampled(tmp_path):
    provider, compile = reinforced(tmp_path)
    before = {name: weight.clone() for name, weight in provider.trainer.model.state_dict().items()}
    sampled = []
    trained = []
    policy = provider.policy
    metric = provider.metric

    async def watched(request):
        sample = await policy(request)
        sampled.append([*request.context, *sample.ids])
        return sample

    def scored(rollout, **columns):
        rewards = metric(rollout, **columns)
        trained.extend(
            (one.context, one.turns[-1].text, reward)
            for one, reward in zip(rollout, rewards, strict=True)
        )
        return rewards

    provider.policy = watched
    provider.trainer.reward_funcs = [scored]
    compile()
    assert provider.trainer.state.global_step == 2 and provider.retokenized == 0
    assert sorted(sampled) == sorted(context for context, _, _ in trained) and len(trained) == 8
    assert all(reward == len(text) % 7 for _, text, reward in trained)
    after = provider.trainer.model.state_dict()
    assert any((before[name] != after[name]).any() for name in before)


def test_an_outage_is_no_score_for_dspys_grpo(tmp_path):
    judged = itertools.count()

    def judge(example, predicted, trace=None):
        if next(judged) == 1:
            raise ServerFailed("the judge is down")
        return 1.0 + len(predicted.answer) % 7

    _, compile = reinforced(tmp_path, num_threads=1, num_train_steps=1, metric=judge)
    compile()
    # The batch that the end of DSPy's run leaves open is recorded without rewards.
    records = read_rollouts(tmp_path / "run" / "rollouts")
    rewards = [line["reward"] for line in records if line["status"] != "failed"]
    assert len(rewards) == 4 and min(rewards) >= 1


def test_dspys_groups_and_messages_must_be_the_trainers(tmp_path):
    with pytest.raises(ValueError, match="num_rollouts_per_grpo_step=2"):
        reinforced(tmp_path, num_rollouts_per_grpo_step=2)[1]()
    with pytest.raises(ValueError, match="never sent"):
        reinforced(tmp_path)[1](with_another_adapter=True)


def test_a_trainer_that_has_ended_says_so_to_dspy(tmp_path):
    with pytest.raises(RuntimeError, match="training has ended: max_steps"):
        reinforced(tmp_path, num_train_steps=9)[1]()


BLOCK = "<<<<<<< SEARCH\nAlways say Lima\n=======\nAlways say Nairobi\n>>>>>>> REPLACE"


def test_espl_takes_the_place_of_gepas_engine(tmp_path):
    oa = pytest.importorskip("gepa.optimize_anything", reason="needs the extra optimizers")
    from optimize_anything import optimize_anything

    read = []
    down = []

    def evaluator(candidate, example):
        oa.log(f"the candidate was {candidate!r}")
        if example["n"] == 1 and not down:
            down.append(example)
            raise ConnectionError("no route")
        return float(candidate.endswith("Nairobi")), {"asked": example["country"]}

    def reference(messages):
        read.append(messages[-1]["content"])
        return "1. Said Lima." if "retell" in read[-1] else BLOCK

    rows = [{"n": n, "country": "Kenya"} for n in range(3)]
    settings = {"reference": reference, "checkpoint": tmp_path / "state.json"}
    optimised = optimize_anything(
        "Always say Lima", evaluator, rows, rows, "the capital", **settings
    )
    assert optimised.best.text == "Always say Nairobi" and optimised.stopped is None
    assert (
        optimised.steps[0].failed == 1 / 3 and optimised.steps[0].reward == 0.0
    )  # of the two that were evaluated
    assert "the candidate was 'Always say Lima'" in read[0]
    assert "Right answer: the capital" in read[0]


def test_a_candidate_can_be_all_there_is_to_evaluate():
    pytest.importorskip("gepa", reason="needs the extra optimizers")
    from optimize_anything import optimize_anything

    from agentic_prompting.evolution import EvolveConfig

    config = EvolveConfig(steps=4, problems_per_step=1, num_generations=1, reflect_on="imperfect")
    result = optimize_anything(
        "Always say Lima",
        lambda candidate: float("Nairobi" in candidate),
        reference=lambda messages: BLOCK,
        config=config,
    )
    assert result.best.text == "Always say Nairobi"
    down = optimize_anything(
        "x", lambda candidate: 1 / 0, reference=lambda messages: BLOCK, config=config
    )
    assert "100%" in down.stopped and down.best.text == "x"
