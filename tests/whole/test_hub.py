"""What is saved and shared: the model card, what an upload holds, agents from the hub.

No hub is reached.
"""

import json
import pickle
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects
from transformers import TrainerCallback

from agentic_prompting import (
    ESPLConfig,
    ESPLTrainer,
    LLMEnvironment,
    OpenAIChat,
    PromptAgent,
    PromptR1Config,
    PromptR1Reward,
    PromptR1Trainer,
)
from agentic_prompting.llm import RoutedChat, ScriptedChat
from agentic_prompting.sandbox import GuardedReflector, Oracle
from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE
from agentic_prompting.trainers import model_card as card_module
from agentic_prompting.trainers.hub import PUBLISHED_FILES
from agentic_prompting.trainers.model_card import (
    describe_chat,
    describe_evaluation,
    fence,
    host_of,
)
from support.training import vars_for

SECRET = "sk-very-secret"
HOSTILE = "Answer `{question}`.\n```\n---\n# {{ model_name }} {% raw %} <script>alert(1)</script>\n"


def real_chat(name="gpt-4o-mini"):
    return OpenAIChat(
        name,
        base_url=f"https://user:{SECRET}@llm.example:8443/{SECRET}/v1?key={SECRET}",
        api_key=SECRET,
        price=(1, 1),
    )


def prompt_r1(policy, folder, rows, chat=None, template=HOSTILE, **changes):
    return PromptR1Trainer(
        model=str(policy),
        environment=LLMEnvironment(chat or real_chat()),
        args=PromptR1Config(**{**vars_for(folder), "check_environment": False, **changes}),
        train_dataset=rows,
        prompt_template=template,
    )


def espl(policy, folder, rows, **changes):
    values = {
        "prompts_per_step": 2,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 4,
        "hub_token": SECRET,
        **changes,
    }
    return ESPLTrainer(
        model=str(policy),
        reward_funcs=PromptR1Reward(),
        reference=GuardedReflector(),
        args=ESPLConfig(**{**vars_for(folder), **values}),
        train_dataset=rows,
        initial_prompt="Answer .\n[G0]. Ask first .",
        environment=LLMEnvironment(Oracle()),
        prompt_template=SANDBOX_TEMPLATE,
    )


# --- the card -------------------------------------------------------------------------------------


def test_the_card_of_the_sandboxs_policy_says_so(tiny_policy, rows, tmp_path):
    """In whatever environment it is trained."""
    prompt_r1(tiny_policy, tmp_path / "out", rows).create_model_card()
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "| sandbox or real | sandbox |" in card.content and "sandbox" in card.data.tags


def test_the_card_of_a_real_run(tiny_policy, rows, tmp_path):
    # The policy of these tests is the sandbox's, whose mark is taken off.
    policy = shutil.copytree(tiny_policy, tmp_path / "policy")
    config = json.loads((policy / "config.json").read_text())
    assert config.pop("sandbox_policy")
    (policy / "config.json").write_text(json.dumps(config))
    trainer = prompt_r1(policy, tmp_path / "hotpot", rows)
    trainer.save_model()
    card = ModelCard.load(tmp_path / "hotpot" / "README.md")
    assert {"prompt-r1", "grpo", "trl", "agentic-prompting"} <= set(card.data.tags)
    assert "sandbox" not in card.data.tags
    assert SECRET not in str(card), "an address may hold a key"
    for said in (
        "# hotpot\n",
        "| method | Prompt-R1 |",
        "gpt-4o-mini at llm.example:8443",
        "prompt_r1_reward",
        "| real |",
        'PromptAgent.from_pretrained("',
        "agentic-prompting serve ",
        "| `learning_rate` |",
        "| `max_turns` | 2 |",
        "No evaluation was found",
        'OpenAIChat("gpt-4o-mini", base_url="http://.../v1")',
    ):
        assert said in card.content, said
    assert [arxiv for arxiv, _ in cited(card.content)] == ["2511.01016"]
    assert fence(HOSTILE) in card.content, "the template as it is, in a fence that it cannot close"
    assert str(tmp_path) not in card.content.split("How to use it")[0], "no paths of this machine"


def test_the_card_of_a_sandbox_run_says_so(tiny_policy, rows, tmp_path):
    trainer = espl(tiny_policy, tmp_path, rows)
    trainer.create_model_card(model_name="me", tags="mine")
    card = ModelCard.load(tmp_path / "README.md")
    assert {"sandbox", "e-spl", "prompt-r1", "mine"} <= set(card.data.tags)
    assert "A run in the sandbox." in card.content
    assert "| sandbox or real | sandbox |" in card.content
    assert "| method | Prompt-R1 and E-SPL |" in card.content
    assert "| reflecting model | GuardedReflector |" in card.content
    assert "[G0]. Ask first ." in card.content, "the best system prompt"
    assert "serve" in card.content
    assert "--sandbox" in card.content
    assert "| `prompts_per_step` | 2 |" in card.content
    scripted = prompt_r1(
        tiny_policy, tmp_path / "scripted", rows, ScriptedChat(["x"]), SANDBOX_TEMPLATE
    )
    scripted.create_model_card()
    assert "A scripted stand-in" in (tmp_path / "scripted" / "README.md").read_text(
        encoding="utf-8"
    )


def test_results_in_the_folder_are_shown(tmp_path):
    assert "No evaluation" in describe_evaluation(tmp_path)
    summary = {
        "exact_match_before": 0.355,
        "exact_match_after": 0.957,
        "interval_after": [0.925, 0.976],
        "questions": 256,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "| exact match after training | 0.957 | 0.925 to 0.976 |" in describe_evaluation(
        tmp_path
    )
    results = {"exact_match": {"policy after, best prompt": [0.9, 0.8, 0.95]}, "questions": 30}
    (tmp_path / "summary.json").write_text(json.dumps(results))
    assert (
        "| exact match, policy after, best prompt | 0.900 | 0.800 to 0.950 |"
        in describe_evaluation(tmp_path)
    )
    (tmp_path / "table.md").write_text("# Table 2\n\n| task | system |\n| --- | --- |\n")
    assert describe_evaluation(tmp_path).startswith("### Table 2\n\n| task |")
    (tmp_path / "summary.json").write_text("{broken")
    assert "exact match" not in describe_evaluation(tmp_path)


def test_a_card_that_cannot_be_made_costs_no_checkpoint(
    tiny_policy, rows, tmp_path, monkeypatch, caplog
):
    def broken(*args):
        raise RuntimeError("no card today")

    monkeypatch.setattr("agentic_prompting.trainers.model_card.create_card", broken)
    prompt_r1(tiny_policy, tmp_path, rows, ScriptedChat(["x"]), SANDBOX_TEMPLATE).save_model()
    assert (tmp_path / "model.safetensors").exists() and "no card today" in caplog.text


def test_who_was_asked():
    assert host_of("http://[::1]:80/v1") == "::1:80" and host_of("http://h:notaport/") == "h"
    assert describe_chat(
        RoutedChat({"a": real_chat("m1"), "b": ScriptedChat(["x"])}, {"a": 1.0})
    ) == ("m1 at llm.example:8443, ScriptedChat")


def cited(text):
    """arXiv number and BibTeX entry of each paper that a card cites."""
    entries = re.findall(r"@article\{.*?\n\}", text, re.DOTALL)
    return [(re.search(r"arXiv:([\d.]+)\}", entry).group(1), entry) for entry in entries]


def test_citations_are_those_of_the_repository():
    cff = (Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8")
    papers = cited(Path(card_module.__file__).with_name("card.md").read_text(encoding="utf-8"))
    assert len(papers) == 2
    for arxiv, bibtex in papers:
        title = re.search(r"title   = \{\{(.*)\}\}", bibtex).group(1)
        assert f'title: "{title}"' in cff and f"arXiv:{arxiv}" in cff
        for family in re.findall(
            r"([\w-]+(?: Ng)?), ", re.search(r"author  = \{(.*)\},\n", bibtex).group(1)
        ):
            assert family in cff


# --- to the hub -----------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """In the place of huggingface_hub's upload: notes which files of the folder its patterns let
    through.
    """
    commits = []

    def upload_folder(
        self,
        *,
        repo_id,
        folder_path,
        commit_message,
        allow_patterns=None,
        ignore_patterns=None,
        **options,
    ):
        there = [
            path.relative_to(folder_path).as_posix()
            for path in Path(folder_path).rglob("*")
            if path.is_file()
        ]
        files = set(
            filter_repo_objects(
                there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        commits.append({"repo": repo_id, "message": commit_message, "files": files})
        done = Future()
        done.set_result(None)
        return done

    def create_repo(self, repo_id, **kwargs):
        return SimpleNamespace(repo_id=f"me/{repo_id}" if "/" not in repo_id else repo_id)

    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    return commits


NEEDED = {
    "README.md",
    "agentic_prompting.json",
    "system_prompt.txt",
    "population.json",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "summary.json",
}


def littered(folder):
    """What else may lie in a run's folder."""
    private = [
        "rollouts/rollouts-00000-00000.jsonl.gz",
        "spending.sqlite",
        "spending.sqlite-wal",
        "replay.sqlite",
        "cache.db",
        "checkpoint-1/model.safetensors",
        ".saving/x.json",
        ".env",
        "api_key.txt",
        "keys/id.json",
        "report/index.html",
        "evolution.jsonl",
        "warm_start/model.safetensors",
        "runs/events.out",
        "completions/c.parquet",
        "notes/x.md",
        "trajectories.json",
        "customers.json",
        "notes.md",
        "questions.txt",
        "reward.png",
        "mine.safetensors",
        "other.model",
        "prompt.jinja",
        "run.json",
        "trainer_state.json",
        "training.lock",
    ]
    for name in private:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "summary.json").write_text('{"sandbox": true}')
    return set(private)


def test_push_to_hub_uploads_the_model_and_nothing_else(tiny_policy, rows, tmp_path, hub):
    trainer = espl(tiny_policy, tmp_path / "run", rows)
    private = littered(tmp_path / "run")
    trainer.push_to_hub(commit_message="done")
    (commit,) = hub
    assert commit["repo"] == "me/run" and commit["message"] == "done"
    assert commit["files"] >= NEEDED and not commit["files"] & {*private, "training_args.bin"}
    assert not [
        name
        for name in commit["files"]
        if "/" in name or not name.endswith((".json", ".txt", ".md", ".safetensors", ".jinja"))
    ]
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert 'from_pretrained("me/run"' in card and "# run\n" in card
    saved = b"".join(path.read_bytes() for path in (tmp_path / "run").glob("*") if path.is_file())
    assert SECRET.encode() not in saved, "no token in training_args.bin"
    assert trainer.args.hub_token == SECRET
    assert pickle.loads(pickle.dumps(trainer.args)).hub_token is None


def test_pushing_while_training_uploads_the_same(tiny_policy, rows, tmp_path, hub):
    trainer = espl(
        tiny_policy,
        tmp_path / "run",
        rows,
        push_to_hub=True,
        hub_model_id="me/agent",
        save_strategy="steps",
        save_steps=1,
        hub_always_push=True,
    )
    private = set()

    class Litters(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            private.update(littered(tmp_path / "run"))

    trainer.add_callback(Litters())
    trainer.train()
    trainer._finish_current_push()
    assert hub and all(commit["repo"] == "me/agent" for commit in hub)
    for commit in hub:
        assert not commit["files"] & private and "model.safetensors" in commit["files"]
        assert not [
            name
            for name in commit["files"]
            if name.startswith(("rollouts", "checkpoint", "spending"))
        ]


def test_of_the_evidence_nothing_is_uploaded(tiny_policy, rows, tmp_path, hub):
    """What the reference LLM is at work on holds rows and rollouts: it belongs to a checkpoint, not
    to a model.
    """
    trainer = espl(
        tiny_policy,
        tmp_path / "run",
        rows,
        save_strategy="steps",
        save_steps=1,
        reflect_on="imperfect",
    )
    trainer.train()
    assert trainer.evolution.pending, "there is such work"
    trainer.push_to_hub()
    uploaded = [tmp_path / "run" / name for name in hub[-1]["files"]]
    told = [row["question"] for row in rows]
    assert not [
        path for path in uploaded for question in told if question.encode() in path.read_bytes()
    ]
    kept = json.loads((tmp_path / "run" / "checkpoint-1" / "population.json").read_text())
    assert kept["pending"], "a checkpoint goes on with it"


def test_sharded_weights_and_chat_templates_are_uploaded(tiny_policy, tmp_path):
    """Everything that `save_pretrained` writes, by the names it has."""
    for name in (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "adapter_model.safetensors",
        "adapter_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/short.jinja",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "added_tokens.json",
        "special_tokens_map.json",
        "preprocessor_config.json",
        "spiece.model",
        "vocab.txt",
        "config.json",
    ):
        assert list(filter_repo_objects([name], allow_patterns=list(PUBLISHED_FILES))) == [name]


# --- from the hub ---------------------------------------------------------------------------------


@pytest.fixture
def cache(tiny_policy, tmp_path):
    """A cache of huggingface_hub with two revisions of an agent in it, as a download leaves it."""
    repo = tmp_path / "cache" / "models--me--agent"
    for revision, turns in (("main", 5), ("v1", 3)):
        commit = ("a" if revision == "main" else "b") * 40
        shutil.copytree(tiny_policy, repo / "snapshots" / commit)
        spec = json.loads((repo / "snapshots" / commit / "agentic_prompting.json").read_text())
        spec["limits"]["max_turns"] = turns
        (repo / "snapshots" / commit / "agentic_prompting.json").write_text(json.dumps(spec))
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
    return tmp_path / "cache"


def test_an_agent_by_its_hub_id(cache, tiny_policy):
    agent = PromptAgent.from_pretrained("me/agent", LLMEnvironment(Oracle()), cache_dir=cache)
    assert agent.spec.limits.max_turns == 5
    question = "what is the capital of Kenya ?"
    same = PromptAgent.from_pretrained(tiny_policy, LLMEnvironment(Oracle())).answer(question)
    assert agent.answer(question).ids == same.ids
    older = PromptAgent.from_pretrained(
        "me/agent", cache_dir=cache, revision="v1", dtype=torch.float32
    )
    assert older.spec.limits.max_turns == 3


def test_a_hub_id_that_nobody_has(cache, tmp_path):
    for name, revision in (
        ("me/other", None),
        ("me/agent", "v9"),
        (str(tmp_path / "no" / "such"), None),
    ):
        with pytest.raises(FileNotFoundError, match="local folder.*Hub") as told:
            PromptAgent.from_pretrained(name, revision=revision, cache_dir=cache, token=SECRET)
        assert name in str(told.value) and SECRET not in str(told.value)


def test_the_token_goes_to_the_hub(cache, monkeypatch):
    asked_for = {}

    def snapshot_download(repo_id, **options):
        asked_for.update(repo=repo_id, **options)
        return str(cache / "models--me--agent" / "snapshots" / ("a" * 40))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    PromptAgent.from_pretrained("me/agent", token=SECRET, revision="main")
    assert (asked_for["repo"], asked_for["token"], asked_for["revision"]) == (
        "me/agent",
        SECRET,
        "main",
    )
    assert "checkpoint-*/*" in asked_for["ignore_patterns"]


class Calculator:
    """Answers sums."""

    def step(self, rollout):
        return "4"


@pytest.mark.parametrize("environment", [Calculator(), None])
def test_the_card_of_ones_own_environment_speaks_of_it(tiny_policy, rows, tmp_path, environment):
    """Not of an LLMEnvironment(gpt-4o-mini), and no question that nobody asked."""
    trainer = PromptR1Trainer(
        model=str(tiny_policy),
        environment=environment,
        train_dataset=rows,
        args=PromptR1Config(**vars_for(tmp_path)),
    )
    trainer.create_model_card(model_name="sums")
    card = ModelCard.load(tmp_path / "README.md").content
    used = card.split("## How to use it")[1].split("## How it is asked")[0]
    assert "LLMEnvironment" not in card and "gpt-4o-mini" not in card and "castle" not in card
    assert ("Calculator" in used) == (environment is not None)
    assert 'PromptAgent.from_pretrained("' in used
    assert "--environment-model" not in used


# --- what is not there ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "./nowhere",
            "./nowhere does not exist: pass the folder of a model, or its name on the Hub",
        ),
        (
            "nowhere-at-all",
            "nowhere-at-all is neither a local folder nor a model on the Hub",
        ),
        ("EMPTY", "holds no model that can be loaded"),
    ],
)
def test_a_missing_model_is_one_line(tmp_path, rows, name, message):
    """71 lines of tracebacks before."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        prompt_r1(name.replace("EMPTY", str(tmp_path / "empty")), tmp_path, rows, template=None)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    error = caught.value
    assert error.__suppress_context__ or error.__context__ is None, "one traceback, not several"


def test_a_hub_that_cannot_be_reached_is_one_line(tiny_policy, tmp_path, rows, monkeypatch):
    def create_repo(*_, **__):
        raise HfHubHTTPError("no\nnetwork", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(
        "transformers.trainer.hf_api", lambda: SimpleNamespace(create_repo=create_repo)
    )
    with pytest.raises(ConnectionError) as caught:
        prompt_r1(tiny_policy, tmp_path, rows, push_to_hub=True, hub_model_id="me/mine")
    assert "push_to_hub=False" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__suppress_context__
