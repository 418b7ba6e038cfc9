"""The sandbox's facts, and the questions made of them."""

import random
import re

import pytest

from agentic_prompting.sandbox.world import (
    CONTINENTS,
    Question,
    World,
    all_questions,
    as_rows,
    load_world,
    make_split,
    parse_facts,
    parse_question,
    question_text,
)

WORLD = load_world()
EVERY_QUESTION = all_questions((1, 2, 3))


def test_the_world_has_its_size():
    assert 150 <= len(WORLD.countries) <= 180
    assert len(WORLD.by["airport"]) >= 90
    assert load_world() is WORLD


@pytest.mark.parametrize("field", ["name", "capital", "airport"])
def test_names_are_unique(field):
    values = [getattr(country, field) for country in WORLD.countries if getattr(country, field)]
    assert len(values) == len(set(map(str.lower, values)))


def test_no_name_is_of_two_kinds():
    assert len(WORLD.names) == sum(len(WORLD.by[field]) for field in ("name", "capital", "airport"))


def test_facts_are_plain_words():
    for country in WORLD.countries:
        for value in (
            country.name,
            country.capital,
            country.currency,
            country.continent,
            country.language,
        ):
            assert re.fullmatch(r"[A-Za-z]+(-[A-Za-z]+)*( [A-Za-z]+(-[A-Za-z]+)*)*", value), value
        assert re.fullmatch(r"([A-Z]{3})?", country.airport)
        assert country.continent in CONTINENTS


def test_some_facts():
    kenya = WORLD.by["name"]["Kenya"]
    assert kenya is WORLD.by["capital"]["Nairobi"] is WORLD.by["airport"]["NBO"]
    assert (kenya.currency, kenya.continent, kenya.language) == ("shilling", "Africa", "Swahili")
    assert WORLD.by["capital"]["Paris"].airport == "CDG"
    assert WORLD.by["name"]["Senegal"].currency == "CFA franc"


def test_a_line_with_a_missing_field_is_an_error():
    with pytest.raises(TypeError):
        parse_facts(["Kenya,Nairobi,shilling"])


def test_every_kind_of_question_reads_as_it_should():
    texts = {
        ("NBO", ("capital",)): "which city is served by airport NBO ?",
        ("Nairobi", ("name",)): "which country has the capital Nairobi ?",
        ("Kenya", ("currency",)): "what is the currency of Kenya ?",
        ("NBO", ("capital", "name")): "which country has the capital served by airport NBO ?",
        (
            "Nairobi",
            ("name", "currency"),
        ): "what is the currency of the country whose capital is Nairobi ?",
        ("NBO", ("capital", "name", "currency")): (
            "what is the currency of the country whose capital is served by airport NBO ?"
        ),
    }
    for (start, chain), text in texts.items():
        assert question_text(start, chain) == text


def test_parsing_is_the_inverse_of_writing():
    for question in EVERY_QUESTION:
        parsed = parse_question(question.text)
        assert parsed == question and parsed.hops == len(question.path)


def test_parsing_is_tolerant():
    expected = Question("Kenya", ("currency",), WORLD.by["name"]["Kenya"])
    for text in (
        "please tell me : what is the currency of Kenya ?",
        "What is the currency of kenya?",
        "WHAT  IS\nTHE CURRENCY OF THE KENYA",
        (
            "I need to know, what is the currency of Kenya? Answer briefly. Which country has the "
            "capital Paris?"
        ),
        "what is the currency of Kenya and why",
    ):
        assert parse_question(text) == expected
    assert parse_question("what is the language of the netherlands").start == "Netherlands"
    assert parse_question("what is the currency of guinea-bissau").start == "Guinea-Bissau"
    assert parse_question("which country has the capital Sao Tome ?").start == "Sao Tome"


def test_a_name_counts_whole_and_by_its_kind():
    for text in (
        "what is the currency of Nairobi ?",
        "what is the currency of Mexico City ?",
        "which country has the capital Kenya ?",
        "which city is served by airport Nairobi ?",
        "what is the currency of Atlantis ?",
        "what is the currency of Guineas ?",
        "what is the currency of " + "the " * 5000,
        "what is the color of Kenya ?",
        "currency Kenya",
        "",
    ):
        assert parse_question(text) is None, text


def test_texts_are_words_and_single_spaces():
    for question in EVERY_QUESTION:
        assert question.text == " ".join(question.text.split()) and question.text.endswith(" ?")


def test_paths_lead_to_the_answer():
    for question in EVERY_QUESTION:
        steps, answers = zip(*question.path, strict=True)
        assert answers[-1] == question.answer
        for step, answer_before in zip(steps[1:], answers, strict=False):
            assert f" {answer_before} ?" in step
        assert all(parse_question(step).hops == 1 for step in steps)


def test_all_questions_are_there_once():
    n = len(WORLD.countries)
    airports = len(WORLD.by["airport"])
    assert len(all_questions((1,))) == 3 * n + n + airports
    assert len(all_questions((2,))) == 3 * n + airports
    assert len(all_questions((3,))) == 3 * airports
    assert len({question.text for question in EVERY_QUESTION}) == len(EVERY_QUESTION)
    assert {len(chain) for chain in WORLD.texts} == {1, 2, 3}


@pytest.mark.parametrize("by", ["country", "question"])
def test_a_split_is_disjoint_and_seeded(by):
    random.seed(7)
    state = random.getstate()
    train, test = make_split(seed=3, n_test=100, by=by)
    assert random.getstate() == state
    texts = [{question.text for question in part} for part in (train, test)]
    assert len(test) == 100 and not texts[0] & texts[1]
    left_out = {question.text for question in all_questions()} - texts[0] - texts[1]
    assert len(left_out) < 8 * (by == "country") + 1, "the last country's"
    assert (
        make_split(seed=3, n_test=100, by=by)
        == (train, test)
        != make_split(seed=4, n_test=100, by=by)
    )
    shared = {question.country for question in train} & {question.country for question in test}
    assert bool(shared) == (by == "question")
    with pytest.raises(ValueError, match="n_test=100000"):
        make_split(seed=3, n_test=100_000, by=by)


def test_rows_have_the_shape_of_every_data_set():
    train, test = make_split(seed=0)
    rows = as_rows(train + test)
    assert len({row["id"] for row in rows}) == len(rows)
    assert rows[0] == {
        "id": rows[0]["id"],
        "question": train[0].text,
        "answers": [train[0].answer],
        "task": "sandbox",
        "meta": {"hops": train[0].hops},
    }


def test_a_slice_of_the_world_is_a_world():
    small = World(WORLD.countries[:10])
    assert all(
        question.text and parse_question(question.text, small)
        for question in all_questions((2, 3), small)
    )
    assert parse_question("what is the currency of Peru ?", small) is None
