"""The report in a real headless Chromium: it draws without an error, filters work, hostile text
runs nothing.
"""

import json
import random
from dataclasses import replace

import pytest

from agentic_prompting.evolution import EvolutionJournal
from agentic_prompting.refine import RefinementResult, RefinementStep
from agentic_prompting.refine.results_file import ResultsFile
from agentic_prompting.report import write_report
from agentic_prompting.sandbox import as_rows, make_split
from support.browser import (
    chromium,
    evolved,
    opened,
    pictured,
    record,
    shows,
    training,
    why_not,
    write_run,
)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

RESULT = RefinementResult(
    id="1",
    query="How many legs?",
    answer="24",
    initial_prompt="Be brief.",
    prompt="Be brief and exact.",
    stop_reason="finished",
    steps=(
        RefinementStep(
            "Be brief.", "Be brief and exact.", output="There are", feedback="Say which."
        ),
    ),
)


@pytest.fixture(scope="module")
def browser():
    with chromium() as started_browser:
        yield started_browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A run with everything in it: 640 trajectories over five steps, a population, refined queries."""
    run = tmp_path_factory.mktemp("run")
    rng = random.Random(0)
    records = [record(number, rng, 8) for number in range(640)]
    evolved(run / "population.json")
    results = ResultsFile(run / "refined.jsonl", "s")
    for number in range(3):
        stopped = ("finished", "max_steps", "finished")[number]
        results.add(str(number), replace(RESULT, query=f"query {number}", stop_reason=stopped))
    return write_report(write_run(run, records), pictures=False), records


class WatchedPage:
    """A page whose errors, messages, dialogs and requests are noted."""

    def __init__(self, browser, page_file, **options):
        self.events = []
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        context.on("console", lambda message: self.events.append(f"console: {message.text}"))
        context.on("weberror", lambda error: self.events.append(f"error: {error.error}"))
        context.on(
            "dialog",
            lambda dialog: (self.events.append(f"dialog: {dialog.message}"), dialog.dismiss()),
        )
        context.on("request", lambda request: self.events.append(f"request: {request.url}"))
        self.page = opened(context, page_file)
        assert self.page.locator("html").get_attribute("data-ready") == "yes"
        self.events.remove(f"request: {page_file.as_uri()}")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_draws_everything_without_an_error(browser, report, width, scheme):
    watched = WatchedPage(
        browser, report[0], viewport={"width": width, "height": 850}, color_scheme=scheme
    )
    page = watched.page
    assert page.locator("#contents a").all_text_contents() == [
        "Training",
        "Evolution of the system prompt",
        "Refined prompts",
        "Trajectories",
    ]
    assert page.locator("#training figure").count() == 5
    assert page.locator("#evolution .node[role=button]").count() > 20
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, (
        "nothing sticks out at the side"
    )
    pictured(page, "evolution", "#evolution")
    assert watched.events == []


def test_the_log_and_the_held_out_results(browser, tmp_path):
    """E-SPL's own, hostile names included: the log's curves beside the others, a table of policies
    and prompts.
    """
    log = [
        {"step": step, "loss": 0.5 / step, "kl": 0.1, "grad_norm": 1.0, "entropy": 2.0}
        for step in (1, 2, 3)
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 3, "log_history": log}))
    table = {
        f"policy {name}": [0.1 * number, 0.0, 0.9]
        for number, name in enumerate(["before", ATTACKS[1], "after"])
    }
    (tmp_path / "summary.json").write_text(json.dumps({"sandbox": True, "exact_match": table}))
    run = write_run(tmp_path, [record(number, random.Random(0), 3) for number in range(200)])
    watched = WatchedPage(browser, write_report(run, pictures=False))
    training = watched.page.locator("#training")
    titles = training.locator("figcaption span").all_text_contents()
    assert titles[-4:] == ["loss", "KL divergence", "gradient norm", "entropy"]
    constant = training.locator("figure", has_text="KL divergence")
    ticks = constant.locator("svg text[text-anchor=end]").all_text_contents()
    assert "0" in ticks and len(set(ticks)) == len(ticks)
    assert "gradient" in training.inner_text() and "in all" in training.inner_text()
    assert training.locator("tr", has_text=ATTACKS[1]).inner_text().split()[-1] == "0–0.900"
    assert "0.200" in training.locator(".tiles div", has_text="held-out exact match").inner_text()
    assert watched.page.title().endswith("agentic-prompting") and watched.events == []


def test_filters(browser, report):
    page = opened(browser, report[0])
    records = report[1]
    shows(page, 640)
    page.get_by_label("outcome").select_option("malformed")
    malformed = [record for record in records if record["status"] == "malformed"]
    shows(page, len(malformed))
    assert all(
        "malformed" in text for text in page.locator("#trajectories .row").all_text_contents()
    )
    page.get_by_label("task", exact=True).select_option("musique")
    page.get_by_label("from step").fill("2")
    page.get_by_label("to step").fill("3")
    matching = [
        rollout
        for rollout in malformed
        if rollout["task"] == "musique" and 2 <= rollout["step"] + 1 <= 3
    ]
    shows(page, len(matching))
    page.get_by_label("text in question").fill("no such words")
    shows(page, 0)
    assert "Nothing fits" in page.locator("#trajectories .detail").inner_text()


def test_search_looks_into_turns_and_replies(browser, report):
    page = opened(browser, report[0])
    page.get_by_label("text in question").fill("QUESTION 77 :")
    shows(page, 1)
    page.locator("#trajectories .detail .message.reply").first.wait_for()
    detail = page.locator("#trajectories .detail")
    assert "question 77 :" in detail.inner_text() and detail.locator(".message").count() == 5
    assert detail.locator("tr", has_text="exact match").count() == 1


def test_the_list_by_keyboard(browser, report):
    page = opened(browser, report[0])
    rows = page.locator("#trajectories .list")
    rows.focus()
    rows.press("ArrowDown")
    page.locator("#trajectories .row[aria-posinset='2'][aria-selected=true]").wait_for()
    rows.press("End")
    page.locator("#trajectories .row[aria-posinset='640'][aria-selected=true]").wait_for()
    page.locator("#trajectories .detail", has_text="step 5").wait_for()
    assert page.locator("#trajectories .row").count() < 40, "only the rows in sight exist"


def test_a_click_on_a_step_shows_its_trajectories(browser, report):
    page = opened(browser, report[0])
    box = page.locator("#training figure svg").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    shows(page, 128)
    assert (
        page.get_by_label("from step").input_value()
        == page.get_by_label("to step").input_value()
        == "3"
    )


def test_the_tree_and_the_diffs(browser, report):
    page = opened(browser, report[0])
    page.locator("#evolution .node[aria-label^='prompt 1,']").focus()
    page.keyboard.press("Enter")
    card = page.locator("#evolution .card")
    card.locator("h3", has_text="What changed from prompt 0").wait_for()
    assert "ask for one thing at a time" in card.locator("ins").first.inner_text()
    page.goto(f"{page.url}#prompt-7")
    card.locator("h3", has_text="Prompt 7").wait_for()
    page.get_by_label("ended").select_option("max_steps")
    assert page.locator("#refinements .row").count() == 1
    page.locator("#refinements .detail .card ins").filter(has_text="and exact").wait_for()


def test_the_trajectories_before_a_birth(browser, tmp_path):
    """A prompt that is born at step 1 was made from the rollouts of step 1, step 0 of the records."""
    evolved(tmp_path / "population.json", 3)
    rng = random.Random(0)
    records = [record(n, rng, 3, step=n // 4, system_prompt=n % 2) for n in range(12)]
    page = opened(browser, write_report(write_run(tmp_path, records), pictures=False))
    page.locator("#evolution .node[aria-label*='born at step 1,']").press("Enter")
    page.get_by_role("button", name="Trajectories under prompt 0 before").click()
    shows(page, 2)
    rows = page.locator("#trajectories .row").all_text_contents()
    assert all("step 1 ·" in row for row in rows)


def write_journal(run, text):
    """Write a journal whose texts are all `text`: of child 1, and of an attempt without a child."""
    problem = {
        "question": text,
        "truth": text,
        "reflections": [{"reward": 0.5, "text": text}],
        "scores": {text: 1.0},
    }
    edit = {
        "problem": 0,
        "op": text,
        "ids": [text],
        "text": text,
        "search": text,
        "reason": text,
        "refused": text,
    }
    attempt = {
        "step": 0,
        "attempt": 0,
        "operator": text,
        "reason": "child",
        "child": 1,
        "parents": [0],
        "counts": {text: 1},
        "edits": [edit],
        "evidence": [{**problem, "won": [0], "lost": [1]}],
        "held_out": {},
    }
    EvolutionJournal(run / "evolution.jsonl").append(
        [attempt, {**attempt, "attempt": 1, "child": None, "reason": text}]
    )


def test_the_evidence_behind_a_child(browser, tmp_path):
    evolved(tmp_path / "population.json", 6)
    write_journal(tmp_path, "ask for the \u00e9 first")
    page = opened(browser, write_report(tmp_path, pictures=False))
    page.locator("#evolution .node[aria-label^='prompt 1,']").press("Enter")
    card = page.locator("#evolution .card")
    card.locator("h3", has_text="The edits that were proposed").wait_for()
    assert "refused: ask for the" in card.locator(".edit .bad").inner_text()
    assert "from problem 1" in card.locator(".edit").inner_text()
    assert "because" in card.locator(".edit").inner_text()
    card.locator("details.problem summary").click()
    assert "best under 0, worse under 1" in card.locator("details.problem").inner_text()
    assert "reward 0.500" in card.locator("details.problem .message.reply").inner_text()
    page.locator("#evolution .node[aria-label^='prompt 2,']").press("Enter")
    card.locator("h3", has_text="Prompt 2").wait_for()
    assert card.locator(".edit").count() == 0, "of another child nothing is known"


ATTACKS = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<svg onload=alert(1)><iframe src='http://127.0.0.1:9/x'></iframe>",
    "--><!--<base href='http://127.0.0.1:9/'>{{script}}{{data}}${alert(1)}`",
    "javascript:alert(1) <a href='javascript:alert(1)'>x</a>",
]


def test_hostile_text_runs_nothing(browser, tmp_path):
    """In every field that a model or a data set fills, in the prompts, in the results, and in the
    folder's name.
    """
    text = "\n".join(ATTACKS) + "\ud800 \x00 \u2028"
    rng = random.Random(0)
    turn = {"text": text, "kind": text, "well_formed": False, "problem": text}
    reply = {"text": text, "error": text, "seconds": 0.1, "cached": True}
    attack = {
        "question": text,
        "answers": [text],
        "answer": text,
        "task": text,
        "status": text,
        "turns": [turn],
        "observations": [reply],
        "error": {"kind": text, "what": text},
        "rewards": {text: 1.0},
        "mode": "train",
    }
    run = tmp_path / "<img src=x onerror=alert(1)>"
    write_run(run, [record(0, rng, 3, **attack), record(1, rng, 3)])
    population_file = run / "population.json"
    evolved(population_file, 2)
    population = population_file.read_text(encoding="utf-8")
    population_file.write_text(population.replace("Ask first.", ATTACKS[0]), encoding="utf-8")
    write_journal(run, text)
    results = ResultsFile(run / "refined.jsonl", "s")
    step = RefinementStep(text, text + text, output=text, feedback=text, problem=text)
    results.add(
        "1",
        replace(RESULT, query=text, answer=text, prompt=text, initial_prompt=text, steps=(step,)),
    )
    watched = WatchedPage(browser, write_report(run, pictures=False))
    page = watched.page
    page.get_by_label("text in question").fill("<script>")
    shows(page, 1)
    page.locator("#trajectories .detail .message").nth(1).wait_for()
    page.locator("#evolution .node[aria-label^='prompt 1,']").press("Enter")
    card = page.locator("#evolution .card")
    card.locator("details.problem summary").click()
    card.locator("details.problem .message.reply").wait_for()
    for attack in ATTACKS[:3]:
        assert card.inner_text().count(attack) >= 6, (
            "question, answer, reflection, edit, what it replaced, reason"
        )
    page.locator("#evolution summary", has_text="1 attempt without a child").click()
    page.locator("#evolution td", has_text=ATTACKS[1]).first.wait_for()
    assert ATTACKS[1] in page.locator("#trajectories .detail").inner_text(), "it is shown as it is"
    assert (
        page.locator(
            "#main :is(script, img, iframe, base, a:not([href^='#rollout-'], [href^='#prompt-']))"
        ).count()
        == 0
    )
    assert page.title() == "<img src=x onerror=alert(1)> · agentic-prompting"
    assert watched.events == []


def test_text_that_hides_and_text_without_end(browser, tmp_path):
    hidden = "right\u202eto left\u200b and \u2066isolated"
    long = {
        "text": "x" * 1_000_000 + "THE END",
        "kind": "answer",
        "well_formed": True,
        "problem": "",
    }
    run = write_run(
        tmp_path, [record(0, random.Random(0), 3, question=hidden, turns=[long], observations=[])]
    )
    page = WatchedPage(browser, write_report(run, pictures=False)).page
    detail = page.locator("#trajectories .detail")
    assert detail.locator(".invisible").all_text_contents() == ["U+202E", "U+200B", "U+2066"]
    assert len(detail.inner_text()) < 30_000
    detail.get_by_role("button", name="Show all 1,000,007 characters").click()
    assert detail.inner_text().rstrip().endswith("THE END")


# --- groups, evaluations, several runs ------------------------------------------------------------


def test_a_group_is_shown_with_its_advantages(browser, tmp_path):
    records = [
        record(
            n,
            random.Random(0),
            3,
            task="t",
            question=f"q{n // 4}",
            reward=n % 4 + 0.0,
            rewards={"a": n % 4 + 0.0},
        )
        for n in range(16)
    ]
    page = opened(browser, write_report(write_run(tmp_path, records), pictures=False))
    detail = page.locator("#trajectories .detail")
    detail.locator("h3", has_text="Its group").wait_for()
    rows = detail.locator("table").last.locator("tbody tr").all_inner_texts()
    assert len(rows) == 4 and "-1.162" in rows[0] and "1.162" in rows[3]
    page.locator("#trajectories .row").nth(5).click()
    detail.get_by_role("button", name="Show these 4 alone").click()
    shows(page, 4)
    assert all("q1" in text for text in page.locator("#trajectories .row").all_text_contents())


def write_evaluation(folder, systems, rows):
    from agentic_prompting.evaluation import evaluate_agent, save_run

    save_run(
        folder,
        evaluate_agent(
            systems, {rows[0].get("task", "sums"): rows}, runs=1, output=folder, progress=False
        ),
    )
    return folder


HOSTILE = {
    "systems": {
        "right": lambda qs: [q.split("q")[-1] for q in qs],
        ATTACKS[1]: lambda qs: [ATTACKS[2] for _ in qs],
    },
    "rows": [{"question": f"{ATTACKS[0]} q{i}", "answers": [str(i)]} for i in range(6)],
}
WIDTHS = pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])


def open_checked(browser, page_file, width, scheme):
    """A page at this width, without errors, with nothing that sticks out and no text too small to
    be read.
    """
    watched = WatchedPage(
        browser, page_file, viewport={"width": width, "height": 850}, color_scheme=scheme
    )
    assert watched.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert watched.events == []
    for drawn in watched.page.locator("figure > svg").all():
        box = drawn.bounding_box()
        assert drawn.get_attribute("viewBox") == f"0 0 {round(box['width'])} 232", (
            "a chart's text has its own size"
        )
        for text in drawn.locator("text").all():
            text_box = text.bounding_box()
            assert (
                text_box["x"] >= box["x"]
                and text_box["x"] + text_box["width"] <= box["x"] + box["width"] + 1
            ), text.text_content()
            assert text_box["y"] + text_box["height"] <= box["y"] + box["height"] + 1, (
                text.text_content()
            )
    return watched.page


@WIDTHS
def test_a_hostile_evaluation(browser, tmp_path, width, scheme):
    page = open_checked(
        browser, write_report(write_evaluation(tmp_path, **HOSTILE), pictures=False), width, scheme
    )
    section = page.locator("#evaluation")
    assert "1.000 [0.610, 1.000]" in section.locator("table").first.inner_text()
    paired = section.locator("table").nth(1).inner_text().replace("\n", " ")
    assert "6 / 0 / 0" in paired or "0 / 6 / 0" in paired
    page.get_by_label("judged").select_option("wrong")
    page.locator("#evaluation .detail").scroll_into_view_if_needed()
    assert page.locator("#contents a").bounding_box()["y"] >= 0, "the navigation stays in sight"
    assert page.locator("#contents a[data-here]").all_inner_texts() == ["Evaluation"], (
        "and says where one is"
    )
    section.locator(".detail", has_text="What each system said").wait_for()
    assert section.locator(".row").count() == 6
    assert ATTACKS[2] in section.locator(".detail").inner_text()
    assert page.locator("#main :is(script, img, iframe, base, a)").count() == 0


@WIDTHS
def test_score_against_dollars(browser, tmp_path, width, scheme):
    runs = [
        write_run(tmp_path / name, [record(n, random.Random(n), 3) for n in range(200)])
        for name in "ab"
    ]
    runs[0] = write_evaluation(runs[0] / "evaluation", **HOSTILE).parent
    page = open_checked(browser, write_report(runs, tmp_path / "both"), width, scheme)
    front = page.locator("#front")
    assert front.locator("circle").count() == 3 and front.locator("tr").count() == 4
    assert "b" in front.locator("table").inner_text() and ATTACKS[2] not in front.inner_text()
    pictured(page, "front", "#front")


@WIDTHS
def test_what_it_looks_like(browser, tmp_path, width, scheme):
    """Also makes the pictures: training, groups, evaluation, comparison, evolution; wide and
    narrow, light and dark.
    """
    run = training(tmp_path / "steady")
    page = open_checked(browser, write_report(run, pictures=False), width, scheme)
    titles = page.locator("#training figcaption span").all_text_contents()
    assert titles[-6:] == [
        "loss",
        "KL divergence",
        "gradient norm",
        "entropy",
        "learning rate",
        "age of tokens (updates)",
    ]
    pictured(page, "training", "#training")
    pictured(page, "groups", "#trajectories")

    rows = as_rows(make_split(0, 40)[1])
    answers = {row["question"]: row["answers"][0] for row in rows}

    def right_of(share):
        return lambda qs: [answers[q] if len(q) % 10 < share else "Nairobi" for q in qs]

    agents = {
        "trained agent": right_of(8),
        "untrained agent": right_of(4),
        "large LLM alone": right_of(1),
    }
    page = open_checked(
        browser,
        write_report(write_evaluation(tmp_path / "e", agents, rows), pictures=False),
        width,
        scheme,
    )
    pictured(page, "evaluation", "#evaluation")

    other = training(tmp_path / "faster", steps=18, seed=1, rising=0.1)
    write_evaluation(run / "evaluation", {"trained agent": right_of(8)}, rows)
    write_evaluation(other / "evaluation", {"trained agent": right_of(7)}, rows)
    page = open_checked(browser, write_report([run, other], tmp_path / "both"), width, scheme)
    section = page.locator("#comparison")
    assert section.locator("polyline").count() >= 20 and section.locator(".legend").count() >= 10
    assert section.locator(".legend").first.locator("li").all_inner_texts() == ["steady", "faster"]
    drawn = section.locator("figure").first
    paired = section.locator("table").nth(1).inner_text()
    assert "steady: trained agent" in drawn.inner_text()
    assert "steady" in paired
    assert "exact_match" in paired
    pictured(page, "comparison", "#comparison")


def test_many_environments_share_line_styles(browser, tmp_path):
    """There are more environments than styles, which kept the page from being drawn."""
    rng = random.Random(0)
    records = [record(n, rng, 3, environment=f"world {n % 7}") for n in range(640)]
    page = WatchedPage(browser, write_report(write_run(tmp_path, records), pictures=False)).page
    figure = page.locator("#training figure", has_text="mean reward by environment")
    assert figure.locator(".legend li").all_inner_texts() == [f"world {n}" for n in range(7)]
    assert figure.locator("polyline.line-0").count() == 2


def test_smoothing(browser, tmp_path):
    page = opened(browser, write_report(training(tmp_path, steps=6), pictures=False))
    lines = page.locator("#training figure").first.locator("polyline")
    before = lines.get_attribute("points")
    page.get_by_label("smoothing").fill("0.9")
    assert lines.count() == 2 and lines.first.get_attribute("points") == before, (
        "what was measured stays, faint"
    )
    ends = [
        float(points.split()[-1].split(",")[1])
        for points in (before, lines.last.get_attribute("points"))
    ]
    assert ends[1] > ends[0] + 5, "a mean of a rising curve lags behind it"


# --- from one thing to another --------------------------------------------------------------------


def test_a_rollout_has_an_address(browser, tmp_path):
    """Which opens it whatever the filters are; the rollouts of its group are a click away."""
    report = write_report(training(tmp_path, steps=4), pictures=False)
    page = WatchedPage(browser, report).page
    page.get_by_label("to step").fill("1")
    shows(page, 24)
    page.goto(f"{report.as_uri()}#rollout-90")
    chosen = page.locator("#trajectories .row[aria-selected=true]")
    page.locator("#trajectories .row[aria-posinset='91'][aria-selected=true]").wait_for()
    assert "step 4" in chosen.inner_text() and page.get_by_label("to step").input_value() == ""
    page.locator("#trajectories .group a").first.click()
    page.locator("#trajectories .row[aria-posinset='89'][aria-selected=true]").wait_for()
    assert page.url.endswith("#rollout-88")
    again = browser.new_context().new_page()
    again.goto(page.url)
    again.locator("#trajectories .row[aria-posinset='89'][aria-selected=true]").wait_for()


def test_keys_from_anywhere(browser, tmp_path):
    page = opened(browser, write_report(training(tmp_path, steps=2), pictures=False))
    for key, place in (("j", 2), ("j", 3), ("k", 2)):
        page.keyboard.press(key)
        page.locator(f"#trajectories .row[aria-posinset='{place}'][aria-selected=true]").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("jk")
    assert page.get_by_label("text in question").input_value() == "jk", "letters where one writes"
