"""Nodes of Kubernetes: `kubectl get nodes -o json`.

The labels are of NVIDIA's and AMD's device plugins, of Google's and of Karpenter's nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.describe.inventory.device_names import is_slice
from weft.describe.inventory.listed_node import ListedNode
from weft.describe.inventory.tool_record import ToolRecord

_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
_MEMORIES_MIB = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")
_COUNT = "nvidia.com/gpu.count"
_SHARED = "-SHARED"


class _Metadata(ToolRecord):
    name: str
    labels: Mapping[str, str] = {}


class _Spec(ToolRecord):
    unschedulable: bool = False


class _Condition(ToolRecord):
    type: str
    status: str


class _Status(ToolRecord):
    allocatable: Mapping[str, str] = {}
    conditions: tuple[_Condition, ...] = ()


class KubernetesNode(ToolRecord):
    """A node, as far as its devices go."""

    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()

    def listed(self) -> ListedNode:
        labels, allocatable = self.metadata.labels, self.status.allocatable
        product = next((labels[key] for key in _PRODUCTS if key in labels), "").removesuffix(_SHARED)
        count = next((int(allocatable[key]) for key in _RESOURCES if allocatable.get(key, "").isdigit()), 0)
        # A device that pods share counts once for each of them.
        devices = min(count, int(labels[_COUNT])) if labels.get(_COUNT, "").isdigit() else count
        memory = next((labels[key] for key in _MEMORIES_MIB if labels.get(key, "").isdigit()), None)
        return ListedNode(
            name=self.metadata.name,
            device=product,
            devices=devices,
            memory_bytes=None if memory is None else int(memory) * 2**20,
            unusable=self._unusable(product),
        )

    def _unusable(self, product: str) -> str:
        ready = [one.status for one in self.status.conditions if one.type == "Ready"]
        if ready and ready != ["True"]:
            return "not ready"
        if self.spec.unschedulable:
            return "cordoned"
        return "slices of a device" if is_slice(product) else ""


class KubernetesNodes(ToolRecord):
    """The answer of `kubectl get nodes -o json`."""

    items: tuple[KubernetesNode, ...]

    def listed(self) -> Iterator[ListedNode]:
        return (node.listed() for node in self.items)
