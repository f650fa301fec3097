"""Calculon's prediction of a row, where that program is installed: a baseline (Isaev et al., SC 2023).

It is github.com/calculon-ai/calculon; the package of that name on PyPI is another program. Its inputs are written here:
model and layout are the row's, rates and links the cluster's, and the fractions of them that are reached those of its
own examples (``systems/a100_80g.json``, ``systems/h100_80g_nvl8.json``).
"""

import importlib
import logging
from typing import Any

from pipeloom.accuracy.rows import Row
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run

_PRODUCTS = [[128, 0.95], [16, 0.9], [1, 0.6], [0, 0.1]]
_ELEMENTS = [[16, 0.95], [1, 0.5], [0, 0.1]]
_MEMORY = [[100, 0.9], [10, 0.75], [1, 0.6], [0, 0.3]]
"""Points (size, fraction that is reached), sizes falling: GFLOP, GFLOP, MB."""
_VECTOR_SHARE = 0.25
"""Rate of element-wise operations / that of products: 78 of 312 TFLOP/s in its file of an A100."""
_ENOUGH_GIB = 1e6
"""Memory without a limit: a row that ran is predicted even if Calculon finds that it does not fit."""
_RECOMPUTES = {"none": "none", "selective": "attn_only", "full": "full"}


def installed() -> Any | None:
    """Calculon's module; ``None`` if it is not installed."""
    try:
        module = importlib.import_module("calculon.llm")
        importlib.import_module("calculon.system")
    except ImportError:
        return None
    return module if hasattr(module, "Llm") else None


def step_s(module: Any, row: Row, cluster: Cluster, software: Software) -> float | None:
    """Calculon's seconds of a row's step; ``None`` if it refuses the layout.

    Args:
        module: of ``installed``.
        row: the row.
        cluster: its machine.
        software: its program, whose overlap of the data-parallel collectives counts.
    """
    system = importlib.import_module("calculon.system").System(system_of(cluster))
    llm = module.Llm
    try:
        model = llm(llm.Application(application_of(row.run)), logging.getLogger(__name__))
        model.compile(system, llm.Execution.from_json(execution_of(row.run, cluster, software)))
        model.run(system)
        return float(model.get_total_time())
    except (AssertionError, ZeroDivisionError, llm.Error):  # sizes that it does not divide, such as uneven stages
        return None


def application_of(run: Run) -> dict[str, int]:
    """The model. Calculon has two matrices in an MLP: a third one, of SwiGLU, is a wider inner layer."""
    shape = run.shape
    return {
        "hidden": shape.hidden,
        "feedforward": shape.ffn * (shape.kind.gates + 1) // 2,
        "seq_size": run.seq,
        "attn_heads": shape.heads,
        "attn_size": shape.head_size,
        "num_blocks": shape.layers,
    }


def execution_of(run: Run, cluster: Cluster, software: Software) -> dict[str, Any]:
    """The layout, on network 0 inside a node and 1 between nodes."""
    is_over_nodes = int(run.num_devices > cluster.devices_per_node)
    return {
        "num_procs": run.num_devices,
        "tensor_par": run.tp,
        "pipeline_par": run.pp,
        "data_par": run.dp,
        "tensor_par_net": int(run.tp > cluster.devices_per_node),
        "pipeline_par_net": is_over_nodes,
        "data_par_net": is_over_nodes,
        "batch_size": run.global_batch,
        "microbatch_size": run.micro_batch,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": _RECOMPUTES[run.recompute],
        "pipeline_interleaving": run.loops,
        "optimizer_sharding": run.shard != "none" and run.dp > 1,
        "tensor_par_comm_type": "rs_ag" if run.sequence_parallel and run.tp > 1 else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": run.dp > 1 and (software.overlap > 0 or software.gathers_layers),
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def system_of(cluster: Cluster) -> dict[str, Any]:
    """The machine."""
    device = cluster.device
    peak = device.peak_flops_per_s.get("bf16") or device.peak_flops_per_s["fp16"]
    memory = {"GiB": _ENOUGH_GIB, "GBps": device.memory_bytes_per_s / 1e9, "MB_efficiency": _MEMORY}
    ring = {"p2p": [1.0, None], "reduce_scatter": [1.0, -1], "all_gather": [1.0, -1], "all_reduce": [2.0, -1]}
    inside = {
        "bandwidth": cluster.intra.bytes_per_s / 1e9,
        "efficiency": 0.65,
        "size": cluster.devices_per_node,
        "latency": cluster.intra.latency_s,
        "ops": ring,
        "must_be_filled": False,
        "processor_usage": 0.15,
    }
    between = inside | {
        "bandwidth": cluster.inter.bytes_per_s / cluster.devices_per_node / 1e9,
        "efficiency": 0.9,
        "size": 1 << 20,
        "latency": cluster.inter.latency_s,
        "processor_usage": 0.02,
    }
    return {
        "matrix": {"float16": {"tflops": peak / 1e12, "gflops_efficiency": _PRODUCTS}},
        "vector": {"float16": {"tflops": _VECTOR_SHARE * peak / 1e12, "gflops_efficiency": _ELEMENTS}},
        "mem1": memory,
        "mem2": memory,
        "processing_mode": "no_overlap",
        "networks": [inside, between],
    }
