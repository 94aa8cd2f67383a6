"""Host time of passes on asynchronous devices: a device waits where its host launches kernels too slowly.

In eager mode, Python, the dispatcher and autograd take several times as long as the launch of a kernel.
The time hardly depends on the width of a layer. So it decides for small layers. A host runs ahead of its
device within a step, also while the device exchanges with other ranks. A pass is late by what is left of the
host's time.

The constants count host launches (`Device.launch_s`, 5 us) for each kernel of `PassWork`. Seven measurements
of forward passes have 3.1, 4.0, 4.0, 5.1, 5.4, 9.1 and 12. Four are weft's own layers, issued by one core,
with one launch added for each kernel (`benchmarks/host_launches.py`). On an A100, NVIDIA timed single samples
of BERT-base in TorchScript (5.4) and of ViT-B in eager mode (12). They are in docs/bert_guide.md and
docs/vit_guide.md of FasterTransformer. The PyTorch team timed 25.5 tokens of Llama-7B per second in eager
mode (9.1; pytorch.org, "Accelerating Generative AI II").
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.describe.plan import Launch

# The geometric mean of the seven.
FORWARD_LAUNCHES = 5.5
# Autograd's backward passes need no Python: 2.4 in the four own measurements, whose forward mean is 4.0.
BACKWARD_LAUNCHES = 3.3
# The call of a collective of tensor ranks: 39 us of the same core for `torch.distributed.all_reduce`.
COLLECTIVE_LAUNCHES = 8.0
# Parts of the host's eager time. Layers compiled one by one had 0.74 to 1.03 in the same benchmark. The
# driver starts each kernel of a captured graph in about a microsecond.
LAUNCH_PARTS: Mapping[Launch, float] = {"eager": 1.0, "compiled": 0.9, "captured": 0.05}
# Half-width of the 90 % interval where hosts decide: six of the seven are within it.
HALF_WIDTH = 0.65


def pace(own_s: float, exchanged_s: float, issue_s: float) -> float:
    """Return the factor by which passes take longer where the device waits for its host; at least 1.

    A micro-batch's passes take `own_s` on the device, `exchanged_s` in exchanges with other ranks, and
    `issue_s` on the host. The host runs ahead within a step. So it is late only by
    what the two others leave of its seconds.
    """
    late_s = issue_s - own_s - exchanged_s
    return 1.0 + late_s / own_s if own_s > 0.0 and late_s > 0.0 else 1.0
