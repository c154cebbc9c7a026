"""Manifests are what the clusters' own schemas and libraries accept, and start the launcher as it wants to be started."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from packages import aside, run_with
from stateroom.__main__ import main
from stateroom.launcher.manifests import Task, _yaml, kubernetes, torchx
from stateroom.launcher.options import parse
from stateroom.launcher.plan import make_plan
from stateroom.launcher.problem import LaunchError

WORDS = ["--name", "llama", "--image", "registry/llama:1", "--num_nodes", "4", "--num_gpus", "8", "--env", "A=on", "--max_restarts", "2"]


def written(
    capsys: pytest.CaptureFixture[str], kind: str, *more: str, script: tuple[str, ...] = ("train.py", "--lr", "1e-3", "$x 'y'")
) -> str:
    assert main(["job", "--format", kind, *WORDS, *more, *script]) == 0
    return capsys.readouterr().out


def test_a_job_of_kubernetes_says_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    service, job = yaml.safe_load_all(written(capsys, "kubernetes", "--namespace", "ml"))
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": "llama"}
    assert service["spec"]["publishNotReadyAddresses"] is True and service["metadata"] == {"name": "llama", "namespace": "ml"}
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["env"] == [{"name": "A", "value": "on"}]  # and no boolean
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "8"}
    assert container["command"][-4:] == ["train.py", "--lr", "1e-3", "$x 'y'"]


def test_its_command_is_one_that_the_launcher_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    _, job = yaml.safe_load_all(written(capsys, "kubernetes", "--min_elastic_nodes", "2"))
    program, *words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    (order,) = make_plan(parse(words), {"JOB_COMPLETION_INDEX": "3"}).orders
    assert program == "launcher" and order.job.script_args == ("--lr", "1e-3", "$x 'y'")
    assert (order.node, order.min_nodes, order.max_nodes, order.num_ranks, order.job.max_restarts) == (3, 2, 4, 8, 2)
    assert (order.address, order.port) == ("llama-0.llama", 29500)


def test_kubernetes_own_schema_accepts_it(capsys: pytest.CaptureFixture[str]) -> None:
    folder = aside("kubernetes-validate==1.37.0")
    if folder is None:
        pytest.skip("the package with the schema of Kubernetes cannot be installed here")
    documents = [
        *yaml.safe_load_all(written(capsys, "kubernetes")),
        *yaml.safe_load_all(written(capsys, "kubernetes", "--cpu_only", "-m", "--namespace", "ml", script=("pkg.train",))),
    ]
    code = (
        "import json, sys, kubernetes_validate as k\nfor d in json.loads(sys.argv[1]): k.validate(d, '1.37', strict=True); print('valid')"
    )
    assert run_with(folder, code, json.dumps(documents)).split() == ["valid"] * 4
    documents[1]["spec"]["completionsMode"] = "Indexed"  # and the check can tell
    code = code.replace("k.validate", "print('begin'); k.validate")
    with pytest.raises(AssertionError, match="completionsMode"):
        run_with(folder, code, json.dumps(documents))


def test_torchx_reads_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = aside("torchx==0.7.0")
    if folder is None:
        pytest.skip("torchx cannot be installed here")
    (tmp_path / "app.py").write_text(written(capsys, "torchx", "--memory", "1.5Gi", "--cpu", "500m"))
    code = """
import json, runpy, sys
from torchx import specs
app = runpy.run_path(sys.argv[1])["llama"]()
values = specs.macros.Values(img_root="", app_id="id", replica_id="3", rank0_env="RANK0_HOST")
role = values.apply(app.roles[0])
print(json.dumps([app.name, role.num_replicas, role.entrypoint, role.args, role.env, role.max_retries, role.image,
                  role.resource.cpu, role.resource.gpu, role.resource.memMB, role.port_map, role.retry_policy.value]))
"""
    name, replicas, entry, args, env, retries, image, *rest = json.loads(run_with(folder, code, str(tmp_path / "app.py")))
    assert (name, replicas, entry, env, retries, image) == ("llama", 4, "bash", {"A": "on"}, 2, "registry/llama:1")
    assert rest == [1, 8, 1536, {"c10d": 29500}, "APPLICATION"]
    assert args[0] == "-c" and args[1].startswith("launcher --no_ssh --node_rank 3 --master_addr ${RANK0_HOST:=localhost} --num_nodes 4")
    assert args[1].endswith("""train.py --lr 1e-3 '$x '"'"'y'"'"''""")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--name", "Llama"], "--name 'Llama'"),
        (["--name", "a" * 60], "at most 55"),
        (["--name", "9a"], "--name '9a'"),
        (["--name", "a\n"], "--name 'a\\n'"),
        (["--namespace", "a_b"], "--namespace 'a_b'"),
        (["--memory", "16 GB"], "--memory '16 GB'"),
        (["--cpu", "four"], "--cpu 'four'"),
        (["--device_kind", "gpu"], "--device_kind 'gpu'"),
        (["--min_elastic_nodes", "5"], "more than the 4 nodes"),
        (["--env", "A"], "--env 'A'"),
    ],
)
@pytest.mark.parametrize("kind", ["kubernetes", "torchx"])
def test_what_a_cluster_would_refuse_is_refused_here(words: list[str], problem: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "--format", kind, *WORDS, *words, "train.py"]) == 2
    out, err = capsys.readouterr()
    assert problem in err and out == ""


def test_without_a_script_there_is_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "--format", "torchx", *WORDS]) == 2
    assert "no script given" in capsys.readouterr().err


SCALARS = st.one_of(st.booleans(), st.integers(0, 10**6), st.text(max_size=12))
KEYS = st.text(max_size=6)
MAPPINGS = st.lists(st.dictionaries(KEYS, SCALARS, min_size=1), min_size=1)
LISTS = st.lists(SCALARS, min_size=1, max_size=3)
VALUES = st.recursive(SCALARS, lambda inner: st.one_of(LISTS, MAPPINGS, st.dictionaries(KEYS, inner, min_size=1, max_size=3)))


@settings(deadline=None)
@given(st.dictionaries(KEYS, VALUES))
def test_yaml_is_read_back_as_it_was_meant(values: dict) -> None:
    assert (yaml.safe_load("\n".join(_yaml(values))) or {}) == values


def test_writers_check_by_themselves() -> None:
    for write in (kubernetes, torchx):
        with pytest.raises(LaunchError):
            write(Task("Bad Name", "i", ("x.py",), 1, 1))


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_example_for_kubernetes_is_what_its_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "kubernetes" / "README.md").read_text()
    command = text[text.index("stateroom job") : text.index(" > llama.yaml")].replace("\\\n", " ")
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == (EXAMPLES / "kubernetes" / "llama.yaml").read_text()


def test_the_example_for_slurm_is_a_command_that_the_launcher_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / "slurm" / "train.sbatch"
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    text = path.read_text()
    command = text[text.index(".venv/bin/launcher") : text.index(" &\n")].replace("\\\n", " ")
    monkeypatch.chdir(EXAMPLES.parent)
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_PER_NODE": "8"}
    plan = make_plan(parse(shlex.split(command)[1:]), env)
    assert [(order.host, order.num_ranks) for order in plan.orders] == [("n1", 8), ("n2", 8)]
    config = plan.orders[0].job.script_args[plan.orders[0].job.script_args.index("--config") + 1]
    assert Path(config).is_file() and plan.orders[0].job.max_restarts == 2
