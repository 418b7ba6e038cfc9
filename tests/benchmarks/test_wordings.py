"""Transfer to other wordings: an oracle in other words, and the table of what the seeds gave."""

import asyncio

from agentic_prompting.sandbox import Oracle
from benchmarks.learning import wordings

ASKED = [{"role": "user", "content": "what is the currency of Kenya ?"}]


def test_each_episode_draws_its_wording_and_keeps_it():
    oracle = wordings.Worded(Oracle(seed=0), wordings.TRAINED)

    def said(session):
        return asyncio.run(oracle(ASKED, session=session)).text

    replies = {str(n): said(str(n)) for n in range(30)}
    assert set(replies.values()) == {one.format("shilling") for one in wordings.TRAINED}
    assert all(said(session) == reply for session, reply in replies.items())
    strange = asyncio.run(oracle([{"role": "user", "content": "hm"}], session="1")).text
    assert strange == asyncio.run(Oracle(seed=0)([{"role": "user", "content": "hm"}])).text, (
        "no answer, no other words"
    )
    assert not {*wordings.TRAINED} & {*wordings.UNSEEN}


def test_every_word_is_in_the_policys_vocabulary():
    from agentic_prompting.sandbox.policy import world_tokenizer

    tokenizer = world_tokenizer()
    for wording in (*wordings.TRAINED, *wordings.UNSEEN):
        assert tokenizer.unk_token not in tokenizer.tokenize(wording.format("Nairobi"))


def test_the_table_is_that_of_the_records():
    records = [
        {"seed": seed, "agent": agent, "correct": dict.fromkeys(wordings.TRIALS, correct)}
        for agent, correct in (("one wording", "0001"), ("three wordings", "0111"))
        for seed in (1, 2)
    ]
    assert wordings.summarise(records)["three wordings"]["unseen: first"]["mean"] == 0.75
    assert "| unseen and noisier | 0.250 [0.250, 0.250] | 0.750 [" in wordings.table(records)
    assert wordings.verdict(records).endswith(
        "less than the expected 0.8 on an unseen wording (first, second)."
    )
    for record in records:
        record["correct"] = dict.fromkeys(wordings.TRIALS, "1111")
    assert wordings.verdict(records).startswith("As expected")
