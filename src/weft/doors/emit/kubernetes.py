"""Kubernetes: indexed Jobs that train the plan with weft's own runtime, one pod per node.

No operator is needed: a headless Service names the pods, and a pod's index is its node's number. Nodes of
several kinds become several Jobs. The pods need an image with weft and torch, and a common volume.
"""

from __future__ import annotations

from textwrap import indent

from weft.doors.emit.base import Decided, Emitted, Loss, header
from weft.doors.emit.own_run import PORT, Nodes, files, losses_of, nodes_of, run_name, worker
from weft.planning.elastic import node_limits
from weft.planning.planned_job import PlannedJob

NAME = "k8s"
# The limit of a ConfigMap.
_MOST_BYTES = 2**20
_VOLUME = "weft-runs"


def emit(planned: PlannedJob) -> Emitted:
    """Return the manifests in one file."""
    decided = Decided(planned)
    nodes, losses = nodes_of(decided), losses_of(decided, "a nodeSelector in each Job")
    size = sum(len(text.encode()) for text in files(decided).values())
    if size > _MOST_BYTES:
        what = f"a plan of {size} bytes in a ConfigMap, which holds {_MOST_BYTES}"
        losses.append(Loss(what, f"put run.toml and plan.json into the volume {_VOLUME}"))
    file = f"{NAME}.yaml"
    launch = f"kubectl apply -f {file}"
    jobs = [_job(decided, number, nodes) for number in range(len(nodes))]
    text = header(decided, launch, losses) + "---\n".join([_plan(decided), _service(decided), *jobs])
    return Emitted(file=file, text=text, launch=launch, losses=tuple(losses))


def _plan(decided: Decided) -> str:
    data = "".join(f"  {name}: |\n{indent(text, '    ')}" for name, text in files(decided).items())
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {run_name(decided)}\ndata:\n{data}"


def _service(decided: Decided) -> str:
    name = run_name(decided)
    return (
        f"apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\nspec:\n  clusterIP: None\n"
        # Pods find each other before they are ready.
        f"  publishNotReadyAddresses: true\n  selector:\n    app: {name}\n"
    )


def _job(decided: Decided, number: int, nodes: list[Nodes]) -> str:
    name, one = run_name(decided), nodes[number]
    job = name if number == 0 else f"{name}-{number}"
    return f"""\
apiVersion: batch/v1
kind: Job
metadata:
  name: {job}
spec:
  completionMode: Indexed
  completions: {one.count}
  parallelism: {one.count}
  backoffLimit: {_replaced_pods(decided, one)}
  template:
    metadata:
      labels:
        app: {name}
    spec:
      subdomain: {name}
      restartPolicy: Never
      containers:
        - name: worker
          # Yours, with weft and torch; Kubernetes refuses an empty one.
          image: ""
          command: ["bash", "-c"]
          args:
            - |
{indent(_script(decided, number, nodes), " " * 14)}\
          ports:
            - containerPort: {PORT}
          resources:
            limits:
              {_limit(one)}
          volumeMounts:
            - {{name: plan, mountPath: /plan}}
            - {{name: runs, mountPath: /runs}}
            - {{name: shared-memory, mountPath: /dev/shm}}
      volumes:
        - {{name: plan, configMap: {{name: {name}}}}}
        # A claim with access mode ReadWriteMany.
        - {{name: runs, persistentVolumeClaim: {{claimName: {_VOLUME}}}}}
        - {{name: shared-memory, emptyDir: {{medium: Memory}}}}
"""


def _replaced_pods(decided: Decided, nodes: Nodes) -> int:
    """Return how many pods may fail before the Job does; those of an elastic run are replaced."""
    elastic = node_limits(decided.job).elastic
    return decided.job.run.run.max_restarts * nodes.count if elastic else 0


def _limit(nodes: Nodes) -> str:
    return f"{'cpu' if nodes.device.synchronous else 'nvidia.com/gpu'}: {nodes.devices}"


def _script(decided: Decided, number: int, nodes: list[Nodes]) -> str:
    name, one = run_name(decided), nodes[number]
    folder = f"/runs/{name}"
    count = sum(other.count for other in nodes)
    prepare = (
        f'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then\n  mkdir -p {folder}\n'
        # `cp -n` fails where it skips a file with some versions of coreutils.
        f"  [ -e {folder}/plan.json ] || cp /plan/* {folder}/\n"
        # A pod that takes another one's place finds the run in training.
        f"  {f'[ -e {folder}/at-hand ] || ' if node_limits(decided.job).elastic else ''}"
        f"weft train {folder} --prepare-only\nfi\n"
    )
    rank = f"$((JOB_COMPLETION_INDEX + {one.first}))" if one.first else '"$JOB_COMPLETION_INDEX"'
    command = worker(decided.job, count, one.devices, rank, f"{name}-0.{name}", folder)
    return f"set -euo pipefail\n{prepare if number == 0 else ''}{command}\n"
