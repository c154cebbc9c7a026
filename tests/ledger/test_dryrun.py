"""The dry run: a script on fake tensors takes the bytes and collectives that the engine takes for real, and the calculator says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from dryrun_job import SEQ, SIZES, config_of, measured  # noqa: E402
from stateroom.ledger.dryrun.collect import report_of  # noqa: E402
from stateroom.ledger.dryrun.run import dry_run  # noqa: E402

JOB = str(HERE / "dryrun_job.py")
CONFIGS = [(stage, precision, gas) for stage in range(4) for precision, gas in (("fp32", 1), ("bf16", 1), ("bf16", 3))]


def dry(config, ranks, rank=0, **options):
    record = dry_run(JOB, [json.dumps(config)], ranks, rank, **options)
    return report_of(record, JOB)


@pytest.mark.parametrize(("stage", "precision", "gas"), CONFIGS)
def test_dry_run_takes_what_the_engine_takes(pools, stage, precision, gas):
    config = config_of(stage, precision, gas)
    (real, peak), _ = pools(2).run(measured, config)
    found = dry(config, 2, backend="gloo")
    rest = found.instants[0].states
    for row in real.states:
        assert rest.get(row.state, 0) == row.measured_bytes == row.predicted_bytes, row
    assert [(r.kind, r.state, r.counted_calls, r.counted_bytes, r.sent_bytes) for r in found.traffic] == [
        (r.kind, r.state, r.counted_calls, r.counted_bytes, r.sent_bytes) for r in real.traffic
    ]
    assert abs(found.peak.total / peak - 1) < 0.03, (found.peak, peak)


FOUR = [pytest.param(*each, marks=() if each == (3, "bf16", 3) else pytest.mark.full) for each in CONFIGS]


@pytest.mark.parametrize(("stage", "precision", "gas"), FOUR)
def test_four_ranks(pools, stage, precision, gas):
    config = config_of(stage, precision, gas)
    (real, peak), *_ = pools(4).run(measured, config)
    found = dry(config, 4, backend="gloo")
    rest = found.instants[0].states
    for row in real.states:
        assert rest.get(row.state, 0) == row.measured_bytes == row.predicted_bytes, row
    moved = [(row.kind, row.state, row.counted_calls, row.counted_bytes) for row in real.traffic]
    assert [(row.kind, row.state, row.counted_calls, row.counted_bytes) for row in found.traffic] == moved
    assert abs(found.peak.total / peak - 1) < 0.03, (found.peak, peak)


@pytest.mark.parametrize("stage", range(4))
def test_calculator_beside_it_is_equal_to_the_byte(stage):
    """Shares, payloads and FLOPs of a rank among 64, where no size divides evenly."""
    found = dry(config_of(stage, "bf16", 3), 60, 17)
    rest, known = found.instants[0].states, found.beside
    assert known.states and known.traffic
    for state, size in known.states.items():
        assert rest[state] == size, state
    counted = {("dp", r.kind, r.state): (r.counted_calls, r.counted_bytes) for r in found.traffic if r.state != "control"}
    assert counted == known.traffic
    assert found.flops == known.flops


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputation_keeps_less_and_executes_more(policy):
    plain, found = (dry(config_of(3, "bf16", 1, activation_checkpointing={"policy": each}), 8) for each in ("none", policy))
    assert found.peak.total < plain.peak.total
    tokens, ffn = 2 * SEQ, 352
    skipped = 3 * 2 * tokens * ffn * SIZES["dim"]  # a layer's last product: its result is needed by nothing
    assert found.flops == found.beside.flops - (skipped if policy == "full" else 0)
    assert any("last product" in note for note in found.notes) == (policy == "full")


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("Muon", marks=pytest.mark.full)])
def test_rank_classes_are_what_a_run_as_each_of_them_finds(optimizer):
    """Muon's units are cut between parameters, so that ranks differ; some have nothing."""
    config = config_of(3, "bf16", 1, optimizer={"type": optimizer, "params": {"lr": 1e-3}})
    classes = dry(config, 12).classes
    assert sum(each.count for each in classes) == 12
    assert len(classes) >= (3 if optimizer == "Muon" else 1)
    for each in classes:
        seen = dry(config, 12, each.spans[-1][1]).instants[0].states
        assert {state: seen.get(state, 0) for state in each.states} == dict(each.states)


def script(folder, text):
    path = folder / "train.py"
    path.write_text(
        "import sys, torch\nimport stateroom\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from dryrun_job import SIZES, SEQ, build, config_of, example_model, take_step\n" + text
    )
    return str(path)


def peak_of(path):
    return report_of(dry_run(path, [], 8, 3), path).peak.total


def test_init_leaves_no_buffer_behind(tmp_path):
    """Parameters that zero.Init sharded take the same memory in the step as others: their own buffers are gone."""
    text = (
        "L = example_model()\n"
        "with stateroom.zero.Init(enabled={0}, dtype=torch.bfloat16): model = L.Llama(L.LlamaConfig(**SIZES))\n"
        "engine, *_ = stateroom.initialize(model, config=config_of(3, 'bf16', 1))\n"
        "while True: take_step(engine)\n"
    )
    with_init, without = (peak_of(script(tmp_path, text.format(flag))) for flag in (True, False))
    assert with_init == without


def test_a_script_as_people_write_them(tmp_path):
    """Values asked for, devices named, a loader, plain backward, errors caught, a save: none of it stops the run."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**config_of(2, "fp16", 2), "run_dir": str(tmp_path / "run")}))
    text = f"""
import argparse, math
parser = stateroom.add_config_arguments(argparse.ArgumentParser())
args = parser.parse_args(["--deepspeed_config", {str(config)!r}])
stateroom.init_distributed()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, i): return torch.randn(8), torch.tensor(i % 3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).to("cuda").cuda().half()
engine, _, loader, _ = stateroom.initialize(args=args, model=model, model_parameters=model.parameters(), training_data=Data())
criterion = torch.nn.CrossEntropyLoss().to(engine.device)
votes = torch.zeros(1)
for x, y in loader:
    try:
        loss = criterion(engine(x.half().to(engine.local_rank)).float(), y.cuda(non_blocking=True))
        engine.scale(loss).backward()
        engine.step()
        torch.distributed.all_reduce(votes)
        print(f"{{loss:.3f}}", math.log(loss.item()), float(loss), loss.detach().cpu().numpy(), y.tolist()[0], bool(votes))
        if torch.isnan(loss): raise SystemExit(3)
        engine.save_checkpoint({str(tmp_path / "saves")!r})
    except Exception as error:
        print("caught", error); raise
"""
    path = script(tmp_path, text)
    found = report_of(dry_run(path, [], 16, 5), path)
    assert found.steps == 2 and found.flops > 0
    assert ("allreduce", 16, 2, 2 * 4) in found.own or ("allreduce", 16, 1, 4) in found.own
    assert not (tmp_path / "saves").exists() and not (tmp_path / "run").exists()
    assert "vocab" in found.beside.why
    text = "\n".join(found.lines())
    assert "no calculator beside it" in text and "the script's own" in text


def test_a_module_is_run_as_a_script_is(tmp_path, monkeypatch):
    script(tmp_path, "engine = build(config_of(3, 'bf16', int(sys.argv[1])))\nwhile True: take_step(engine)\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    found = report_of(dry_run("-m", ["train", "2"], 8, 3), "-m train")
    assert found.peak.total == dry(config_of(3, "bf16", 2), 8, 3).peak.total
    assert sys.path == before


TROUBLES = {
    "nothing": ("print('hi')", "without calling stateroom.initialize"),
    "no step": ("build(config_of(3, 'bf16', 1))", "ended before its first engine.step"),
    "raises": ("build(config_of(3, 'bf16', 1))\nraise KeyError('lr')", "train.py:6 (raise KeyError('lr')): KeyError"),
    "exits": ("sys.exit('no data')", "ended itself: no data"),
    "shape": (
        "engine = build(config_of(3, 'bf16', 1))\nengine(torch.zeros(2, SEQ + 1, dtype=torch.long))",
        "train.py:6 (engine(torch.zeros(2, SEQ + 1, dtype=torch.long))): RuntimeError",
    ),
    "divide": ("build({**config_of(3, 'bf16', 1), 'train_batch_size': 100})", "nearest legal"),
    "values": ("engine = build(config_of(3, 'bf16', 1))\nx = torch.randn(4)\ny = x[x > 0]", "what depends on values"),
    "objects": (
        "engine = build(config_of(3, 'bf16', 1))\ntorch.distributed.all_gather_object([None] * 8, 1)",
        "all_gather_object() exchanges Python objects",
    ),
    "group": ("torch.distributed.init_process_group('nccl')", "call stateroom.init_distributed()"),
    "endless": ("while True: pass", "took no 2 steps in 1 s"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_stops_a_script_is_one_clear_message(tmp_path, trouble):
    from stateroom.errors import StateroomError

    text, expected = TROUBLES[trouble]
    with pytest.raises(StateroomError) as caught:
        dry_run(script(tmp_path, text), [], 8, 3, limit_s=1 if trouble == "endless" else 60)
    assert expected in str(caught.value)


def test_the_limit_holds_where_interrupts_are_ignored(tmp_path):
    """As in a job that a shell has put into the background."""
    import signal

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(Exception, match=r"took no 2 steps in 0.5 s"):
            dry_run(script(tmp_path, "while True: pass"), [], 8, 3, limit_s=0.5)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_missing_script_and_wrong_ranks_are_said(tmp_path, capsys):
    from stateroom.ledger.dryrun.cli import main

    assert main(["--ranks", "8", "--", str(tmp_path / "none.py")]) == 1
    assert "no script" in capsys.readouterr().err
    assert main(["--ranks", "8", "--rank", "8", "--", JOB]) == 1
    assert "ranks count from 0" in capsys.readouterr().err
    assert main(["--ranks", "8"]) == 2
    assert main(["--help"]) == 0
    assert main(["--ranks", "12", "--on", "16 h100", "--", JOB]) == 1
    assert "16 devices" in capsys.readouterr().err


def test_the_command_says_whether_it_fits(capsys):
    from stateroom.ledger.dryrun.cli import main

    config = json.dumps(config_of(3, "bf16", 1))
    assert main(["--ranks", "16", "--on", "2x8 h100", "--json", "--", JOB, config]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["peak_bytes"] < found["memory"]["usable_bytes"]
    assert found["rank_classes"][0]["count"] == 16


LLAMA_8B = """
L = example_model()
config = {**config_of(3, 'bf16', 1), 'train_micro_batch_size_per_gpu': 1}
model = L.Llama(L.LlamaConfig(128256, 4096, 32, 32, 8, hidden_dim=14336, max_seq_len=8192))
engine, *_ = stateroom.initialize(model, config=config)
while True:
    ids = torch.randint(0, 128256, (1, 8192), device=engine.device)
    engine.backward(engine(ids, ids))
    engine.step()
"""


def test_llama_8b_at_1024_ranks(tmp_path):
    """In a process of its own: it must stay under 4 GB, and its shares and traffic are those of the table's Llama 3 8B."""
    import subprocess

    path = script(tmp_path, LLAMA_8B)
    command = [sys.executable, "-m", "stateroom", "dryrun", "--ranks", "1024", "--rank", "17", "--model", "llama3-8b", "--json", "--", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["took"]["host_bytes"] < 4e9
    compared = [row for row in found["states"] if row["calculator"] is not None]
    assert len(compared) == 4 and all(row["bytes"] == row["calculator"] for row in compared)
    assert sum(row["bytes"] for row in compared) == 141_157_068
    moved = [row for row in found["traffic"] if row["state"] != "control"]
    assert len(moved) == 2 and all([row["counted_calls"], row["counted_bytes"]] == row["calculator"] for row in moved)
    assert found["flops"]["counted"] == found["flops"]["calculator"]
