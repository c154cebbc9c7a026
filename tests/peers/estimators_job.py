"""Runs DeepSpeed's own estimators on a list of inputs, in an interpreter that has it, and prints what they return as JSON."""

import json
import sys


def main() -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    found = []
    for case in json.loads(sys.stdin.read()):
        stage, inputs = case["stage"], case["inputs"]
        estimate = estimate_zero2_model_states_mem_needs if stage == 2 else estimate_zero3_model_states_mem_needs
        found.append([int(value) for value in estimate(**inputs)[:2]])
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
