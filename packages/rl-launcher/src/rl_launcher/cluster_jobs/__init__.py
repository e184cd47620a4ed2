"""Files that start a recipe on a cluster: a batch script for SLURM, a manifest for Kubernetes with KubeRay.

They only write text. Starting it is `sbatch`'s and `kubectl`'s affair; what runs inside is `rl-launcher run`.
"""

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
