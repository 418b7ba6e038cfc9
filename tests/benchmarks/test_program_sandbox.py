"""benchmarks/learning/program_sandbox.py without its trainings: what its table says follows from
the records.
"""

from benchmarks.learning import program_sandbox as sandbox


def record(agent, seed, before, after):
    said = {"before": "1" * before + "0" * (20 - before), "after": "1" * after + "0" * (20 - after)}
    return {"agent": agent, "seed": seed, "sequences": 2.0 if agent == "vote" else 1.0, **said}


def test_the_table_is_paired_by_seed():
    afters = {"native": (15, 17, 19), "script": (16, 18, 20), "vote": (14, 18, 19)}
    records = [
        record(name, seed, 5, after[seed]) for name, after in afters.items() for seed in range(3)
    ]
    native, script, vote, last = sandbox.table(records).splitlines()[2:6]
    assert "0.250 [0.250, 0.250] | 0.850 [" in native and native.endswith(" |  | 1.00 |")
    assert "+0.050 [+0.050, +0.050] | 1.00 |" in script
    assert vote.endswith(" | 2.00 |")
    assert "not run" in last


def test_the_verdict_is_the_protocols():
    def of(native, script, vote):
        pair = {"native": native, "script": script, "vote": vote}
        return sandbox.verdict(
            [record(name, seed, 5, pair[name][seed]) for name in pair for seed in range(3)]
        )

    alike = of((15, 17, 19), (16, 17, 18), (14, 18, 19))
    assert (
        alike
        == "the script learns as the native loop does; *vote* gains; *last exchange* shows no gain."
    )
    assert of((15, 17, 19), (16, 18, 20), (5, 4, 6)).startswith(
        "the script differs from the native loop; *vote* shows"
    )
    assert "too few seeds show" in of((10, 14, 19), (16, 14, 20), (5, 5, 5))


def test_nothing_is_said_without_records():
    assert sandbox.table([]) == sandbox.verdict([]) == sandbox.NOTHING
