"""`doctor`, which checks this machine, and `render`, which writes jobs for clusters."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rl_launcher.cli.arguments import Flags, Json, Out, Overrides, RecipeFile, load, with_flags
from rl_launcher.cli.console import or_refuse, warn, write
from rl_launcher.cluster_jobs import KubernetesOptions, RayPorts, SlurmOptions
from rl_launcher.recipe_files.shipped import find_recipe, shipped_recipes

PORTS, PORT = "ports", "port_"


def doctor(*, json: Json = False) -> None:
    """Check what is installed and works here, which versions are tested together, and what each feature lacks."""
    from rl_launcher.checks.doctor import doctor as diagnose

    raise typer.Exit(or_refuse(lambda: diagnose(json=json)))


def _slurm(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    out: Out = None,
    shared_dir: Annotated[
        Path | None,
        typer.Option(help="A folder that every node mounts; by default the current one.", show_default=False),
    ] = None,
    flags: Flags,
) -> None:
    """Write the batch script that runs RECIPE under SLURM: `sbatch` it. Overrides become part of it."""
    from rl_launcher.cluster_jobs import cluster_job, render_slurm

    resolved = load(recipe, overrides)
    shared = str((shared_dir or Path.cwd()).absolute())
    found = find_recipe(recipe)
    name = _shipped_name(found)

    def rendered() -> str:
        file = name or str(found.resolve())
        job = cluster_job(resolved.value, file, overrides or (), shipped=name is not None)
        options = SlurmOptions(**_with_ports(flags), shared_dir=shared)
        return render_slurm(job, options, file="run.sbatch" if out is None else str(out))

    write(or_refuse(rendered), out)


def _kubernetes(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    out: Out = None,
    recipe_path: Annotated[
        str | None,
        typer.Option(
            help="Path of the recipe in the pods; by default a shipped name, or the file in the shared folder.",
            show_default=False,
        ),
    ] = None,
    flags: Flags,
) -> None:
    """Write the KubeRay job that runs RECIPE on Kubernetes: `kubectl apply -f` it. Overrides become part of it."""
    from rl_launcher.cluster_jobs import cluster_job, render_kubernetes

    resolved = load(recipe, overrides)
    found = find_recipe(recipe)
    name = None if recipe_path else _shipped_name(found)

    def rendered() -> str:
        file = name or recipe_path or found.name
        job = cluster_job(resolved.value, file, overrides or (), shipped=name is not None)
        options = KubernetesOptions(**_with_ports(flags))
        if job.memory_bytes is None and None in (options.memory, options.shm):
            warn(
                f"policy.model_name={resolved.value.policy.model_name} cannot be read from here, so the memory that a "
                f"node needs is not known, and the job asks for a default: give --memory and --shm"
            )
        return render_kubernetes(job, options)

    write(or_refuse(rendered), out)


slurm = with_flags(_slurm, {"": SlurmOptions, PORT: RayPorts}, leave_out=(PORTS, "shared_dir"))
kubernetes = with_flags(_kubernetes, {"": KubernetesOptions, PORT: RayPorts}, leave_out=(PORTS,))


def _shipped_name(file: Path) -> str | None:
    """Return the name of a shipped recipe, which is valid on every machine, unlike its path; None for other files."""
    return next((name for name, path in shipped_recipes().items() if path.resolve() == file.resolve()), None)


def _with_ports(flags: Flags) -> dict[str, Any]:
    """Return the flags with those of the ports gathered into `RayPorts`."""
    ports = {name.removeprefix(PORT): value for name, value in flags.items() if name.startswith(PORT)}
    others = {name: value for name, value in flags.items() if not name.startswith(PORT)}
    return {**others, PORTS: RayPorts(**ports)}
