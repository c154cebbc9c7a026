"""DeepSpeed's `zero_to_fp32` under its own names, for any checkpoint: whole fp32 weights without a process group.

python -m stateroom.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization]
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ..errors import CheckpointError

EXAMPLE = "example: python -m stateroom.utils.zero_to_fp32 out/ckpt out/weights --safe_serialization"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """Return a state dict: fp32 parameters, frozen ones too, and buffers in their dtype, all names of tied ones.

    Args:
        checkpoint_dir: directory of tags, or one tag's folder.
        tag: which one; default: the latest.
        exclude_frozen_parameters: leave out parameters without gradient.
        lazy_mode: give for each parameter an object with `shape`, `dtype` and `contiguous()`, which reads it.

    Raises:
        CheckpointError: the checkpoint cannot be read, or lacks some parameter's weights.
    """
    from ..checkpoint import state_dict
    from ..checkpoint.opener import open_source

    source = open_source(checkpoint_dir, tag)
    if not lazy_mode:
        return state_dict.state_dict_of(source, exclude_frozen=exclude_frozen_parameters)
    found: dict[str, Any] = {}
    for weight in state_dict.weights_of(source, state_dict.dtype_of(None), exclude_frozen_parameters):
        for name in (weight.name, *weight.aliases):
            found[name] = LazyTensor(source, weight)
    return {**found, **source.buffers()}


class LazyTensor:
    """A tensor that is read when `contiguous()` is called."""

    def __init__(self, source: Any, weight: Any) -> None:
        self._source, self._weight = source, weight
        self.shape, self.dtype = weight.shape, weight.dtype

    def contiguous(self) -> Any:
        """Return the tensor, read."""
        from ..checkpoint.state_dict import read_weight

        return read_weight(self._source, self._weight)


def load_state_dict_from_zero_checkpoint(model: Any, checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> Any:
    """Load fp32 weights into a plain module on the CPU and return it.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit the module.
    """
    from ..checkpoint.state_dict import load_into

    return load_into(model, checkpoint_dir, tag)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: Any = None,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write weights as `pytorch_model*.bin`, or `model*.safetensors` if `safe_serialization`; what is there is replaced.

    Raises:
        CheckpointError: the checkpoint cannot be read, or lacks some parameter's weights.
    """
    from ..checkpoint.exporting import export

    kind = "safetensors" if safe_serialization else "pt"
    export(checkpoint_dir, output_dir, kind, dtype, max_shard_size, tag, exclude_frozen_parameters, overwrite=True)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write fp32 weights; see `convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, None, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the optimizer files of one DeepSpeed tag's folder, in the order of ranks."""
    return _files(checkpoint_dir, "optimizer")


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the files with model states of one DeepSpeed tag's folder, in the order of ranks."""
    return _files(checkpoint_dir, "model")


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int | None = None) -> str:
    """Return the first file with model states; the stage is seen from its name."""
    return get_model_state_files(checkpoint_dir)[0]


def _files(checkpoint_dir: str | os.PathLike[str], kind: str) -> list[str]:
    from pathlib import Path

    from ..checkpoint.deepspeed.files import find

    found = getattr(find(Path(checkpoint_dir)), kind)
    return [str(found[key]) for key in sorted(found)]


def main(argv: list[str] | None = None) -> int:
    """Run as a command and return the exit status (0 good, 1 the checkpoint is bad, 2 usage)."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32", description="Write whole fp32 weights out of a sharded checkpoint.", epilog=EXAMPLE
    )
    parser.add_argument("checkpoint_dir", help="directory of tags, or the folder of one tag")
    parser.add_argument("output_dir", help="folder for pytorch_model*.bin or model*.safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file, such as 5GB (the default)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint; default: the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out parameters without gradient")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect: errors name file and parameter by themselves")
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse ends the process for --help and for usage errors
        return stop.code if isinstance(stop.code, int) else 2
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            args.checkpoint_dir, args.output_dir, args.max_shard_size, args.safe_serialization, args.tag, args.exclude_frozen_parameters
        )
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
