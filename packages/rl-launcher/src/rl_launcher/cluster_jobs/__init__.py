"""Files that start a recipe on a cluster: a SLURM batch script, or a Kubernetes manifest for KubeRay."""

from rl_launcher.cluster_jobs.job import ClusterJob, RayPorts, cluster_job
from rl_launcher.cluster_jobs.kubernetes import KubernetesOptions, render_kubernetes
from rl_launcher.cluster_jobs.slurm import SlurmOptions, render_slurm

__all__ = [
    "ClusterJob",
    "KubernetesOptions",
    "RayPorts",
    "SlurmOptions",
    "cluster_job",
    "render_kubernetes",
    "render_slurm",
]
