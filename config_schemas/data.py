"""Data efficiency: curriculum, dynamic batches, random layer-token drop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from .fields import Bool, Int, Lower, Section, Str, key, section


class ScheduleConfig(Section):
    """Shape of a difficulty schedule."""

    total_curriculum_step: Int | None = key(None, "Steps until the last difficulty.", ge=1)
    difficulty_step: Int | None = key(None, "Difficulty rises in multiples of this.", ge=1)
    root_degree: Int | None = key(None, "Degree for fixed_root.", ge=1)
    difficulty: list[Int] | None = key(None, "Difficulties for fixed_discrete.")
    max_step: list[Int] | None = key(None, "Steps at which they end.")


class CurriculumMetric(Section):
    """One measure of difficulty."""

    index_to_sample_path: Str | None = key(None, "Index from difficulty to samples.")
    index_to_metric_path: Str | None = key(None, "Index from position to difficulty.")
    difficulty_type: Literal["value", "percentile"] | None = key(None, "value or percentile.")
    clustering_type: Str | None = key(None, "single_cluster, or one cluster a difficulty.")
    min_difficulty: Int | None = key(None, "First difficulty.")
    max_difficulty: Int | None = key(None, "Last difficulty.")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = key(None, "Shape of the schedule.")
    schedule_config: ScheduleConfig | None = key(None, "Its numbers.")


class CurriculumLearning(Section):
    """Samples in order of difficulty."""

    enabled: Bool = key(False, "Use it.", alters="result")
    data_cluster_path: Str | None = key(None, "Folder of clusters.")
    curriculum_metrics: dict[str, CurriculumMetric] = key({}, "Measures of difficulty by name.")


class DynamicBatching(Section):
    """Batches of a fixed number of tokens."""

    enabled: Bool = key(False, "Use it.", alters="result")
    metrics_path: Str | None = key(None, "Folder with the sequence lengths.")
    lr_scaling_method: Annotated[Literal["linear", "sqrt", "none"], Lower] = key("linear", "How the learning rate follows the batch.")
    min_batch_size: Int = key(1, "Fewest samples.", ge=1)
    max_batch_size: Int | None = key(None, "Most samples.", ge=1)
    sequence_picking_order: Annotated[Literal["random", "seqlen", "dataloader"], Lower] = key("dataloader", "Order of samples.")
    max_tokens: Int | None = key(None, "Tokens of a batch.", ge=1)
    verbose: Bool = key(False, "Print the batches.")


class DataSampling(Section):
    """Which samples are drawn."""

    enabled: Bool = key(False, "Use it.", alters="result")
    num_epochs: Int = key(1000, "Most epochs.", ge=1)
    num_workers: Int = key(0, "Loader processes.", ge=0)
    pin_memory: Bool = key(False, "Pinned batches.")
    curriculum_learning: CurriculumLearning = section("Samples in order of difficulty.")
    dynamic_batching: DynamicBatching = section("Batches of a fixed number of tokens.")


class LtdScheduleConfig(Section):
    """Shape of the token schedule."""

    require_steps: Int | None = key(None, "Steps until all tokens are kept.", ge=1)
    seq_per_step: Int | None = key(None, "Kept tokens rise in multiples of this.", ge=1)


class LtdSchedule(Section):
    """How many tokens are kept."""

    min_value: Int | None = key(None, "Tokens at the start.", ge=1)
    max_value: Int | None = key(None, "Tokens at the end.", ge=1)
    schedule_type: Str | None = key(None, "Shape of the schedule.")
    schedule_config: LtdScheduleConfig | None = key(None, "Its numbers.")


class RandomLtd(Section):
    """Layers that see a random part of the tokens."""

    enabled: Bool = key(False, "Use it.", alters="result")
    total_layer_num: Int | None = key(None, "Layers.", ge=1)
    random_ltd_layer_num: Int | None = key(None, "Layers that drop tokens.", ge=0)
    random_ltd_layer_id: list[Int] | None = key(None, "Which.")
    model_mask_name: Str | None = key(None, "Name of the attention mask.")
    model_type: Str | None = key(None, "decoder or encoder.")
    hidden_state_order: Str | None = key(None, "batch_seq_dim or seq_batch_dim.")
    random_ltd_schedule: LtdSchedule | None = key(None, "How many tokens are kept.")
    layer_token_lr_schedule: dict[str, Any] | None = key(None, "Learning rate by kept tokens.")


class DataRouting(Section):
    """Which tokens go where."""

    enabled: Bool = key(False, "Use it.", alters="result")
    random_ltd: RandomLtd = section("Layers that see a random part of the tokens.")


class DataEfficiency(Section):
    """Train on fewer samples or tokens."""

    enabled: Bool = key(False, "Use it.", alters="result")
    seed: Int = key(1234, "Seed of the sampling.")
    data_sampling: DataSampling = section("Which samples are drawn.")
    data_routing: DataRouting = section("Which tokens go where.")
