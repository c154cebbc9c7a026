"""What a run reports: profilers, loggers, monitors, timers and the tuner."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from .fields import Bool, Float, Int, Lower, Section, Str, key, section

_JOB = "DeepSpeedJobName"


class FlopsProfiler(Section):
    """FLOPs and latency per module at one step."""

    enabled: Bool = key(False, "Profile.")
    profile_step: Int = key(1, "Step that is profiled.", ge=1)
    module_depth: Int = key(-1, "Depth of the printed tree; -1 means all.", ge=-1)
    top_modules: Int = key(1, "Modules listed for each depth.", ge=1)
    detailed: Bool = key(True, "Print the annotated model.")
    output_file: Str | None = key(None, "File; absent means standard output.")
    recompute_fwd_factor: Float = key(0.0, "Share of the forward that is recomputed.", ge=0)


class CommsLogger(Section):
    """Size and time of collectives."""

    enabled: Bool = key(False, "Log.")
    verbose: Bool = key(False, "Print each call.")
    prof_all: Bool = key(True, "All operations.")
    prof_ops: list[Str] = key([], "Only these.")
    debug: Bool = key(False, "Name the caller.")


class Tensorboard(Section):
    """Events for TensorBoard."""

    enabled: Bool = key(False, "Write events.")
    output_path: Str = key("", "Folder.")
    job_name: Str = key(_JOB, "Folder of this run in it.")


class Wandb(Section):
    """Events for Weights & Biases."""

    enabled: Bool = key(False, "Send events.")
    group: Str | None = key(None, "Group of the run.")
    team: Str | None = key(None, "Team.")
    project: Str = key("deepspeed", "Project.")


class CsvMonitor(Section):
    """Events as CSV files."""

    enabled: Bool = key(False, "Write files.")
    output_path: Str = key("", "Folder.")
    job_name: Str = key(_JOB, "Folder of this run in it.")


class Comet(Section):
    """Events for Comet."""

    enabled: Bool = key(False, "Send events.")
    samples_log_interval: Int = key(100, "Samples between two events.", ge=1)
    project: Str | None = key(None, "Project.")
    workspace: Str | None = key(None, "Workspace.")
    api_key: Str | None = key(None, "Key of the account.")
    experiment_name: Str | None = key(None, "Name of the run.")
    experiment_key: Str | None = key(None, "Identity of a run that goes on.")
    online: Bool | None = key(None, "Send now, not later.")
    mode: Str | None = key(None, "get, create, or get_or_create.")


class Throughput(Section):
    """The samples-per-second timer."""

    enabled: Bool = key(True, "Measure.")
    synchronized: Bool = key(True, "Wait for the device at each reading.")


class Timers(Section):
    """Timers."""

    throughput: Throughput = section("The samples-per-second timer.")


class ModelInfo(Section):
    """What the tuner knows of the model."""

    profile: Bool = key(False, "Measure it.")
    num_params: Int | None = key(None, "Parameters.", ge=0)
    hidden_size: Int | None = key(None, "Width.", ge=1)
    num_layers: Int | None = key(None, "Depth.", ge=1)


class Autotuning(Section):
    """Search for a fast config."""

    enabled: Bool = key(False, "Search.")
    fast: Bool = key(True, "Tune only stage and micro batch.")
    results_dir: Str = key("autotuning_results", "Folder of results.")
    exps_dir: Str = key("autotuning_exps", "Folder of trials.")
    overwrite: Bool = key(True, "Overwrite earlier results.")
    start_profile_step: Int = key(3, "First measured step.", ge=0)
    end_profile_step: Int = key(5, "Last measured step.", ge=0)
    metric: Annotated[Literal["throughput", "latency", "flops"], Lower] = key("throughput", "What is made best.")
    metric_path: Str | None = key(None, "File with the measured value.")
    tuner_type: Annotated[Literal["gridsearch", "random", "model_based"], Lower] = key("gridsearch", "Kind of search.")
    tuner_early_stopping: Int = key(5, "Trials without gain before it ends.", ge=1)
    tuner_num_trials: Int = key(50, "Most trials.", ge=1)
    arg_mappings: dict[str, Any] | None = key(None, "Config key to command-line flag.")
    model_info: ModelInfo | None = key(None, "What is known of the model.")
    model_info_path: Str | None = key(None, "File with it.")
    mp_size: Int = key(1, "Ranks that share one model.", ge=1)
    max_train_batch_size: Int | None = key(None, "Largest global batch.", ge=1)
    min_train_batch_size: Int = key(1, "Smallest global batch.", ge=1)
    max_train_micro_batch_size_per_gpu: Int = key(1024, "Largest micro batch.", ge=1)
    min_train_micro_batch_size_per_gpu: Int = key(1, "Smallest micro batch.", ge=1)
    num_tuning_micro_batch_sizes: Int = key(3, "Micro batches tried.", ge=1)
