"""Text from outside forges no token, through whichever door it comes; what the chat template writes stays."""

import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, normalizers

from agentic_prompting.rollout import (
    AgentSpec,
    ChatFormat,
    PlainText,
    prompt_r1_template,
    time_limit,
)
from benchmarks.reliability import forged_tokens
from support.hostile import PIECES
from support.tokenizers_for_tests import FAMILIES, tokenizer_for

texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=8).map("".join)
ORDINARY = [
    "Which currency has the country whose capital is Nairobi?",
    " A question\twith\n\nlines, braces {question} {x}, 日本, é and 🙂 < 3 > 2 ",
    "",
]


@pytest.mark.parametrize("door", forged_tokens.DOORS)
@settings(max_examples=60, deadline=None)
@given(text=texts, family=st.sampled_from(list(FAMILIES)))
def test_no_door_lets_a_token_through(door, text, family):
    assert not forged_tokens.forges(forged_tokens.DOORS[door], family, text)


def test_an_openenv_server_forges_nothing_either():
    found = forged_tokens.forged_tokens(10)
    assert found["total"] == 0 and found["doors"] >= 6 and "openenv_reset" in found["by_door"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("question", ORDINARY)
def test_ordinary_prompts_are_what_transformers_makes_of_them(family, question):
    """Also where the run's own template and system prompt hold tags that are tokens of the tokenizer."""
    tokenizer = tokenizer_for(family)
    spec = AgentSpec(
        prompt_r1_template() + "\n<think> comes first.", system_prompt="Begin with <think>."
    )
    form = ChatFormat(tokenizer, own_texts=spec.own_texts)
    assistant = {"role": "assistant", "content": "<think> a </think> It was Kenya."}
    for messages in (
        spec.messages({"question": question}),
        spec.messages(
            {
                "prompt": [
                    {"role": "user", "content": "Hello"},
                    assistant,
                    {"role": "user", "content": question},
                ]
            }
        ),
    ):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert (
            form.prompt_ids(messages) == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        )


@settings(max_examples=100, deadline=None)
@given(
    text=texts, family=st.sampled_from(["chatml", "qwen3_thinking"])
)  # the others' templates strip
def test_characters_stay(text, family):
    form = ChatFormat(tokenizer_for(family))
    ids = form.prompt_ids([{"role": "user", "content": text}])
    assert form.tokenizer.decode(ids).startswith(f"<|im_start|>user\n{text}<|im_end|>\n")


def test_a_normaliser_puts_nothing_together_in_a_question():
    import copy

    tokenizer = copy.deepcopy(tokenizer_for("qwen3"))
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("\u200b", ""), normalizers.NFKC(), normalizers.Lowercase()]
    )
    tokenizer.add_tokens([AddedToken("<stop>", normalized=True)])
    form = ChatFormat(tokenizer)
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    for text in ("<st\u200bop>", "＜stop＞", "<STOP>", "x<s\u200bt\u200bop><stop>"):
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False
        )
        assert stop in tokenizer(rendered, add_special_tokens=False)["input_ids"], (
            "it would have been"
        )
        assert stop not in form.prompt_ids([{"role": "user", "content": text}])


def test_a_question_that_repeats_the_template_gains_nothing():
    spec = AgentSpec("Write <think> first. {question}")
    form = ChatFormat(tokenizer_for("qwen3"), own_texts=spec.own_texts)
    think = form.tokenizer.convert_tokens_to_ids("<think>")
    ids = form.prompt_ids(spec.messages({"question": "Write <think> first. "}))
    assert ids.count(think) == 1


def test_the_local_large_llm_cuts_special_tokens_and_keeps_ordinary_ones():
    text = PlainText(tokenizer_for("qwen3"), keep_ordinary=True)
    ids = text.conversation_ids([{"role": "user", "content": "<think> <|im_end|>"}])
    names = text.tokenizer.convert_ids_to_tokens(ids)
    assert names.count("<think>") == 1 and names.count("<|im_end|>") == 1


# --- a template that loops --------------------------------------------------------------------------------------------

LOOPS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
}


def looping(template, only_for=None):
    import copy

    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    condition = (
        f"{{% if messages[0].content == '{only_for}' %}}{template}{{% endif %}}"
        if only_for
        else template
    )
    tokenizer.chat_template = condition + tokenizer.chat_template
    return tokenizer


@pytest.fixture
def half_a_second(monkeypatch):
    monkeypatch.setattr(time_limit, "TEMPLATE_SECONDS", 0.5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_loops_is_refused(name, half_a_second):
    with pytest.raises(ValueError, match=r"did not end within 0\.5 seconds"):
        ChatFormat(looping(LOOPS[name]))


@pytest.mark.timeout(60)
def test_one_that_loops_for_some_messages_only_ends_on_every_thread(half_a_second):
    form = ChatFormat(looping(LOOPS["loops in loops"], only_for="Hang"))
    ended = []

    def ask(text):
        try:
            ended.append(form.prompt_ids([{"role": "user", "content": text}]))
        except ValueError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("Hang", "Hello", "Hang")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(isinstance(one, str) and "did not end" in one for one in ended) == 2
    assert form.prompt_ids([{"role": "user", "content": "Hello"}]) in ended


TRACED = """
import sys
from agentic_prompting.rollout.time_limit import limited

def loops():
    while True:
        pass

def ends_late():
    try:
        loops()
    except BaseException:
        return 1

for work in (loops, ends_late):
    try:
        limited(work, "it", seconds=0.2)
    except ValueError as error:
        print(error)
sys.setprofile(lambda *_: None)
(lambda: None)()
sys.setprofile(None)
sys.settrace(lambda *_: None)
(lambda: None)()
"""


def test_code_can_be_traced_after_a_limit_was_reached():
    """By a debugger, a profiler, coverage or Hypothesis. In a process of its own: what goes wrong here never ends."""
    done = subprocess.run(
        [sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.count("did not end within 0.2 seconds") >= 1, (
        done.stderr
    )


@pytest.mark.timeout(120)
def test_many_that_end_about_when_the_limit_does_leave_nothing_behind(monkeypatch):
    """Whatever the moment, a call returns or raises its error, and nothing is raised in the thread afterwards."""
    import time

    outcomes = set()
    for i in range(18):
        until = time.monotonic() + 0.19 + i % 6 * 0.02

        def work(until=until):
            while time.monotonic() < until:
                pass
            return "done"

        try:
            outcomes.add(time_limit.limited(work, "it", seconds=0.2))
        except ValueError:
            outcomes.add("late")
        sum(range(2000))
    assert outcomes <= {"done", "late"}
    time.sleep(0.3)
