"""Algorithm 1 for one query, with a failure at every position."""

import pytest

from agentic_prompting.llm import BudgetExceeded, Reply, ScriptedChat, fill
from agentic_prompting.refine import (
    ProRefiner,
    RefinementResult,
    RolePrompts,
    summarize,
)
from agentic_prompting.refine.templates import COMPLETE, CUT_OFF
from agentic_prompting.rewards import exact_match
from support.refine_models import (
    PROMPT,
    QUERY,
    Log,
    answer,
    critic,
    improve,
    keep,
    models,
    refined,
    says_nothing,
    says_right,
    says_wrong,
    words,
)

ROLES = RolePrompts()


def algorithm_1(prompt, query, k, n, length, verdict=None):
    """The paper's pseudo-code, written down without regard to anything else.

    Returns p*, the answer and all calls.
    """
    calls = []

    def task(system, limit):
        calls.append(("task", system, query, limit))
        output = answer(length)(system, query).split(" ")
        return " ".join(output[:limit]), len(output) <= limit

    def ask(role, rule, **values):
        user = fill(getattr(ROLES, role), **values)
        calls.append((role, ROLES.role(role), user, 2048))
        return rule("", user)

    if verdict is not None:
        initial, _ = task(prompt, 512)
        ask("verifier", says_right, query=query, output=initial)
        if verdict == "right":
            return prompt, initial, calls
    for i in range(1, n + 1):
        output, eos = task(prompt, i * k)
        feedback = ask(
            "feedback", critic, query=query, output=output, state=COMPLETE if eos else CUT_OFF
        )
        reply = ask("optimizer", improve, prompt=prompt, feedback=feedback)
        prompt = reply.split("<IMPROVED_PROMPT>")[1].split("</IMPROVED_PROMPT>")[0]
        if eos:
            break
    return prompt, task(prompt, 512)[0], calls


def flat(log):
    return [
        (role, said[0]["content"], said[-1]["content"], sent["max_tokens"])
        for role, said, sent in log.calls
    ]


@pytest.mark.parametrize("length", [1, 10, 11, 35, 60, 100, 600])
@pytest.mark.parametrize("verdict", [None, "right", "wrong", "none"])
def test_calls_arguments_order_prompts_and_answer_are_algorithm_1s(length, verdict):
    log = Log()
    verifier = {None: None, "right": says_right, "wrong": says_wrong, "none": says_nothing}[verdict]
    result = refined(log, length=length, verifier=verifier)
    prompt, final, calls = algorithm_1(PROMPT, QUERY, 10, 6, length, verdict)
    assert flat(log) == calls
    assert (result.prompt, result.answer, result.verdict) == (prompt, final, verdict)
    assert result.stop_reason == (
        "verified" if verdict == "right" else "finished" if length <= 60 else "max_steps"
    )
    assert all(sent["temperature"] == 0 for _, _, sent in log.calls)
    assert result.error is None and result.failures == ()
    assert result.finish_reason == ("length" if length > 512 else "stop")
    assert result.initial_answer == (
        None if verdict is None else answer(length)(PROMPT, "")[: len(words(512, "v0w"))]
    )


def test_every_step_is_in_the_result():
    result = refined(Log(), length=25)
    assert [step.prompt for step in result.steps] == [PROMPT, PROMPT + "+", PROMPT + "++"]
    assert [step.new_prompt for step in result.steps] == [
        PROMPT + "+",
        PROMPT + "++",
        PROMPT + "+++",
    ]
    assert [step.output for step in result.steps] == [
        words(10, "v0w"),
        words(20, "v1w"),
        words(25, "v2w"),
    ]
    assert [step.complete for step in result.steps] == [False, False, True]
    assert [step.tokens for step in result.steps] == [10, 20, 25]
    assert [step.problem for step in result.steps] == [None] * 3
    assert all("unfinished" in step.feedback for step in result.steps[:-1])
    assert {role: usage.calls for role, usage in result.usage.items()} == {
        "task": 4,
        "feedback": 3,
        "optimizer": 3,
    }
    assert result.usage["task"].completion_tokens == 10 + 20 + 25 + 25
    assert 0 <= sum(step.seconds for step in result.steps) <= result.seconds


def test_the_papers_numbers_are_the_defaults():
    log = Log()
    result = ProRefiner(**models(log, length=1000)).refine(PROMPT, QUERY)
    limits = [sent["max_tokens"] for role, _, sent in log.calls if role == "task"]
    assert limits == [10 * i for i in range(1, 26)] + [512]
    assert (result.stop_reason, len(result.steps)) == ("max_steps", 25)


def test_calls_of_a_role_share_a_session():
    log = Log()
    refined(log, verifier=says_wrong)
    refined(log, queries="Another question?", verifier=says_wrong)
    by_role = {(role, session) for role, session in zip(log.roles, log.sessions, strict=True)}
    assert len(by_role) == 8 and len({session for _, session in by_role}) == 8


def test_known_outputs_are_not_asked_for_again():
    log = Log()
    result = refined(log, length=35, optimizer=keep)
    assert (
        log.roles == ["task", "feedback", "optimizer"] * 4
    )  # no fifth call of the task model for the answer
    assert (result.answer, result.stop_reason, result.prompt) == (
        words(35, "v0w"),
        "finished",
        PROMPT,
    )
    log = Log()
    result = refined(log, length=600, optimizer=keep, verifier=says_wrong)
    assert (
        log.roles == ["task", "verifier"] + ["task", "feedback", "optimizer"] * 6
    )  # the first answer is the last
    assert result.answer == result.initial_answer == words(512, "v0w")
    log = Log()
    refined(log, length=35, optimizer=keep, sampling={"task": {"temperature": 0.7}})
    assert log.roles == ["task", "feedback", "optimizer"] * 4 + [
        "task"
    ]  # not greedy, so another draw


def test_white_space_around_an_unchanged_prompt_changes_nothing():
    log = Log()
    result = ProRefiner(
        **models(log, length=5, optimizer=lambda *_: f"<IMPROVED_PROMPT>{PROMPT}</IMPROVED_PROMPT>")
    )
    assert result.refine(f"{PROMPT}\n", QUERY).prompt == f"{PROMPT}\n"


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("A better one: be careful.", "no tag"),
        ("<IMPROVED_PROMPT>be careful", "unclosed tag"),
        ("<IMPROVED_PROMPT> \n </IMPROVED_PROMPT>", "empty prompt"),
    ],
)
def test_an_optimizer_reply_without_a_prompt_keeps_the_old_one_and_is_counted(reply, problem):
    result = refined(Log(), length=25, optimizer=lambda *_: reply)
    assert result.prompt == PROMPT and [step.problem for step in result.steps] == [problem] * 3
    assert result.kept_prompts == 3 and result.failures == () and result.error is None
    assert summarize([result])["kept_prompts"] == 3


def test_history_gives_critic_and_optimizer_their_earlier_steps():
    log = Log()
    refined(log, length=25, history=True)
    for role in ("feedback", "optimizer"):
        said = [messages for name, messages, _ in log.calls if name == role]
        assert [len(messages) for messages in said] == [2, 4, 6]
        assert said[2][:4] == said[1] and said[1][:2] == said[0]
        assert [message["role"] for message in said[2]] == [
            "system",
            *["user", "assistant"] * 2,
            "user",
        ]
    assert all(len(messages) == 2 for name, messages, _ in log.calls if name == "task")


def test_history_of_the_task_model():
    """What the released code gives it ("task"), and the paper's ablation with the full chat history
    ("all").
    """
    log = Log()
    result = refined(log, length=25, optimizer=keep, history="task")
    task = [messages for name, messages, _ in log.calls if name == "task"]
    assert [len(messages) for messages in task] == [2, 4, 6, 2]  # the final answer is a fresh one
    for before, after, step in zip(task[:2], task[1:3], result.steps, strict=False):
        said = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": step.output}]
        assert after == [*before[:-1], *said, before[-1]]
    assert all(len(messages) == 2 for name, messages, _ in log.calls if name != "task")
    log = Log()
    refined(log, length=25, history="all", verifier=says_wrong)
    of_steps = {
        role: [len(said) for name, said, _ in log.calls if name == role] for role in log.roles
    }
    assert of_steps == {
        "task": [2, 2, 4, 6, 2],
        "verifier": [2],
        "feedback": [2, 4, 6],
        "optimizer": [2, 4, 6],
    }


def test_sentences_and_paragraphs_as_steps():
    text = "One is first. Two (it is 2.5) follows!\nThree ends."
    log = Log()
    task = models(log)["task"]
    task.rule = lambda system, user: text
    others = {role: model for role, model in models(log, optimizer=keep).items() if role != "task"}
    result = ProRefiner(task, **others, unit="sentence").refine(PROMPT, QUERY)
    assert [step.output for step in result.steps] == [
        "One is first.",
        "One is first. Two (it is 2.5) follows!",
        text,
    ]
    assert [step.complete for step in result.steps] == [False, False, True]
    assert (
        log.roles.count("task") == 1 and log.calls[0][2]["max_tokens"] == 512
    )  # the prompt never changed
    result = ProRefiner(task, **others, unit="paragraph").refine(PROMPT, QUERY)
    assert len(result.steps) == 1 and result.stop_reason == "finished"


def test_the_papers_three_settings_by_name():
    log = Log()
    rules = models(log, length=15)
    task = rules["task"]
    critic_model = rules["feedback"]
    said = {"check answers": says_wrong, "edit the prompt": improve, "read over": critic}
    critic_model.rule = lambda system, user: next(
        rule for piece, rule in said.items() if piece in system
    )(system, user)
    row = {"question": QUERY, "answers": [words(15, "v0w")]}

    assert (
        ProRefiner.from_paper("no_verifier", task, critic_model).refine(PROMPT, row).verdict is None
    )
    refiner = ProRefiner.from_paper("verifier", task, critic_model)
    assert refiner.refine(PROMPT, row).verdict == "wrong"
    optimal = ProRefiner.from_paper("optimal_verifier", task, critic_model, score=exact_match)
    assert optimal.refine(PROMPT, row).stop_reason == "verified"
    assert optimal.refine(PROMPT, {"question": QUERY, "answers": ["other"]}).verdict == "wrong"
    assert (refiner.tokens_per_step, refiner.max_steps) == (10, 25)
    with pytest.raises(ValueError, match="setting.*no_verifier, verifier, optimal_verifier"):
        ProRefiner.from_paper("optimal", task, critic_model)
    with pytest.raises(ValueError, match="score must be a function"):
        ProRefiner.from_paper("optimal_verifier", task, critic_model)
    with pytest.raises(ValueError, match="score.*optimal"):
        ProRefiner.from_paper("verifier", task, critic_model, score=exact_match)


def total_calls(**options):
    log = Log()
    refined(log, **options)
    return log


@pytest.mark.parametrize("verifier", [None, says_wrong, says_right])
def test_one_failure_at_every_position(verifier):
    clean = total_calls(verifier=verifier)
    for position, role in enumerate(clean.roles):
        log = Log(fail_at={position})
        result = refined(log, verifier=verifier)
        assert [failure.role for failure in result.failures] == [role]
        assert sum(usage.failed for usage in result.usage.values()) == 1
        assert RefinementResult.from_dict(result.to_dict()) == result
        last = position == len(clean.roles) - 1 and role == "task"
        if last:  # the final answer itself: the best of what there was before, and the reason
            assert result.stop_reason == "failed"
            assert result.error == result.failures[0]
            assert result.error.step == -1
            assert result.answer == words(35, "v3w")
            continue
        assert result.error is None and result.stop_reason in ("finished", "verified"), (
            position,
            role,
        )
        assert result.answer.startswith("v")
        if role in ("feedback", "optimizer"):
            step = result.steps[result.failures[0].step - 1]
            assert step.problem == f"{role} failed" and step.new_prompt == step.prompt
        if role == "verifier":
            assert result.verdict == "none" and result.steps


@pytest.mark.parametrize("verifier", [None, says_wrong])
def test_everything_fails_from_every_position_on(verifier):
    clean = total_calls(verifier=verifier)
    for position in range(len(clean.roles)):
        log = Log(fail_at=set(range(position, 1000)))
        result = refined(log, verifier=verifier)
        if (
            result.error is None
        ):  # the prompt of a complete output was not changed any more: that is the answer
            assert result.stop_reason == "finished" and result.answer == result.steps[-1].output
            assert position == len(log.calls) - 1 and log.roles[-1] in ("feedback", "optimizer")
            continue
        assert result.stop_reason == "failed" and result.error == result.failures[-1]
        assert len(log.calls) <= position + 4  # three failures, and one more try at the answer
        assert bool(result.answer) == (position > 0)


def test_three_failures_end_the_refinement():
    log = Log(fail_at={1, 3, 5})  # the critic, step after step
    result = refined(log, length=100)
    assert log.roles == ["task", "feedback"] * 3 + ["task"]
    assert (result.stop_reason, len(result.steps), result.answer) == (
        "failed",
        3,
        words(100, "v0w"),
    )
    assert str(result.error) == "feedback model in step 3: ServerFailed: scripted failure"
    assert refined(Log(fail_at={1, 3}), length=100).error is None


def test_the_critics_thought_is_no_feedback():
    def improve(messages):
        return "<IMPROVED_PROMPT>Count twice.</IMPROVED_PROMPT>"

    critics = iter(["<think>Perhaps the sum?</think>Add them.", "<think>Perhaps the", "Fine."])
    optimizer = ScriptedChat(improve)
    task = ScriptedChat(lambda messages: Reply("cut", finish_reason="length"))
    feedback = ScriptedChat(lambda messages: next(critics))
    refiner = ProRefiner(task=task, feedback=feedback, optimizer=optimizer, max_steps=3)
    result = refiner.refine("Count.", "How many?")
    assert [step.feedback for step in result.steps] == ["Add them.", None, "Fine."]
    assert result.steps[1].problem == "feedback failed" and result.error is None
    assert [failure.kind for failure in result.failures] == ["BadReply"]
    assert "Perhaps" not in str(optimizer.calls)


def test_a_fatal_failure_ends_it_at_once():
    log = Log(fail_at={1}, error=BudgetExceeded("$1 is spent"))
    result = refined(log, length=100)
    assert log.roles == ["task", "feedback", "task"]
    assert result.error.fatal
    assert result.error.kind == "BudgetExceeded"
    assert result.answer == words(100, "v0w")


def test_the_first_answer_is_kept_for_the_worst_case():
    # Task, verifier, then the task model is down: three steps without output.
    result = refined(Log(fail_at=set(range(2, 99))), verifier=says_wrong)
    assert (result.stop_reason, result.answer, result.finish_reason) == (
        "failed",
        words(35, "v0w"),
        "stop",
    )
    result = refined(Log(fail_at=set(range(1, 99))))
    assert (result.answer, result.finish_reason) == (
        words(10, "v0w"),
        "",
    )  # cut off: better than nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_step": 0}, "tokens_per_step must be a whole number of at least 1, got 0"),
        ({"tokens_per_step": 2.5}, "tokens_per_step"),
        ({"max_steps": 0}, "max_steps"),
        ({"final_max_tokens": -1}, "final_max_tokens"),
        ({"max_failures": 0}, "max_failures"),
        ({"history": "critic"}, "history must be one of True, False, 'task', 'all', got 'critic'"),
        ({"unit": "word"}, "unit must be one of tokens, sentence, paragraph, got 'word'"),
        ({"sampling": {"critic": {}}}, "unknown: critic"),
        ({"sampling": {"task": {"max_tokens": 5}}}, "follow from tokens_per_step"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        ProRefiner(**models(Log()), **options)


def test_models_that_are_none():
    with pytest.raises(TypeError, match="optimizer.*'gpt-4o'"):
        ProRefiner(**{**models(Log()), "optimizer": "gpt-4o"})

    def forgot():
        return ""

    with pytest.raises(TypeError, match="the feedback model: forgot takes no messages"):
        ProRefiner(**{**models(Log()), "feedback": forgot})
    with pytest.raises(TypeError, match="verifier.*ChatModel"):
        ProRefiner(**models(Log()), verifier="gpt-4o")


def test_functions_are_models_whatever_their_parameter_is_called():
    def small(conversation):
        return "seven"

    def critic(said):
        return "Be kind. <IMPROVED_PROMPT>Think hard.</IMPROVED_PROMPT>"

    def verify(dialogue, temperature=0.0):
        return "<ACCURACY>0</ACCURACY>"

    result = ProRefiner(small, critic, critic, verify).refine("Think.", "How many?")
    assert (result.verdict, result.prompt, result.answer) == ("wrong", "Think hard.", "seven")
    assert (
        ProRefiner(small, critic, critic, lambda query, answer: True).refine("Think.", "?").verdict
        == "right"
    )


def test_templates_without_their_variables():
    with pytest.raises(ValueError, match=r"the feedback template has no \{output\}"):
        RolePrompts(feedback="Question: {query}")
    with pytest.raises(ValueError, match=r"no \{prompt\} and no \{feedback\}"):
        RolePrompts(optimizer="improve it")


@pytest.mark.parametrize(
    ("prompt", "query", "message"),
    [
        ("", QUERY, "the prompt is empty"),
        (" \n", QUERY, "the prompt is empty"),
        (PROMPT, "", "query 0 is empty"),
        (PROMPT, {"question": "  "}, "query 0 is empty"),
        (PROMPT, {"query": QUERY}, "query 0 must be a text or a row with a text `question`"),
        (PROMPT, 7, "query 0 must be a text"),
        (
            PROMPT,
            {"question": QUERY, "answers": "4"},
            "`answers` of query 0 must be a list of texts",
        ),
    ],
)
def test_nothing_to_work_on(prompt, query, message):
    log = Log()
    with pytest.raises(ValueError, match=message):
        ProRefiner(**models(log)).refine(prompt, query)
    assert log.calls == []


def test_a_query_of_a_megabyte_with_braces():
    query = "{output} {query} <IMPROVED_PROMPT> 3.5... " * 25_000
    log = Log()
    result = refined(log, queries=query, length=15)
    assert result.query == query and result.stop_reason == "finished"
    assert (
        log.calls[1][1][1]["content"].count("{output}") == 25_000
    )  # filled in once, never inside a value
