"""Memory of a run before it starts: a step on fake tensors, how it is laid out over GPUs, and what
fits.
"""

import importlib
import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from transformers import Qwen3Config

from agentic_prompting.cli import main as command
from agentic_prompting.planning import Layout, Plan, Unplannable, plan
from agentic_prompting.planning.fake_gpu import GPU_HEAD, as_on_a_gpu
from agentic_prompting.planning.layout import GIB, SAMPLING
from agentic_prompting.planning.measured_step import (
    OPTIMIZER,
    PASSES,
    SCORING,
    MeasuredStep,
    SamplingMemory,
    TrainingJob,
    measure_training,
)
from agentic_prompting.planning.measurement_processes import MeasurementProcesses, MeasurementResult
from agentic_prompting.planning.model_shape import load_shape
from agentic_prompting.planning.plan import Planner, longest_job
from agentic_prompting.rollout import Rollout, RolloutLog, rollout_record
from agentic_prompting.trainers.settings_file import SETTINGS_FILE, RunSettings
from support.families import FAMILIES, model_of
from support.marks import long

ROOT = Path(__file__).parents[2]
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2000,
    "max_position_embeddings": 4096,
}
ARGS = {
    "bf16": True,
    "gradient_checkpointing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_context": 512,
    "max_completion_length": 512,
    "beta": 0.0,
}


def benchmark():
    return importlib.import_module("benchmarks.speed.plan")


@pytest.mark.parametrize("name", ["small, checkpointing", "small, LoRA", "mixture of experts"])
def test_the_peak_is_that_of_real_steps(name):
    script = benchmark()
    job = script.build_job(name)
    predicted = script.predict_peak(job)
    assert predicted == pytest.approx(script.measure_peak(job), rel=0.01)


def test_every_family_is_planned():
    """In float32 under autocast, where fake tensors know no product of several experts; and what
    sampling takes.
    """
    jobs = {}
    for name in FAMILIES:
        shape = model_of(name).config
        shape.router_aux_loss_coef = 0.0  # TRL cannot compute Granite's
        jobs[name] = TrainingJob(ARGS, shape, rows=2, context=128)
    with MeasurementProcesses(240) as processes:
        results = processes.measure(jobs)
    for name, result in results.items():
        assert result.error is None, (name, result.error)
        assert result.step.moments[PASSES]["weights"] >= 4 * result.step.parameters
        has_engine = result.step.sampling.kv_bytes_per_token > 0
        assert has_engine == (FAMILIES[name][2] is None), name


@long
def test_more_is_more():
    """Without checkpointing, with another row, and with a reference model a step takes more; states
    stay.
    """
    job = TrainingJob(ARGS, Qwen3Config(**SHAPE), context=256, rows=1)
    few, plain, two, reference = (
        measure_training(one)
        for one in (
            job,
            TrainingJob({**ARGS, "gradient_checkpointing": False}, job.model, context=256, rows=1),
            TrainingJob(ARGS, job.model, context=256, rows=2),
            TrainingJob({**ARGS, "beta": 0.1}, job.model, context=256, rows=1),
        )
    )
    for more in (plain, two):
        assert more.moments[PASSES]["activations"] > few.moments[PASSES]["activations"]
        assert more.optimizer_states == few.optimizer_states
    # The moments themselves, and for each parameter a number of steps.
    assert few.optimizer_states == pytest.approx(8 * few.parameters, rel=0.02)
    assert reference.moments[PASSES]["reference"] == few.moments[PASSES]["weights"]
    assert reference.moments[SCORING]["activations"] > few.moments[SCORING]["activations"]
    assert few.moments[OPTIMIZER]["optimizer"] == few.optimizer_states


def test_paths_that_are_replaced_are_there():
    """Each name that stands in for a GPU's path is used by the function that it is replaced for."""
    import transformers.masking_utils
    import trl.kernels.chunked_logprob as head
    import trl.trainer.utils as utils

    for name in GPU_HEAD:
        module, _, attribute = name.rpartition(".")
        assert f"{attribute}" in inspect.getsource(sys.modules[module]), name
    assert {"_use_triton", "_addmm_fp32"} <= vars(head).keys() and "_use_triton" in vars(utils)
    assert "_ignore_causal_mask_sdpa(" in inspect.getsource(transformers.masking_utils.sdpa_mask)


@pytest.mark.parametrize(
    ("window", "is_padded", "has_mask"),
    [
        (None, False, False),
        (16, False, False),
        (8, False, True),
        (4, False, True),
        (16, True, True),
    ],
)
def test_rows_longer_than_a_window_need_masks(window, is_padded, has_mask):
    """As the library calls the function that is replaced, and as it decides on a GPU itself."""
    import transformers.masking_utils

    def build_mask():
        return transformers.masking_utils.sdpa_mask(1, 8, 8, local_size=window)

    with as_on_a_gpu(is_padded):
        assert (build_mask() is not None) == has_mask
    if not is_padded:
        assert (build_mask() is not None) == has_mask


# --- in processes of their own --------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    accelerate = {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "fsdp_config": {"fsdp_version": 2},
    }
    return plan(ARGS, Qwen3Config(**SHAPE), gpu_memory=8.0, accelerate=accelerate, seconds=240)


def test_a_plan_over_fake_processes(made):
    whole = 4 * made.parameters / GIB
    assert made.moments[PASSES]["weights"] == pytest.approx(whole / 2, rel=0.02)
    assert made.moments[PASSES]["optimizer"] == pytest.approx(whole, rel=0.02)
    assert made.moments[SAMPLING]["gathered weights"] == pytest.approx(whole, rel=0.02)
    assert made.fits and made.peak == max(sum(of.values()) for of in made.moments.values())


def test_what_fits(made):
    assert made.kv_bytes == 2 * 2 * 32 * (
        4 + 2
    )  # layers, heads, their size; under autocast keys stay in float32
    assert made.largest_batch > 2 and made.largest_context == 4096  # what the model can read
    assert made.options == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    assert "per_device_train_batch_size: 4" in str(made) and "not measured on a GPU" in str(made)
    assert json.loads(json.dumps(made.to_json()))["fits"]


def test_a_moment_without_large_parts_lists_none(made):
    small = replace(made, moments={PASSES: {"weights": 0.01}}, batch=1)
    assert "()" not in str(small) and "1 rollout of" in str(small)


def test_a_step_that_fails_is_a_sentence():
    with pytest.raises(Unplannable, match="fake tensors.* rough estimate: 0.0 billion"):
        plan({**ARGS, "optim": "adamw_bnb_8bit"}, Qwen3Config(**SHAPE), seconds=1)


def test_what_there_was_no_time_for_is_said_once():
    class Measures:
        max_wait = 1.0

        def measure(self, jobs):
            return {"configured": MeasurementResult(step=MEASURED)}

    result = planner(layout=Layout(1, 1000)).plan(Measures())
    assert (result.largest_batch, result.largest_context) == (None, None)
    assert len([note for note in result.notes if "no time" in note]) == 1


def test_a_step_that_takes_too_long_says_how_long_it_had():
    with (
        MeasurementProcesses(0.0, first_seconds=0.5) as processes,
        pytest.raises(Unplannable, match="no result in 0 s"),
    ):
        planner().plan(processes)


# --- layouts --------------------------------------------------------------------------------------


STATES = {"weights": 8 * GIB, "reference": 8 * GIB, "optimizer": 32 * GIB}
MEASURED = MeasuredStep(
    moments={
        SCORING: {**STATES, "activations": 2 * GIB},
        PASSES: {**STATES, "activations": 4 * GIB, "gradients": 8 * GIB},
        OPTIMIZER: {**STATES, "activations": 0, "gradients": 8 * GIB},
    },
    optimizer_states=32 * GIB,
    parameters=4 * 10**9,
    trained=4 * 10**9,
    sampling=SamplingMemory(kv_bytes_per_token=147456, reading=GIB, weights=8 * GIB),
)


def test_zero_shards_by_its_rule():
    billion = 1e9 / GIB
    zero3 = Layout(8, 80, "zero3").training_moments(MEASURED, 2560)[PASSES]
    assert zero3["weights"] == pytest.approx(4 * billion * 2 / 8) and zero3["reference"] == 1
    assert zero3["optimizer"] == pytest.approx(4 * billion * 12 / 8) and zero3["activations"] == 4
    assert zero3["gathered weights"] == pytest.approx(2 * 1.05 * billion)
    assert zero3["buckets"] == pytest.approx(billion)
    zero2 = Layout(8, 80, "zero2").training_moments(MEASURED, 2560)[PASSES]
    assert zero2["weights"] == pytest.approx(8 * billion) and zero2["gathered weights"] == 0
    auto = Layout(8, 80, "zero3", {"reduce_bucket_size": "auto"}).training_moments(MEASURED, 1024)[
        PASSES
    ]
    assert auto["buckets"] == pytest.approx(2 * 1024**2 / GIB)
    assert (
        Layout(1, 80, "zero3").training_moments(MEASURED, 2560)[PASSES]["weights"] == 8
    )  # one process shards nothing
    assert Layout(2, 80, "ddp").training_moments(MEASURED, 2560)[PASSES]["buckets (estimate)"] == 8


@pytest.mark.parametrize(
    "form", [{"offload_{}_device": "cpu"}, {"offload_{}": {"device": "nvme"}}], ids=str
)
def test_what_is_offloaded_is_not_on_the_gpu(form):
    def moments(*whats):
        zero = {name.format(what): value for what in whats for name, value in form.items()}
        return Layout(8, 80, "zero3", zero).training_moments(MEASURED, 2560)

    plain = moments()
    states = moments("optimizer")
    weights = moments("param")
    for name in (SCORING, PASSES, OPTIMIZER):
        assert (
            states[name]["optimizer"] == 0 < plain[name]["optimizer"] == weights[name]["optimizer"]
        )
        assert weights[name]["weights"] == 0 < plain[name]["weights"] == states[name]["weights"]
        assert states[name]["gradients"] == plain[name]["gradients"]
    assert states[OPTIMIZER]["activations"] == 0 and states[PASSES]["gathered weights"] > 0
    assert (
        Layout(8, 80, "zero3", {"offload_optimizer_device": "none"}).training_moments(
            MEASURED, 2560
        )
        == plain
    )


def test_layouts_of_the_example_files():
    def read(name, **more):
        values = yaml.safe_load((ROOT / "examples" / "accelerate" / name).read_text())
        return Layout.from_accelerate({**values, **more}, None, 80)

    assert (read("zero3.yaml").sharding, read("zero3.yaml").gpus) == ("zero3", 8)
    assert read("fsdp2.yaml").sharding == "fsdp2" and read("ddp.yaml").sharding == "ddp"
    assert read("single.yaml").gpus == 1 and not read("single.yaml").is_sharded
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        read("fsdp2.yaml", fsdp_config={"fsdp_version": 1})
    with pytest.raises(ValueError, match="fsdp_offload_params"):
        read("fsdp2.yaml", fsdp_config={"fsdp_version": 2, "fsdp_offload_params": True})
    for wrong in ({"gpus": 0}, {"memory": 0}, {"sharding": "megatron"}):
        with pytest.raises(ValueError):
            Layout(**wrong)


def test_sampling_holds_the_whole_policy():
    layout = Layout(8, 80, "zero3")
    moments = layout.training_moments(MEASURED, 2560)
    held = layout.sampling_parts(MEASURED, moments, 80, 8192, {"prefix_cache_mb": 1024})
    assert held["gathered weights"] == 8
    assert held["cached between turns"] == pytest.approx(1.024e9 / GIB)
    assert held["keys and values"] == pytest.approx(
        (layout.usable - sum(held.values()) + held["keys and values"]) / 2
    )
    few = layout.sampling_parts(MEASURED, moments, 2, 1024, {})
    assert few["keys and values"] == pytest.approx(2 * 1024 * 147456 / GIB)
    assert "gathered weights" not in layout.sampling_parts(
        MEASURED, moments, 80, 8192, {"use_vllm": True}
    )


# --- what fits ------------------------------------------------------------------------------------


def planner(values=ARGS, layout=Layout()):
    return Planner(
        "a", dict(values), layout, longest_job(values, Qwen3Config(**SHAPE), layout, None)
    )


def test_the_longest_micro_batch():
    job = planner({**ARGS, "max_turns": 1, "max_turn_tokens": 64}).job
    assert (job.context, job.prompt_length, job.scored) == (512, 256, 0.25)
    assert planner({**ARGS, "max_context": None, "max_completion_length": None}).job.context == 4096
    assert planner(layout=Layout(2, 80, "zero3")).job.dtype == "bfloat16"
    assert planner().job.dtype == "float32"
    assert planner({**ARGS, "async_lead": 1.0}).job.off_policy
    with pytest.raises(Unplannable, match="quantized weights"):
        planner({**ARGS, "model_init_kwargs": {"quantization_config": "asked for"}})


def test_the_largest_batch_lies_on_a_line():
    here, there = ({PASSES: {"weights": 10.0, "activations": 5.0 * rows}} for rows in (2, 1))
    assert planner().largest_size(here, there, 2, 1) == int((Layout().usable - 10) / 5)
    assert planner(layout=Layout(memory=10)).largest_size(here, there, 2, 1) == 0


def test_vllm_takes_its_share():
    values = {
        **ARGS,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.25,
    }
    of = planner(values).compute_moments(planner(values).job, MEASURED)
    assert all(parts["vLLM's share"] == 20 for parts in of.values())
    sleeping = planner({**values, "vllm_enable_sleep_mode": True})
    of = sleeping.compute_moments(sleeping.job, MEASURED)
    assert [name for name in of if "vLLM's share" in of[name]] == [SAMPLING]


def test_what_is_turned_on_next():
    values = {**ARGS, "gradient_checkpointing": False, "use_vllm": True}
    changes = planner(values, Layout(2, 80, "ddp")).next_changes(planner(values).job)
    names = [list(change.options) for change in changes]
    assert [name[0] for name in names] == [
        "vllm_mode",
        "gradient_checkpointing",
        "accelerate_config",
        "use_peft",
        "dtype",
    ]


def test_the_first_option_that_fits_is_taken(monkeypatch):
    class Measures:
        """Checkpointing takes the activations to a tenth."""

        def measure(self, jobs):
            (job,) = jobs.values()
            activations = 10 if job.args["gradient_checkpointing"] else 100
            moments = {
                PASSES: {"weights": GIB, "activations": activations * GIB, "optimizer": 2 * GIB}
            }
            return {"next": MeasurementResult(step=MeasuredStep(moments, 0, 1, 1))}

    one = planner({**ARGS, "gradient_checkpointing": False})
    result = Plan("a", Layout(), 1, 1, 2, 512, {PASSES: {"activations": 100.0}}, largest_batch=0)
    one.set_options(result, Measures())
    assert result.options == {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
    }
    result.layout = one.layout = Layout(memory=4)
    one.set_options(result, Measures())
    assert not result.options and "use more GPUs" in result.notes[-1]


# --- models that cannot be planned ----------------------------------------------------------------


@pytest.mark.parametrize(
    "values, says",
    [
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}, **SHAPE},
            "needs its own Python code.*GiB",
        ),
        (
            {"model_type": "unheard_of", **SHAPE},
            "cannot load its config.json.*rough estimate: 0.0 billion",
        ),
        ({"model_type": "unheard_of", "hidden_size": 8}, "num_hidden_layers and vocab_size"),
    ],
)
def test_a_model_that_cannot_be_made(tmp_path, values, says):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(Unplannable, match=says):
        load_shape(str(tmp_path))


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(Unplannable, match="config.json cannot be read"):
        load_shape(str(tmp_path))


# --- the command ----------------------------------------------------------------------------------


def asked(*words):
    with pytest.raises(SystemExit) as end:
        command(["plan", *map(str, words)])
    return end.value.code


def test_the_command_refuses_in_a_line(capsys, tmp_path):
    config = ROOT / "examples" / "configs" / "qwen3_4b.yaml"
    assert asked() == 2 and "--config FILE" in capsys.readouterr().err
    assert asked("--config", config, "--gpus", 0) == 2
    assert "at least 1 GPU" in capsys.readouterr().err
    assert asked("--config", tmp_path / "none.yaml") == 2
    assert "none.yaml does not exist" in capsys.readouterr().err
    (tmp_path / "list.yaml").write_text("- a")
    assert asked("--config", config, "--accelerate-config", tmp_path / "list.yaml") == 2
    assert "list.yaml does not contain options by name" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert asked("--config", config, "--model-name", tmp_path) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_command_prints_the_plan(capsys, monkeypatch, tmp_path, made):
    given = {}

    def planned(values, model, **options):
        given.update(
            options, model=model, batch=values["per_device_train_batch_size"], bf16=values["bf16"]
        )
        return made

    monkeypatch.setattr("agentic_prompting.planning.plan", planned)
    config = ROOT / "examples" / "configs" / "qwen3_4b.yaml"
    zero3 = ROOT / "examples" / "accelerate" / "zero3.yaml"
    words = [
        f"--config={config}",
        f"--accelerate-config={zero3}",
        f"--model-name={tmp_path}",
        "--environment-model=gpt-4o-mini",
    ]
    assert asked(*words, "--rows", 640, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert given["model"] == str(tmp_path) and given["batch"] == 2 and given["bf16"]
    assert given["accelerate"]["distributed_type"] == "DEEPSPEED" and printed["cost"]["usd"] > 0
    assert printed["headroom"] is None
    # What `headroom` has measured is shown beside the costs.
    assert asked(*words, "--headroom", tmp_path) == 2
    assert "headroom.json" in capsys.readouterr().err
    floor = {"mean": 0.25, "low": 0.125, "high": 0.375, "n": 64}
    signal = {"group_size": 5, "differing": floor, "lost_to_form": None, "sentence": "worth it"}
    measured = {"delta": 0.1, "calls": {"signal": 300}, "cost_usd": 1.5}
    measured["signal"] = {**signal, "pass_at": {"1": floor}}
    (tmp_path / "headroom.json").write_text(json.dumps(measured))
    assert asked(*words, "--headroom", tmp_path, "--rows", 640, "--json") == 0
    assert json.loads(capsys.readouterr().out)["headroom"]["calls"] == 300
    assert asked(*words, "--headroom", tmp_path / "headroom.json") == 0
    out = capsys.readouterr().out
    assert "pass@1: 0.250 [0.125, 0.375]" in out and "300 calls, $1.5000" in out
    assert "groups of 5 with a gradient" in out
    assert asked(*words) == 0
    assert "set max_steps" in capsys.readouterr().out


def test_a_pilot_needs_no_configuration(capsys, monkeypatch, tmp_path, made):
    """Its settings are those of the run; options of the command line come first."""
    given = {}

    def planned(values, model, **options):
        given.update(options, model=model, **values)
        return made

    monkeypatch.setattr("agentic_prompting.planning.plan", planned)
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    args = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 4,
        "generation_batch_size": 8,
        "num_generations": 4,
        "max_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "budget_usd": None,
    }
    RunSettings(args=args, model="a/model", rows=64, processes=1, peft=adapter).write(tmp_path)
    rollout = Rollout([1], row={"question": "q"}).finish("answered")
    RolloutLog(tmp_path / "rollouts").write([rollout_record(rollout, mode="train", step=0)])

    assert asked("--from", tmp_path, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert given["model"] == "a/model" and given["gpus"] == 1 and given["peft_config"].r == 4
    assert given["bf16"] and not given["use_cpu"] and printed["cost"]["steps"] == 2

    words = ["--from", tmp_path, "--gpus", 2, "--model-name", "b/model", "--json"]
    assert asked(*words, "--max-steps", 50) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["steps"] == 50
    assert (given["model"], given["gpus"], given["generation_batch_size"]) == ("b/model", 2, 16)
    # Steps by rows: 64 rows, 4 rollouts each, 8 of them in a step on each GPU of the plan.
    assert asked(*words, "--rows", 64) == 0
    steps = -(-64 * 4 // (8 * made.layout.gpus))
    assert json.loads(capsys.readouterr().out)["cost"]["steps"] == steps


def test_a_folder_without_settings_is_refused(capsys, tmp_path):
    assert asked("--from", tmp_path) == 2 and "--config FILE" in capsys.readouterr().err
    (tmp_path / SETTINGS_FILE).parent.mkdir()
    (tmp_path / SETTINGS_FILE).write_text("{")
    assert asked("--from", tmp_path) == 2 and "damaged" in capsys.readouterr().err


def test_the_command_takes_the_price_of_the_client(capsys, monkeypatch, tmp_path):
    moments = {PASSES: {"weights": 1.0}}
    memory = Plan("m", Layout(1, 80.0), 10**9, 10**7, batch=2, context=512, moments=moments)
    monkeypatch.setattr("agentic_prompting.planning.plan", lambda *values, **options: memory)
    monkeypatch.delenv("MY_KEY", raising=False)
    config = ROOT / "examples" / "configs" / "qwen3_4b.yaml"
    words = ["--config", config, "--model-name", tmp_path, "--environment-model", "mine", "--json"]
    words += ["--rows", 100, "--environment-client", "price=3/4,key=MY_KEY"]
    assert asked(*words) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["usd"] > 0


def test_a_run_on_a_cpu_has_no_plan_for_a_gpu(capsys, monkeypatch, tmp_path):
    moments = {PASSES: {"weights": 1.0}}
    memory = Plan("m", Layout(1, 80.0), 10**9, 10**7, batch=2, context=512, moments=moments)
    monkeypatch.setattr("agentic_prompting.planning.plan", lambda *values, **options: memory)
    config = tmp_path / "cpu.yaml"
    config.write_text(
        f"model_name_or_path: {tmp_path}\nenvironment_model: m\nuse_cpu: true\nmax_steps: "
        f"2\noutput_dir: {tmp_path}"
    )
    assert asked("--config", config) == 2
    error = capsys.readouterr().err
    assert "use_cpu: true" in error and "--gpus 1" in error
    # The same run on GPUs, if they are named.
    assert asked("--config", config, "--gpus", 1) == 0
    assert "note: " in (out := capsys.readouterr().out) and "use_cpu: true" in out


def test_the_command_prices_a_pool(capsys, monkeypatch, tmp_path):
    moments = {PASSES: {"weights": 1.0}}
    memory = Plan("m", Layout(1, 80.0), 10**9, 10**7, batch=2, context=512, moments=moments)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("agentic_prompting.planning.plan", lambda *values, **options: memory)
    config = ROOT / "examples" / "configs" / "conductor.yaml"
    assert asked("--config", config, "--model-name", tmp_path, "--json") == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert set(cost["workers"]) == {"coder", "mathematician", "reader", "calculator"}
    assert cost["workers"]["reader"]["usd"] > cost["workers"]["calculator"]["usd"] == 0
    assert cost["usd"] == pytest.approx(sum(each["usd"] for each in cost["workers"].values()))
    # An environment that cannot be loaded leaves the rest of the plan.
    lost = tmp_path / "lost.yaml"
    lost.write_text(config.read_text().replace("examples/train_conductor.py", "nowhere.py"))
    assert asked("--config", lost, "--model-name", tmp_path) == 0
    assert "nowhere.py" in capsys.readouterr().out
