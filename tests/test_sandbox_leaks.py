"""No sandbox shows a policy anything about what it is held to afterwards, its names in copying exercises aside."""

import pytest

from agentic_prompting.sandbox import load_guarded_world, load_world, setup
from agentic_prompting.sandbox.world import parse_question

OWN = ("name", "capital", "airport", "domain", "letters")  # what belongs to one country alone


def prepare(name, folder):
    if name == "prompt-r1":
        return setup.prepare_sandbox(folder, 5, warm_start_steps=20), load_world(), setup.world_tokenizer()
    sandbox = setup.prepare_guarded(folder, 5, warm_start_steps=20, world=name)
    return sandbox, load_guarded_world(), setup.guarded_tokenizer()


@pytest.mark.parametrize("name", ["prompt-r1", *setup.WORLDS])
def test_nothing_about_a_held_out_country_is_seen_before(name, tmp_path, monkeypatch):
    shown = []

    def capture(folder, spec, tokenizer, world, traces, *rest):
        shown.extend(traces())
        return folder

    monkeypatch.setattr(setup, "warm_started", capture)
    sandbox, world, tokenizer = prepare(name, tmp_path)
    texts = [row["question"] for row in sandbox.train]
    for trace in shown:
        texts += [trace["question"], *trace["answers"], *trace["turns"], *trace["observations"]]
        texts += [message["content"] for message in trace.get("prompt", ())]
    texts += sandbox.root.principles if name in setup.WORLDS else ()
    seen = set(tokenizer.tokenize("\n".join(texts)))  # a name is one token: in `Port of Spain` there is no Spain

    held, trained_on = (
        {parse_question(question, world).country for question in rows["question"]}
        for rows in (sandbox.test, sandbox.train)
    )
    assert len(held) >= 20 and len(shown) == 400 and not trained_on & held
    shared = {value for country in trained_on for value in vars(country).values()}  # MAD is a dirham, too
    assert not seen & ({getattr(country, field) for country in held for field in OWN} - shared - {""})
    assert len(seen & {country.capital for country in trained_on}) == len(trained_on)
