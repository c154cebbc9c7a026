"""Checkpoints: when they are written, by whom, and how many are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from .fields import Bool, Float, Int, Section, Str, key, later, no_effect, section


def _title(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


_OWN_WRITER = no_effect("one writer serves every case: each rank writes its own part, past the page cache, with checksums")


class ParallelWrite(Section):
    """Who writes in a pipeline."""

    pipeline_stage: Bool = key(
        False, "Let all data-parallel ranks of a stage write.", effect=no_effect("every rank always writes its own part")
    )


class Writer(Section):
    """The engine that writes."""

    type: Annotated[Literal["FAST", "PYTHON", "MOCK"], BeforeValidator(_upper)] = key("FAST", "FAST, PYTHON or MOCK.", effect=_OWN_WRITER)
    decoupled: Bool = key(False, "Write beside training.", effect=no_effect("checkpoint.async is the switch for this"))
    io_buffer_size: Int = key(64 * 1024 * 1024, "Bytes of the write buffer.", effect=_OWN_WRITER, ge=1)
    io_buffer_double: Bool = key(True, "Two write buffers in turn.", effect=_OWN_WRITER)
    data_parallel: Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], BeforeValidator(_upper)] | None = key(
        None, "Ranks that share the writing: REPLICA, SOCKET or MACHINE.", effect=_OWN_WRITER
    )
    io_multiplier: Int = key(1, "Writers of a rank.", effect=_OWN_WRITER, ge=1)
    show_statistics: Bool = key(False, "Print write speeds.", effect=no_effect("every save prints its speed"))


class Checkpoint(Section):
    """Saving and loading of training state."""

    tag_validation: Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(_title)] = key(
        "Warn", "What to do when ranks save under different tags; rank 0's is used unless it is Fail."
    )
    load_universal: Bool = key(
        False, "Load a universal checkpoint.", effect=no_effect("load_checkpoint sees by itself what kind of directory it is given")
    )
    use_node_local_storage: Bool = key(
        False,
        "Every node writes to its own disk.",
        effect=later("a checkpoint is one directory, on a disk that all ranks share"),
        alters="placement",
    )
    parallel_write: ParallelWrite = section("Who writes in a pipeline.")
    checkpoint_serialization: Bool = key(True, "Use torch's newer container.", effect=no_effect("the container is always the newer one"))
    writer: Writer | None = key(None, "The engine that writes.")
    async_: Bool = key(False, "Write beside training.", alias="async")
    keep_last: Int | None = key(None, "Checkpoints kept; absent means all.", ge=1)
    keep_every: Int | None = key(None, "Keep those at multiples of this step for good.", ge=1)
    save_every_steps: Int | None = key(None, "Save every so many steps.", ge=1)
    save_every_minutes: Float | None = key(None, "Save every so many minutes.", gt=0)
    auto_interval: Bool = key(False, "Choose the interval from the cost of a save and mtbf_hours (Young and Daly).")
    mtbf_hours: Float | None = key(None, "Mean hours between failures of the whole job, for auto_interval.", gt=0)
    save_on_sigterm: Bool = key(False, "Save at the end of the step when the job is asked to end, then exit with status 143.")
    dir: Str | None = key(None, "Folder; absent means checkpoints under run_dir.")
