"""Offload: states that rest in host memory or on NVMe, the I/O engine under them, and ZenFlow."""

from __future__ import annotations

from typing import Annotated, Literal

from .fields import HONOURED, Bool, Float, Int, IntOrAuto, Lower, Section, Str, key, later, no_effect

_THREADS = no_effect("requests are made by threads, one each, and the system orders them")
Device = Annotated[Literal["none", "cpu", "nvme"], Lower]


class OffloadOptimizer(Section):
    """Where optimizer states and master weights rest."""

    device: Device = key("none", "none, cpu or nvme; stages 1 to 3.", effect=HONOURED)
    pin_memory: Bool = key(True, "Page-lock host memory that an accelerator copies to and from.", effect=HONOURED)
    nvme_path: Str | None = key(None, "Folder on the drive; required for nvme.", effect=HONOURED)
    buffer_count: Int = key(
        4,
        "Host buffers of one state of one sub-group each; for each 4 of them one sub-group is in memory, at most 3.",
        effect=HONOURED,
        ge=1,
    )
    pipeline_read: Bool = key(
        False, "Read the next sub-group while this one is updated; only an explicit false turns it off.", effect=HONOURED
    )
    pipeline_write: Bool = key(
        False, "Write the last sub-group while this one is updated; only an explicit false turns it off.", effect=HONOURED
    )
    fast_init: Bool = key(
        False,
        "Shortcut for the first write to nvme.",
        effect=no_effect("room on the drive is reserved; nothing is written before it is there"),
    )
    ratio: Float = key(1.0, "Share of the states that is offloaded, in whole units; below 1 only in stage 3.", effect=HONOURED, ge=0, le=1)
    super_offload: Bool = key(
        False,
        "Overlap of accelerator and host steps for tightly coupled hosts; stage 3.",
        effect=no_effect("the host's update runs by sub-groups, and what is done of it travels meanwhile"),
    )
    cpuadam_cores_perc: Float = key(
        0.8,
        "Share of the host's cores for super_offload.",
        effect=no_effect("the update runs on torch's threads; OMP_NUM_THREADS sets them"),
        ge=0,
        le=1,
    )


class OffloadParam(Section):
    """Where parameters rest between their uses; stage 3 only."""

    device: Device = key("none", "none, cpu or nvme.", effect=HONOURED)
    pin_memory: Bool = key(True, "Page-lock host memory that an accelerator copies to and from.", effect=HONOURED)
    nvme_path: Str | None = key(None, "Folder on the drive; required for nvme.", effect=HONOURED)
    buffer_count: Int = key(5, "Staging buffers between drive and device.", effect=HONOURED, ge=1)
    buffer_size: Int = key(
        100_000_000, "Most elements of a staging buffer; a request (aio.block_size) bounds it too.", effect=HONOURED, ge=1
    )
    max_in_cpu: Int = key(1_000_000_000, "Elements that stay in host memory under nvme.", effect=HONOURED, ge=0)


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

    block_size: Int = key(1_048_576, "Bytes of one request, rounded up to whole sectors of 4096.", effect=HONOURED, ge=1)
    queue_depth: Int = key(8, "Requests in flight, each on a thread of its own.", effect=HONOURED, ge=1)
    intra_op_parallelism: Int = key(
        1, "Threads that share one transfer.", effect=no_effect("every transfer is shared by all threads; queue_depth counts them"), ge=1
    )
    single_submit: Bool = key(False, "Submit requests one by one.", effect=_THREADS)
    overlap_events: Bool = key(True, "Collect finished requests while others are submitted.", effect=_THREADS)
    use_gds: Bool = key(False, "Let the accelerator talk to the drive directly.", effect=later("states pass through host memory"))
