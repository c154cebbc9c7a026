"""Published runs whose layout and throughput are both known: what the step-time model is fitted on, and judged by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..flops.layers import training_flops_per_token
from ..flops.published import narayanan_flops
from ..hardware.load import read_cluster
from ..job import Job, Layout
from ..shapes.load import read_shape
from ..shapes.shape import ModelShape


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        layout: fields of the layout that differ from the defaults; dp_shard and accumulation follow from the rest.
        device_tokens_s: tokens a second of one device, as published or from the published FLOP/s by the source's own form.
        fitted: used for the fit; the others are kept out of it and only judged.
        assumed: what the source does not say and we took.
    """

    name: str
    model: str
    cluster: str
    seq: int
    batch: int
    device_tokens_s: float
    source: str
    fitted: bool
    layout: dict[str, Any] = field(default_factory=dict)
    assumed: str = ""

    def job(self) -> Job:
        """Return the job that was run."""
        cluster = read_cluster(self.cluster)
        given = dict(self.layout)
        parallel = given.get("tp", 1) * given.get("pp", 1) * given.get("cp", 1)
        dp = cluster.devices // parallel
        given.setdefault("dp_shard", dp // given.get("dp_replicate", 1))
        given["accumulation"] = max(1, self.batch // (dp * given.get("micro_batch", 1)))
        return Job(read_shape(self.model), cluster, Layout(**given), self.seq)


def _by_form(flops_s: float, shape: ModelShape, seq: int, recompute: str = "none") -> float:
    """Tokens a second from FLOP/s that Narayanan's form counts."""
    return flops_s / (narayanan_flops(1, shape.layers, shape.hidden, seq, shape.vocab, recompute) / seq)


def _by_layers(flops_s: float, shape: ModelShape, seq: int, attention: str = "causal") -> float:
    """Tokens a second from FLOP/s that count every layer kind."""
    return flops_s / training_flops_per_token(shape, seq, attention=attention, router=False)


_KORTHIKANTI = "arXiv:2205.05198 table 5"
_OLD = {"flash": False, "dropout": True, "param": "fp16", "grad": "fp32", "zero": 0}


def _korthikanti() -> list[Run]:
    rows = (("22b", 8, 4, 4, 1, 1, 1.10, 1.42), ("175b", 64, 64, 1, 8, 3, 13.75, 18.13), ("530b", 280, 280, 1, 35, 3, 37.83, 49.05),
            ("1t", 512, 512, 1, 64, 1, 71.49, 94.42))  # fmt: skip
    made = []
    for size, devices, batch, micro, pp, vp, core, full in rows:
        base = {**_OLD, "tp": 8, "pp": pp, "vp": vp, "micro_batch": micro}
        for policy, seconds in (("core", core), ("full", full)):
            layout = {**base, "recompute": policy, "sequence_parallel": policy == "core"}
            rate = batch * 2048 / seconds / devices
            fitted = (policy == "core" and size != "530b") or (policy == "full" and size in ("175b", "1t"))
            made.append(
                Run(
                    f"Megatron {size}, recompute {policy}",
                    f"megatron-{size}",
                    f"{devices} a100",
                    2048,
                    batch,
                    rate,
                    _KORTHIKANTI,
                    fitted,
                    layout,
                )
            )
    return made


def _sc21() -> list[Run]:
    rows = (("1.7b", 1, 1, 1, 32, 512, 16, 137), ("3.6b", 2, 1, 1, 64, 512, 16, 138), ("7.5b", 4, 1, 1, 128, 512, 16, 142),
            ("18.4b", 8, 1, 1, 256, 1024, 8, 135), ("39.1b", 8, 2, 2, 512, 1536, 4, 138), ("76.1b", 8, 4, 3, 1024, 1792, 2, 140),
            ("145.6b", 8, 8, 2, 1536, 2304, 2, 148), ("310.1b", 8, 16, 2, 1920, 2160, 1, 155), ("529.6b", 8, 35, 3, 2520, 2520, 1, 163),
            ("1008.0b", 8, 64, 1, 3072, 3072, 1, 163))  # fmt: skip
    made = []
    for size, tp, pp, vp, devices, batch, micro, tflops in rows:
        model = f"sc21-gpt-{size}"
        layout = {**_OLD, "tp": tp, "pp": pp, "vp": vp, "micro_batch": micro, "recompute": "full", "sequence_parallel": False}
        rate = _by_form(tflops * 1e12, read_shape(model), 2048, "full")
        made.append(
            Run(f"GPT {size.upper()}", model, f"{devices} a100", 2048, batch, rate, "arXiv:2104.04473 table 1",
                size in ("145.6b", "310.1b", "529.6b", "1008.0b"), layout, "" if size in ("76.1b", "145.6b", "529.6b",
                    "1008.0b") else "micro-batch, chunks")
        )  # fmt: skip
    return made


def _large_a100() -> list[Run]:
    megascale = ((256, 768, 39300, True), (512, 768, 74100, False), (768, 768, 103800, False), (1024, 768, 132700, True), (3072, 6144,
        433600, True),
                 (6144, 6144, 851600, False), (8192, 6144, 1027900, False), (12288, 6144, 1466800, False))  # fmt: skip
    made = [
        Run(f"Megatron-LM 175B on {devices:,}", "megascale-175b", f"{devices} a100", 2048, batch, rate / devices,
            "arXiv:2402.15627 table 2", fitted,
            {"tp": 8, "pp": 8, "vp": 6, "zero": 1, "recompute": "core", "dropout": True}, "selective recomputation")
        for devices, batch, rate, fitted in megascale
    ]  # fmt: skip
    nlg = ((2240, 60.1, True), (2800, 50.2, False), (3360, 44.4, True))
    made += [
        Run(f"MT-NLG 530B on {devices:,}", "mt-nlg-530b", f"{devices} a100", 2048, 1920, 1920 * 2048 / seconds / devices,
            "arXiv:2201.11990 section 2.4",
            fitted, {**_OLD, "tp": 8, "pp": 35, "recompute": "full", "sequence_parallel": False, "zero": 1})
        for devices, seconds, fitted in nlg
    ]  # fmt: skip
    bloom = {**_OLD, "tp": 4, "pp": 12, "micro_batch": 2, "recompute": "full", "sequence_parallel": False, "zero": 1, "param": "bf16"}
    made.append(
        Run(
            "BLOOM 176B",
            "bloom-176b",
            "384 a100",
            2048,
            2048,
            2048 * 2048 / 105.22 / 384,
            "bigscience tr11-176B-ml chronicles",
            True,
            bloom,
        )
    )
    return made


_FOUNDRY = "mosaicml/llm-foundry scripts/train/benchmarking/README.md"
_FULL = {"zero": 3, "grad": "bf16"}


def _sharded() -> list[Run]:
    """Fully sharded data parallelism alone."""
    rows = (
        ("MPT 13B", "opt-13b", "8 a100", 2048, 64, 18097 / 8, 2, "none", True, _FOUNDRY),
        ("MPT 70B", "llama-65b", "64 a100", 2048, 512, 26274 / 64 * 64.86 / 65.29, 8, "full", True, _FOUNDRY),
        ("Llama 2 7B", "llama2-7b", "128 a100", 4096, 256, 3700.0, 2, "none", True, "IBM/PyTorch FSDP blog"),
        ("GPT-2 124M", "gpt2", "1 a100", 1024, 480, 100 * 1024 / 0.755, 12, "none", True, "karpathy/nanoGPT transformer_sizing.ipynb"),
        ("MPT 7B", "mpt-7b", "8 h100", 2048, 128, 85144 / 8, 6, "none", True, _FOUNDRY),
        ("MPT 3B, s 512", "opt-2.7b", "8 h100", 512, 512, 223721 / 8, 32, "none", True, _FOUNDRY),
        ("MPT 13B, s 1024", "opt-13b", "8 h100", 1024, 512, 44019 / 8, 32, "full", True, _FOUNDRY),
        ("MPT 30B", "mpt-30b", "32 h100", 2048, 512, 73860 / 32, 8, "full", True, _FOUNDRY),
        ("MPT 70B", "llama-65b", "64 h100", 2048, 512, 66523 / 64 * 64.86 / 65.29, 8, "full", True, _FOUNDRY),
        ("Llama 2 7B", "llama2-7b", "96 h100", 4096, 192, 9600.0, 2, "none", True, "foundation-model-stack/fms-fsdp README"),
        ("Llama 2 13B", "llama2-13b", "96 h100", 4096, 192, 4850.0, 2, "selective", True, "foundation-model-stack/fms-fsdp README"),
        ("Llama 2 34B", "yi-34b", "96 h100", 4096, 192, 1830.0 * 33.74 / 34.39, 2, "full", False, "foundation-model-stack/fms-fsdp README"),
        ("Llama 2 70B", "llama2-70b", "96 h100", 4096, 192, 890.0, 2, "full", False, "foundation-model-stack/fms-fsdp README"),
        ("Llama 3 8B, compiled", "llama3-8b", "8 h100", 8192, 16, 6667.0, 2, "selective", True,
         "pytorch/torchtitan benchmarks, December 2024"),
    )  # fmt: skip
    made = []
    for name, model, cluster, seq, batch, rate, micro, recompute, fitted, source in rows:
        devices = int(cluster.split()[0])
        layout = {**_FULL, "micro_batch": micro, "recompute": recompute}
        size = -(-batch // (devices * micro)) * devices * micro
        made.append(Run(f"{name} on {cluster}", model, cluster, seq, size, rate, source, fitted, layout, "micro-batch, accumulation"))
    return made


def _hopper() -> list[Run]:
    llama = read_shape("llama3-405b")
    wide = read_shape("megatron-h100-462b")
    meta = {"tp": 8, "pp": 16, "vp": 8, "zero": 1}
    dgxc = "NVIDIA/dgxc-benchmarking llama3.1 README"
    return [
        Run("Llama 3 405B on 8,192", "llama3-405b", "8192 h100", 8192, 2048, _by_layers(430e12, llama, 8192),
            "arXiv:2407.21783 table 4", False,
            meta, "8 chunks a stage"),
        Run("Llama 3 405B on 16,384", "llama3-405b", "16384 h100", 8192, 2048, _by_layers(400e12, llama, 8192),
            "arXiv:2407.21783 table 4", True,
            meta, "8 chunks a stage"),
        Run("Llama 3 405B, 128K tokens", "llama3-405b", "16384 h100", 131072, 128, _by_layers(380e12, llama, 131072),
            "arXiv:2407.21783 table 4", True,
            {**meta, "cp": 16}, "8 chunks a stage"),
        Run("Megatron 462B", "megatron-h100-462b", "6144 h100", 4096, 1536, _by_form(459.9e12, wide, 4096),
            "NVIDIA/Megatron-LM README table", True,
            {"tp": 8, "pp": 16, "vp": 7, "zero": 1, "recompute": "core"}, "batch, chunks"),
        Run("Llama 3.1 8B, NeMo", "llama3-8b", "128 h100", 8192, 2048, 2048 * 8192 / 12.33 / 128, dgxc, True, {"zero": 1, "micro_batch": 1},
            "data parallelism alone"),
        Run("Llama 3.1 405B, NeMo", "llama3-405b", "512 h100", 8192, 256, 256 * 8192 / 19.78 / 512, dgxc, True,
            {"tp": 8, "pp": 8, "cp": 2, "vp": 8, "zero": 1}, "axes"),
        Run("Llama 3.1 405B, NeMo, fp8", "llama3-405b", "512 h100", 8192, 256, 256 * 8192 / 12.37 / 512, dgxc, False,
            {"tp": 8, "pp": 8, "cp": 2, "vp": 8, "zero": 1, "compute": "fp8"}, "axes"),
        Run("Nemotron-4 340B", "nemotron4-340b", "6144 h100", 4096, 2304, _by_layers(0.41 * 989e12, read_shape("nemotron4-340b"), 4096),
            "arXiv:2406.11704 table 2", False, {"tp": 8, "pp": 12, "vp": 8, "zero": 1}),
        Run("DeepSeek-V3, fp8", "deepseek-v3", "2048 h800", 4096, 15360, 272.8e9 / 86400 / 2048, "arXiv:2412.19437; arXiv:2505.09343", True,
            {"pp": 16, "ep": 64, "zero": 1, "compute": "fp8", "schedule": "dualpipe", "recompute": "selective"}),
        Run("Mixtral 8x22B, Megatron folding", "mixtral-8x22b", "128 h100", 4096, 256,
            _by_layers(0.463 * 989e12, read_shape("mixtral-8x22b"), 4096), "arXiv:2504.14960", False,
            {"tp": 2, "pp": 8, "ep": 8, "zero": 1, "vp": 1}, "axes"),
    ]  # fmt: skip


def _others() -> list[Run]:
    llama = read_shape("llama3-405b")
    return [
        Run("PaLM 540B", "palm-540b", "6144 tpu-v4", 2048, 2048, 238300 / 6144, "arXiv:2204.02311 appendix B", True,
            {"tp": 12, "zero": 3, "micro_batch": 1, "recompute": "full", "sequence_parallel": False}, "rematerialization of whole layers"),
        Run("MaxText 32B", "qwen2.5-32b", "128 tpu-v5p", 2048, 1024, _by_layers(328e12, read_shape("qwen2.5-32b"), 2048, "full"),
            "AI-Hypercomputer/maxtext README", True, {"zero": 3, "micro_batch": 8, "recompute": "none"}, "a shape of the same size; batch"),
        Run("MaxText 32B", "qwen2.5-32b", "256 tpu-v5e", 2048, 1024, _by_layers(132e12, read_shape("qwen2.5-32b"), 2048, "full"),
            "AI-Hypercomputer/maxtext README", True, {"zero": 3, "micro_batch": 4, "recompute": "none"}, "a shape of the same size; batch"),
        Run("Llama 3.1 405B, NeMo", "llama3-405b", "128 gb200", 8192, 64, 64 * 8192 / 9.347 / 128, "NVIDIA/dgxc-benchmarking", True,
            {"tp": 4, "pp": 8, "vp": 8, "zero": 1}, "axes"),
        Run("Llama 3.1 405B, fp8", "llama3-405b", "128 gb200", 8192, 64, _by_layers(2129e12, llama, 8192),
            "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md", True, {"tp": 4, "pp": 8, "vp": 8, "zero": 1, "compute": "fp8"},
             "axes"),
    ]  # fmt: skip


_GROUPS: tuple[Callable[[], list[Run]], ...] = (_korthikanti, _sc21, _large_a100, _sharded, _hopper, _others)


def published_runs() -> list[Run]:
    """Return every run, those of the fit and those kept out of it."""
    return [run for group in _GROUPS for run in group()]
