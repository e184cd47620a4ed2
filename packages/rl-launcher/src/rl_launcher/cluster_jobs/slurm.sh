#!/bin/bash
@@DIRECTIVES@@

# Written by `rl-launcher render slurm`. Submit it with: sbatch @@FILE@@
# Save and end early with: scancel --batch --signal=TERM JOBID   (plain scancel also ends Ray, before the run has saved)
set -uo pipefail

# ---- What this job runs. Everything below these lines is the same for every recipe.
@@VALUES@@
# ---- End of the values.

say() { printf 'rl-launcher: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# ---- On each node, within a step.

enter_node() {
  [[ -z $SETUP ]] || eval "$SETUP" || die "setup failed on $(hostname): $SETUP"
  cd -- "$SHARED_DIR" || die "$(hostname) has no $SHARED_DIR; --shared-dir names a folder that every node mounts there"
  for mark in "${MARKS[@]}"; do
    [[ -r $mark ]] || die "$(hostname) does not see $mark, which the first node wrote: that folder is not shared"
  done
  ulimit -Sn "$(ulimit -Hn)" # each Ray actor holds many sockets
  # Ray gives a node 30 s to register, which is too short when Python is imported from a busy file system.
  export RAY_raylet_start_wait_time_s="${RAY_raylet_start_wait_time_s:-$JOIN_TIMEOUT_S}"
}

ray_node() {
  trap 'code=$?; echo "$(hostname): its Ray ended with exit code $code" >"$STATE/left-$(hostname)"' EXIT # wait_for_nodes looks for it
  enter_node
  local since=$SECONDS
  if [[ $1 == worker ]]; then
    until (exec 3<>"/dev/tcp/$HEAD_IP/$GCS_PORT") 2>/dev/null; do
      ((SECONDS - since < JOIN_TIMEOUT_S)) || die "$(hostname) cannot reach the head at $HEAD_IP:$GCS_PORT"
      sleep 1
    done
    set -- --address "$HEAD_IP:$GCS_PORT"
  else
    set -- --head --node-ip-address "$HEAD_IP" --port "$GCS_PORT" --ray-client-server-port "$CLIENT_PORT" \
      --include-dashboard "$DASHBOARD" --dashboard-host 127.0.0.1 --dashboard-port "$DASHBOARD_PORT"
  fi
  "$PYTHON" -m ray.scripts.scripts start --block --disable-usage-stats "$@" \
    --num-cpus "${SLURM_CPUS_ON_NODE:?}" --num-gpus "$GPUS_PER_NODE" \
    --node-manager-port "$NODE_MANAGER_PORT" --object-manager-port "$OBJECT_MANAGER_PORT" \
    --min-worker-port "$MIN_WORKER_PORT" --max-worker-port "$MAX_WORKER_PORT"
}

# A signal interrupts `wait`; called again, it returns how the process ended.
await() {
  local code
  while NEWS=; wait "$1"; code=$?; [[ -n $NEWS ]]; do :; done
  return "$code"
}

drive() {
  enter_node
  export RAY_ADDRESS="$HEAD_IP:$GCS_PORT"
  local child=
  start() {
    trap '' USR1 # inherited: a signal to a step may reach all its processes, and USR1 ends those without a handler
    "$PYTHON" -m "$@" &
    child=$!
    trap 'NEWS=yes; kill -TERM "$child" 2>/dev/null' USR1 TERM
    await "$child"
  }
  start rl_launcher.cluster_jobs.wait_for_nodes --address "$RAY_ADDRESS" --num-nodes "$NUM_NODES" \
    --gpus-per-node "$GPUS_PER_NODE" --timeout-s "$JOIN_TIMEOUT_S" --left-in "$STATE" || exit $?
  if [[ -e $RUN_RECIPE ]]; then
    say "$RUN_DIR exists already and is resumed"
    start rl_launcher resume "$RUN_DIR"
  else
    start rl_launcher run "${ARGUMENTS[@]}"
  fi
  exit $?
}

# ---- In the batch script, on the first node.

SRUN=(srun --overlap --cpu-bind=none "${CONTAINER[@]}")

stop_ray() {
  # Not `ray stop`: it ends every Ray of this user on a node, and another job may have one there.
  [[ ${#NODE_STEPS[@]} -eq 0 ]] || kill -TERM "${NODE_STEPS[@]}" 2>/dev/null
  wait
  rm -rf -- "${MARKS[@]}" "$STATE"
}

NEWS= TOLD= DRIVER= NODE_STEPS=() MARKS=()
hear() {
  NEWS=yes TOLD=$1
  say "received $1: the run saves and ends after its step"
  # srun turns SIGTERM into SIGKILL, but passes SIGUSR1 on unchanged.
  [[ -z $DRIVER ]] || kill -USR1 "$DRIVER" 2>/dev/null
}
trap 'hear USR1' USR1
trap 'hear TERM' TERM

for name in "${REQUIRED_ENV[@]}"; do
  [[ -n ${!name:-} ]] || die "$name is not set; export it before sbatch, or leave --env $name out"
done
cd -- "$SHARED_DIR" || die "there is no $SHARED_DIR here"
mapfile -t NODES < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?this is a batch script: submit it with sbatch}")
((${#NODES[@]} == NUM_NODES)) || die "the recipe needs $NUM_NODES nodes, and the job has ${#NODES[@]}: ${NODES[*]}"
HEAD=${NODES[0]} LAST=${NODES[-1]}

# The token that admits processes to this Ray cluster. Only this user can read it, and it is removed with the job.
STATE=$SHARED_DIR/.rl-launcher-slurm-$SLURM_JOB_ID
RUN_MARK=$(dirname -- "$RUN_DIR")/.rl-launcher-slurm-$SLURM_JOB_ID.mark
(umask 077 && mkdir -p -- "$STATE" && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$STATE/token") ||
  die "cannot write $STATE"
mkdir -p -- "$(dirname -- "$RUN_DIR")" && : >"$RUN_MARK" || die "cannot write beside run_dir=$RUN_DIR"
MARKS=("$STATE/token" "$RUN_MARK")
trap stop_ray EXIT
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$STATE/token"

# The address by which another node reaches the head: on the head itself, its name may mean loopback.
HEAD_IP=$("${SRUN[@]}" --nodes=1 --ntasks=1 --nodelist="$LAST" getent ahostsv4 "$HEAD" | awk 'NR == 1 { print $1 }')
[[ -n $HEAD_IP ]] || die "$LAST does not know an IPv4 address of $HEAD"

STEP="$(declare -p SHARED_DIR RUN_DIR RUN_RECIPE ARGUMENTS NUM_NODES GPUS_PER_NODE SETUP PYTHON JOIN_TIMEOUT_S MARKS \
  STATE GCS_PORT CLIENT_PORT NODE_MANAGER_PORT OBJECT_MANAGER_PORT MIN_WORKER_PORT MAX_WORKER_PORT DASHBOARD DASHBOARD_PORT HEAD_IP)
$(declare -f say die enter_node ray_node await drive)"

say "job $SLURM_JOB_ID: head $HEAD ($HEAD_IP), ${#NODES[@]} nodes with $GPUS_PER_NODE GPUs each"
"${SRUN[@]}" --nodes=1 --ntasks=1 --nodelist="$HEAD" bash -c "$STEP"$'\nray_node head' &
NODE_STEPS=($!)
if ((NUM_NODES > 1)); then
  WORKERS=$(IFS=,; printf '%s' "${NODES[*]:1}")
  "${SRUN[@]}" --nodes=$((NUM_NODES - 1)) --ntasks=$((NUM_NODES - 1)) --ntasks-per-node=1 --nodelist="$WORKERS" \
    bash -c "$STEP"$'\nray_node worker' &
  NODE_STEPS+=($!)
fi

[[ -z $TOLD ]] || exit 130
"${SRUN[@]}" --nodes=1 --ntasks=1 --nodelist="$HEAD" bash -c "$STEP"$'\ndrive' &
DRIVER=$!
await "$DRIVER"
CODE=$?
say "the run ended with exit code $CODE"

# Only a run that reached the time limit is requeued; one that failed or was stopped waits for a person.
if [[ $TOLD == USR1 && $CODE -eq 130 && $REQUEUE == yes ]]; then
  if ((${SLURM_RESTART_COUNT:-0} < MAX_REQUEUES)); then
    trap - EXIT
    stop_ray
    scontrol requeue "$SLURM_JOB_ID" || say "could not be requeued; submit this script again to resume"
  else
    say "was requeued $MAX_REQUEUES times already; submit this script again to resume"
  fi
fi
exit "$CODE"
