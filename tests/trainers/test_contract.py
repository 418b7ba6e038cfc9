"""What trainers/ takes for granted of TRL beyond its documented interface. Checked on trl 1.16.0.

One test per private part (for what a trainer class inherits from transformers, of transformers as
TRL uses it). When TRL changes, these show what has changed; a version is added to `TESTED` only
after they pass. `CONTRACT` is compared with the source of trainers/, so that a new private use has
to be listed there and needs a test here.
"""

import ast
import importlib.metadata
import inspect
import re
import tomllib
import warnings
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad

import agentic_prompting
from agentic_prompting.trainers import MultiTurnGRPOTrainer
from agentic_prompting.trainers.contract import (
    CONTRACT,
    TESTED,
    TRLChanged,
    TRLPart,
    compare_trl,
)
from agentic_prompting.trainers.row_order import EpochSampler

TRAINERS = Path(agentic_prompting.__file__).parent / "trainers"
ROOT = Path(__file__).parents[2]

# transformers.Trainer's and TRL's documented attributes and methods; using them needs no contract.
DOCUMENTED = {
    "accelerator",
    "add_callback",
    "args",
    "compute_loss",
    "create_optimizer",
    "evaluate",
    "init_hf_repo",
    "log",
    "model",
    "pop_callback",
    "push_to_hub",
    "remove_callback",
    "save_model",
    "state",
    "train",
    "train_dataset",
    "training_step",
    "is_in_train",
    "is_world_process_zero",
    "model_wrapped",
    "processing_class",
}


# Names that stand for something of our own there.
OWN = {
    "loss_inputs.py": {"loss_type", "max_completion_length"},
}


# --- the list is the truth ------------------------------------------------------------------------


@cache
def names_of_trl():
    """Every name that GRPOTrainer, SFTTrainer or one of their bases defines, sets or reads on
    itself.
    """
    names = set()
    for kind in {*GRPOTrainer.__mro__, *SFTTrainer.__mro__} - {object}:
        names |= set(vars(kind)) | set(re.findall(r"\bself\.(\w+)", inspect.getsource(kind)))
    return names


def uses_of_trl(source, theirs):
    """The names in `theirs` that a module defines in a class, or reaches on a trainer; and its deep
    imports of trl.
    """
    used = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            on_trainer = ast.unparse(node.value) in ("self", "trainer", "self.trainer", "super()")
            if node.attr in theirs and (on_trainer or node.attr.startswith("_")):
                used.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            defined = [
                statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)
            ]
            targets = [t for statement in node.body for t in _targets(statement)]
            used |= {name for name in defined + targets if name in theirs and name.startswith("_")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl."):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in used if not name.startswith("__")} - DOCUMENTED


def _targets(statement):
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id]
    return [target.id for target in statement.targets] if isinstance(statement, ast.Assign) else []


def test_the_reading_of_uses():
    source = (
        "from trl.deep import thing\nfrom trl import GRPOTrainer\n"
        "class T:\n    _tag = 1\n    _own = 2\n    def _save(self):\n"
        "        super()._inner(); self.state; self.public_one; other._far; self._mine; row.public_one\n"
    )
    theirs = {"_tag", "_save", "_inner", "_far", "state", "public_one", "unused"}
    assert uses_of_trl(source, theirs) == {
        "trl.deep.thing",
        "_tag",
        "_save",
        "_inner",
        "_far",
        "public_one",
    }


def touches():
    """The names of TRL that files of trainers/ use, by file."""
    found = {}
    for path in sorted(TRAINERS.rglob("*.py")):
        theirs = names_of_trl()
        name = path.relative_to(TRAINERS).as_posix()
        if name == "contract.py":
            continue
        if name == "config.py":  # there `self` is a GRPOConfig, whose fields are documented
            theirs = theirs - set(GRPOConfig.__dataclass_fields__)
        used = uses_of_trl(path.read_text(encoding="utf-8"), theirs) - OWN.get(name, set())
        if used:
            found[name] = used
    return found


def test_every_private_use_is_in_the_contract():
    names = {part.name for part in CONTRACT}
    methods = {name for name in names if name.rpartition(".")[0] in names}  # of an imported class
    assert set().union(*touches().values()) == names - methods, (
        "write it there, and a test of it here"
    )


def test_trl_is_touched_in_few_files_by_few_names():
    """The surface that a new TRL can break: it only ever gets smaller."""
    assert len(touches()) <= 8 and len(CONTRACT) <= 30
    assert sum(part.name.startswith("_") for part in CONTRACT) <= 15


@pytest.mark.parametrize("part", CONTRACT, ids=lambda part: part.name)
def test_the_installed_trl_has_the_part(part):
    assert part.find_difference() == ""


def test_every_part_has_a_test_of_what_it_does():
    tests = "".join(
        inspect.getsource(f) for name, f in globals().items() if name.startswith("test_")
    )
    for part in CONTRACT:
        assert part.name.rpartition(".")[2] in tests, f"no test here is about {part.name}"


def test_another_version_with_the_same_parts_is_warned_of():
    with pytest.warns(UserWarning, match=r"TRL 1.99.0 is not among the tested versions \(1.16.0\)"):
        compare_trl("1.99.0", GRPOTrainer)


def test_a_version_that_differs_is_refused_by_the_parts_name():
    class Other(GRPOTrainer):
        def _compute_loss(self, batch):
            """With another signature."""

    with pytest.raises(TRLChanged) as raised:
        compare_trl("1.99.0", Other)
    message = str(raised.value)
    assert "_compute_loss takes (batch), but (model, inputs) was expected" in message
    assert "1.16.0" in message
    assert "\n" not in message and message.count("expected") == 1
    assert "does not exist" in TRLPart("_gone").find_difference()
    assert "does not exist" in TRLPart("trl.models.gone").find_difference()


def test_only_trainers_imports_trl():
    """And the programs its parser and model arguments, which are public."""
    for path in TRAINERS.parent.rglob("*.py"):
        if not {TRAINERS, TRAINERS.parent / "cli"} & set(path.parents):
            assert not re.search(
                r"^\s*(from|import) trl\b", path.read_text(encoding="utf-8"), re.M
            ), path


def test_the_installed_trl_is_in_the_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (trl,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "trl")
    installed = importlib.metadata.version("trl")
    assert trl.specifier.contains(installed), (
        f"trl {installed} is outside of {trl.specifier} in pyproject.toml"
    )
    assert all(trl.specifier.contains(version) for version in TESTED)
    assert not trl.specifier.contains("2.0.0")
    assert not trl.specifier.contains("1.14.2") and not trl.specifier.contains("1.15.0"), (
        "these fail tests here"
    )


def test_a_workflow_runs_these_tests_on_the_newest_trl_each_week():
    steps = (ROOT / ".github" / "workflows" / "trl.yml").read_text(encoding="utf-8")
    assert "schedule: [{cron:" in steps and "pip install --upgrade trl" in steps
    assert Path(__file__).relative_to(ROOT).as_posix() in steps


# --- a plain GRPOTrainer with a rollout_func, watched ---------------------------------------------


class Watched(GRPOTrainer):
    """TRL's trainer; notes what passes through the private methods that ours overrides."""

    def __init__(self, *args, **kwargs):
        self.seen = defaultdict(list)
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        self.seen["inputs"].append([dict(row) for row in inputs])
        self.seen["step"].append(self._step)
        return super()._generate_and_score_completions(inputs)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.seen["rewarded"].append((inputs, prompts, completion_ids_list, rewards.clone()))
        return rewards

    def save_model(self, output_dir=None, *args, **kwargs):
        super().save_model(output_dir, *args, **kwargs)
        self.seen["saved"].append(output_dir)


END = 3  # <|im_end|> of the sandbox tokenizer


def rollout_func(prompts, trainer):
    """Four tokens each: own, observed, own, end. The second prompt of each group fails (no reward)."""
    trainer.seen["prompts"].append(prompts)
    n = len(prompts)
    return {
        "prompt_ids": [[5, 6, 7]] * n,
        "completion_ids": [[20, 21, 22 + i, END] for i in range(n)],
        "logprobs": None,
        "env_mask": [[1, 0, 1, 1]] * n,
        "rollout": [f"rollout {i}" for i in range(n)],
    }


def some_reward(prompts, completions, rollout, **kwargs):
    return [None if episode.endswith(" 1") else float(episode[-1]) for episode in rollout]


def grpo(policy, folder, **changes):
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 2,
        "max_completion_length": 8,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    rows = [
        {"prompt": [{"role": "user", "content": f"question : {i} ?"}], "extra": i} for i in range(8)
    ]
    return Watched(
        model=str(policy),
        reward_funcs=some_reward,
        args=GRPOConfig(str(folder), **{**settings, **changes}),
        train_dataset=Dataset.from_list(rows),
        rollout_func=rollout_func,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def trained(tiny_policy, folder):
    """After two steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = grpo(tiny_policy, folder)
    trainer.seen["warnings"] = [str(warning.message) for warning in caught]
    trainer.train()
    trainer.during_training = {name: list(values) for name, values in trainer.seen.items()}
    return trainer


def test_rollout_func_warns_in_these_words(trained):
    """`MultiTurnGRPOTrainer` silences exactly this one."""
    (about_it,) = [text for text in trained.during_training["warnings"] if "rollout_func" in text]
    assert re.match("You are using 'rollout_func'", about_it)
    assert "You are using 'rollout_func'" in inspect.getsource(MultiTurnGRPOTrainer.__init__)


def test_generate_and_score_completions_gets_repeated_rows(trained):
    """`_generate_and_score_completions(inputs)`: all columns of each row, `num_generations` times,
    groups in a row.
    """
    assert list(inspect.signature(GRPOTrainer._generate_and_score_completions).parameters) == [
        "self",
        "inputs",
    ]
    assert len(trained.during_training["inputs"]) == 2
    for inputs in trained.during_training["inputs"]:
        assert len(inputs) == 4 and set(inputs[0]) == {"prompt", "extra"}
        assert len({row["extra"] for row in inputs}) == 1


def test_rollout_func_gets_the_prompts_of_those_rows_in_order(trained):
    """Ours pairs the prompts it gets with the rows it saw, by position."""
    for inputs, prompts in zip(
        trained.during_training["inputs"], trained.during_training["prompts"], strict=True
    ):
        assert prompts == [row["prompt"] for row in inputs]


def test_calculate_rewards(trained):
    """`_calculate_rewards`: the extra keys of rollout_func are in `inputs`, `None` is NaN, the
    result is gathered.
    """
    parameters = list(inspect.signature(GRPOTrainer._calculate_rewards).parameters)
    assert parameters == ["self", "inputs", "prompts", "completions", "completion_ids_list"]
    inputs, prompts, ids, rewards = trained.during_training["rewarded"][0]
    assert [row["rollout"] for row in inputs] == [f"rollout {i}" for i in range(4)]
    assert "env_mask" not in inputs[0] and len(prompts) == 4
    assert ids == [[20, 21, 22 + i, END] for i in range(4)]
    assert rewards.shape == (4, 1)
    assert rewards.isnan().flatten().tolist() == [
        False,
        True,
        False,
        False,
    ]
    assert rewards[[0, 2, 3], 0].tolist() == [0, 2, 3]
    assert "gather(rewards_per_func)" in inspect.getsource(GRPOTrainer._calculate_rewards)


def test_a_row_without_any_reward_is_warned_of_in_these_words():
    """Silenced where the rollout failed (`mute_missing_reward_warning`): by these words, from this
    module's logger.
    """
    source = inspect.getsource(GRPOTrainer._calculate_rewards)
    assert source.count("logger.warning(") == 1 and 'f"All reward functions returned None' in source
    assert "logger = get_logger(__name__)" in inspect.getsource(inspect.getmodule(GRPOTrainer))


def test_a_row_without_any_reward_has_no_advantage_and_no_part_in_the_baseline(trained):
    trained.model.train()
    batch = trained._generate_and_score_completions(
        [dict(row) for row in trained.during_training["inputs"][0]]
    )
    rewards = torch.tensor([0.0, 2.0, 3.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert batch["advantages"][1] == 0
    assert torch.allclose(batch["advantages"][[0, 2, 3]], expected, atol=1e-6)


def test_what_is_scored_goes_by_labels_and_the_loss_by_the_mask(trained):
    """`ScoredTokensModel` changes the labels on their way into the model, which is called with them
    by name, in slices.
    """
    source = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "model(**model_inputs, labels=labels, fused_lm_head=True)" in source
    assert source.count("model(") == 1
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert parameters[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'completion_mask * inputs["tool_mask"]' in source
    earlier = set(re.findall(r'"(\w+_per_token_logps)"', source))
    assert earlier == {"old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"}


def test_the_importance_ratio_is_vllms_by_use_vllm_alone():
    """`use_vllm` is set around these two, so that any policy counts as vLLM for it; it must do
    nothing else there. `_generate` pushes weights unless `_last_loaded_step` is the step at hand;
    the carried path does so by itself.
    """
    correction = "self.use_vllm and self.vllm_importance_sampling_correction"
    for method, times in (
        (GRPOTrainer._generate_and_score_completions, 4),
        (GRPOTrainer._compute_loss, 1),
    ):
        source = inspect.getsource(method)
        assert source.count("use_vllm") == source.count(correction) == times
    source = inspect.getsource(GRPOTrainer._generate)
    pushes = "if self.use_vllm and self.state.global_step != self._last_loaded_step:"
    assert source.count("use_vllm") == source.count(pushes) == 1
    assert "self.vllm_generation.sync_weights()" in source
    assert (
        'output["importance_sampling_ratio"] = vllm_importance_sampling_ratio'
        in inspect.getsource(GRPOTrainer._generate_and_score_completions)
    )


def test_pad_is_how_completions_are_padded(trained):
    padded = pad([torch.tensor([1]), torch.tensor([1, 0, 1])], 0, "right", 4)
    assert padded.tolist() == [[1, 0, 0, 0], [1, 0, 1, 0]]
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert source.count("pad_to_multiple_of=self.pad_to_multiple_of") >= 3  # ids, mask, tool mask


def test_env_mask_becomes_the_tool_mask(trained):
    """Masked tokens stay in the completion; the loss leaves them out (test_grpo.py shows that they
    get none).
    """
    trained.model.train()
    batch = trained._generate_and_score_completions(
        [dict(row) for row in trained.during_training["inputs"][0]]
    )
    assert batch["completion_ids"].shape == (4, 4)
    assert batch["tool_mask"].tolist() == [[1, 0, 1, 1]] * 4
    assert batch["completion_mask"].tolist() == [[1] * 4] * 4


def test_truncation_is_a_missing_end_token(trained):
    """Why `Batch.to_trl` adds an end token: TRL looks at the last token of a completion, so there
    must be one.
    """
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions) + inspect.getsource(
        GRPOTrainer._generate
    )
    assert re.search(r"ids\[-1\] not in eos_and_pad", source)
    assert trained.eos_token_ids == [END] and isinstance(trained.eos_token_ids, list)


def test_eos_token_ids_are_the_models_and_the_tokenizers(tiny_policy, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    model.generation_config.eos_token_id = [7, 8]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=some_reward,
        args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=AutoTokenizer.from_pretrained(tiny_policy),
    )
    assert trainer.eos_token_ids == [END, 7, 8]


def test_metrics_are_lists_by_mode_and_are_logged_as_means(trained):
    """`_metrics[mode][name].append(value)` is what reaches the log, averaged and prefixed for
    evaluation.
    """
    assert set(trained._metrics) == {"train", "eval"}
    for mode, prefix in (("train", ""), ("eval", "eval_")):
        trained.model.train(mode == "train")
        for value in (1.0, 3.0):
            trained._metrics[mode]["our/metric"].append(value)
        logs = {}
        trained.log(logs)
        assert logs[f"{prefix}our/metric"] == 2.0
        assert trained._metrics[mode] == {}
    trained.model.train()


def test_step_counts_training_steps(trained):
    """`_step`: 0 at first, one more for every micro-batch; rollout seeds are made of it."""
    assert trained.during_training["step"] == [0, 1] and trained._step == 2
    assert "self._step += 1" in inspect.getsource(GRPOTrainer.training_step)


def test_rollouts_are_made_once_per_generation_batch(tiny_policy, tmp_path):
    """With gradient accumulation, one generation serves several micro-batches and `_step` tells
    them apart.
    """
    trainer = grpo(
        tiny_policy,
        tmp_path,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        max_steps=2,
    )
    trainer.train()
    assert trainer.seen["step"] == [0, 2] and trainer._step == 4
    assert [len(inputs) for inputs in trainer.seen["inputs"]] == [4, 4]


def test_reward_func_names_are_function_names(trained):
    assert trained.reward_func_names == ["some_reward"]
    logged = trained.state.log_history[0]
    assert "rewards/some_reward/mean" in logged and "reward" in logged


def test_save_checkpoint_saves_through_save_model(trained, folder):
    """`_save_checkpoint(model, trial)` makes `checkpoint-<step>` and calls `save_model(folder,
    ...)` for the model in it; so does an upload, before it begins.
    """
    assert list(inspect.signature(GRPOTrainer._save_checkpoint).parameters) == [
        "self",
        "model",
        "trial",
    ]
    source = inspect.getsource(Trainer.push_to_hub)
    assert source.index("self.save_model(_internal_call=True)") < source.index("upload_folder(")
    trained._save_checkpoint(trained.model, trial=None)
    assert trained.seen["saved"][-1] == str(folder / "checkpoint-2")
    assert (folder / "checkpoint-2" / "trainer_state.json").exists()
    trained.save_model(str(folder / "last"))
    assert trained.seen["saved"][-1] == str(folder / "last")


def test_reward_funcs_are_the_functions(trained):
    assert [reward.__name__ for reward in trained.reward_funcs] == ["some_reward"]


def test_what_is_uploaded_goes_through_one_name():
    """`hf_api()` in transformers.trainer, which hub/ takes the place of: every upload is its
    `upload_folder`, with keywords alone, of `args.output_dir` (or of a checkpoint). `hub_model_id`
    is where to, once that is known.
    """
    from transformers import trainer

    source = inspect.getsource(trainer.Trainer)
    assert callable(trainer.hf_api) and "HfApi()" not in source
    for method, times in ((Trainer.push_to_hub, 1), (Trainer._push_from_checkpoint, 2)):
        said = inspect.getsource(method)
        assert (
            said.count("hf_api().upload_folder(")
            == said.count("repo_id=self.hub_model_id,")
            == times
        )
        assert "folder_path=" in said and "ignore_patterns=" in said
    assert "self.hub_model_id = None" in inspect.getsource(Trainer.__init__)


def test_the_card_is_made_on_the_first_process_and_with_every_checkpoint(trained):
    assert trained.is_world_process_zero() is True
    assert "self.create_model_card(model_name=model_name)" in inspect.getsource(
        GRPOTrainer._save_checkpoint
    )


def test_callback_handler_holds_the_trackers(trained):
    """`LiveView` looks in it for transformers' callbacks, by these names, and for what they write
    to.
    """
    from transformers.integrations import integration_utils

    assert any(
        type(callback).__name__ == "DefaultFlowCallback"
        for callback in trained.callback_handler.callbacks
    )
    for name, writes_to in (
        ("TensorBoard", "self.tb_writer"),
        ("Wandb", "self._wandb"),
        ("Trackio", "self._trackio"),
    ):
        assert writes_to in inspect.getsource(
            getattr(integration_utils, f"{name}Callback").__init__
        )


def test_model_wrapped_is_what_generation_unwraps(trained):
    """`model_wrapped` and `unwrap_model_for_generation` as we hold the weights."""
    parameters = inspect.signature(unwrap_model_for_generation).parameters
    assert {"gather_deepspeed3_params", "gradient_checkpointing_kwargs"} <= set(parameters)
    assert list(parameters)[:2] == ["model", "accelerator"]
    with unwrap_model_for_generation(
        trained.model_wrapped,
        trained.accelerator,
        gather_deepspeed3_params=True,
        gradient_checkpointing_kwargs=trained.args.gradient_checkpointing_kwargs,
    ) as model:
        assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=1).shape == (1, 3)
    ours = re.sub(r"\s", "", inspect.getsource(GRPOTrainer._generate_single_turn))
    assert "unwrap_model_for_generation(self.model_wrapped,self.accelerator" in ours, (
        "TRL generates this way itself"
    )


def test_generation_config_is_read_at_every_call(trained):
    """`generation_config.max_new_tokens` may be set between two calls of the transformers backends."""
    before = trained.generation_config.max_new_tokens
    for limit in (1, 3):
        trained.generation_config.max_new_tokens = limit
        ids, _ = trained._generate_single_turn([[5, 6, 7]] * 8, None, {}, 1)  # TRL's own way
        assert max(map(len, ids)) == limit
    trained.generation_config.max_new_tokens = before
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "self.use_transformers_continuous_batching" in source
    assert re.search(
        r"generate_batch\(\s*prompt_ids,\s*generation_config=self\.generation_config", source
    )


def test_vllm_generation_reads_its_limit_at_every_call():
    """`vllm_generation.max_completion_length` may be set between two calls of its `generate`, which
    returns ids and for each the log-probabilities of the likeliest tokens, the sampled one first.
    One prompt in `num_generations` is sent to the server, so that diverged histories need 1.
    """
    source = inspect.getsource(VLLMGeneration.generate)
    assert "self.max_completion_length" in source
    assert '"max_tokens": max_completion_length' in source
    assert "all_prompts[::num_generations]" in source
    assert "self.max_completion_length = max_completion_length" in inspect.getsource(
        VLLMGeneration.__init__
    )
    trl_source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "_, completion_ids, logprobs, _ = self.vllm_generation.generate(" in trl_source
    assert "logprobs = [[lp[0] for lp in seq] for seq in logprobs]" in trl_source, (
        "TRL reads them as ours does"
    )


def test_loss_type_is_read_at_every_loss_and_dapo_is_a_sum_over_tokens(trained):
    """What a token counts is then in the mask, see `loss_inputs.py`."""
    assert trained.loss_type == trained.args.loss_type
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "self.loss_type in" in source and "args.loss_type" not in source
    branch = source.split('self.loss_type in ["cispo", "dapo", "vespo"]')[1].split("elif")[0]
    assert "(per_token_loss * mask).sum() / normalizer" in branch
    assert 'inputs["num_items_in_batch"]' in branch


def test_use_vllm_and_continuous_batching_are_flags(trained):
    assert trained.use_vllm is False and trained.use_transformers_continuous_batching is False
    assert "vllm_max_model_length" in GRPOConfig.__dataclass_fields__


def test_vllm_stops_at_stop_strings_of_generation_kwargs():
    """Ours puts `stop` into `args.generation_kwargs`, which vLLM's sampling parameters must get in
    both modes.
    """
    init = inspect.getsource(GRPOTrainer.__init__)
    generate = inspect.getsource(VLLMGeneration.generate)
    assert "generation_kwargs=args.generation_kwargs" in init
    assert '"generation_kwargs": self.generation_kwargs' in generate  # server
    assert "generation_kwargs.update(self.generation_kwargs)" in generate  # colocate


def test_another_vllm_generation_can_be_put_in_its_place(tiny_policy, tmp_path, monkeypatch):
    """`GRPOTrainer` takes the class `VLLMGeneration` from its own module `grpo_trainer`; it asks
    the client for `get_server_info` and nothing else, and calls `sync_weights` before the rollouts
    of each step. Of its own the class has `model`, `processing_class`, and `_iter_named_params`,
    which gathers all weights.
    """
    from trl.trainer import grpo_trainer

    class Noting(VLLMGeneration):
        def _init_vllm(self):
            self.vllm_client = self
            self.asked = 0
            self.synced = []

        def get_server_info(self):
            self.asked += 1
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def sync_weights(self):
            self.synced.append((trainer.state.global_step, len(trainer.seen["prompts"])))

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Noting)
    trainer = grpo(tiny_policy, tmp_path, use_vllm=True, vllm_mode="server")
    generation = trainer.vllm_generation
    assert type(generation) is Noting and generation.asked == 1
    assert generation.model is trainer.model
    assert generation.processing_class is trainer.processing_class
    assert (
        dict(generation._iter_named_params()).keys()
        == dict(trainer.model.named_parameters()).keys()
    )
    trainer.vllm_importance_sampling_correction = (
        False  # the rollouts here have no log-probabilities
    )
    trainer.train()
    assert generation.synced == [(0, 0), (1, 1)]


# --- what E-SPL adds ------------------------------------------------------------------------------


def test_get_train_sampler_repeats_rows(trained):
    """`_get_train_sampler` deals rows out as [`EpochSampler`] does: each comes `num_generations`
    times in a row, each batch as often as it is used; in the first epoch in the same order.
    """
    assert trained.num_generations == 4
    assert trained.num_iterations == 1
    assert trained.shuffle_dataset is True
    sampler = trained._get_train_sampler()
    order = list(sampler)
    assert len(order) == 8 * 4 and all(len(set(order[i : i + 4])) == 1 for i in range(0, 32, 4))
    args = trained.args
    assert (args.generation_batch_size, args.steps_per_generation, args.shuffle_dataset) == (
        4,
        1,
        True,
    )
    ours = EpochSampler(
        8,
        rows_per_batch=1,
        rollouts_per_row=4,
        batch_repeats=1,
        seed=args.seed,
        get_epoch=lambda: 0,
    )
    assert list(ours) == list(trained._get_train_sampler()) and len(ours) == len(sampler) == 32
    blocks = EpochSampler(
        5, rows_per_batch=2, rollouts_per_row=2, batch_repeats=2, seed=None, get_epoch=lambda: 0
    )
    assert list(blocks) == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3] and len(blocks) == 16
    assert trained._get_train_sampler.__func__ is GRPOTrainer._get_train_sampler
    assert "self._get_train_sampler" in inspect.getsource(GRPOTrainer.get_train_dataloader)


def test_num_generations_is_read_at_every_batch():
    """The size of a group may be changed after construction: E-SPL's marginal baseline does."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert 'num_generations = self.num_generations if mode == "train"' in source
    assert "rewards.view(-1, num_generations)" in source


def test_reward_weights_are_one_number_per_function(trained):
    assert trained.reward_weights.tolist() == [1.0]


def test_training_step_prepares_before_anything_else_and_an_optimizer_passes_over_weights_without_gradient(
    trained,
):
    """What has no loss has no backward pass, where `accelerator.backward` is asked for it;
    transformers then calls `step` with no gradient anywhere, since it clears them to `None`.
    """
    source = inspect.getsource(Trainer.training_step)
    assert (
        source.index("_prepare_inputs(inputs)")
        < source.index("compute_loss(")
        < source.index("accelerator.backward")
    )
    assert all(parameter.grad is None for parameter in trained.model.parameters()), (
        "after the last step of `train`"
    )
    before = [parameter.clone() for parameter in trained.model.parameters()]
    trained.optimizer.step()
    assert all(
        torch.equal(old, new) for old, new in zip(before, trained.model.parameters(), strict=True)
    )


def test_is_in_train_is_true_while_training_evaluation_included(trained):
    assert trained.is_in_train is False and "self.is_in_train = True" in inspect.getsource(Trainer)


def test_all_that_transformers_loads_is_there_when_training_begins():
    """The callbacks' `on_train_begin`, where a resumed run takes back the rest, and before the
    first batch.
    """
    source = inspect.getsource(Trainer._inner_training_loop)
    begins = source.index("callback_handler.on_train_begin")
    assert (
        source.index("self._init_training_state(")
        < source.index("self._prepare_for_training(")
        < begins
    )
    assert begins < source.index("self._run_epoch(")


# --- what an exact resume adds --------------------------------------------------------------------


def test_buffered_inputs_are_reused_until_the_block_is_over(tiny_policy, tmp_path):
    """`_step` and `_buffered_inputs` say where in a block of `steps_per_generation` x
    `num_iterations` training is; the buffer is plain data, one entry per step.
    """
    trainer = grpo(
        tiny_policy,
        tmp_path,
        num_iterations=2,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        per_device_train_batch_size=2,
    )
    trainer.train()
    assert trainer.seen["step"] == [0, 4]
    assert trainer._step == 6
    assert len(trainer._buffered_inputs) == 2
    torch.save(trainer._buffered_inputs, tmp_path / "buffer")
    again = torch.load(tmp_path / "buffer", weights_only=True)
    assert [set(batch) for batch in again] == [set(batch) for batch in trainer._buffered_inputs]
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in source


def test_losses_wait_to_be_logged(trained):
    """`_tr_loss` sums them since `_globalstep_last_logged`; both start anew before
    `on_train_begin`.
    """
    assert trained._globalstep_last_logged == trained.state.global_step and trained._tr_loss == 0
    source = inspect.getsource(Trainer._inner_training_loop)
    places = [source.index(f"self.{name} = ") for name in ("_tr_loss", "_globalstep_last_logged")]
    assert max(places) < source.index("on_train_begin")
    assert (
        'logs["loss"] = tr_loss_scalar / (self.state.global_step - self._globalstep_last_logged)'
        in (inspect.getsource(Trainer._maybe_log_save_evaluate))
    )


def test_checkpoints_go_where_get_output_dir_says():
    """`_get_output_dir` is asked by `_save_checkpoint` alone while it saves; and
    `_push_from_checkpoint(folder)` is all that `push_to_hub` does there.
    """
    assert list(inspect.signature(Trainer._get_output_dir).parameters) == ["self", "trial"]
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "run_dir = self._get_output_dir(trial=trial)" in source
    assert source.count("output_dir=run_dir") == 1
    assert "if self.args.push_to_hub:\n            self._push_from_checkpoint(output_dir)" in source
    assert "best_checkpoint_dir = os.path.join(run_dir, best_checkpoint_folder)" in source


def test_run_epoch_is_one_epoch_and_the_loop_asks_after_it_whether_to_stop():
    """`_run_epoch` may be passed over, with a word to `control`; the loop itself does not look at
    the steps taken.
    """
    source = inspect.getsource(Trainer._inner_training_loop)
    loop = source[source.index("for epoch in range(epochs_trained, num_train_epochs):") :]
    assert loop.index("self._run_epoch(") < loop.index("if self.control.should_training_stop:")
    assert "global_step" not in loop and "max_steps" not in loop


def test_is_deepspeed_enabled_is_a_flag(trained):
    assert trained.is_deepspeed_enabled is False


def test_continuous_batching_config_is_built_from_the_arguments(trained):
    """`continuous_batching_config` is `None` without it, and goes to `generate_batch` as it is."""
    assert trained.continuous_batching_config is None
    assert "ContinuousBatchingConfig(**cb_kwargs)" in inspect.getsource(GRPOTrainer.__init__)


# --- the warm start -------------------------------------------------------------------------------


def test_sft_takes_our_tokens_and_labels_as_they_are(tiny_policy, tmp_path):
    """`skip_prepare_dataset` with `max_length=None`: nothing is tokenised, cut, packed or
    relabelled.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100]},
        {"input_ids": list(range(5, 45)), "labels": [-100] * 38 + [43, 44]},
    ]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            str(tmp_path),
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=None,
            packing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    assert batch["input_ids"].shape == (2, 40)
    assert batch["input_ids"][0, :4].tolist() == [5, 6, 7, 8]
    assert batch["attention_mask"][0].sum() == 4
    kept = [[label for label in row if label != -100] for row in batch["labels"].tolist()]
    assert kept == [[7], [43, 44]]
    # The loss is that of the three labelled tokens and of nothing else.
    loss = trainer.compute_loss(model, batch).item()
    with torch.no_grad():
        log_probabilities = model(
            batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits.log_softmax(-1)
    expected = [
        log_probabilities[0, 1, 7],
        log_probabilities[1, 37, 43],
        log_probabilities[1, 38, 44],
    ]
    assert loss == pytest.approx(-torch.stack(expected).mean().item(), abs=1e-5)
