"""Checkpoints: when they are written, by whom, and how many are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from .fields import Bool, Float, Int, Section, Str, key, section


def _title(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


class ParallelWrite(Section):
    """Who writes in a pipeline."""

    pipeline_stage: Bool = key(False, "Let all data-parallel ranks of a stage write.")


class Writer(Section):
    """The engine that writes."""

    type: Annotated[Literal["FAST", "PYTHON", "MOCK"], BeforeValidator(_upper)] = key("FAST", "FAST, PYTHON or MOCK.")
    decoupled: Bool = key(False, "Write beside training.")
    io_buffer_size: Int = key(64 * 1024 * 1024, "Bytes of the write buffer.", ge=1)
    io_buffer_double: Bool = key(True, "Two write buffers in turn.")
    data_parallel: Annotated[Literal["REPLICA", "SOCKET", "MACHINE"], BeforeValidator(_upper)] | None = key(
        None, "Ranks that share the writing: REPLICA, SOCKET or MACHINE."
    )
    io_multiplier: Int = key(1, "Writers of a rank.", ge=1)
    show_statistics: Bool = key(False, "Print write speeds.")


class Checkpoint(Section):
    """Saving and loading of training state."""

    tag_validation: Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(_title)] = key(
        "Warn", "What to do when ranks save under different tags."
    )
    load_universal: Bool = key(False, "Load a universal checkpoint.")
    use_node_local_storage: Bool = key(False, "Every node writes to its own disk.")
    parallel_write: ParallelWrite = section("Who writes in a pipeline.")
    checkpoint_serialization: Bool = key(True, "Use torch's newer container.")
    writer: Writer | None = key(None, "The engine that writes.")
    async_: Bool = key(False, "Write beside training.", alias="async")
    keep_last: Int | None = key(None, "Checkpoints kept; absent means all.", ge=1)
    keep_every: Int | None = key(None, "Keep those at multiples of this step for good.", ge=1)
    save_every_steps: Int | None = key(None, "Save every so many steps.", ge=1)
    save_every_minutes: Float | None = key(None, "Save every so many minutes.", gt=0)
    auto_interval: Bool = key(False, "Choose the interval from the cost of a save and the failures seen.")
    save_on_sigterm: Bool = key(False, "Save when the job is asked to end.")
    dir: Str | None = key(None, "Folder; absent means checkpoints under run_dir.")
