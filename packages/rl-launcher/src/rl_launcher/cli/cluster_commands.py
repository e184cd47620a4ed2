"""`doctor` and `render`: whether this machine is fit, and the job that runs a recipe on others."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rl_launcher.bundled_recipes import find_recipe, shipped_recipes
from rl_launcher.cli.arguments import Flags, Json, Overrides, RecipeFile, load, with_flags
from rl_launcher.cli.console import or_refuse, show, warn
from rl_launcher.cluster_jobs import KubernetesOptions, RayPorts, SlurmOptions

__all__ = ["doctor", "kubernetes", "slurm"]

PORTS, PORT = "ports", "port_"
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write here in the place of stdout.", show_default=False)
]


def doctor(*, json: Json = False) -> None:
    """Say what is installed and works here, which versions fit together, and what is missing for which feature."""
    from rl_launcher.checks.doctor import doctor as diagnose

    raise typer.Exit(or_refuse(lambda: diagnose(json=json)))


def _slurm(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    out: Out = None,
    shared_dir: Annotated[
        Path | None,
        typer.Option(help="A folder that every machine mounts; here, if not given.", show_default=False),
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

    _write(or_refuse(rendered), out)


def _kubernetes(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    out: Out = None,
    recipe_path: Annotated[
        str | None,
        typer.Option(
            help="The recipe in the pods; if not given, a shipped one's name, or the file's in the shared folder.",
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
        return render_kubernetes(job, options)

    _write(or_refuse(rendered), out)


slurm = with_flags(_slurm, {"": SlurmOptions, PORT: RayPorts}, leave_out=(PORTS, "shared_dir"))
kubernetes = with_flags(_kubernetes, {"": KubernetesOptions, PORT: RayPorts}, leave_out=(PORTS,))


def _shipped_name(file: Path) -> str | None:
    """The name under which every rl-launcher knows `file`: its folder here is in no other machine's installation."""
    return next((name for name, path in shipped_recipes().items() if path.resolve() == file.resolve()), None)


def _with_ports(flags: Flags) -> dict[str, Any]:
    """The flags of the ports as the section that they are."""
    ports = {name.removeprefix(PORT): value for name, value in flags.items() if name.startswith(PORT)}
    others = {name: value for name, value in flags.items() if not name.startswith(PORT)}
    return {**others, PORTS: RayPorts(**ports)}


def _write(text: str, out: Path | None) -> None:
    if out is None:
        show(text, end="")
    else:
        or_refuse(lambda: out.write_text(text, encoding="utf-8"))
        warn(f"written: {out}")
