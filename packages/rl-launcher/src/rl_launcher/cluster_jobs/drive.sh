#!/bin/bash
# On the head of the Ray cluster: wait for all nodes, then run the recipe, or resume what an earlier pod started.
set -uo pipefail
@@VALUES@@
cd -- "$SHARED_DIR" || exit 2
ulimit -Sn "$(ulimit -Hn)" # each Ray actor holds many sockets
"$PYTHON" -m rl_launcher.cluster_jobs.wait_for_nodes --address auto --num-nodes "$NUM_NODES" \
  --gpus-per-node "$GPUS_PER_NODE" --timeout-s "$JOIN_TIMEOUT_S" || exit $?
# exec, so that the SIGTERM of `ray job stop` reaches the run itself, and only once.
if [[ -e $RUN_RECIPE ]]; then
  exec "$PYTHON" -m rl_launcher resume "$RUN_DIR"
fi
exec "$PYTHON" -m rl_launcher run "${ARGUMENTS[@]}"
