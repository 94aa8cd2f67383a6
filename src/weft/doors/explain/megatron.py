"""Megatron-LM: the options of a command line, alone or in the script that assembles it.

Scripts keep options in variables and arrays. So the reader looks at all words of the text, and replaces
variables that the text itself sets.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

from weft.describe.model import ModelConfig
from weft.describe.plan import Blocking, Recompute, Sharding
from weft.doors.configuration import Configuration, counts, whole
from weft.doors.keys import MEGATRON_LM
from weft.doors.optimizers import known_or_adamw, other_optimizer
from weft.doors.replicas import groups_of_megatron_lm
from weft.doors.stack_memory import LIKE_MEGATRON, memory_of_fsdp2
from weft.doors.stage_splits import StageSplit

NAME = "Megatron-LM"
_MARKS = (
    MEGATRON_LM.key("tp"),
    MEGATRON_LM.key("pp"),
    "--num-layers-per-virtual-pipeline-stage",
    "--use-distributed-optimizer",
    "--num-attention-heads",
)
_LAYOUT = "--pipeline-model-parallel-layout"
_MOST_LETTERS = 100_000
_STRATEGIES: Mapping[str, Sharding] = {
    "no_shard": "zero-0",
    "optim": "zero-1",
    "optim_grads": "zero-2",
    "optim_grads_params": "zero-3",
}


def recognises(text: str, name: str) -> bool:
    """Return True for text with options that only Megatron-LM has."""
    return any(mark in text.replace("_", "-") for mark in _MARKS)


def read(text: str, name: str) -> Configuration:
    """Return the options, by their names with dashes in front.

    Raises:
        InputError: when a degree or a batch size is no count.
    """
    given = options_of(text)
    values, keys = counts(given, MEGATRON_LM.counts, name)
    if "global_batch" not in values and "micro_batch_size" in values:
        # By default one micro-batch per replica.
        values["micro_batches"] = 1
    loops, loops_key = _loops(given, values)
    group = whole(given.get("--microbatch-group-size-per-virtual-pipeline-stage"))
    pipeline = values.get("pp", 1)
    looped = loops > 1 and pipeline > 1
    devices, sharding = _devices(given), _sharding(given)
    precision = next((name for name in ("bf16", "fp16") if f"--{name}" in given), "fp32")
    said = {
        "loops": loops,
        "schedule": "depth-first" if looped else "1f1b",
        "sharding": sharding,
        "recompute": _recompute(given),
        "blocking": _blocking(given, looped=looped, pipeline=pipeline),
    }
    configuration = Configuration(
        stack=NAME,
        given=given,
        optimizer=known_or_adamw(given.get("--optimizer")),
        keys=keys | {"loops": loops_key, "devices": "--nproc-per-node"},
        devices=devices,
        precision=precision,
        reduce_precision=_reduce_precision(given, precision),
        clips=whole(given.get("--clip-grad", 1)) not in (0, "0.0"),
        launch="captured" if _captures(given) else "eager",
        model=_model(given),
        options={"group_size": group} if looped and isinstance(group, int) and group > 0 else {},
        unpredicted=tuple(_unpredicted(given)),
        incomparable=tuple(_incomparable(given)),
        memory=LIKE_MEGATRON if sharding in ("zero-0", "zero-1") else memory_of_fsdp2(sharding),
        split=_split(given),
    )
    return configuration.saying(said | values | groups_of_megatron_lm(given, values, sharding, devices))


def _reduce_precision(given: Mapping[str, Any], precision: str) -> str | None:
    """Return the precision of reductions: fp32 by default with bf16, and that of weights with fp16."""
    key = {"bf16": "--grad-reduce-in-bf16", "fp16": "--accumulate-allreduce-grads-in-fp32"}.get(precision)
    return precision if key is not None and (key in given) == (precision == "bf16") else None


def _captures(given: Mapping[str, Any]) -> bool:
    """Return True if layers run as captured graphs, in the words of any of Megatron-LM's versions."""
    named = given.get("--cuda-graph-impl")
    return named not in (None, "none") or any(
        key in given for key in ("--enable-cuda-graph", "--external-cuda-graph")
    )


_VALUE = re.compile(r"^--[a-zA-Z]")
_ASSIGNMENT = re.compile(
    r"(?:^|[;&])[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(\$\(\([^()]*\)\)|\"[^\"]*\"|'[^']*'|[^\s()#;&|]+)",
    re.MULTILINE,
)
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?[-=]([^}]*))?\}|([A-Za-z_]\w*))")


def options_of(text: str) -> dict[str, Any]:
    """Return all options of a text, with their first values; True for an option without one.

    Dashes and underlines in names are alike. Later options win, as in Megatron-LM's parser.
    """
    text = _substituted(re.sub(r"\\\r?\n", " ", text))
    found: dict[str, Any] = {}
    for line in text.splitlines():
        words = _words(line)
        for position, word in enumerate(words):
            if not _VALUE.match(word):
                continue
            option, sign, value = word.partition("=")
            following = words[position + 1] if position + 1 < len(words) else ""
            if not sign:
                value = "" if _VALUE.match(following) else following
            found[option.replace("_", "-")] = value or True
    return found


def _words(line: str) -> list[str]:
    """Return the words of a line, also inside quotations and arrays, without its comment."""
    line = re.sub(r"(^|\s)#.*", "", line).replace('"', " ").replace("'", " ")
    words = re.sub(r"\w+=\(", " ", line).split()
    return [word if "(" in word else word.rstrip(")") for word in words if word not in ("(", ")")]


def _substituted(text: str) -> str:
    """Return the text with its own variables replaced, and sums and products computed."""
    known: dict[str, str] = {}

    def value_of(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return known.get(name, match[0] if default is None else default)

    def result_of(match: re.Match[str]) -> str:
        # Names need no sign inside an expression.
        expression = re.sub(r"[A-Za-z_]\w*", lambda name: known.get(name[0], name[0]), match[1])
        return _result(expression) or match[0]

    def put(words: str) -> str:
        return _ARITHMETIC.sub(result_of, _VARIABLE.sub(value_of, words))

    for match in _ASSIGNMENT.finditer(text):
        known[match[1]] = put(match[2].strip("\"'"))
    return put(text)


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _result(expression: str) -> str:
    try:
        return str(_evaluated(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return ""


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 10**12:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right)))
    raise ValueError("neither a number nor a sum or product of some")


def _devices(given: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that torchrun's options start."""
    per_node, nodes = whole(given.get("--nproc-per-node")), whole(given.get("--nnodes", 1))
    return per_node * nodes if isinstance(per_node, int) and isinstance(nodes, int) else None


def _loops(given: Mapping[str, Any], values: Mapping[str, int]) -> tuple[int, str]:
    pipeline = values.get("pp", 1)
    layout = given.get(_LAYOUT)
    if isinstance(layout, str):
        return max(1, len(stages_of(layout)) // pipeline), _LAYOUT
    key = "--num-virtual-stages-per-pipeline-rank"
    if isinstance(chunks := whole(given.get(key)), int):
        return max(1, chunks), key
    key = "--num-layers-per-virtual-pipeline-stage"
    per_stage, layers = whole(given.get(key)), whole(given.get("--num-layers"))
    if isinstance(per_stage, int) and isinstance(layers, int) and per_stage > 0:
        return max(1, layers // (pipeline * per_stage)), key
    return 1, key


def _split(given: Mapping[str, Any]) -> StageSplit:
    """Return the layers of the stages: as listed, or equally many, with options for both ends."""
    layout = given.get(_LAYOUT)
    if isinstance(layout, str):
        return StageSplit(layers=tuple(sum(stage.count(one) for one in "EtL") for stage in stages_of(layout)))
    first, last = (whole(given.get(f"--decoder-{end}-pipeline-num-layers")) for end in ("first", "last"))
    return StageSplit(
        first=first if isinstance(first, int) else None,
        last=last if isinstance(last, int) else None,
        counts_embedding=int("--account-for-embedding-in-pipeline-split" in given),
        counts_head=int("--account-for-loss-in-pipeline-split" in given),
    )


def stages_of(layout: str) -> list[str]:
    """Return the layers of each stage in a --pipeline-model-parallel-layout, such as ``E|(t|)*3,m|m||L``.

    Each letter is a layer: E the embedding, t a block, m one that predicts further tokens, L the head.
    """
    repeated = re.compile(r"(?:\(([^()]*)\)|([A-Za-z]))(?:\*(\d{1,5}))")
    grouped = re.compile(r"\(([^()]*)\)")
    layout = layout.replace(",", "")
    while len(layout) < _MOST_LETTERS and (match := repeated.search(layout) or grouped.search(layout)):
        text, *others = (one for one in match.groups() if one is not None)
        count = min(int(others[0] if others else 1), _MOST_LETTERS // max(1, len(text)))
        layout = layout[: match.start()] + text * count + layout[match.end() :]
    return layout.split("|")


def _sharding(given: Mapping[str, Any]) -> Sharding:
    if "--use-torch-fsdp2" in given:
        return "zero-3"
    if "--use-megatron-fsdp" in given or "--use-custom-fsdp" in given:
        return _STRATEGIES.get(str(given.get("--data-parallel-sharding-strategy", "no_shard")), "zero-0")
    return "zero-1" if "--use-distributed-optimizer" in given else "zero-0"


def _recompute(given: Mapping[str, Any]) -> Recompute:
    granularity = given.get("--recompute-granularity")
    if granularity == "full":
        return "full"
    return "selective" if granularity == "selective" or "--recompute-activations" in given else "none"


def _blocking(given: Mapping[str, Any], *, looped: bool, pipeline: int) -> tuple[Blocking, ...]:
    """Return the waits: messages overlap on looped pipelines only, gathers and reductions by option."""
    found: list[Blocking] = []
    if "--overlap-param-gather" not in given and _sharding(given) == "zero-1":
        found.append("gathers")
    if pipeline > 1 and (not looped or "--no-overlap-p2p-communication" in given):
        found.append("messages")
    if "--overlap-grad-reduce" not in given and _sharding(given) in ("zero-0", "zero-1"):
        found.append("reductions")
    return tuple(found)


# Larger than those of any model; layers are priced one by one.
_LARGEST_SIZE = 10**6
_MOST_LAYERS = 4096


def _model(given: Mapping[str, Any]) -> ModelConfig | None:
    """Return the sizes, where the options have all of them; `--vocab-size` may be left to the tokenizer."""
    names = ("--num-layers", "--hidden-size", "--num-attention-heads", MEGATRON_LM.key("sequence"))
    sizes = [whole(given.get(name)) for name in names]
    if not all(isinstance(size, int) and 0 < size <= _LARGEST_SIZE for size in sizes):
        return None
    layers, hidden, heads, sequence = sizes
    if layers > _MOST_LAYERS:
        return None
    llama = "--swiglu" in given
    inner = whole(given.get("--ffn-hidden-size"))
    groups = whole(given.get("--num-query-groups")) if "--group-query-attention" in given else heads
    vocabulary = whole(given.get("--vocab-size"))
    return ModelConfig(
        name=f"{'llama' if llama else 'gpt'} of {layers} layers",
        family="llama" if llama else "gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=groups if isinstance(groups, int) and groups > 0 else heads,
        feed_forward=inner if isinstance(inner, int) and inner > 0 else 4 * hidden,
        vocabulary=vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else 50_304,
        sequence=sequence,
        tied_embeddings="--untie-embeddings-and-output-weights" not in given,
    )


def _unpredicted(given: Mapping[str, Any]) -> list[str]:
    found = {
        "--grad-reduce-in-bf16": "gradients accumulated in bf16, too: predicted as accumulated in fp32",
        "--fp8-format": "fp8 products: predicted in the precision beside them",
        "--fp8-hybrid": "fp8 products: predicted in the precision beside them",
    }
    lines = [f"{key}: {line}" for key, line in found.items() if key in given]
    if _model(given) is not None and whole(given.get("--vocab-size")) is None:
        lines.append("--vocab-size is not given; predicted with 50304")
    return lines


_EXPERTS = "a mixture of experts, which this reader takes for a dense model"
_ON_HOST = "optimizer states in host memory are not modelled"
_IMAGES = "a model of images beside one of text is not modelled"
_GENERATION = "generation of text, which is no training"
# The beginnings of options that make the job another than the predicted one.
_OTHER_JOBS = {
    "--num-experts": _EXPERTS,
    "--moe-router-topk": _EXPERTS,
    "--cpu-offload-fraction": _ON_HOST,
    "--optimizer-cpu-offload": _ON_HOST,
    "--use-precision-aware-optimizer": "states of fewer bits are not modelled",
    "--multi-latent-attention": "latent attention, which this reader takes for the usual one",
    "--encoder-num-layers": "an encoder beside a decoder is not modelled",
    "--hybrid-": "layers of another kind than attention's are not modelled",
    "--is-hybrid-model": "layers of another kind than attention's are not modelled",
    "--mtp-num-layers": "heads that predict further tokens are not modelled",
    "--vision-model-type": _IMAGES,
    "--language-model-type": _IMAGES,
    "--img-h": _IMAGES,
    "--freeze-": "gradients of a part of the weights are not modelled",
    "--perform-rl-step": "other passes than those of training on text are not modelled",
    "--num-tokens-to-generate": _GENERATION,
    "--max-tokens-to-oom": _GENERATION,
    "--inference-": _GENERATION,
}


def _incomparable(given: Mapping[str, Any]) -> list[str]:
    found = [
        f"{option}: {problem}"
        for begin, problem in _OTHER_JOBS.items()
        for option in given
        if (option.startswith(begin) if begin.endswith("-") else option == begin)
    ]
    return found + other_optimizer("--optimizer", given.get("--optimizer"))
