"""The command `ckpt-to-universal`: its options are those of DeepSpeed's `ds_to_universal`, and a few more."""

from __future__ import annotations

import argparse
import gc
import sys

from ..errors import CheckpointError

EXAMPLE = """example:
  ckpt-to-universal --input_folder out/ckpt --output_folder out/ckpt/global_step500_universal --num_workers 4

Reads checkpoints of Stateroom and of DeepSpeed (ZeRO 0 to 3, fp32, bf16, fp16, pipelines, experts), executes nothing in
them, and writes what DeepSpeed and Stateroom load at any number of ranks. Stopped halfway, the same command goes on.
Exit status: 0 done, 1 the checkpoint cannot be converted, 2 usage.
"""


def main(argv: list[str] | None = None) -> int:
    """Convert, and return the exit status (0 good, 1 the checkpoint is bad, 2 usage)."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # argparse ends the process for --help and for usage errors
        return stop.code if isinstance(stop.code, int) else 2
    for line in _explained(args):
        print(f"note: {line}", file=sys.stderr)
    from .progress import size
    from .universal import convert_to_universal

    gc.freeze()  # what was imported stays: looking through all of torch for garbage takes 80 ms
    try:
        made = convert_to_universal(
            args.input_folder,
            args.output_folder,
            tag=args.tag,
            num_workers=_workers(args),
            stage=args.stage,
            strict=args.strict,
            inert=tuple(args.inert),
            say=lambda line: print(line, file=sys.stderr),
        )
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 1
    finally:
        gc.unfreeze()
    for line in made.remarks:
        print(line, file=sys.stderr)
    print(f"wrote {made.folder}: {made.num_files} files, {size(made.num_bytes)} in {made.seconds:.1f} s")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    made = argparse.ArgumentParser(
        prog="ckpt-to-universal",
        description="Convert a checkpoint to DeepSpeed's universal layout.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--input_folder", required=True, metavar="IN", help="directory of tags, or the folder of one tag")
    made.add_argument("--output_folder", required=True, metavar="OUT", help="directory to make; latest_universal beside it will name it")
    made.add_argument("--tag", metavar="T", help="which checkpoint in IN; default: the one that `latest` names")
    made.add_argument("--num_workers", type=_positive, metavar="N", help="threads; each holds one state of one parameter")
    made.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage of the DeepSpeed run that will load it; default: IN's")
    made.add_argument("--no_strict", dest="strict", action="store_false", help="leave out states that are missing in part, with a remark")
    made.add_argument(
        "--inert", action="append", default=[], metavar="MODULE.CLASS", help="read objects of this class in the client state as plain data"
    )
    deepspeeds = made.add_argument_group("spellings of DeepSpeed's converter")
    deepspeeds.add_argument("--num_extract_workers", type=_positive, metavar="N", help="see --num_workers: there is one pass only")
    deepspeeds.add_argument("--num_merge_workers", type=_positive, metavar="N", help="see --num_workers")
    deepspeeds.add_argument("--keep_temp_folder", action="store_true", help="has no effect: there are no intermediate files")
    deepspeeds.add_argument("--inject_missing_state", action="store_true", help="has no effect: nothing has to be injected")
    return made


def _workers(args: argparse.Namespace) -> int | None:
    if args.num_workers is not None:
        return int(args.num_workers)
    return max((n for n in (args.num_extract_workers, args.num_merge_workers) if n is not None), default=None)


def _explained(args: argparse.Namespace) -> list[str]:
    """Return a line for each option that is accepted without effect."""
    lines = []
    if args.keep_temp_folder:
        lines.append("--keep_temp_folder has no effect: parameters go straight from the input into the output, without files in between")
    if args.inject_missing_state:
        lines.append("--inject_missing_state has no effect: rules are only needed under tensor parallelism, and cannot be made up there")
    if args.num_workers is None and (args.num_extract_workers or args.num_merge_workers):
        lines.append(f"extracting and merging are one pass here, by {_workers(args)} thread(s)")
    return lines


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
