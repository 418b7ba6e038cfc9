"""`evaluate_agent` on scripted models: what is asked, what is saved, what is counted, and how a
killed run goes on.
"""

import asyncio
import json
from decimal import Decimal
from itertools import combinations
from math import comb, inf
from threading import Event

import numpy as np
import pytest
from datasets import DatasetDict
from hypothesis import given, strategies as st

from agentic_prompting.data import TASKS, load_task
from agentic_prompting.environments import LLMEnvironment, Worker, Workers
from agentic_prompting.evaluation import (
    AgentSystem,
    Answer,
    EvaluationStopped,
    EvaluationTask,
    PromptedSystem,
    ProRefineSystem,
    System,
    compare_runs,
    compare_systems,
    evaluate_agent,
    load_evaluation_task,
    load_run,
    mcnemar,
    paired_difference,
    pass_at_k,
    read_answer,
    repeats_table,
    results_table,
    save_run,
    to_markdown,
    wilson_interval,
    write_tables,
)
from agentic_prompting.evaluation.scoring import format_scores, score_records, score_rollouts
from agentic_prompting.evaluation.systems import answer_of_replies
from agentic_prompting.interop.user import UserSimulator
from agentic_prompting.llm import (
    BudgetExceeded,
    ReplayCache,
    Reply,
    ScriptedChat,
    ServerFailed,
    Usage,
    start,
)
from agentic_prompting.llm.loop import in_parallel
from agentic_prompting.refine import LabelVerifier, ProRefiner, RoleUsage
from agentic_prompting.rewards import exact_match
from agentic_prompting.rollout import Environment, Rollout
from agentic_prompting.sandbox.puzzles import SORTING, make_puzzles, puzzle_models
from paper_tables.chats import CallCount, MeteredChat, SelfReflection

ROWS = [
    {"id": f"r{i}", "question": f"what is {i} + {i} ?", "answers": [str(2 * i)]} for i in range(20)
]
TASK = EvaluationTask("sums", ROWS, ("exact_match", "token_f1"))


def add(messages):
    number = int(messages[-1]["content"].split()[2])
    return f"Let me see.\nAnswer: {2 * number if number % 4 else 'no idea'}"


def system(**options):
    return PromptedSystem(ScriptedChat(add, **options), "Add.")


def lines(folder, name="system"):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_plain_function_is_a_system():
    evaluation = evaluate_agent(
        lambda questions: ["0"] * len(questions), {"sums": ROWS}, runs=1, progress=False
    )
    result = evaluation.result("system", "sums")
    assert result.estimates["exact_match"].mean == 1 / 20
    assert result.answers == 20
    assert result.failed == 0


def test_a_data_set_is_one_task():
    """As the page says: the result of `load_task` goes in as it is; lists of rows and lists with
    data sets too.
    """
    zero = lambda questions: ["0"] * len(questions)  # noqa: E731
    loaded = load_task(ROWS)
    for tasks in (loaded, ROWS, [loaded], TASK, {"sums": loaded}, DatasetDict(sums=loaded)):
        evaluation = evaluate_agent(zero, tasks, ["exact_match"], runs=1, progress=False)
        (result,) = evaluation.results
        assert result.answers == 20 and result.estimates["exact_match"].mean == 1 / 20


def test_rows_of_a_named_set_keep_its_metrics():
    rows = [{**row, "task": "gsm8k"} for row in ROWS]
    (result,) = evaluate_agent(
        lambda questions: ["0"] * len(questions), rows, runs=1, progress=False
    ).results
    assert result.task == "gsm8k" and tuple(result.estimates) == TASKS["gsm8k"].metrics


@pytest.mark.parametrize(
    "tasks",
    [
        3,
        None,
        [ROWS[0], "hotpotqa"],
        {"sums": 3},
        {"sums": "hotpotqa"},
        ROWS[0],
        [["hotpotqa"]],
        [b"x"],
        [3],
    ],
)
def test_what_is_no_task_is_refused_in_a_line(tasks):
    with pytest.raises(ValueError) as raised:
        evaluate_agent(lambda questions: 1 / 0, tasks, progress=False)
    assert "\n" not in str(raised.value)


def test_right_wrong_and_failed_are_three_things(tmp_path):
    asked_system = system(fail_on=lambda call: call in (1, 2, 3))
    evaluation = evaluate_agent(asked_system, [TASK], runs=1, output=tmp_path, progress=False)
    result = evaluation.result("system", "sums")
    # Questions 1, 2, 3 failed and are in no mean; 0, 4, 8, 12, 16 are wrong; the others right.
    assert (result.answers, result.failed) == (20, 3)
    assert result.estimates["exact_match"].n == 17
    assert result.estimates["exact_match"].mean == pytest.approx(12 / 17)
    assert set(result.values["exact_match"]) == set(range(20)) - {1, 2, 3}
    assert "scripted failure" in lines(tmp_path)[1]["error"]
    row = results_table(evaluation)[0]
    assert (row["answered"], row["failed"]) == ("17", "3")


def test_tokens_are_those_of_replayed_calls_too():
    usage = Usage(prompt_tokens=30, completion_tokens=12)
    reply = Reply("x", cached=True, saved=usage)
    answer = answer_of_replies([reply], 1.0)
    assert (answer.tokens, answer.cached) == (42, 1)
    refinement = RoleUsage.from_reply(reply)
    assert (refinement.tokens, refinement.worth_tokens) == (0, 42)


def test_a_replayed_call_shows_its_worth_beside_what_was_paid():
    """One system has one cost, whether its calls were made here or replayed."""

    class Paid(System):
        async def answer(self, row, seed):
            return Answer("x", cost_usd=0.02)

    class Replayed(System):
        async def answer(self, row, seed):
            return Answer("x", cost_usd=0.0, worth_usd=0.02)

    first = evaluate_agent(Paid(), [TASK], progress=False)
    assert "$ paid" not in results_table(first)[0]
    both = evaluate_agent({"paid": Paid(), "replayed": Replayed()}, [TASK], progress=False)
    rows = results_table(both)
    assert [row["$"] for row in rows] == ["0.02000", "0.02000"]
    assert [row["$ paid"] for row in rows] == ["0.02000", "0.00000"]


def test_a_cheap_answer_costs_more_than_nothing(tmp_path):
    class Cheap(System):
        async def answer(self, row, seed):
            return Answer("x", cost_usd=4.6e-6)

    evaluation = evaluate_agent({"cheap": Cheap()}, [TASK], progress=False)
    assert [row["$"] for row in results_table(evaluation)] == ["0.0000046"]
    files = write_tables(tmp_path, evaluation)
    assert all("0.0000046" in files[suffix].read_text() for suffix in ("md", "csv", "tex"))


def test_no_answer_is_wrong_not_failed():
    evaluation = evaluate_agent(
        lambda questions: [None] * len(questions), [TASK], runs=1, progress=False
    )
    result = evaluation.result("system", "sums")
    assert (result.failed, result.estimates["exact_match"].mean) == (0, 0.0)


def test_no_answer_is_not_zero_to_the_integer_rule():
    records = [
        {"answer": None, "answers": ["0"]},
        {"answer": "0", "answers": ["0"]},
        {"error": "x", "answers": ["0"]},
    ]
    from agentic_prompting.evaluation import find_metrics

    assert score_records(records, find_metrics(["integer_match"]))["integer_match"] == [
        0.0,
        1.0,
        None,
    ]


def test_a_judges_verdict_is_a_score_and_none_is_ungraded():
    from agentic_prompting.evaluation import find_metrics

    given = [Answer("a", judged=0.0), Answer("a", judged=1.0), Answer("a"), Answer(None)]
    records = [{"answer": one.text, "answers": ["b"], **one.to_json()} for one in given]
    assert score_records(records, find_metrics(["judged"]))["judged"] == [0.0, 1.0, None, 0.0]


class Killed(BaseException):
    pass


class Killable(SelfReflection):
    """Ends as if the process were killed, at the first answer at which `is_killed()` is true."""

    def answer_each(self, rows, seed=0):
        for answered in super().answer_each(rows, seed):
            if self.is_killed():
                raise Killed
            yield answered


def test_a_killed_run_goes_on_without_asking_again(tmp_path):
    cache = ReplayCache(tmp_path / "replies.sqlite")
    asked = []

    def answer(messages):
        asked.append(messages[0]["content"] + messages[-1]["content"])
        return add(messages[:2])

    def run(stop_after=inf):
        reflecting = Killable(MeteredChat(ScriptedChat(answer), cache), "Add.", max_in_flight=4)
        reflecting.is_killed = lambda: len(asked) >= stop_after
        return evaluate_agent(reflecting, [TASK], runs=2, output=tmp_path, progress=False)

    with pytest.raises(Killed):
        run(stop_after=50)
    assert 0 < len(lines(tmp_path)) < 40
    path = tmp_path / "system.jsonl"
    path.write_bytes(path.read_bytes() + b'{"system": "torn')  # killed while writing
    evaluation = run()
    assert len(asked) == 20 * 2 * 3 and evaluation.result("system", "sums").answers == 40
    assert len(lines(tmp_path)) == 40
    again = run(stop_after=0)  # everything is there: nothing is asked
    assert again.results == evaluation.results


def test_failures_are_asked_again(tmp_path):
    evaluate_agent(
        system(fail_on=lambda call: call == 5), [TASK], runs=1, output=tmp_path, progress=False
    )
    chat = ScriptedChat(add)
    evaluation = evaluate_agent(
        PromptedSystem(chat, "Add."), [TASK], runs=1, output=tmp_path, progress=False
    )
    assert len(chat.calls) == 1 and evaluation.results[0].failed == 0


def test_results_of_others_are_not_continued(tmp_path):
    evaluate_agent(system(), [TASK], runs=1, output=tmp_path, progress=False)
    with pytest.raises(ValueError, match="answers of another system"):
        evaluate_agent(
            PromptedSystem(ScriptedChat(add), "Subtract."),
            [TASK],
            runs=1,
            output=tmp_path,
            progress=False,
        )
    with pytest.raises(ValueError, match="another sample of sums"):
        evaluate_agent(system(), [TASK], n=10, runs=1, seed=5, output=tmp_path, progress=False)
    (tmp_path / "system.jsonl").write_text("what\n")
    with pytest.raises(ValueError, match="line 1 is no record"):
        evaluate_agent(system(), [TASK], runs=1, output=tmp_path, progress=False)


def test_a_models_own_settings_are_not_continued_with_others(tmp_path):
    def asked(**options):
        def chat(messages):
            return add(messages)

        vars(chat).update(
            {"model": "m", "sampling": {"temperature": 0}, "system_prompt": None, **options}
        )
        return evaluate_agent(PromptedSystem(chat), [TASK], runs=1, output=tmp_path, progress=False)

    asked()
    asked()
    for other in ({"sampling": {"temperature": 1}}, {"system_prompt": "Think."}, {"model": "n"}):
        with pytest.raises(ValueError, match="other settings"):
            asked(**other)


def load_function(file, name):
    """A function of a file, as a process that starts anew would import it."""
    names = {"__name__": "my_system"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names[name]


def test_an_edited_function_is_not_continued(tmp_path):
    """Else the table would show the answers of the old function as those of the new one."""
    file = tmp_path / "my_system.py"

    def ask():
        function = load_function(file, "answer")
        return evaluate_agent(function, [TASK], runs=1, output=tmp_path, progress=False)

    file.write_text("def answer(questions):\n    return ['2'] * len(questions)\n")
    ask()
    file.write_text("# always the same\n" + file.read_text())
    ask()
    file.write_text(file.read_text().replace("2", "4"))
    with pytest.raises(ValueError, match="code"):
        ask()

    # Answers of older versions do not say what gave them.
    records = lines(tmp_path)
    for record in records:
        del record["version"]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "system.jsonl").write_text(text)
    ask()


class Shop(Environment):
    def step(self, rollout):
        return None


class CountingAgent:
    """Counts the rows that it is asked, and answers none of them."""

    def __init__(self, environment):
        self.asked = 0
        self.environment = environment

    def answer_all(self, questions, seed=0, progress=True):
        self.asked += len(questions)
        return [Rollout([1], row=dict(row)).finish("answered") for row in questions]


def test_a_row_whose_columns_changed_is_asked_again(tmp_path, caplog):
    """An environment of the user's own may read any column of its row."""
    agent = CountingAgent(Shop())

    def ask(rows):
        system = AgentSystem(agent, "shop")
        evaluate_agent(system, {"sums": rows}, runs=1, output=tmp_path, progress=False)

    rows = [{**row, "price": 3, "id": f"a{n}"} for n, row in enumerate(ROWS)]
    ask(rows)
    ask([{**row, "id": f"b{n}"} for n, row in enumerate(rows)])
    assert agent.asked == 20
    ask([{**rows[0], "price": 4}, *rows[1:]])
    assert agent.asked == 21
    assert "1 questions are asked again" in caplog.text
    ask([{**rows[0], "price": 4}, *rows[1:]])
    assert agent.asked == 21


def _chat():
    return ScriptedChat(lambda messages: "ok")


@pytest.mark.parametrize(
    ("environment", "columns"),
    [
        (Workers({"a": _chat(), "b": _chat()}), {"pool", "budget"}),
        (Workers({"a": _chat(), "shop": Worker(Shop())}), {"pool", "budget", "price"}),
        (UserSimulator(_chat()), {"pool", "budget", "price"}),
        (LLMEnvironment(_chat()), set()),
    ],
)
def test_columns_that_an_environment_reads_are_compared(tmp_path, environment, columns):
    rows = [{**row, "pool": ["a"], "budget": "low", "price": 3} for row in ROWS]
    changes = {"pool": ["a", "b"], "budget": "high", "price": 4}

    for column, value in changes.items():
        agent = CountingAgent(environment)
        for first_row in (rows[0], {**rows[0], column: value}):
            evaluate_agent(
                AgentSystem(agent, "agent"),
                {"sums": [first_row, *rows[1:]]},
                runs=1,
                output=tmp_path / column,
                progress=False,
            )
        assert agent.asked == 20 + (column in columns)


def test_labels_that_decide_a_refinement_are_asked_again(tmp_path):
    """With the optimal verifier the accepted answers are part of what answers."""
    models = puzzle_models()
    rows = make_puzzles(3, kinds=(SORTING,))
    roles = (models["task"], models["feedback"], models["optimizer"])

    def ask(rows, verifier):
        refiner = ProRefiner(*roles, verifier, max_steps=2)
        return evaluate_agent(
            ProRefineSystem(refiner, "Sort."),
            {"sorting": rows},
            runs=1,
            output=tmp_path / str(verifier is None),
            progress=False,
        ).records

    changed = [{**rows[0], "answers": ["other"]}, *rows[1:]]
    for verifier, asked_again in ((LabelVerifier(exact_match), 1), (None, 0)):
        first = ask(rows, verifier)
        second = ask(changed, verifier)
        new = [a["seconds"] != b["seconds"] for a, b in zip(first, second, strict=True)]
        assert sum(new) == asked_again


def test_a_fatal_failure_stops_and_keeps_what_there_is(tmp_path):
    chat = MeteredChat(ScriptedChat(add), count=CallCount(7))
    with pytest.raises(EvaluationStopped, match="7 calls.*7 of 20"):
        evaluate_agent(
            PromptedSystem(chat, None, max_in_flight=1),
            [TASK],
            runs=1,
            output=tmp_path,
            progress=False,
        )
    assert sum(record.get("error") is None for record in lines(tmp_path)) == 7


def test_an_answer_that_was_put_right_counts_without_asking_again(tmp_path):
    """The user corrects the accepted answer of a question and runs the evaluation again."""
    evaluate_agent(system(), [TASK], runs=1, output=tmp_path, progress=False)
    mended = [{**row, "answers": ["no idea"]} if row["id"] == "r0" else row for row in ROWS]
    silent = PromptedSystem(ScriptedChat(lambda messages: 1 / 0), "Add.")
    again = evaluate_agent(silent, {"sums": mended}, runs=1, output=tmp_path, progress=False)
    assert again.result("system", "sums").estimates["exact_match"].mean == pytest.approx(16 / 20)
    save_run(tmp_path, again)
    assert load_run(tmp_path).results == again.results

    class Judged(System):
        asked = 0

        async def answer(self, row, seed):
            self.asked += 1
            return Answer("no idea", judged=float("no idea" in row["answers"]))

    judge = Judged()
    task = ("judged",)
    for rows in (ROWS, mended):  # a verdict is about what was accepted when it was given
        of = [EvaluationTask("sums", rows, task)]
        evaluation = evaluate_agent({"judge": judge}, of, runs=1, output=tmp_path, progress=False)
    assert judge.asked == 21
    assert evaluation.result("judge", "sums").estimates["judged"].mean == 1 / 20


def test_samples_and_runs_are_seeded():
    def asked(**options):
        evaluation = evaluate_agent(
            lambda questions: questions, [TASK], n=5, progress=False, **options
        )
        return [record["id"] for record in evaluation.records]

    assert asked(runs=1) == asked(runs=1) != asked(runs=1, seed=1)
    assert asked(runs=3) == 3 * asked(runs=1)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["hotpot_qa"], "unknown task 'hotpot_qa'; did you mean 'hotpotqa'"),
        (["hotpotqa/test"], "hotpotqa has no split 'test'; it has: train, validation"),
        (
            {"mine": [ROWS[0], {"question": "", "answers": ["a"]}]},
            "mine: row 1 of the dataset: `question` must be",
        ),
        (
            {"mine": [ROWS[0], {"question": "q"}]},
            "mine: row 1 of the dataset: `answers` must be a list",
        ),
        (
            {"mine": [{"question": "q", "answers": ["a", 3]}]},
            "mine: row 0 of the dataset: `answers` must be",
        ),
        ({"mine": [{"question": "q", "answers": []}]}, "row 0 of the dataset: `answers` is empty"),
        ("hotpotqa", "tasks must be a list"),
    ],
)
def test_bad_tasks_are_told_before_anything_is_asked(tasks, message):
    chat = ScriptedChat(add)
    with pytest.raises(ValueError, match=message):
        evaluate_agent(PromptedSystem(chat, None), tasks, progress=False)
    assert not chat.calls


def test_a_file_of_ones_own_is_a_task(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("question,answer\nq,007\nr,b\n")
    task = load_evaluation_task(str(path), 1)
    assert task.name == "own"
    assert len(task.rows) == 1
    assert task.rows[0]["answers"] in (["007"], ["b"])
    evaluation = evaluate_agent(
        lambda questions: ["007"] * len(questions), [str(path)], runs=1, progress=False
    )
    result = evaluation.result("system", "own")
    assert result.estimates["exact_match"].mean == 0.5


def test_two_tasks_of_one_name_are_refused_before_anything_is_asked(tmp_path):
    """Their answers would be each other's: `hotpotqa/test.jsonl` and `musique/test.jsonl` are both
    called test.
    """
    files = [tmp_path / folder / "test.csv" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text("question,answer\nwhat is 1 + 1 ?,2\n")
    with pytest.raises(ValueError, match="two tasks are called 'test'"):
        evaluate_agent(system(), [str(file) for file in files], progress=False)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="runs and n"):
        evaluate_agent(system(), [TASK], runs=0)
    with pytest.raises(ValueError, match="unknown metric 'f1'"):
        evaluate_agent(system(), [TASK], metrics=["f1"])
    with pytest.raises(TypeError, match="System"):
        evaluate_agent("gpt", [TASK])
    with pytest.raises(ValueError, match="1 answers.*20 questions"):
        evaluate_agent(lambda questions: ["x"], [TASK], runs=1, progress=False)


def test_a_function_that_raises_fails_its_questions():
    evaluation = evaluate_agent(lambda questions: 1 / 0, [TASK], runs=1, progress=False)
    assert evaluation.results[0].failed == 20
    assert evaluation.results[0].estimates["exact_match"] is None
    assert "ZeroDivisionError" in evaluation.records[0]["error"]
    assert "–" in to_markdown(results_table(evaluation))


def test_a_fatal_error_that_a_system_raises_stops_the_evaluation():
    """As one that it returns does: the other questions would fail as this one did."""

    class Raises(System):
        max_in_flight = 1

        async def answer(self, row, seed):
            raise BudgetExceeded("spent")

    def function(questions):
        raise BudgetExceeded("spent")

    for one in (Raises(), function):
        with pytest.raises(EvaluationStopped, match="spent; 0 of 20 answers"):
            evaluate_agent(one, [TASK], runs=1, progress=False)


def test_a_system_is_one_coroutine_so_many_at_a_time():
    most = on_their_way = 0

    class Slow(System):
        max_in_flight = 3

        async def answer(self, row, seed):
            nonlocal most, on_their_way
            on_their_way += 1
            most = max(most, on_their_way)
            while most < 3:  # who is asked one by one waits for ever
                await asyncio.sleep(0.001)
            on_their_way -= 1
            if row["id"] == "r7":
                raise RuntimeError("no idea")
            return Answer(row["answers"][0])

    result = evaluate_agent(Slow(), [TASK], runs=2, progress=False).results[0]
    assert (most, result.answers, result.failed, result.estimates["exact_match"].mean) == (
        3,
        40,
        2,
        1.0,
    )
    with pytest.raises(NotImplementedError, match="neither `answer` nor"):
        asyncio.run(System().answer(ROWS[0], 0))


def test_a_model_is_asked_by_awaiting_it_too():
    async def model(messages, *, repeat=None, session=None, **sampling):
        if "7 + 7" in messages[-1]["content"]:
            raise RuntimeError("broken")
        return Reply(add(messages))

    records = evaluate_agent(
        PromptedSystem(MeteredChat(model), None), [TASK], runs=1, progress=False
    ).records
    assert [record["answer"] for record in records[:4]] == ["no idea", "2", "4", "6"]
    assert "the model model raised RuntimeError: broken" in records[7]["error"]


def test_a_call_that_its_model_cancels_is_a_failed_call():
    async def closing(messages):
        raise asyncio.CancelledError

    (record,) = evaluate_agent(
        PromptedSystem(closing, None), {"a": ROWS[:1]}, runs=1, progress=False
    ).records
    assert "the model closing raised CancelledError" in record["error"]


def test_leaving_early_cancels_what_is_on_its_way():
    cancelled = Event()

    async def work(number):
        try:
            await asyncio.sleep(0 if number == 0 else 60)
        finally:
            if number:
                cancelled.set()
        return number

    finished = in_parallel(map(work, range(2)), 2)
    assert next(finished) == (0, 0)
    finished.close()
    assert cancelled.wait(30)


# Systems
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("I think.\nAnswer: 42.", "42"),
        ("**Answer:** Rome\nThat is all.", "Rome"),
        ("<think>x</think><answer> Oslo </answer>", "Oslo"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("Answer: 1 then Answer: 2", "1 then Answer: 2"),
        ("just this", "just this"),
        ("", ""),
        ("\\boxed{open", "open"),
    ],
)
def test_reading_an_answer(reply, answer):
    assert read_answer(reply) == answer


def test_self_reflection_is_three_calls_and_the_last_one_counts():
    said = iter(["Answer: 1", "Wrong.", "Answer: 2"])
    chat = ScriptedChat(lambda messages: next(said))
    (answer,) = SelfReflection(chat, "Think.")(["what?"])
    assert (answer.text, answer.calls) == ("2", 3)
    assert [len(call) for call in chat.calls] == [2, 4, 6]
    assert [message["role"] for message in chat.calls[2]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    failing = SelfReflection(ScriptedChat(["Answer: 1", ServerFailed("down")]), None)(["what?"])[0]
    assert failing.text is None and "down" in failing.error and failing.calls == 2


@pytest.mark.parametrize("setting", ["no_verifier", "verifier", "optimal_verifier"])
def test_prorefine_in_its_three_settings(setting):
    from agentic_prompting.refine import LabelVerifier
    from agentic_prompting.rewards import word_sorting_match

    models = puzzle_models()
    verifier = {
        "no_verifier": None,
        "verifier": models.pop("verifier"),
        "optimal_verifier": LabelVerifier(word_sorting_match),
    }
    refining = ProRefineSystem(
        ProRefiner(**models, verifier=verifier[setting]), "Sort. End with 'Answer: ...'."
    )
    task = EvaluationTask("sorting", make_puzzles(12, kinds=[SORTING]), ("word_sorting_match",))
    plain = evaluate_agent(
        PromptedSystem(puzzle_models()["task"], "Sort."), [task], runs=1, progress=False
    ).results[0]
    refined = evaluate_agent(refining, [task], runs=1, progress=False).results[0]
    assert refined.estimates["word_sorting_match"].mean > plain.estimates["word_sorting_match"].mean
    assert refined.calls > plain.calls == 1


def test_a_call_count_is_shared():
    count = CallCount(3)
    first, second = (MeteredChat(ScriptedChat(["x"]), count=count) for _ in range(2))
    message = [{"role": "user", "content": "q"}]
    replies = [start(chat(message)).result() for chat in (first, second, first, second)]
    assert [isinstance(reply.error, BudgetExceeded) for reply in replies] == [
        False,
        False,
        False,
        True,
    ]
    assert count.affords(0) and not count.affords(1)


# Paired differences
# -------------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_test(wins, losses):
    n = wins + losses
    each = [comb(n, k) / 2**n for k in range(n + 1)]
    expected = sum(p for p in each if p <= each[wins] * (1 + 1e-9))
    assert mcnemar(wins, losses) == pytest.approx(expected) == pytest.approx(mcnemar(losses, wins))


def test_mcnemar_at_its_ends():
    assert mcnemar(0, 0) == 1.0 and mcnemar(5, 0) == pytest.approx(2 / 32)
    assert 0 <= mcnemar(9000, 1000) < 1e-300 or mcnemar(9000, 1000) == 0.0
    with pytest.raises(ValueError, match="must not be negative"):
        mcnemar(-1, 2)


def test_a_paired_interval_covers_the_truth():
    rng = np.random.default_rng(3)
    covered = 0
    for trial in range(800):
        hard = rng.random(128)  # shared difficulty: what pairing takes out
        first = rng.random(128) < 0.2 + 0.6 * hard
        second = rng.random(128) < 0.1 + 0.6 * hard
        scores = [dict(enumerate(values.astype(float))) for values in (first, second)]
        difference = paired_difference(*scores, n_resamples=300, seed=trial).difference
        covered += difference.low <= 0.1 <= difference.high
    assert covered / 800 == pytest.approx(0.95, abs=0.015)


def test_only_questions_that_both_answered_are_compared():
    gaps = paired_difference({0: 1.0, 1: 1.0, 2: 0.0, 3: 1.0}, {1: 0.0, 2: 0.0, 3: 1.0, 9: 1.0})
    assert (gaps.wins, gaps.losses, gaps.ties, gaps.left_out) == (1, 0, 2, 2)
    assert gaps.difference.mean == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="no question in common"):
        paired_difference({0: 1.0}, {1: 1.0})


# Runs and tables
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_systems(tmp_path):
    systems = {"adds": system(), "guess | 50%": lambda questions: ["2"] * len(questions)}
    evaluation = evaluate_agent(systems, [TASK], runs=2, output=tmp_path, progress=False)
    save_run(tmp_path, evaluation)
    return tmp_path, evaluation


def test_a_saved_run_is_loaded_with_the_same_numbers(two_systems):
    folder, evaluation = two_systems
    assert load_run(folder).results == evaluation.results
    with pytest.raises(FileNotFoundError, match="holds no finished evaluation"):
        load_run(folder / "nowhere")


def test_tables_in_four_forms(two_systems, tmp_path):
    _, evaluation = two_systems
    comparisons = compare_systems(evaluation, "adds")
    assert [
        (comparison.first, comparison.paired.wins, comparison.paired.losses)
        for comparison in comparisons
    ] == [("guess | 50%", 0, 14)]
    table = results_table(evaluation)
    assert "guess \\| 50%" in to_markdown(table)
    paths = write_tables(tmp_path / "tables", evaluation, comparisons, "Sums")
    assert set(paths) == {"md", "csv", "tex", "json"}
    assert paths["md"].read_text().startswith("# Sums")
    assert paths["csv"].read_text().startswith("task,system,exact_match,token_f1,answered,failed")
    assert "50\\%" in paths["tex"].read_text()
    saved = json.loads(paths["json"].read_text())
    assert saved["results"][0]["estimates"]["exact_match"]["n"] == 20
    assert saved["comparisons"][0]["paired"]["losses"] == 14
    with pytest.raises(ValueError, match="'cot'"):
        compare_systems(evaluation, "cot")


def test_two_runs_are_compared_question_by_question(two_systems):
    _, first = two_systems
    better = PromptedSystem(
        ScriptedChat(lambda messages: f"Answer: {2 * int(messages[-1]['content'].split()[2])}"),
        None,
    )
    second = evaluate_agent({"adds": better}, [TASK], runs=1, progress=False)
    (comparison,) = compare_runs(first, second, ("old", "new"))
    assert (comparison.first, comparison.second) == ("adds (old)", "adds (new)")
    assert (comparison.paired.wins, comparison.paired.losses) == (0, 5)
    other = evaluate_agent(
        {"adds": better}, [EvaluationTask("sums", ROWS[::-1])], runs=1, progress=False
    )
    with pytest.raises(ValueError, match="asked different questions of sums"):
        compare_runs(first, other)


def test_single_systems_are_compared_whatever_their_names():
    def answers(text):
        return PromptedSystem(ScriptedChat(lambda messages: f"Answer: {text}"), None)

    before = evaluate_agent({"base": answers("no")}, [TASK], runs=1, progress=False)
    after = evaluate_agent({"trained": answers("no")}, [TASK], runs=1, progress=False)
    (comparison,) = compare_runs(before, after, ("one", "two"))
    assert (comparison.first, comparison.second) == ("base (one)", "trained (two)")
    both = evaluate_agent({"a": answers("no"), "b": answers("no")}, [TASK], progress=False, runs=1)
    with pytest.raises(ValueError, match="base on sums, and a, b on sums"):
        compare_runs(before, both)


def test_form_is_scored_where_there_are_turns():
    good = (
        "<think>t</think> <interaction_prompt>q</interaction_prompt>",
        "<think>t</think> <answer>a</answer>",
    )
    record = {"answers": ["a"], "trajectory": {"turns": [{"text": text} for text in good]}}
    assert format_scores([record, {"answers": ["a"]}, {**record, "error": "x"}]) == [
        1.0,
        None,
        None,
    ]


# Several runs of each question
# ----------------------------------------------------------------------------------------


@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_answer(n, data):
    right = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    draws = list(combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased():
    """Its mean over many samples of n answers is 1 - (1 - p)^k, which the plug-in 1 - (1 - c/n)^k
    is not.
    """
    drawn = np.random.default_rng(0).binomial(6, 0.3, 20_000)
    assert np.mean([pass_at_k(6, int(right), 3) for right in drawn]) == pytest.approx(
        1 - 0.7**3, abs=0.01
    )


@pytest.mark.parametrize(("n", "right", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_of_nonsense_is_an_error(n, right, k):
    with pytest.raises(ValueError, match="expected 0 <= right <= n"):
        pass_at_k(n, right, k)


def test_several_runs_give_pass_at_k_a_majority_and_a_spread(tmp_path):
    texts = {0: ["4", "4", "5"], 1: ["5", "6", "4"], 2: ["9", "9", "4"], 3: ["4", "4", None]}
    asked = iter([0, 1, 2])

    def by_run(questions):
        run = next(asked)
        return [texts[place][run] for place in range(len(questions))]

    rows = [{"question": f"{i} ?", "answers": ["4"]} for i in range(4)]
    task = EvaluationTask("four", rows, ("exact_match", "token_f1"))
    evaluation = evaluate_agent(by_run, [task], runs=3, output=tmp_path, progress=False)
    result = evaluation.result("system", "four")
    found = result.repeated["exact_match"]
    assert list(found) == ["pass@1", "pass@2", "pass@3", "majority@3", "spread"]
    assert (
        found["pass@1"].mean
        == pytest.approx(result.estimates["exact_match"].mean)
        == pytest.approx(6 / 12)
    )
    assert found["pass@2"].mean == pytest.approx((1 + 2 / 3 + 2 / 3 + 1) / 4)
    assert (found["pass@3"].mean, found["pass@3"].n) == (1.0, 4) and found[
        "pass@3"
    ].low > 0.5  # Wilson's
    # Of three answers given once each any may be taken; no answer is no vote.
    assert found["majority@3"].mean == pytest.approx((1 + 1 / 3 + 0 + 1) / 4)
    assert found["spread"].mean == pytest.approx(np.sqrt(1 / 3))
    assert list(result.repeated["token_f1"]) == ["spread"]
    save_run(tmp_path, evaluation)
    assert load_run(tmp_path).results == evaluation.results
    tables = write_tables(tmp_path, evaluation)
    assert "| majority@3 |" in tables["md"].read_text()
    assert (
        json.loads(tables["json"].read_text())["results"][0]["repeated"]["exact_match"]["pass@2"][
            "n"
        ]
        == 4
    )
    assert [row["metric"] for row in repeats_table(evaluation)] == ["exact_match", "token_f1"]
    assert repeats_table(evaluation)[1]["pass@2"] == "–"


def test_several_runs_that_agree_are_as_uncertain_as_one():
    """All 20 questions right in each of 3 runs: the bootstrap would be certain of 1."""
    right = PromptedSystem(
        ScriptedChat(lambda messages: f"{2 * int(messages[-1]['content'].split()[2])}")
    )
    estimates = {
        runs: evaluate_agent(right, [TASK], runs=runs, progress=False)
        .results[0]
        .estimates["exact_match"]
        for runs in (1, 3)
    }
    assert estimates[1] == estimates[3] == wilson_interval(20, 20) and estimates[3].low < 0.85


def test_a_failed_run_is_no_attempt():
    answering = system(
        fail_on=lambda call: call == 1
    )  # one run of question 1, which the others get right
    evaluation = (
        evaluate_agent(answering, [TASK], runs=2, progress=False)
        .result("system", "sums")
        .repeated["exact_match"]
    )
    assert (
        evaluation["pass@1"].n,
        evaluation["pass@2"].n,
        evaluation["majority@2"].n,
        evaluation["spread"].n,
    ) == (
        20,
        19,
        19,
        19,
    )


def test_a_single_run_has_no_repeats():
    evaluation = evaluate_agent(system(), [TASK], runs=1, progress=False)
    assert evaluation.results[0].repeated == {} and repeats_table(evaluation) == []


def test_names_that_share_a_file_are_refused(tmp_path):
    systems = {"a b": lambda questions: questions, "a_b": lambda questions: questions}
    rows = [{"question": "x", "answers": ["x"]}]
    with pytest.raises(ValueError, match="'a b' and 'a_b'"):
        evaluate_agent(systems, rows, output=tmp_path)
    assert len(evaluate_agent(systems, rows, runs=1).results) == 2


def test_an_answer_that_is_no_text_is_refused():
    rows = [{"question": "x", "answers": ["x"]}]
    with pytest.raises(ValueError, match="not a dict"):
        evaluate_agent(lambda questions: [{"answer": "x"} for _ in questions], rows, runs=1)
    # Any kind of number has a text.
    rows = [{"question": "x", "answers": ["2.5"]}]
    evaluation = evaluate_agent(lambda _: [Decimal("2.5")], rows, runs=1, progress=False)
    assert evaluation.results[0].estimates["exact_match"].mean == 1.0


def test_two_metrics_of_one_name_are_refused():
    metrics = [lambda texts, answers: [1.0 for _ in texts] for _ in range(2)]
    with pytest.raises(ValueError, match="two metrics are called '<lambda>'"):
        evaluate_agent(
            lambda questions: questions, [{"question": "x", "answers": ["x"]}], metrics=metrics
        )


def test_rewards_beyond_the_rollouts_are_refused():
    rollouts = [Rollout([1], row={"question": "x"}).finish("answered") for _ in range(2)]
    for rewards in ([1.0], [1.0, 0.0, 1.0]):
        with pytest.raises(ValueError, match=f"2 completions; it returned {len(rewards)}"):
            asyncio.run(score_rollouts(lambda rewards=rewards, **columns: rewards, rollouts))
