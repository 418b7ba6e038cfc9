"""What is kept of rollouts: the log on disk and what a kill leaves of it, the metrics, and the
agent's own file.
"""

import contextlib
import gzip
import json
import logging
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

import agentic_prompting
from agentic_prompting.llm import LLMError, Misconfigured, Reply, ServerFailed, Usage
from agentic_prompting.rollout import (
    SPEC_FILE,
    STATUSES,
    AgentSpec,
    FreeText,
    Limits,
    Observation,
    Rollout,
    RolloutFacts,
    RolloutLog,
    Sample,
    TagGrammar,
    parse_turn,
    read_rollouts,
    rollout_metrics,
    rollout_record,
)

SOURCE = str(Path(agentic_prompting.__file__).parents[1])
ASK = "<think> a </think> <interaction_prompt> b </interaction_prompt>"
END = "<think> a </think> <answer> c </answer>"


def records(*numbers):
    return [{"n": n, "text": f"line {n}\nand \u2028 another"} for n in numbers]


def numbers(folder):
    return [record["n"] for record in read_rollouts(folder)]


def parts(folder):
    return sorted(path.name for path in folder.iterdir())


def answered_rollout():
    """Asked once (reply from a cache after a retry), then answered: 3 + 2 tokens around 4 of
    observation.
    """
    rollout = Rollout(
        [1, 2],
        row={"id": "q1", "question": "Q?", "answers": ["c"], "task": "t", "meta": "{}"},
        seed=7,
    )
    rollout.add_turn(Sample([3, 4, 5]), parse_turn(ASK))
    reply = Reply("fine", usage=Usage(10, 5, 0.25), cached=True, attempts=3)
    rollout.add_observation(Observation("fine", replies=(reply,), seconds=0.5), [6, 7, 8, 9])
    rollout.add_turn(Sample([10, 11]), parse_turn(END))
    rollout.status = "answered"
    return rollout


def failed_rollout(error=None):
    rollout = Rollout([1], seed=8)
    rollout.add_turn(Sample([3]), parse_turn(ASK))
    error = error or ServerFailed("down", "m at http://x", attempts=2, status=503)
    rollout.fail(Observation(error=error, replies=(Reply(error=error, attempts=2),), seconds=1.5))
    return rollout


# --- the log --------------------------------------------------------------------------------------


def test_several_batches_in_order(tmp_path):
    log = RolloutLog(tmp_path / "deep" / "rollouts")
    for batch in (records(0, 1), records(2), [], records(3, 4)):
        log.write(record for record in batch)  # a generator, as the trainer passes it
    assert list(read_rollouts(tmp_path / "deep" / "rollouts")) == records(0, 1, 2, 3, 4)
    assert parts(log.folder) == ["rollouts-00000-00000.jsonl.gz"]
    # Ordinary tools read it too.
    with gzip.open(log.folder / parts(log.folder)[0], "rt", encoding="utf-8") as file:
        assert [json.loads(line)["n"] for line in file] == [0, 1, 2, 3, 4]


def test_nothing_to_keep_makes_no_folder(tmp_path):
    RolloutLog(tmp_path / "a").write([])
    RolloutLog(tmp_path / "b", max_mb=0).write(records(1))
    assert list(tmp_path.iterdir()) == []
    assert list(read_rollouts(tmp_path / "a")) == []


def test_processes_write_files_of_their_own(tmp_path):
    for process in (1, 0):
        RolloutLog(tmp_path, process_index=process).write(records(process))
    assert parts(tmp_path) == ["rollouts-00000-00000.jsonl.gz", "rollouts-00001-00000.jsonl.gz"]
    assert numbers(tmp_path) == [0, 1]


@pytest.mark.parametrize("lost", [1, 10, "all but one"])
def test_a_torn_end_is_skipped_and_said(tmp_path, caplog, lost):
    log = RolloutLog(tmp_path)
    log.write(records(0, 1))
    path = tmp_path / parts(tmp_path)[0]
    whole = path.stat().st_size
    log.write(records(2, 3))
    data = path.read_bytes()
    path.write_bytes(data[: whole + 1] if lost == "all but one" else data[:-lost])
    with caplog.at_level(logging.WARNING):
        assert numbers(tmp_path) == [0, 1]
    assert "skipped the last" in caplog.text and path.name in caplog.text


def test_any_cut_keeps_every_batch_before_it(tmp_path):
    """Wherever the file ends, what was written whole is read and nothing raises."""
    log = RolloutLog(tmp_path)
    ends = []
    for n in range(3):
        log.write(records(n))
        path = tmp_path / parts(tmp_path)[0]
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        assert numbers(tmp_path) == list(range(sum(end <= cut for end in ends))), cut


def test_a_run_that_goes_on_after_being_killed_loses_only_the_torn_batch(tmp_path):
    RolloutLog(tmp_path).write(records(0))
    log = RolloutLog(tmp_path)
    log.write(records(1))
    path = tmp_path / parts(tmp_path)[-1]
    path.write_bytes(path.read_bytes()[:-5])
    resumed = RolloutLog(tmp_path)
    resumed.write(records(2))
    resumed.write(records(3))
    assert numbers(tmp_path) == [0, 2, 3]


def test_parts_rotate(tmp_path):
    log = RolloutLog(tmp_path, part_mb=1e-6)  # every batch is more than a byte
    for n in range(12):
        log.write(records(n))
    assert parts(tmp_path) == [f"rollouts-00000-{n:05d}.jsonl.gz" for n in range(12)]
    assert numbers(tmp_path) == list(range(12))


def test_a_part_is_filled_before_the_next(tmp_path):
    log = RolloutLog(tmp_path, part_mb=0.001)
    for n in range(40):
        log.write(records(n))
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert 1 < len(sizes) < 20 and all(size >= 0.001 * 2**20 for size in sizes[:-1])
    assert numbers(tmp_path) == list(range(40))


def test_the_oldest_part_is_dropped_above_the_limit(tmp_path, caplog):
    other = RolloutLog(tmp_path, process_index=1)
    other.write(records(100))
    log = RolloutLog(tmp_path, max_mb=0.002, part_mb=0.0005)
    with caplog.at_level(logging.WARNING):
        for n in range(100):
            log.write(records(n))
    parts = [path for path in tmp_path.iterdir() if path.name.startswith("rollouts-00000")]
    assert sum(path.stat().st_size for path in parts) <= 0.002 * 2**20
    kept = numbers(tmp_path)
    assert kept[-1] == 100, "another process's files are its own business"
    assert 1 < len(kept) - 1 < 99 and kept[:-1] == list(range(kept[0], 100)), (
        "the newest, without a gap"
    )
    assert "dropping rollouts-00000-00000.jsonl.gz" in caplog.text


def test_the_limit_holds_without_small_parts(tmp_path):
    """A limit below the size of a part is a limit all the same."""
    log = RolloutLog(tmp_path, max_mb=0.01)
    for n in range(300):
        log.write([{"n": n, "text": os.urandom(100).hex()}])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 0.01 * 2**20
    assert numbers(tmp_path)[-1] == 299


def test_a_batch_larger_than_the_limit_is_kept(tmp_path):
    log = RolloutLog(tmp_path, max_mb=1e-6)
    log.write(records(0))
    log.write(records(1))
    assert numbers(tmp_path) == [1]


class FullDisk:
    """`open` for writing fails while `full`, after half of what was to be written where `torn`."""

    def __init__(self, torn=False):
        self.full = True
        self.torn = torn

    def __call__(self, path, mode="r", **options):
        file = open(path, mode, **options)  # noqa: SIM115  # as what it stands for
        if self.full and "a" in mode:
            writes = file.write

            def write(data):
                if self.torn:
                    writes(data[: len(data) // 2])
                    file.flush()
                raise OSError(28, "No space left on device")

            file = SimpleNamespace(write=write, close=file.close, flush=file.flush)
            return contextlib.closing(file)
        return file


@pytest.mark.parametrize("torn", [False, True])
def test_what_a_full_disk_does_not_take_is_written_later(tmp_path, monkeypatch, caplog, torn):
    """Said once; also where half of a batch was written, which no reader then trips over."""
    disk = FullDisk(torn)
    log = RolloutLog(tmp_path)
    log.write(records(0))
    monkeypatch.setattr("agentic_prompting.rollout.recording.open", disk, raising=False)
    for n in (1, 2):
        log.write(records(n))
    assert numbers(tmp_path) == [0]
    assert caplog.text.count("cannot be written") == 1 and "No space left" in caplog.text
    disk.full = False
    log.write(records(3))
    assert numbers(tmp_path) == [0, 1, 2, 3] and "written again" in caplog.text
    disk.full = True
    log.write(records(4))
    assert caplog.text.count("cannot be written") == 2, "the next time it is said again"


def test_what_waits_for_the_disk_is_bounded(tmp_path, monkeypatch, caplog):
    disk = FullDisk()
    monkeypatch.setattr("agentic_prompting.rollout.recording.open", disk, raising=False)
    monkeypatch.setattr("agentic_prompting.rollout.recording.MAX_WAITING", 1000)
    log = RolloutLog(tmp_path)
    for n in range(50):
        log.write([{"n": n, "text": os.urandom(50).hex()}])
    disk.full = False
    log.write(records(50))
    kept = numbers(tmp_path)
    assert 2 < len(kept) < 20 and kept == list(range(51 - len(kept), 51)), "the newest"
    assert "lost" in caplog.text


def test_a_small_file_that_unfolds_into_gigabytes_is_passed_over(tmp_path, caplog, monkeypatch):
    """Read in memory that is bounded, the batches after it as well."""
    monkeypatch.setattr("agentic_prompting.rollout.recording.MAX_BATCH", 2**20)
    RolloutLog(tmp_path).write(records(0))
    path = tmp_path / parts(tmp_path)[0]
    bomb = gzip.compress(b'{"n": 1, "text": "' + b" " * 2**26 + b'"}\n')
    path.write_bytes(path.read_bytes() + bomb + gzip.compress(b'{"n": 2}\n'))
    tracemalloc.start()
    with caplog.at_level(logging.WARNING):
        assert numbers(tmp_path) == [0, 2]
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    assert "skipped a batch" in caplog.text and path.name in caplog.text


def test_a_large_batch_is_written_in_pieces_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("agentic_prompting.rollout.recording.MAX_BATCH", 400)
    RolloutLog(tmp_path).write(records(*range(30)))
    assert numbers(tmp_path) == list(range(30))


@settings(max_examples=50, deadline=None)
@given(
    text=st.lists(
        st.one_of(st.characters(), st.sampled_from("\ud83d\udc00\u2028\x85\r\n")), max_size=30
    ).map("".join)
)
def test_any_text_is_kept(tmp_path_factory, text):
    """Unicode as it is; half a surrogate pair, which no encoding has, as a question mark.

    One record stays one line.
    """
    folder = tmp_path_factory.mktemp("log")
    RolloutLog(folder).write([{"text": text}, {"text": "next"}])
    texts = [record["text"] for record in read_rollouts(folder)]
    assert texts == [text.encode("utf-8", "replace").decode(), "next"]


def test_unicode_and_lone_surrogates(tmp_path):
    RolloutLog(tmp_path).write([{"text": "日本 🙂 e\u0301 \u2028 \x00 \ud83d!"}])
    assert next(read_rollouts(tmp_path)) == {"text": "日本 🙂 e\u0301 \u2028 \x00 ?!"}


def test_what_json_does_not_know_is_kept_as_text(tmp_path):
    RolloutLog(tmp_path).write([{"path": tmp_path}])
    assert next(read_rollouts(tmp_path)) == {"path": str(tmp_path)}


def test_a_record_says_everything(tmp_path):
    """What later tools read; a change here breaks them."""
    RolloutLog(tmp_path).write(
        [rollout_record(answered_rollout(), step=3), rollout_record(failed_rollout())]
    )
    answered, failed = read_rollouts(tmp_path)
    assert answered == {
        "step": 3,
        "id": "q1",
        "question": "Q?",
        "answers": ["c"],
        "task": "t",
        "status": "answered",
        "error": None,
        "answer": "c",
        "turns": [
            {"text": ASK, "kind": "act", "well_formed": True, "problem": ""},
            {"text": END, "kind": "answer", "well_formed": True, "problem": ""},
        ],
        "observations": [
            {"text": "fine", "error": None, "seconds": 0.5, "cached": True, "shared": False}
        ],
        "tokens": {"agent": 5, "observation": 4},
        "cost_usd": 0.25,
        "worth_usd": 0.25,
        "seed": 7,
    }
    message = "down (m at http://x, HTTP 503, 2 attempts)"
    assert (failed["status"], failed["answer"], failed["error"]) == (
        "failed",
        None,
        {"kind": "ServerFailed", "what": message},
    )
    assert failed["observations"] == [
        {"text": "", "error": message, "seconds": 1.5, "cached": False, "shared": False}
    ]
    assert "question" not in failed


# --- the metrics ----------------------------------------------------------------------------------


def fact(status="answered", **changes):
    zero = {
        "error_kind": None,
        "error": None,
        "fatal": False,
        "turns": 1,
        "interactions": 0,
        "agent_tokens": 0,
        "observation_tokens": 0,
        "latencies": (),
        "calls": 0,
        "cached": 0,
        "shared": 0,
        "retries": 0,
        "tokens": 0,
        "cost_usd": 0.0,
    }
    return RolloutFacts(status=status, **{**zero, **changes})


def test_a_record_has_the_text_of_a_prompt_as_its_question():
    system = {"role": "system", "content": "Be brief."}
    turns = [{"role": "user", "content": "hello"}, {"role": "user", "content": "which ?"}]
    assert rollout_record(Rollout([], row={"prompt": [system, *turns]}))["question"] == (
        "hello\n\nwhich ?"
    )
    assert rollout_record(Rollout([], row={"prompt": "The capital is"}))["question"] == (
        "The capital is"
    )
    row = {"prompt": turns, "question": "mine"}
    assert rollout_record(Rollout([], row=row))["question"] == "mine"
    assert "question" not in rollout_record(Rollout([], row={}))


def test_facts_of_a_rollout():
    assert RolloutFacts.of(answered_rollout()) == fact(
        turns=2,
        interactions=1,
        agent_tokens=5,
        observation_tokens=4,
        latencies=(0.5,),
        calls=1,
        cached=1,
        shared=0,
        retries=2,
        tokens=15,
        cost_usd=0.25,
    )
    failed = RolloutFacts.of(failed_rollout())
    assert (failed.status, failed.error_kind, failed.fatal) == ("failed", "ServerFailed", False)
    assert (failed.interactions, failed.calls, failed.retries, failed.latencies) == (
        0,
        1,
        1,
        (1.5,),
    )
    assert "down" in failed.error
    assert RolloutFacts.of(failed_rollout(Misconfigured("wrong key"))).fatal


def test_means_and_sums():
    facts = [
        fact(
            "answered",
            turns=3,
            interactions=2,
            agent_tokens=30,
            observation_tokens=10,
            latencies=(1.0, 3.0),
            calls=2,
            cached=1,
            shared=1,
            retries=4,
            tokens=100,
            cost_usd=0.5,
        ),
        fact("truncated", turns=1, agent_tokens=10),
        fact("failed", turns=1, latencies=(8.0,), calls=1, retries=5, tokens=7, cost_usd=0.25),
        fact(
            "answered",
            turns=3,
            interactions=2,
            agent_tokens=20,
            observation_tokens=6,
            latencies=(0.0, 0.0),
            calls=2,
            tokens=3,
        ),
    ]
    assert rollout_metrics(facts) == {
        "rollout/turns": 2.0,
        "rollout/interactions": 1.0,
        "rollout/answered": 0.5,
        "rollout/out_of_turns": 0.0,
        "rollout/truncated": 0.25,
        "rollout/malformed": 0.0,
        "rollout/failed": 0.25,
        "rollout/agent_tokens": 15.0,
        "rollout/observation_tokens": 4.0,
        "environment/calls": 5.0,
        "environment/retries": 9.0,
        "environment/cached": 1.0,
        "environment/shared": 1.0,
        "environment/tokens": 110.0,
        "environment/cost_usd": 0.75,
        "environment/latency_mean": 2.4,  # over the five interactions, not the four rollouts
        "environment/latency_p95": pytest.approx(
            7.0
        ),  # of 0, 0, 1, 3, 8 at position 3.8, as numpy has it
    }


@given(statuses=st.lists(st.sampled_from(STATUSES), min_size=1, max_size=40))
def test_shares_add_up_to_one(statuses):
    metrics = rollout_metrics([fact(status) for status in statuses])
    shares = [metrics[f"rollout/{status}"] for status in STATUSES]
    assert sum(shares) == pytest.approx(1) and all(0 <= share <= 1 for share in shares)
    assert metrics["environment/latency_mean"] == metrics["environment/latency_p95"] == 0.0


def test_all_processes_together_are_one_batch():
    """Facts of all processes are averaged once: an average of averages would weigh three like one."""
    facts = [fact(turns=1), fact(turns=1), fact(turns=1), fact(turns=5)]
    assert rollout_metrics(facts[:3] + facts[3:])["rollout/turns"] == 2.0


def test_the_statuses_are_those_of_a_rollout():
    from typing import get_args

    from agentic_prompting.rollout.types import Status

    assert set(STATUSES) == set(get_args(Status)) - {"running"}


# --- the agent's file -----------------------------------------------------------------------------

SPEC = AgentSpec(
    prompt_template="Réponds: {question} {0} 日本",
    system_prompt="Be brief.",
    grammar=TagGrammar(think="t", act="ask", observation="reply", answer="réponse"),
    limits=Limits(max_turns=3, max_turn_tokens=7, max_tokens=99, max_context=2048),
    chat_template_kwargs={"enable_thinking": False},
    stop_at_tags=False,
    sampling={"temperature": 0.7, "min_p": None},
)


@pytest.mark.parametrize("spec", [AgentSpec(), SPEC, AgentSpec(grammar=FreeText(stops=("###",)))])
def test_spec_round_trip(tmp_path, spec):
    spec.save(tmp_path)
    assert AgentSpec.load(tmp_path) == spec and AgentSpec.load(str(tmp_path)) == spec
    assert parts(tmp_path) == [SPEC_FILE]
    assert json.loads((tmp_path / SPEC_FILE).read_bytes())["format"] == 1


def test_spec_is_utf8_whatever_the_locale(tmp_path):
    """A file written on one machine is read on another, also where the locale knows ASCII only."""
    SPEC.save(tmp_path)
    written = (tmp_path / SPEC_FILE).read_bytes()
    assert "Réponds" in written.decode("utf-8")
    again = (
        "from agentic_prompting.rollout import AgentSpec; "
        f"AgentSpec.load({str(tmp_path)!r}).save({str(tmp_path)!r})"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-c", again],
        check=True,
        env={**os.environ, "PYTHONPATH": SOURCE, **ascii_only},
    )
    assert (tmp_path / SPEC_FILE).read_bytes() == written


def test_spec_of_a_newer_format_is_refused(tmp_path):
    SPEC.save(tmp_path)
    saved = json.loads((tmp_path / SPEC_FILE).read_text("utf-8"))
    (tmp_path / SPEC_FILE).write_text(json.dumps({**saved, "format": 2, "news": 1}), "utf-8")
    with pytest.raises(ValueError, match="newer agentic-prompting") as raised:
        AgentSpec.load(tmp_path)
    assert "\n" not in str(raised.value)


def test_spec_with_a_grammar_of_the_users_own(tmp_path):
    """It cannot be built from the file, which says so instead of taking another."""

    class Mine(FreeText):
        pass

    AgentSpec(grammar=Mine()).save(tmp_path)
    with pytest.raises(ValueError, match="'Mine'.*grammar=") as raised:
        AgentSpec.load(tmp_path)
    assert "\n" not in str(raised.value)
    assert AgentSpec.load(tmp_path, grammar=Mine()).grammar == Mine()


def test_spec_that_is_not_there(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="was not saved by a trainer of this library"
    ) as raised:
        AgentSpec.load(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("broken", ["replace", "write"])
def test_spec_is_written_whole_or_not_at_all(tmp_path, monkeypatch, broken):
    """A kill or a full disk in the middle leaves the old file."""
    AgentSpec().save(tmp_path)
    if broken == "replace":
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    else:

        def half(self, content):
            with open(self, "wb") as file:
                file.write(content[: len(content) // 2])
            raise OSError("no space left on device")

        monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError):
        SPEC.save(tmp_path)
    monkeypatch.undo()
    assert AgentSpec.load(tmp_path) == AgentSpec()
    SPEC.save(tmp_path)  # what was left behind is no hindrance
    assert AgentSpec.load(tmp_path) == SPEC and parts(tmp_path) == [SPEC_FILE]


def test_spec_messages():
    assert AgentSpec("Q: {question}").messages({"question": "why {x}?"}) == [
        {"role": "user", "content": "Q: why {x}?"}
    ]
    system = {"role": "system", "content": "Be brief."}
    spec = AgentSpec("Q: {question}", system_prompt="Be brief.")
    assert spec.messages({"question": "a"}) == [system, {"role": "user", "content": "Q: a"}]
    # A row's own prompt is used as it is: as text, as messages, with a system message of its own.
    assert spec.messages({"prompt": "P", "question": "a"}) == [
        system,
        {"role": "user", "content": "P"},
    ]
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "P"}]
    assert spec.messages({"prompt": own}) == own


def test_spec_without_a_question():
    with pytest.raises(ValueError, match=r"no \{question\}"):
        AgentSpec("Answer me.")


def test_errors_of_all_kinds_are_recorded(tmp_path):
    """Every error of the vocabulary goes into a record as its kind and one line."""
    kinds = [
        kind
        for kind in [LLMError, *LLMError.__subclasses__()]
        if kind.__module__.startswith("agentic_prompting")
    ]
    RolloutLog(tmp_path).write(rollout_record(failed_rollout(kind("what"))) for kind in kinds)
    assert [record["error"]["kind"] for record in read_rollouts(tmp_path)] == [
        kind.__name__ for kind in kinds
    ]
