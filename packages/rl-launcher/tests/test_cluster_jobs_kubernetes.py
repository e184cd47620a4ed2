"""Claims about the Kubernetes manifest: fields that KubeRay's RayJob has, references for secrets, a real script."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import yaml

from rl_launcher.cluster_jobs import ClusterJob, KubernetesOptions, cluster_job, render_kubernetes
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe

# Of ray.io/v1, as KubeRay 1.5 and later document it: what is written, and of which type.
POD = {
    "spec": {
        "containers": [
            {
                "name": str,
                "image": str,
                "workingDir": str,
                "resources": {"limits": dict, "requests": dict},
                "env": [{"name": str, "value?": str, "valueFrom?": {"secretKeyRef": {"name": str, "key": str}}}],
                "volumeMounts": [{"name": str, "mountPath": str}],
                "ports?": [{"containerPort": int, "name": str}],
            }
        ],
        "volumes": [
            {
                "name": str,
                "persistentVolumeClaim?": {"claimName": str},
                "emptyDir?": {"medium": str, "sizeLimit": str},
                "configMap?": {"name": str},
            }
        ],
        "terminationGracePeriodSeconds": int,
    }
}
RAY_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace?": str},
    "spec": {
        "entrypoint": str,
        "submissionMode": str,
        "backoffLimit": int,
        "submitterConfig": {"backoffLimit": int},
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec": {
            "rayVersion": str,
            "authOptions?": {"mode": str},
            "headGroupSpec": {"rayStartParams": dict, "template": POD},
            "workerGroupSpecs?": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": dict,
                    "template": POD,
                }
            ],
        },
    },
}


def check(value, structure, where="RayJob"):
    """Hold plain data against a structure: every key is known, and none but those with `?` is missing."""
    if isinstance(structure, dict):
        keys = {name.rstrip("?"): inner for name, inner in structure.items()}
        assert set(value) <= set(keys), f"{where}: {set(value) - set(keys)} are not fields of it"
        missing = {name for name in structure if not name.endswith("?")} - set(value)
        assert not missing, f"{where}: {missing} are missing"
        for name, each in value.items():
            check(each, keys[name], f"{where}.{name}")
    elif isinstance(structure, list):
        for each in value:
            check(each, structure[0], f"{where}[]")
    else:
        assert type(value) is structure, f"{where}: {value!r}"


def job(**changes):
    return ClusterJob(
        **{"recipe": "my recipe.yaml", "run_dir": "runs/a", "num_nodes": 4, "gpus_per_node": 8, **changes}
    )


def options(**changes):
    return KubernetesOptions(**{"image": "registry.example/rl:1", "claim": "shared", **changes})


def documents(job, options):
    return [*yaml.safe_load_all(render_kubernetes(job, options))]


def test_the_manifest_has_the_fields_of_a_rayjob_and_what_the_recipe_asks_for():
    config, ray_job = documents(
        job(), options(env=("NCCL_DEBUG=INFO",), secret_env=("HF_TOKEN=hugging-face:token",), namespace="training")
    )
    check(ray_job, RAY_JOB)
    assert (ray_job["apiVersion"], ray_job["kind"]) == ("ray.io/v1", "RayJob")
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap")
    spec = ray_job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 3
    for group in (spec["rayClusterSpec"]["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert {"name": "shared", "mountPath": "/shared"} in container["volumeMounts"]
        assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
        reference = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
        assert {"name": "HF_TOKEN", "valueFrom": reference} in container["env"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "shared"}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert ray_job["metadata"]["namespace"] == config["metadata"]["namespace"] == "training"


def test_one_machine_without_gpus_has_no_workers_and_asks_for_none():
    _, ray_job = documents(job(num_nodes=1, gpus_per_node=0), options(token=False))
    check(ray_job, RAY_JOB)
    cluster = ray_job["spec"]["rayClusterSpec"]
    assert "workerGroupSpecs" not in cluster
    assert "authOptions" not in cluster
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}


NASTY = "a'b\"c $(touch x): {yes} #\n- !!python/object:os.system"


@pytest.mark.parametrize("run_dir_is_there", [False, True], ids=["first", "after another pod"])
def test_the_script_waits_then_runs_or_resumes_whatever_the_words_hold(tmp_path, run_dir_is_there):
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport sys, json\n"
        "with open('calls', 'a') as f: f.write(json.dumps(sys.argv[1:]) + chr(10))\n"
    )
    python.chmod(0o755)
    asked = options(shared_dir=str(tmp_path / "shared"), python=str(python))
    config, _ = documents(job(recipe=f"{NASTY}.yaml", overrides=(NASTY,)), asked)
    run = tmp_path / "shared" / "runs" / "a"
    run.mkdir(parents=True)
    if run_dir_is_there:
        (run / "recipe.yaml").touch()
    script = tmp_path / "drive.sh"
    script.write_text(config["data"]["drive.sh"])
    done = subprocess.run(
        ["bash", script], capture_output=True, text=True, timeout=240, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    calls = [yaml.safe_load(line) for line in (tmp_path / "shared" / "calls").read_text().splitlines()]
    assert calls[0][:4] == ["-m", "rl_launcher.cluster_jobs.wait_for_nodes", "--address", "auto"]
    if run_dir_is_there:
        assert calls[1] == ["-m", "rl_launcher", "resume", str(run)]
    else:
        recipe = str(tmp_path / "shared" / f"{NASTY}.yaml")
        assert calls[1] == ["-m", "rl_launcher", "run", recipe, NASTY, "cluster.address=auto"]
    assert not (tmp_path / "shared" / "x").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env": ("WANDB_API_KEY=abc",)}, "is a secret by its name"),
        ({"env": ("HF_HOME",)}, "a pod inherits none"),
        ({"secret_env": ("HF_TOKEN",)}, "as HF_TOKEN=hugging-face:token"),
        ({"name": "Not_A_Name"}, "is not a Kubernetes name"),
        ({"name": "a" * 48}, "at most 47"),
        ({"memory": "lots"}, "memory='lots' is not a Kubernetes quantity"),
        ({"shared_dir": "shared"}, "must be absolute"),
        ({"retries": -1}, "retries=-1 must be >= 0"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(changes, words):
    with pytest.raises(Refusal, match=words):
        options(**changes)


@pytest.mark.parametrize(
    "changes", [{"run_dir": "/elsewhere/a"}, {"recipe": "/elsewhere/r.yaml"}, {"run_dir": "../a"}], ids=str
)
def test_what_pods_do_not_share_is_refused(changes):
    with pytest.raises(Refusal, match="pods only share /shared"):
        render_kubernetes(job(**changes), options())


def test_a_job_is_what_the_recipe_says_and_one_process_is_refused(recipe):
    on_ray = ["cluster.runtime=ray", "cluster.num_nodes=2", "cluster.gpus_per_node=4"]
    on_gpus = [*on_ray, "policy.dtensor_cfg.device=cuda"]
    for overrides, gpus in ((on_ray, 0), (on_gpus, 4)):
        read = cluster_job(load_recipe(recipe, schema=Recipe, overrides=overrides).value, recipe, overrides)
        assert (read.num_nodes, read.gpus_per_node) == (2, gpus)
        assert read.arguments == (str(recipe), *overrides, "cluster.address=auto")
    with pytest.raises(Refusal, match=r"cluster\.runtime=in_process needs no cluster"):
        cluster_job(load_recipe(recipe, schema=Recipe).value, recipe)
    elsewhere = [*on_ray, "cluster.address=10.0.0.1:6379"]
    with pytest.raises(Refusal, match="a cluster job starts its own"):
        cluster_job(load_recipe(recipe, schema=Recipe, overrides=elsewhere).value, recipe)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_waiting_for_machines_ends_with_who_is_there(tmp_path):
    code = """
        import sys, tempfile, time
        import ray
        from rl_launcher.cluster_jobs.wait_for_nodes import NotJoinedError, wait_for_nodes
        # Ray's agents may write for a moment after its end.
        with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
            ray.init(num_cpus=1, include_dashboard=False, _temp_dir=folder)
            assert "0 GPUs" in wait_for_nodes(1, gpus_per_node=0, deadline=time.monotonic() + 60)
            try:
                wait_for_nodes(2, gpus_per_node=0, deadline=time.monotonic())
            except NotJoinedError as error:
                assert "2 nodes with 0 GPUs each were expected, and there are 1" in str(error), error
            else:
                sys.exit("it did not refuse")
            finally:
                ray.shutdown()
    """
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_pods_have_the_memory_that_the_recipe_needs():
    large = job(memory_bytes=300 * 2**30, shm_bytes=113 * 2**30 - 5)
    text = render_kubernetes(large, options())
    assert 'sizeLimit: "113Gi"' in text
    assert 'memory: "300Gi"' in text
    with pytest.raises(Refusal, match="shm=16Gi is less than the 113Gi that the recipe needs on each node"):
        render_kubernetes(large, options(shm="16Gi"))
    assert 'sizeLimit: "150G"' in render_kubernetes(large, options(shm="150G"))
