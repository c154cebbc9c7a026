"""Offload: states that rest in host memory or on NVMe, the I/O engine under them, and ZenFlow."""

from __future__ import annotations

from typing import Annotated, Literal

from .fields import Bool, Float, Int, IntOrAuto, Lower, Section, Str, key

Device = Annotated[Literal["none", "cpu", "nvme"], Lower]


class OffloadOptimizer(Section):
    """Where optimizer states and master weights rest."""

    device: Device = key("none", "none, cpu or nvme.", alters="placement")
    pin_memory: Bool = key(True, "Use pinned host buffers.")
    nvme_path: Str | None = key(None, "Folder for the swap files; required for nvme.")
    buffer_count: Int = key(4, "Staging buffers for nvme; at least the number of states of a parameter.", ge=1)
    pipeline_read: Bool = key(False, "Read the next tile while this one is updated.")
    pipeline_write: Bool = key(False, "Write the last tile while this one is updated.")
    fast_init: Bool = key(False, "Shortcut for the first write to nvme.")
    ratio: Float = key(1.0, "Share of the states that is offloaded; below 1 only in stage 3.", ge=0, le=1)
    super_offload: Bool = key(False, "Overlap of accelerator and host steps for tightly coupled hosts; stage 3.")
    cpuadam_cores_perc: Float = key(0.8, "Share of the host's cores for super_offload.", ge=0, le=1)


class OffloadParam(Section):
    """Where parameters rest between their uses; stage 3 only."""

    device: Device = key("none", "none, cpu or nvme.", alters="placement")
    pin_memory: Bool = key(True, "Use pinned host buffers.")
    nvme_path: Str | None = key(None, "Folder for the swap files; required for nvme.")
    buffer_count: Int = key(5, "Staging buffers for nvme.", ge=1)
    buffer_size: Int = key(100_000_000, "Elements of a staging buffer; the largest parameter must fit.", ge=1)
    max_in_cpu: Int = key(1_000_000_000, "Elements kept in host memory under nvme.", ge=0)


class ZenFlow(Section):
    """Important gradient columns are applied on the accelerator at once, the rest later on the host."""

    topk_ratio: Float = key(0.1, "Share of columns that counts as important.", gt=0, lt=1)
    select_strategy: Annotated[Literal["auto", "step", "epoch"], Lower] = key("auto", "When the columns are chosen anew.")
    select_interval: IntOrAuto = key("auto", "Steps or epochs between two choices.")
    update_interval: IntOrAuto = key("auto", "Steps between two updates on the host.")
    overlap_step: Bool = key(False, "Run the host's update beside the next step.")
    offload: Bool = key(False, "Keep the chosen columns' states on the host too.")
    auto_ratio: Float = key(0.99, "Share of gradient energy that automatic intervals keep.", ge=0, le=1)
    full_warm_up_rounds: Int = key(0, "Rounds with full updates at the start.", ge=0)
    pt_reserved_cores_perc: Float = key(0.5, "Share of the host's cores left to torch.", ge=0, le=1)


class Aio(Section):
    """Asynchronous file I/O for nvme."""

    block_size: Int = key(1_048_576, "Bytes of one request.", ge=1)
    queue_depth: Int = key(8, "Requests in flight.", ge=1)
    intra_op_parallelism: Int = key(1, "Threads that share one transfer.", ge=1)
    single_submit: Bool = key(False, "Submit requests one by one.")
    overlap_events: Bool = key(True, "Collect finished requests while others are submitted.")
    use_gds: Bool = key(False, "Let the accelerator talk to the drive directly.")
