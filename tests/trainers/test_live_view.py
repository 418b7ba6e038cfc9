"""What trackers get beside the curves: trajectories and E-SPL's tree; few, escaped, and never the
end of training.

TensorBoard is the real one, its event file read back. trackio is the real one where it is
installed. wandb is a fake at its boundary: the package pulls in too much for a test.
"""

import logging
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from agentic_prompting import ESPLConfig, ESPLTrainer
from agentic_prompting.evolution import Population, SystemPrompt
from agentic_prompting.llm import ServerFailed
from agentic_prompting.rewards import PromptR1Reward
from agentic_prompting.rollout import (
    BatchEngine,
    FreeText,
    Observation,
    Rollout,
    TagGrammar,
    parse_turn,
)
from agentic_prompting.trainers.live_view import (
    MAX_CELL_CHARS,
    MAX_MEMBERS,
    MAX_TRAJECTORIES,
    LiveView,
    LoggedTable,
    TensorBoard,
)
from support.browser import evolved
from support.espl_training import Reference, WritesBySeed, reward_by_word
from support.training import vars_for

HOSTILE = (
    "</td>![x](http://127.0.0.1:9/x.png) | `a` __b__ &lt;b&gt; <script>alert(1)</script>\r\n\n# "
    "head\u2028x\x00\ud800"
)


def rollout(text=HOSTILE, question="which ?", error=None):
    one = Rollout([1], row={"question": question, "answers": ["Nairobi"]})
    one.turns = [
        parse_turn("<think> a </think> <interaction_prompt> b </interaction_prompt>", TagGrammar())
    ]
    one.observations = [Observation(text=text, error=error)]
    one.turns.append(parse_turn("<think> c </think> <answer> Nairobi </answer>", TagGrammar()))
    one.status = "failed" if error else "answered"
    one.error = error
    return one


class FakeWandB:
    """Keeps what it is told; a table is its columns and rows."""

    def __init__(self, breaks=False):
        self.logged = []
        self.breaks = breaks
        self.tried = 0

    def Table(self, columns, data):
        assert all(len(row) == len(columns) for row in data)
        return columns, data

    def Image(self, path):
        with open(path, "rb") as file:
            return file.read(4)

    def log(self, values):
        self.tried += 1
        if self.breaks:
            raise ConnectionError("no network")
        self.logged.append(values)


class WandbCallback:
    """By its name transformers' own."""

    def __init__(self, wandb):
        self._wandb = wandb


def view_of(wandb, population=None, rewards=(PromptR1Reward(),)):
    return LiveView(
        ["wandb"], lambda: [WandbCallback(wandb)], ["r"] * len(rewards), list(rewards), population
    )


def log(view, step=1, **logs):
    view.on_log(
        None, SimpleNamespace(is_world_process_zero=True, global_step=step), None, logs=logs
    )


def test_a_few_trajectories_spread_over_the_batch():
    wandb = FakeWandB()
    view = view_of(wandb)
    view.show("train", [rollout(question=f"q{number}") for number in range(50)], [[1.0]] * 50)
    log(view, step=7)
    ((columns, rows),) = [values["train/trajectories"] for values in wandb.logged]
    assert columns == ["question", "conversation", "answer", "status", "r", "parts"]
    assert len(rows) == MAX_TRAJECTORIES
    assert [row[0] for row in rows] == ["q0", "q12", "q24", "q36"]
    assert wandb.logged[0]["train/global_step"] == 7
    assert "[reply] </td>" in rows[0][1] and "<answer> Nairobi" in rows[0][1]
    assert rows[0][-1] == "total 1.000, format 1.000, answer 1.000"
    log(view, step=8)
    assert len(wandb.logged) == 1, "a batch is logged once"


def test_failed_rollouts_and_rewards_without_parts():
    wandb = FakeWandB()
    view = view_of(wandb, rewards=[lambda **columns: [0.5]])
    view.show(
        "eval",
        [rollout(error=ServerFailed("down")), rollout("x" * 10 * MAX_CELL_CHARS)],
        [[float("nan")], [0.5]],
    )
    log(view)
    first, second = wandb.logged[0]["eval/trajectories"][1]
    assert first[4] is None and second[4] == 0.5 and first[-1] == ""
    assert len(second[1]) < 1.1 * MAX_CELL_CHARS and "characters more]" in second[1]
    for row in (first, second):
        "".join(str(cell) for cell in row).encode("utf-8")
        assert "\x00" not in row[1]


def test_the_population_and_its_tree(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra [report] is not installed")
    population = evolved(tmp_path / "population.json", 60)
    assert len(population.members) > MAX_MEMBERS
    wandb = FakeWandB()
    view = view_of(wandb, population)
    log(view)
    table, picture = wandb.logged
    columns, rows = table["evolution/members"]
    assert len(rows) == MAX_MEMBERS and columns[:3] == ["id", "parents", "operator"]
    assert rows[0][0] == population.best().id
    assert rows[0][7] == "best"
    assert rows[1][0] == len(population.members) - 1
    assert picture["evolution/tree"] == b"\x89PNG"
    log(view)
    assert len(wandb.logged) == 2, "nothing has changed"
    population.select(1)
    log(view)
    assert len(wandb.logged) == 3, "new ratings, the same tree"
    population.add(SystemPrompt("new", (), parents=(0,)))
    log(view, train_runtime=1.0)
    assert "evolution/tree" in wandb.logged[-1], "at the end in any case"


def test_a_broken_tracker_is_said_once(caplog):
    wandb = FakeWandB(breaks=True)
    view = view_of(wandb, Population(SystemPrompt("a", ())))
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            view.show("train", [rollout()], [[1.0]])
            view.population.select(1)
            log(view, step)
    assert wandb.tried == 1
    assert [record.message for record in caplog.records] == [
        "logging to wandb failed, training goes on without it: ConnectionError('no network')"
    ]


def test_no_trackers_cost_nothing():
    view = view_of(FakeWandB())
    view.report_to = []
    view.show("train", [object()], [])
    log(view)


# --- the real ones --------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.add(tag)


def test_nothing_in_tensorboards_markdown_is_markup():
    """Rendered as TensorBoard renders it."""
    markdown = pytest.importorskip("markdown", reason="comes with tensorboard")
    texts = []
    writer = SimpleNamespace(add_text=lambda name, text, step: texts.append(text))
    rows = [[HOSTILE.replace("\ud800", ""), None], ["x", 1.5]]
    TensorBoard(writer).log_table(LoggedTable("t", ["a", "b"], rows, 0))
    html = markdown.markdown(
        texts[0], extensions=["markdown.extensions.tables", "markdown.extensions.fenced_code"]
    )
    assert Tags(html).found == {"table", "thead", "tbody", "tr", "th", "td", "br"}
    assert html.count("<tr>") == 3, "no line of a cell begins a row"
    assert "alert&#40;1&#41;" in html, "the text is still there"


def trainer_for(policy, folder, rows, tracker, **changes):
    args = {
        **vars_for(folder),
        "prompts_per_step": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "max_turn_tokens": 12,
        "p_crossover": 0.0,
        "evolution_lag": 0,
        "report_to": [tracker],
        "gradient_accumulation_steps": 1,
        **changes,
    }
    trainer = ESPLTrainer(
        model=str(policy),
        reward_funcs=reward_by_word,
        reference=Reference(),
        args=ESPLConfig(**args),
        train_dataset=rows,
        initial_prompt=f"{HOSTILE}\n[G0]. Ask first .".replace("\x00\ud800", ""),
        grammar=FreeText(),
    )
    trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
    return trainer


def test_tensorboard(tiny_policy, rows, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra [tracking] is not installed")
    pytest.importorskip("matplotlib", reason="the extra [report] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = trainer_for(tiny_policy, tmp_path, rows, "tensorboard")
    trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0})
    events.Reload()
    assert "train/reward" in events.Tags()["scalars"]
    told = events.Tensors("train/trajectories/text_summary")
    assert [event.step for event in told] == [1, 2, 3]
    table = told[0].tensor_proto.string_val[0].decode("utf-8")
    assert table.startswith(
        "| question | conversation | answer | status | reward_by_word | parts |"
    )
    assert table.count("\n") == 1 + MAX_TRAJECTORIES and "<script>" not in table
    members = (
        events.Tensors("evolution/members/text_summary")[-1]
        .tensor_proto.string_val[0]
        .decode("utf-8")
    )
    assert members.count("\n") == 1 + len(trainer.population.members) > 2
    assert "<script>" not in members
    assert "![" not in members
    assert events.Images("evolution/tree")[-1].encoded_image_string[:4] == b"\x89PNG"


def test_trackio(tiny_policy, rows, tmp_path, monkeypatch):
    """Its local database, offline."""
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trainer = trainer_for(tiny_policy, tmp_path, rows, "trackio", project="ours", run_name="one")
    trainer.train()
    assert not trainer.live_view._failed_trackers
    found = b"".join(
        path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file()
    )
    assert b"train/trajectories" in found
    assert b"evolution/members" in found
    assert b"evolution/tree" in found
