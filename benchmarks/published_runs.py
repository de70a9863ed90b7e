"""Runs that somebody has published: the model, the GPUs, the parallelism, the seconds of a step, and who says so.

Of Alpa (Zheng et al. 2022, arXiv:2201.12023) the runs with ZeRO-3 of Figure 8 stand here, whose seconds are in the
artifact of the paper. Its other runs use pipelines, or splits that its search found and that are not told. Of
torchtitan all runs in 16 bits are here that use no pipeline, and all of Megatron-LM's Table 1, up to 10^12 parameters
in 64 stages. NVIDIA's pages on NeMo and Megatron-Bridge have runs in float8 alone where there is no pipeline.

Mixtures of experts are Mixtral and Qwen3 of Megatron-Core, with expert parallelism within hosts and over several, and
Qwen3 and DeepSeek-V3 of NeMo Automodel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from published_models import Kernels, Shape

from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.pricing.hardware import Hardware, read_hardware

Again = Literal[
    "nothing", "attention", "layers", "layers but their end", "every second layer", "every second product", "norms",
    "norms and experts",
]  # fmt: skip
PER_HOST = 8
# The bytes that an update moves for each parameter. In one pass Adam reads a parameter, its gradient and two moments in
# float32, writes three of them, and the parameter in 16 bits. torch's AdamW with foreach=True makes eight passes, and
# the clipping of gradients two.
ONE_PASS = 4 * 4 + 3 * 4 + 2
FOREACH = (8 + 12 + 8 + 12 + 8 + 8 + 8 + 16) + (4 + 8)


@dataclass(frozen=True)
class Run:
    """One published run.

    Args:
        rows: samples of each replica in one micro-batch.
        micro_batches: how many of them make a step.
        published_s: measured seconds of a step.
        source: where that stands.
        again: what is computed a second time in the backward.
        kernels: how attention and what stands beside it is computed.
        sharded: what is stored split over all replicas too: parameters as FSDP does, or the optimizer's states alone.
        split_sequence: whether what tensor parallelism leaves whole is split over the sequence.
        hardware: the name of a board, as `board` knows it.
        copies: whether torch copies what it moves: FSDP2 parameters out of one buffer and gradients into one, DTensor
            parts of a sequence beside each other.
        exact_sums: whether gradients are reduced in float32.
        updated_bytes: what the optimizer moves for each parameter of a GPU.
        stages: groups of GPUs of a pipeline; ``mesh`` is that of one.
        chunks: of layers that each of these has in turn, in 1F1B that is interleaved.
        counts_vocabulary: whether its two ends count as a layer each where layers are dealt out to stages.
        dispatch: how tokens go to their experts.
        neighbours: whether the experts of a token are, from one whose number choices divide.
        exchanges_beside: whether they do beside the computing of another micro-batch.
        why: what a prediction that is far off is due to.
    """

    name: str
    shape: Shape
    mesh: Mesh
    rows: int
    micro_batches: int
    published_s: float
    source: str
    again: Again = "layers"
    kernels: Kernels = "megatron"
    sharded: Literal["", "parameters", "optimizer"] = ""
    split_sequence: bool = False
    hardware: str = "a100"
    copies: bool = False
    exact_sums: bool = False
    updated_bytes: int = ONE_PASS
    stages: int = 1
    chunks: int = 1
    counts_vocabulary: bool = False
    dispatch: Literal["all-to-all", "DeepEP"] = "all-to-all"
    neighbours: bool = False
    exchanges_beside: bool = False
    why: str = ""

    @property
    def over(self) -> tuple[str, ...]:
        """The axes of replicas: experts are split over some of these, which have attention whole."""
        return tuple(name for name in self.mesh.names if name in ("dp", "ep"))

    @property
    def of_experts(self) -> tuple[str, ...]:
        """The axes over which experts are split, those of tensor parallelism among them: no expert is."""
        return tuple(name for name in self.mesh.names if name in ("ep", "tp"))

    @property
    def replicas(self) -> int:
        return self.mesh.extent(self.over)

    @property
    def tp(self) -> int:
        return self.mesh.sizes.get("tp", 1)

    @property
    def layers_of_stage(self) -> float:
        return (self.shape.layers + 2 * self.counts_vocabulary) / (self.stages * self.chunks)

    @property
    def layers_at_the_end(self) -> float:
        """Those of the last group of GPUs, all layers where there are no stages."""
        return self.layers_of_stage * self.chunks - self.counts_vocabulary


def board(name: str) -> Hardware:
    """Return the shipped profile of a GPU, or that of torchtitan's H100s, whose pages say how they differ.

    They have 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W, so that "the actual peak TFLOPs number is between SXM and
    NVL": the speed of products is that of the H100 SXM times 835 / 989, the data sheets' dense TFLOP/s of NVL and SXM.
    """
    if name != "h100 500 W":
        return replace(read_hardware(name), ranks_per_host=PER_HOST)
    full = board("h100")
    slower = tuple((dtype, flops * 835 / 989) for dtype, flops in full.flops)
    return replace(full, flops=slower, memory_bandwidth=full.memory_bandwidth * 2.4 / 3.35)


def _megatron_s(shape: Shape, batch: int, gpus: int, tera: float, times: int = 4) -> float:
    """Return the seconds of a step from the published TFLOP/s, by the formula (3) of Narayanan et al.

    That counts the work of four forwards, the second forward among them; ``times`` is 3 where it isn't counted.
    """
    layers, width, length = shape.layers, shape.width, shape.length
    flops = 24 * times * batch * length * layers * width**2
    flops *= 1 + length / (6 * width) + shape.words / (4 * times * layers * width)
    return flops / (gpus * tera * 1e12)


def _narayanan(
    name: str, layers: int, width: int, heads: int, tp: int, gpus: int, batch: int, tera: float, stages: int = 1
) -> Run:
    """Megatron-LM's Table 1 gives no size of a micro-batch: 4 is assumed, and 1 where there are stages, in 1F1B."""
    shape, replicas, rows = Shape(layers, width, heads, 51200), gpus // tp // stages, 4 if stages == 1 else 1
    mesh = Mesh.of(dp=replicas, tp=tp) if tp > 1 else Mesh.of(dp=replicas)
    published_s = _megatron_s(shape, batch, gpus, tera)
    source = f"Narayanan et al. 2021, arXiv:2104.04473, Table 1: {tera:.0f} TFLOP/s"
    times = batch // replicas // rows
    return Run(f"GPT {name}", shape, mesh, rows, times, published_s, source, stages=stages)


def _megatron_core(name: str, layers: int, width: int, heads: int, tp: int, tera: float, why: str = "") -> Run:
    """Megatron-Core's table of weak scaling on H100s: 48 replicas, 192 samples of 4,096 words.

    It gives no size of a micro-batch, and does not say what is computed again: all 4 samples of a replica at once and
    nothing are assumed, which fits into 80 GB with fused attention. Its FLOPs have no second forward.
    """
    shape = Shape(layers, width, heads, 131072, length=4096)
    mesh = Mesh.of(dp=48, tp=tp) if tp > 1 else Mesh.of(dp=48)
    source = f"Megatron-LM, README, model_table.png (Megatron-Core 0.8): {tera} TFLOP/s"
    return Run(
        f"GPT {name}", shape, mesh, 4, 1, _megatron_s(shape, 192, 48 * tp, tera, times=3), source, "nothing", "flash",
        "optimizer", split_sequence=tp > 1, hardware="h100", exact_sums=True, why=why,
    )  # fmt: skip


def _mpt(name: str, layers: int, width: int, heads: int, gpus: int, rows: int, tokens_s: float, again: Again) -> Run:
    shape = Shape(layers, width, heads, 50368)
    source = f"llm-foundry, scripts/train/benchmarking/README.md, A100 80GB: {tokens_s:,.0f} tokens/s/GPU"
    published_s = rows * shape.length / tokens_s
    return Run(
        f"MPT {name}", shape, Mesh.of(dp=gpus), rows, 1, published_s, source, again, "flash", sharded="parameters"
    )  # fmt: skip


def _alpa(gpus: int, width: int, heads: int, published_s: float) -> Run:
    """8 samples on all GPUs together; XLA joins what stands beside the products into few kernels."""
    shape = Shape(8, width, heads, 25600, length=1024)
    source = f"Alpa, OSDI 22 artifact, results_intra_ablation.tsv, zero_3 on p3.16xlarge: {published_s} s"
    mesh = Mesh.of(dp=gpus)
    return Run("Alpa GPT", shape, mesh, 8 // gpus, 1, published_s, source, sharded="parameters", hardware="v100")


_ALPA_GPT = {
    "760M": (24, 1536, 16),
    "1.3B": (24, 2048, 32),
    "2.6B": (32, 2560, 32),
    "6.7B": (32, 4096, 32),
    "15B": (48, 5120, 40),
}


def _on_p3(system: str, name: str, dp: int, tp: int, stages: int, micro_batches: int, tera: float) -> Run:
    """1,024 samples through stages on p3.16xlarge, as Alpa has found it, or Megatron-LM's best by hand.

    Alpa's runs of other numbers of GPUs have stages of several sizes.
    """
    layers, width, heads = _ALPA_GPT[name]
    shape, gpus = Shape(layers, width, heads, 51200, length=1024), dp * tp * stages
    mesh = Mesh.of(dp=dp, tp=tp) if tp > 1 else Mesh.of(dp=dp)
    source = f"Alpa, OSDI 22 artifact, results_e2e.tsv, {system} on {gpus} V100s: {tera} TFLOP/s"
    published_s, rows = _megatron_s(shape, 1024, gpus, tera), 1024 // micro_batches // dp
    return Run(f"GPT {name}", shape, mesh, rows, micro_batches, published_s, source, hardware="v100", stages=stages)


def _min_gpt(gpus: int, rows: int, tera: float) -> Run:
    """FLOPs with the second forward, as "hardware utilization" says."""
    shape = Shape(96, 12288, 96, 50000)
    published_s = _megatron_s(shape, rows * gpus, gpus, tera)
    source = f"Zhao et al. 2023, arXiv:2304.11277, section 5.4 and Figure 7 (b): {tera:.0f} TFLOP/s"
    return Run(
        "minGPT 175B", shape, Mesh.of(dp=gpus), rows, 1, published_s, source, kernels="plain", sharded="parameters"
    )


LLAMA_2_13B = Shape(40, 5120, 40, 32000, 4096, 40, 13824)
LLAMA_2_70B = Shape(80, 8192, 64, 32000, 4096, 8, 28672)
LLAMA_3_8B = Shape(32, 4096, 32, 128256, 8192, 8, 14336)
LLAMA_3_70B = Shape(80, 8192, 64, 128256, 8192, 8, 28672)
LLAMA_3_405B = Shape(126, 16384, 128, 128256, 8192, 8, 53248)
_TITAN_2024_04 = "docs/performance.md at 1ea476e, A100 80GB"
_TITAN_2024_08 = "docs/performance.md at 3faaa1a and #481, H100 500 W"
_TITAN_2024_12 = "benchmarks/llama3_h100_202412_torchtitan.md, H100 500 W"
_TITAN_2025_06 = "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, H100 500 W"


def _titan(
    name: str, shape: Shape, mesh: Mesh, rows: int, tokens_s: float, page: str, again: Again, kernels: Kernels
) -> Run:
    """FSDP2, which gathers in bfloat16 and reduces in float32, and with it tensor and sequence parallelism.

    Checkpointing of layers ends before the last product of a layer, of which the backward needs nothing. The kind of
    norm is that of the configuration that stands beside the page.
    """
    tp = mesh.sizes.get("tp", 1)
    return Run(
        f"{name}, {kernels}", shape, mesh, rows, 1, rows * shape.length / tp / tokens_s,
        f"torchtitan, {page}: {tokens_s:,.0f} tokens/s/GPU", again, kernels, "parameters", split_sequence=tp > 1,
        hardware="a100" if "A100" in page else "h100 500 W", copies=True, exact_sums=True, updated_bytes=FOREACH,
    )  # fmt: skip


def _mixture_s(shape: Shape, batch: int, gpus: int, tera: float, *, causal: bool) -> float:
    """Return the seconds of a step from the published TFLOP/s, as num_floating_point_operations of Megatron-LM counts.

    That has the experts that are chosen, without the router, and the scores of all words, up to v0.11; with ``causal``,
    since 8873b55 of March 2025, half of them.
    """
    head = shape.of_head
    products = 2 * shape.width * head * (shape.heads + shape.kv_heads)
    products += 3 * shape.width * shape.inner * shape.choices
    scores = 2 * shape.length * head * shape.heads / (2 if causal else 1)
    flops = 6 * batch * shape.length * (shape.layers * (products + scores) + shape.width * shape.words)
    return flops / (gpus * tera * 1e12)


MIXTRAL_8X7B = Shape(32, 4096, 32, 32000, 4096, 8, 14336, 8, 2)
MIXTRAL_8X22B = Shape(56, 6144, 48, 32000, 4096, 8, 16384, 8, 2)
QWEN3_30B = Shape(48, 2048, 32, 151936, 4096, 4, 768, 128, 8, 128)
QWEN3_235B = Shape(94, 4096, 64, 151936, 4096, 4, 1536, 128, 8, 128)
DEEPSEEK_V3 = Shape(61, 7168, 128, 129280, 4096, 128, 2048, 256, 8, 128, (1536, 512, 64), 2048)


def _mixture(
    name: str, shape: Shape, mesh: Mesh, rows: int, micro_batches: int, stages: int, chunks: int, published_s: float,
    source: str, again: Again, why: str = "",
) -> Run:  # fmt: skip
    """Megatron-Core on H100s, in interleaved 1F1B where there are stages, with its distributed optimizer.

    Gradients are summed in float32. Experts are whole, over the GPUs of tensor parallelism too ("parallel folding").
    Every expert gets as many tokens as the others. Nothing that tensor parallelism sends is hidden, though
    `--tp-comm-overlap` was given for some, and nobody waits for the host, which starts kernels and counts tokens.
    """
    return Run(
        name, shape, mesh, rows, micro_batches, published_s, source, again, "compiled", "optimizer",
        split_sequence="tp" in mesh.sizes, hardware="h100", exact_sums=True, stages=stages, chunks=chunks, why=why,
    )  # fmt: skip


def _mixtral_8x7b() -> Run:
    """The mapping is the page's for v0.8, which reached 438 TFLOP/s, and the speed that of v0.9.

    Its arguments compute nothing again. `training.py` of that version counts all scores.
    """
    source = "Megatron-LM, megatron/core/transformer/moe/README.md at 022bcb5, 64 H100s: 468 TFLOP/s"
    published_s = _mixture_s(MIXTRAL_8X7B, 256, 64, 468, causal=False)
    return _mixture("Mixtral 8x7B", MIXTRAL_8X7B, Mesh.of(dp=2, ep=8), 1, 16, 4, 8, published_s, source, "nothing")


def _mixtral_8x22b(tera: float, routing: str) -> Run:
    """The mapping is that of runtime_configs/benchmarking/runtime.conf beside the script, which computes nothing again.

    No row is dropped: routers are made to balance, or trained ones are what they are.
    """
    source = f"Megatron-MoE-ModelZoo, run_mixtral_8x22B.sh at b09773a, 128 H100s, {routing}: {tera:.0f} TFLOP/s"
    published_s = _mixture_s(MIXTRAL_8X22B, 256, 128, tera, causal=True)
    mesh = Mesh.of(dp=2, ep=4, tp=2)
    return _mixture("Mixtral 8x22B", MIXTRAL_8X22B, mesh, 1, 32, 8, 7, published_s, source, "nothing")


def _qwen3_235b(
    mesh: Mesh, stages: int, chunks: int, published_s: float, what: str, again: Again = "norms", why: str = "",
    **others: Any,
) -> Run:  # fmt: skip
    """Qwen3 235B on 256 H100s, balanced by force, with DeepEP unless ``what`` says otherwise.

    2,048 samples of 4,096 words are a step unless it says so. Activations of experts, a hundredth of a step, aren't
    computed again here. The arguments are those of `run_235b.sh` at 31c5686, written as the page's figures were, and
    with FSDP its mapping: the page has tensor parallelism beside FSDP, whose four times of gathering and reducing would
    take 20 s alone.
    """
    source = f"Megatron-MoE-ModelZoo, best_practice/qwen3 at e865051, 256 H100s, {what}: {published_s:.1f} s"
    times = 2048 // (256 // stages // mesh.sizes.get("tp", 1))
    run = _mixture("Qwen3 235B", QWEN3_235B, mesh, 1, times, stages, chunks, published_s, source, again, why)
    return replace(run, **{"counts_vocabulary": stages > 1, "dispatch": "DeepEP", **others})


def _qwen3_235b_16k() -> Run:
    """256 samples of 16,384 words, of which norms and experts are computed again, as the command says."""
    shape = replace(QWEN3_235B, length=16384)
    published_s, what = _mixture_s(shape, 256, 256, 295, causal=True), "experts within hosts, 16,384 words, 295 TFLOP/s"
    return _qwen3_235b(
        Mesh.of(dp=4, ep=2, tp=4), 8, 4, published_s, what, "norms and experts", shape=shape, micro_batches=32
    )


def _qwen3_30b() -> Run:
    """FSDP2 of 8 GPUs gathers parameters once a step, and reduces gradients once, as sharded states do here.

    Its loss stays in bfloat16, and positions are turned by several kernels. Its gate gives each token eight experts in
    a row (`FakeBalancedGate`), which one GPU has.
    """
    source = "NeMo Automodel, docs/performance-summary.md at 8d9bfb9, Qwen3 MoE 30B, 8 H100s: 21.773 s"
    run = _mixture("Qwen3 30B", QWEN3_30B, Mesh.of(ep=8), 4, 16, 1, 1, 21.773, source, "layers")
    return replace(run, dispatch="DeepEP", neighbours=True, updated_bytes=FOREACH)


def _deepseek_v3() -> Run:
    """Layers alike, of which three have a dense MLP with as many products, and as many layers in each of 32 stages.

    Otherwise as `_qwen3_30b`: FSDP gathers and reduces once a step, and eight experts in a row are on one host.
    """
    source = "NeMo Automodel, docs/performance-summary.md at 01926a5, DeepSeek V3 671B, 256 H100s: 8.18 s"
    run = _mixture("DeepSeek-V3", DEEPSEEK_V3, Mesh.of(ep=64), 1, 8, 4, 8, 8.18, source, "layers")
    return replace(run, dispatch="DeepEP", neighbours=True, updated_bytes=FOREACH)


_KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198, Table 5"
_SMALL = (
    "probably its products, the smallest of these runs on H100s and priced at the 794 TFLOP/s of large ones (cuBLAS "
    "reaches 515 of 2048 x 2048 x 2048 and 722 of 2048 x 8192 x 8192, github.com/triton-lang/triton issue 2339), and "
    "a loss over 131,072 words, for which Megatron-LM goes through memory more often than torch's operators"
)
_HOST = (
    "probably waiting for the host, which starts many small kernels for a layer and counts its tokens: with CUDA "
    "graphs of routers the same plan takes 15.2 s (run_h100_235b.sh); besides, kernels that send hold 24 of 132 SMs "
    "(sbatch_benchmarking.sh), where a tenth is counted here"
)
_MANY_PARTS = (
    "probably waiting for the host, which starts many small kernels for each of 96 parts of one layer and counts its "
    "tokens: with 12 layers on each GPU and slower links between experts the page has 19.7 s"
)
_SMALL_PARTS = (
    "probably waiting for the host, which starts many small kernels for a layer and counts its tokens, where a GPU has "
    "1,024 of them and computes a forward of 1.1 ms; with 4,096 of them, in samples of 16,384, the prediction is near"
)
_GPT_22B = Shape(48, 6144, 64, 51200)
_WHOLE, _HALF, _PRODUCTS = "layers but their end", "every second layer", "every second product"
RUNS = (
    _narayanan("1.7B", 24, 2304, 24, 1, 32, 512, 137),
    _narayanan("3.6B", 30, 3072, 32, 2, 64, 512, 138),
    _narayanan("7.5B", 36, 4096, 32, 4, 128, 512, 142),
    _narayanan("18.4B", 40, 6144, 48, 8, 256, 1024, 135),
    _narayanan("39.1B", 48, 8192, 64, 8, 512, 1536, 138, stages=2),
    _narayanan("76.1B", 60, 10240, 80, 8, 1024, 1792, 140, stages=4),
    _narayanan("145.6B", 80, 12288, 96, 8, 1536, 2304, 148, stages=8),
    _narayanan("310.1B", 96, 16384, 128, 8, 1920, 2160, 155, stages=16),
    _narayanan("529.6B", 105, 20480, 128, 8, 2520, 2520, 163, stages=35),
    _narayanan("1008.0B", 128, 25600, 160, 8, 3072, 3072, 163, stages=64),
    Run("GPT 22B", _GPT_22B, Mesh.of(tp=8), 4, 1, 1.42, f"{_KORTHIKANTI}, full recompute"),
    Run(
        "GPT 22B", _GPT_22B, Mesh.of(tp=8), 4, 1, 1.10, f"{_KORTHIKANTI}, present work", "attention",
        split_sequence=True,
    ),
    _megatron_core("1.7B", 24, 2048, 16, 1, 408.8, _SMALL),
    _megatron_core("7.1B", 30, 4096, 32, 2, 465.9),
    _megatron_core("16B", 32, 6144, 48, 4, 489.1),
    _megatron_core("32B", 48, 7168, 56, 8, 459.6),
    _min_gpt(256, 1, 173),
    _min_gpt(256, 2, 186),
    _alpa(2, 3072, 24, 0.6354),
    _alpa(4, 4096, 32, 0.4974),
    _alpa(8, 5760, 40, 0.5219),
    _on_p3("Alpa", "760M", 1, 1, 2, 128, 57.92),
    _on_p3("Alpa", "1.3B", 2, 1, 2, 128, 58.21),
    _on_p3("Alpa", "6.7B", 2, 4, 2, 64, 60.0),
    _on_p3("Alpa", "15B", 2, 4, 4, 128, 59.9),
    _on_p3("Megatron-LM", "1.3B", 2, 1, 2, 128, 55.89),
    _on_p3("Megatron-LM", "2.6B", 1, 1, 8, 128, 50.44),
    _on_p3("Megatron-LM", "6.7B", 1, 2, 8, 256, 56.59),
    _on_p3("Megatron-LM", "15B", 1, 4, 8, 256, 58.24),
    _mpt("1B", 24, 2048, 16, 8, 14, 20513, "nothing"),
    _mpt("7B", 32, 4096, 32, 8, 6, 4641, "nothing"),
    _mpt("13B", 40, 5120, 40, 8, 2, 2262, "nothing"),
    _mpt("30B", 48, 7168, 56, 8, 3, 916, "layers"),
    _mpt("70B", 80, 8192, 64, 64, 8, 410, "layers"),
    _titan("Llama-2 13B", LLAMA_2_13B, Mesh.of(dp=64), 2, 2162, _TITAN_2024_04, "nothing", "fused norms"),
    _titan("Llama-2 13B", LLAMA_2_13B, Mesh.of(dp=64), 2, 1914, _TITAN_2024_04, _HALF, "fused norms"),
    _titan("Llama-2 13B", LLAMA_2_13B, Mesh.of(dp=64), 2, 1904, _TITAN_2024_04, _PRODUCTS, "fused norms"),
    _titan("Llama-2 70B", LLAMA_2_70B, Mesh.of(dp=64), 1, 355, _TITAN_2024_04, _PRODUCTS, "eager"),
    _titan("Llama-2 70B", LLAMA_2_70B, Mesh.of(dp=64), 2, 353, _TITAN_2024_04, _WHOLE, "eager"),
    _titan("Llama-3 8B", LLAMA_3_8B, Mesh.of(dp=64), 1, 2904, _TITAN_2024_04, _HALF, "fused norms"),
    _titan("Llama-3 8B", LLAMA_3_8B, Mesh.of(dp=64), 1, 2973, _TITAN_2024_04, _PRODUCTS, "fused norms"),
    _titan("Llama-3 70B", LLAMA_3_70B, Mesh.of(dp=64), 1, 331, _TITAN_2024_04, _WHOLE, "eager"),
    _titan("Llama-3 405B", LLAMA_3_405B, Mesh.of(dp=16, tp=8), 2, 109, _TITAN_2024_08, _WHOLE, "eager"),
    _titan("Llama-3 8B", LLAMA_3_8B, Mesh.of(dp=8), 2, 5762, _TITAN_2024_12, _PRODUCTS, "eager"),
    _titan("Llama-3 8B", LLAMA_3_8B, Mesh.of(dp=8), 2, 6667, _TITAN_2024_12, _PRODUCTS, "compiled"),
    _titan("Llama-3 8B", LLAMA_3_8B, Mesh.of(dp=128), 2, 5605, _TITAN_2024_12, _PRODUCTS, "eager"),
    _titan("Llama-3 8B", LLAMA_3_8B, Mesh.of(dp=128), 2, 6514, _TITAN_2024_12, _PRODUCTS, "compiled"),
    _titan("Llama-3 8B", LLAMA_3_8B, Mesh.of(dp=8, tp=8), 12, 4378, _TITAN_2025_06, _PRODUCTS, "compiled"),
    _titan("Llama-3 70B", LLAMA_3_70B, Mesh.of(dp=32, tp=8), 16, 597.3, _TITAN_2025_06, _WHOLE, "compiled"),
    _mixtral_8x7b(),
    _mixtral_8x22b(465, "balanced by force"),
    _mixtral_8x22b(445, "dropless"),
    _qwen3_235b(Mesh.of(ep=16, tp=2), 8, 4, 19.7, "experts over 4 hosts"),
    _qwen3_235b(
        Mesh.of(ep=16, tp=2), 8, 4, 17.6, "experts over 4 hosts, tokens sent beside computing", exchanges_beside=True,
        why=_HOST,
    ),
    _qwen3_235b(
        Mesh.of(ep=16, tp=2), 8, 4, _mixture_s(QWEN3_235B, 2048, 256, 320, causal=True),
        "experts over 4 hosts, beside computing, CUDA graphs of routers, 320 TFLOP/s", exchanges_beside=True,
    ),
    _qwen3_235b(
        Mesh.of(ep=4, tp=2), 32, 3, 24.2, "32 stages, all-to-all within hosts", dispatch="all-to-all", why=_MANY_PARTS
    ),
    _qwen3_235b(Mesh.of(dp=4, ep=2, tp=4), 8, 4, 29.0, "experts within hosts", "nothing", _SMALL_PARTS),
    _qwen3_235b(
        Mesh.of(dp=32, ep=8), 1, 1, 17.6, "experts within hosts, FSDP", "layers", rows=4, micro_batches=2,
        sharded="parameters",
    ),
    _qwen3_235b_16k(),
    _qwen3_30b(),
    _deepseek_v3(),
)  # fmt: skip
