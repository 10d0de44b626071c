"""Deliberate faults, and the tests that must turn red under each: ``make faults``.

A green test says little until it has been seen red. Each row of ``FAULTS`` replaces one function of ours and
names the tests that hold it; ``python -m tests.faults`` first sees all of them green, then runs each row's
tests with its fault in place and demands that every one of them fails (a collection error, a crash of pytest
or a hang does not count), and that the replacement was really called.

The fault is applied before any test module is imported, in the test process (whose forked ranks inherit it)
and in every Python process it launches. The replaced function is exchanged wherever a module of ours already
holds it: as its own name, under ``from ... import``, or as a value of a module-level dict.
"""

import argparse
import functools
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import fault_bodies as bodies

ROOT = Path(__file__).parents[1]
SITE = Path(__file__).parent / "support" / "fault_site"
OURS = ("lightning_spindle", "tasks", "datamodules", "train", "benchmark", "benchmarking", "tests")
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One function of ours replaced, and who must notice.

    ``target`` is ``"module:qualname"`` of a function, method, static or class method or property.
    ``body`` takes the original function and returns the faulty one. Each of ``tests`` is a pytest node id, of
    which at least one case must fail.
    """

    name: str
    target: str
    body: Callable[[Callable[..., Any]], Callable[..., Any]]
    tests: tuple[str, ...]


SCALE = "tests/cases/test_c01_c02_scale.py"
HALF_A_MODEL = "tests/runtime/test_memory.py::test_a_rank_with_half_a_model_needs_half_of_its_memory"
LOGS = "tests/cases/test_c04_c05_logs.py"
IDLE = "tests/cases/test_c03_idle_tasks.py"
BATCHES = "tests/cases/test_c15_batches.py"
MISSING = "tests/cases/test_c16_missing.py"
SKIPPED = "tests/cases/test_c37_skipped_steps.py"
NORMS = "tests/cases/test_c43_batch_norm.py"
FREEZING = "tests/cases/test_freezing.py"
ATTRIBUTES = "tests/cases/test_attributes.py"
SHARDED = "tests/cases/test_sharded_state.py"
OWNERSHIP = "tests/test_ownership.py"
SHARED = "tests/cases/test_c06_c18_shared.py"
PARAMETERS = "tests/cases/test_c25_c35_c51_parameters.py"
LIBRARIES = "tests/capture/test_library_models.py"
SAMPLERS = "tests/cases/test_c07_samplers.py"
CHECKPOINTS = "tests/cases/test_c09_checkpoints.py"
COLLATING = "tests/cases/test_collating.py"
ROW_LOADING = "tests/cases/test_row_loading.py"
BUFFERS = "tests/cases/test_written_buffers.py"
MESSAGES = "tests/cases/test_c12_c13_messages.py"
GATHERED = "tests/cases/test_gather_batch.py"
AGREEMENT = "tests/cases/test_c19_c23_agreement.py"
DROPOUT = "tests/cases/test_c45_dropout.py"
KINDS = "tests/cases/test_kinds_of_tasks.py"
PLANNER = "tests/planner"

WAYS = "tests/parity/test_ways.py"
SHAPES = "tests/capture/test_shapes.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "strategy-not-registered",
        "lightning_spindle._registration:_register",
        bodies.does_nothing,
        ("tests/test_imports.py::test_strategy_is_registered_in_either_import_order",),
    ),
    Fault(
        "branches-on-sizes-not-tried",
        "lightning_spindle.capture.branches:_turned_by_variants",
        bodies.returns([]),
        (f"{LIBRARIES}::test_c20_a_branch_that_batches_take_differently",),
    ),
    Fault(
        "branches-on-sizes-not-checked",
        "lightning_spindle.capture.patches:expect",
        bodies.does_nothing,
        (
            f"{LIBRARIES}::test_a_limit_that_the_user_checks_is_checked",
            f"{LIBRARIES}::test_a_branch_on_the_train_flag_is_checked",
        ),
    ),
    Fault(
        "checks-of-branches-left-out",
        "lightning_spindle.capture.grouping:Grouping._place_checks",
        bodies.does_nothing,
        (f"{LIBRARIES}::test_a_limit_that_the_user_checks_is_checked",),
    ),
    Fault(
        "train-flags-frozen",
        "lightning_spindle.capture.patches:is_training",
        bodies.returns(True),
        (f"{LIBRARIES}::test_c35_train_flags_are_live",),
    ),
    Fault(
        "idle-branches-on-flags-kept",
        "lightning_spindle.capture.branches:_forget_flags",
        bodies.does_nothing,
        (f"{LIBRARIES}::test_c35_train_flags_are_live",),
    ),
    Fault(
        "hooks-do-not-see-the-trace",
        "lightning_spindle.capture.watching:observe",
        bodies.does_nothing,
        (f"{LIBRARIES}::test_what_a_hook_collects_belongs_to_the_trace",),
    ),
    Fault(
        "values-of-hooks-frozen",
        "lightning_spindle.capture.patches:_refuse_leaked",
        bodies.does_nothing,
        (f"{LIBRARIES}::test_what_a_hook_collects_inside_of_an_operator_is_not_frozen",),
    ),
    Fault(
        "assigned-entries-lost",
        "lightning_spindle.capture.patches:assigned",
        bodies.passes_through(0),
        (f"{LIBRARIES}::test_assigned_entries",),
    ),
    Fault(
        "modes-not-restored",
        "lightning_spindle.capture.apart:mode",
        bodies.leaves_eval_mode,
        (f"{PARAMETERS}::test_c35_modes_are_kept_and_restored_on_every_rank",),
    ),
    Fault(
        "empty-groups-dropped",
        "lightning_spindle.runtime.state:LocalisedOptimizer.localise",
        bodies.drops_empty_groups,
        (f"{PARAMETERS}::test_c25_ranks_with_nothing_to_train",),
    ),
    Fault(
        "no-warning-of-what-does-not-train",
        "lightning_spindle.runtime.hints:warn_before_fit",
        bodies.does_nothing,
        (
            f"{PARAMETERS}::test_c35_a_trainable_module_in_eval_mode_is_named",
            f"{PARAMETERS}::test_c51_a_parameter_in_no_optimizer_is_named",
        ),
    ),
    Fault(
        "loss-weights-given-to-no-optimizer",
        "lightning_spindle.merging:_merged_groups",
        bodies.leaves_out_loss_weights,
        (f"{PARAMETERS}::test_c51_learnable_loss_weights",),
    ),
    Fault(
        "means-not-weighted-by-rows",
        "lightning_spindle.runtime.engine:Engine._share",
        bodies.returns(1.0),
        (f"{SCALE}::test_c02_ragged_rows",),
    ),
    Fault(
        "means-taken-for-sums",
        "lightning_spindle.capture.assemble:Assembler._reduction",
        bodies.returns("sum"),
        (f"{SCALE}::test_c02_ragged_rows",),
    ),
    Fault(
        "gradients-averaged",
        "lightning_spindle.runtime.gradients:PendingBucket.finish",
        bodies.divides_by_two,
        (f"{SCALE}::test_c01_nine_placements", f"{SCALE}::test_c01_in_single_precision"),
    ),
    Fault(
        "gradients-not-summed",
        "lightning_spindle.runtime.gradients:PendingBucket.finish",
        bodies.does_nothing,
        (
            f"{SHARED}::test_c06_tied_embedding_and_head",
            f"{SHARED}::test_c06_encoder_shared_by_three_tasks",
            f"{SHARED}::test_c18_contrastive_losses_with_shared_encoder_and_scale",
            "tests/cases/test_kinds_of_parameters.py::test_parameters_of_every_kind",
        ),
    ),
    Fault(
        "devices-without-a-parameter-add-ones",
        "lightning_spindle.runtime.gradients:_zeros",
        bodies.changes_result(lambda zeros: zeros + 1),
        (
            "tests/runtime/test_engine.py::test_parity_where_devices_add_zeros_for_parameters_that_they_do_not_hold",
        ),
    ),
    Fault(
        "groups-not-bounded",
        "lightning_spindle.program.pooling:pooled",
        bodies.changes_result(lambda pool: {group: group for group in pool}),
        (
            "tests/test_pooling.py::test_every_group_has_a_superset_in_a_bounded_pool",
            "tests/test_program.py::test_a_parameter_is_in_one_bucket_iff_several_devices_hold_it",
        ),
    ),
    Fault(
        "zeros-for-missing-gradients",
        "lightning_spindle.runtime.gradients:PendingBucket.finish",
        bodies.fills_missing_gradients,
        (
            f"{KINDS}::test_tasks_without_a_batch_are_idle",
            f"{IDLE}::test_c03_an_idle_task_keeps_parameters_momentum_and_steps",
            f"{MISSING}::test_c16_an_optional_image",
            "tests/runtime/test_engine.py::test_idle_parameters_have_no_gradient",
        ),
    ),
    Fault(
        "gradients-of-local-edges-forgotten",
        "lightning_spindle.runtime.engine:Engine._pass_back",
        bodies.does_nothing,
        (f"{SCALE}::test_c01_each_module_in_a_group_of_its_own", "tests/runtime/test_engine.py::test_parity"),
    ),
    Fault(
        "gradients-of-received-edges-forgotten",
        "lightning_spindle.runtime.engine:Engine._gradient",
        bodies.forgets_received_gradients,
        (f"{SCALE}::test_c01_each_module_in_a_group_of_its_own", "tests/runtime/test_engine.py::test_parity"),
    ),
    Fault(
        "gradient-parts-dropped",
        "lightning_spindle.runtime.rows:summed",
        bodies.changes_arguments(lambda like, value, have, parts: (like, value, have, parts[:1])),
        (f"{SCALE}::test_c01_nine_placements",),
    ),
    Fault(
        "parts-joined-as-they-come",
        "lightning_spindle.runtime.rows:join",
        bodies.joins_as_given,
        (f"{SCALE}::test_c01_each_module_in_a_group_of_its_own",),
    ),
    Fault(
        "rows-off-by-one",
        "lightning_spindle.capture.layout:take_rows",
        bodies.shifts_rows,
        (f"{SCALE}::test_c02_ragged_rows", f"{SAMPLERS}::test_c07_each_sample_once_an_epoch"),
    ),
    Fault(
        "shards-overlap",
        "lightning_spindle.program:row_range",
        bodies.overlaps_rows,
        (f"{SCALE}::test_c02_ragged_rows", f"{SAMPLERS}::test_c07_each_sample_once_an_epoch"),
    ),
    Fault(
        "one-tag-for-all-messages",
        "lightning_spindle.runtime.messages:tag_of",
        bodies.returns(1),
        (f"{MESSAGES}::test_c12_receives_posted_in_another_order_than_sends",),
    ),
    Fault(
        "gradients-tagged-as-values",
        "lightning_spindle.runtime.messages:tag_of",
        lambda original: lambda instruction: 2 * instruction.index + 1,
        (f"{MESSAGES}::test_c12_receives_posted_in_another_order_than_sends",),
    ),
    Fault(
        "forms-not-renewed",
        "lightning_spindle.runtime.engine:_signature",
        bodies.returns(()),
        (f"{MESSAGES}::test_c13_lengths_and_rows_change",),
    ),
    Fault(
        "buffers-of-traces-not-compared",
        "lightning_spindle.capture.evaluate:written_buffers",
        bodies.returns({}),
        (f"{BUFFERS}::test_buffers_assigned_by_a_step_are_written",),
    ),
    Fault(
        "changed-parameters-not-kept",
        "lightning_spindle.capture.untouched:_Writes._keep",
        bodies.does_nothing,
        tuple(
            f"{BUFFERS}::test_parameters_changed_by_a_step_are_refused_and_left_as_they_were[{way}]"
            for way in ("data", "plain")
        ),
    ),
    Fault(
        "entries-of-lists-not-compared",
        "lightning_spindle.capture.untouched:_same_entries",
        bodies.returns(True),
        (f"{BUFFERS}::test_values_collected_by_a_step_are_refused",),
    ),
    Fault(
        "first-sample-tells-all-rows",
        "lightning_spindle.capture.layout:_grown",
        lambda original: lambda batch, collate, samples: original(None, collate, samples[:1]),
        ("tests/capture/test_layout.py::test_growth_of_samples_of_which_some_lack_a_part",),
    ),
    Fault(
        "recurrent-modules-keep-references",
        "lightning_spindle.runtime.state:_recurrent",
        bodies.returns([]),
        ("tests/cases/test_kinds_of_parameters.py::test_recurrent_modules_are_dropped_and_completed",),
    ),
    Fault(
        "rows-as-long-as-the-examples",
        "lightning_spindle.runtime.rows:entries_per_row",
        lambda original: lambda tensor, value, rows: value.per_row,
        (f"{MESSAGES}::test_c13_tokens_of_rows_of_any_length_are_cut_by_rows",),
    ),
    Fault(
        "logs-left-local",
        "lightning_spindle.runtime.engine:Engine._exchange",
        bodies.leaves_results_local,
        (
            f"{LOGS}::test_c04_each_rank_knows_each_tasks_values",
            f"{LOGS}::test_c05_hooks_and_logs_under_spindle",
        ),
    ),
    Fault(
        "epoch-means-not-weighted",
        "lightning_spindle.runtime.replay:_log",
        bodies.weighs_one_row,
        (
            f"{LOGS}::test_c04_each_rank_knows_each_tasks_values",
            f"{LOGS}::test_c04_a_key_logged_in_every_third_step",
        ),
    ),
    Fault(
        "parameters-not-broadcast",
        "lightning_spindle.runtime.objects:broadcast_tensors",
        bodies.does_nothing,
        (f"{AGREEMENT}::test_c19_ranks_start_from_rank_zeros_weights",),
    ),
    Fault(
        "agreement-not-checked",
        "lightning_spindle.runtime.objects:require_agreement",
        bodies.does_nothing,
        (
            f"{AGREEMENT}::test_c19_other_shapes_on_a_rank_are_refused_on_all",
            f"{AGREEMENT}::test_c23_another_plan_on_one_rank_is_an_error_on_every_rank",
        ),
    ),
    Fault(
        "plans-not-shared",
        "lightning_spindle.runtime.session:shared_plan",
        bodies.differs_by_rank,
        (f"{AGREEMENT}::test_c23_ranks_that_measure_other_times_run_one_plan",),
    ),
    Fault(
        "data-not-compared",
        "lightning_spindle.runtime.checks:require_same_data",
        bodies.does_nothing,
        (f"{SAMPLERS}::test_c07_a_sampler_seeded_by_the_rank_is_refused",),
    ),
    Fault(
        "rows-not-told-to-those-that-read-nothing",
        "lightning_spindle.runtime.engine:Engine._take_rows",
        bodies.does_nothing,
        (f"{COLLATING}::test_collating_that_drops_rows",),
    ),
    Fault(
        "draws-of-reading-unknown",
        "lightning_spindle.runtime.randomness:shared_generators",
        bodies.returns(()),
        (
            f"{COLLATING}::test_collating_that_draws",
            f"{ROW_LOADING}::test_rows_that_depend_on_what_else_is_read[Drawing]",
            f"{ROW_LOADING}::test_draws_that_come_later_are_an_error",
        ),
    ),
    Fault(
        "all-rows-read",
        "lightning_spindle.runtime.rowneeds:rows_needed",
        bodies.needs_all_rows,
        (
            f"{ROW_LOADING}::test_each_rank_reads_only_its_rows",
            f"{ROW_LOADING}::test_a_collate_function_of_ones_own",
            f"{ROW_LOADING}::test_an_operator_that_reads_nothing_of_the_batch",
            f"{ROW_LOADING}::test_evaluation_reads_rows_too",
        ),
    ),
    Fault(
        "wrong-rows-read",
        "lightning_spindle.runtime.rowloading:_picked",
        bodies.changes_arguments(lambda indices, held: (indices[:1] * len(indices), held)),
        (
            f"{ROW_LOADING}::test_each_rank_reads_only_its_rows",
            f"{ROW_LOADING}::test_rows_read_by_workers",
            f"{SAMPLERS}::test_c07_each_sample_once_an_epoch",
        ),
    ),
    Fault(
        "rows-cut-as-of-whole-batches",
        "lightning_spindle.runtime.iteration:TaskBatch.taken",
        bodies.holds_everything,
        (
            f"{ROW_LOADING}::test_each_rank_reads_only_its_rows",
            f"{ROW_LOADING}::test_evaluation_reads_rows_too",
        ),
    ),
    Fault(
        "no-row-of-messages-read",
        "lightning_spindle.runtime.rowneeds:_messages",
        bodies.returns(()),
        (f"{ROW_LOADING}::test_an_operator_that_reads_nothing_of_the_batch",),
    ),
    Fault(
        "rows-read-alone-untried",
        "lightning_spindle.runtime.rowloading:whole_because",
        bodies.returns(None),
        (
            f"{ROW_LOADING}::test_rows_that_depend_on_what_else_is_read[Remembering]",
            f"{ROW_LOADING}::test_padding_is_found_before_training",
        ),
    ),
    Fault(
        "later-draws-unnoticed",
        "lightning_spindle.runtime.rowloading:DrawGuard.check",
        bodies.does_nothing,
        (f"{ROW_LOADING}::test_draws_that_come_later_are_an_error",),
    ),
    Fault(
        "shapes-of-rows-not-compared",
        "lightning_spindle.runtime.checks:require_same_shapes",
        bodies.does_nothing,
        (f"{ROW_LOADING}::test_padding_that_comes_later_is_an_error_on_every_rank",),
    ),
    Fault(
        "rows-of-unlike-data",
        "lightning_spindle.runtime.feeding:agree_on_rows",
        bodies.passes_through(),
        (f"{ROW_LOADING}::test_data_that_differ_by_rank_are_refused",),
    ),
    Fault(
        "variants-get-the-planned-rows",
        "lightning_spindle.runtime.feeding:_covered",
        bodies.passes_through(1),
        (f"{ROW_LOADING}::test_a_variant_of_the_step_reads_the_rows_that_it_sees",),
    ),
    Fault(
        "indices-not-compared",
        "lightning_spindle.runtime.rowloading:PartialBatch.drawn",
        bodies.returns(0),
        (f"{SAMPLERS}::test_c07_a_sampler_seeded_by_the_rank_is_refused",),
    ),
    Fault(
        "reading-rows-draws-nothing",
        "lightning_spindle.runtime.rowloading:RowReader.batches",
        bodies.takes_back_draws,
        ("tests/runtime/test_loaders.py::test_reading_some_rows_changes_no_draw",),
    ),
    Fault(
        "buffers-of-some-modules-forgotten",
        "lightning_spindle.capture.api:_written",
        bodies.returns({}),
        (
            f"{BUFFERS}::test_buffers_written_by_training_and_by_validation",
            f"{BUFFERS}::test_a_buffer_of_the_model_itself",
        ),
    ),
    Fault(
        "skipped-loaders-draw-nothing",
        "lightning_spindle.runtime.loaders:_RowCounter.__init__",
        bodies.takes_back_draws,
        ("tests/runtime/test_loaders.py::test_skipping_a_loader_changes_no_draw",),
    ),
    Fault(
        "parameters-stay-everywhere",
        "lightning_spindle.runtime.state:LocalisedModel.localise",
        bodies.does_nothing,
        (HALF_A_MODEL,),
    ),
    Fault(
        "capture-holds-on-to-parameters",
        "lightning_spindle.capture.measure:measure",
        bodies.holds_on_to_parameters,
        ("tests/runtime/test_memory.py::test_capture_holds_on_to_no_parameter",),
    ),
    Fault(
        "gathered-rows-are-ones-own",
        "lightning_spindle.program.program:Edge.reads",
        bodies.passes_through(1),
        (f"{GATHERED}::test_parity[together]", f"{GATHERED}::test_only_features_travel"),
    ),
    Fault(
        "sums-of-one-device",
        "lightning_spindle.runtime.rows:join",
        bodies.joins_one_of_values_without_rows,
        (f"{GATHERED}::test_parity[four-tokens]",),
    ),
    Fault(
        "rows-counted-from-zero",
        "lightning_spindle.runtime.engine:Engine._argument",
        bodies.counts_rows_from_zero,
        (f"{GATHERED}::test_parity[four]", f"{GATHERED}::test_a_step_over_several_loaders"),
    ),
    Fault(
        "gathering-ignored",
        "lightning_spindle.capture.classify:_Classifier._reading",
        bodies.reads_ones_own,
        (
            f"{GATHERED}::test_a_loss_of_all_pairs_is_split",
            f"{GATHERED}::test_a_mean_over_tokens_is_summed_where_the_tokens_are",
        ),
    ),
    Fault(
        "gathered-rows-counted-in-the-batch",
        "lightning_spindle.capture.sizes:_may_count_gathered",
        bodies.returns(False),
        (f"{GATHERED}::test_a_loss_of_all_pairs_is_split[Repelling]",),
    ),
    Fault(
        "gathered-where-it-is-given",
        "lightning_spindle.capture.grouping:Grouping._reads_whole_batch",
        bodies.returns(False),
        (
            f"{GATHERED}::test_a_loss_of_all_pairs_is_split[Repelling]",
            f"{GATHERED}::test_a_condition_on_gathered_rows_makes_a_step_one_operator",
        ),
    ),
    Fault(
        "gatherers-join-who-gives",
        "lightning_spindle.planner.contraction:_meet",
        bodies.returns(False),
        (f"{GATHERED}::test_a_producer_and_who_gathers_its_rows_are_never_one_run",),
    ),
    Fault(
        "values-never-meet",
        "lightning_spindle.graph:Value.meets",
        bodies.returns(False),
        (
            f"{GATHERED}::test_measured_against_all_rows",
            f"{GATHERED}::test_a_run_that_gathers_from_itself_is_refused",
        ),
    ),
    Fault(
        "all-gather-takes-what-it-gets",
        "lightning_spindle.strategy:SpindleStrategy.all_gather",
        bodies.passes_through(1),
        ("tests/cases/test_all_gather.py::test_what_ranks_do_not_share_is_refused",),
    ),
    Fault(
        "all-gather-waits-inside-steps",
        "lightning_spindle.strategy:SpindleStrategy._inside_a_step",
        bodies.gives_a_null_context,
        ("tests/cases/test_all_gather.py::test_a_step_as_one_operator",),
    ),
    Fault(
        "metrics-not-updated",
        "lightning_spindle.capture.patches:update_metric",
        bodies.does_nothing,
        ("tests/projects/test_frozen_backbone.py::test_equal_to_one_process",),
    ),
    Fault(
        "optimizer-state-of-rank-zero-only",
        "lightning_spindle.runtime.objects:gather_objects",
        bodies.keeps_rank_zeros,
        (
            f"{CHECKPOINTS}::test_c09_the_file_is_a_plain_one",
            f"{CHECKPOINTS}::test_c09_resumes_at_another_number_of_ranks",
            f"{CHECKPOINTS}::test_c09_saving_after_the_fit",
        ),
    ),
    Fault(
        "parameters-of-rank-zero-only",
        "lightning_spindle.runtime.state:LocalisedModel.state_dict",
        lambda original: lambda self: self._model.state_dict() if self._transport.rank == 0 else {},
        (f"{CHECKPOINTS}::test_c09_the_file_is_a_plain_one",),
    ),
    Fault(
        "buffers-not-shared",
        "lightning_spindle.runtime.state:LocalisedModel.share_buffers",
        bodies.does_nothing,
        (f"{KINDS}::test_batch_norm_runs_whole_and_its_buffers_reach_validation",),
    ),
    Fault(
        "unfrozen-parameters-not-noticed",
        "lightning_spindle.runtime.session:Step.follow",
        bodies.does_nothing,
        (f"{FREEZING}::test_freezing_and_unfreezing_in_the_fit",),
    ),
    Fault(
        "added-groups-not-noticed",
        "lightning_spindle.runtime.state:LocalisedOptimizer.follow",
        bodies.returns(False),
        (
            f"{FREEZING}::test_groups_that_were_added_are_saved",
            f"{FREEZING}::test_what_cannot_be_followed_is_refused",
        ),
    ),
    Fault(
        "optimizer-state-kept-by-all",
        "lightning_spindle.runtime.sharding:ShardedStep._hide",
        bodies.does_nothing,
        (f"{SHARDED}::test_each_state_is_kept_once",),
    ),
    Fault(
        "resumed-state-kept-by-all",
        "lightning_spindle.runtime.state:LocalisedModel.steps",
        bodies.returns(True),
        (f"{SHARDED}::test_each_state_is_kept_once",),
    ),
    Fault(
        "new-values-not-given",
        "lightning_spindle.runtime.engine:Engine.share",
        bodies.does_nothing,
        (
            f"{SHARDED}::test_each_state_is_kept_once",
            f"{SHARDED}::test_accumulation",
            f"{SHARDED}::test_idle_tasks_rest",
            "tests/parity/test_work.py::test_sharded_optimizer_state",
        ),
    ),
    Fault(
        "new-values-not-taken",
        "lightning_spindle.runtime.sharding:PendingValues.finish",
        bodies.does_nothing,
        (
            f"{SHARDED}::test_data_parallel_states_are_of_equal_size",
            f"{SHARDED}::test_freezing_and_adding_groups",
        ),
    ),
    Fault(
        "gradients-stay-hidden",
        "lightning_spindle.runtime.sharding:ShardedStep._after",
        bodies.leaves_gradients_hidden,
        (
            f"{SHARDED}::test_each_state_is_kept_once",
            f"{SHARDED}::test_gradients_are_clipped_on_every_holder",
        ),
    ),
    Fault(
        "the-optimizer-stays-divided",
        "lightning_spindle.runtime.sharding:ShardedStep.end",
        bodies.does_nothing,
        (f"{SHARDED}::test_each_state_is_kept_once",),
    ),
    Fault(
        "all-state-on-the-first-holder",
        "lightning_spindle.program.ownership:owners",
        bodies.gives_all_to_the_first,
        (
            f"{SHARDED}::test_data_parallel_states_are_of_equal_size",
            f"{OWNERSHIP}::test_shares_are_balanced_and_the_same_on_every_rank",
        ),
    ),
    Fault(
        "shared-out-anew-when-ranks-join",
        "lightning_spindle.program.ownership:owners",
        bodies.shares_out_anew,
        (
            f"{SHARDED}::test_ranks_that_come_to_hold_a_parameter_get_its_values",
            f"{OWNERSHIP}::test_who_steps_a_parameter_goes_on_when_others_join",
        ),
    ),
    Fault(
        "state-saved-by-the-first-holder",
        "lightning_spindle.runtime.state:LocalisedModel.owner",
        lambda original: lambda self, name: self.held[name][0],
        (
            f"{CHECKPOINTS}::test_c09_the_file_is_a_plain_one",
            f"{CHECKPOINTS}::test_c09_a_divided_optimizer_resumes_anywhere",
        ),
    ),
    Fault(
        "planned-as-if-whole",
        "lightning_spindle.planner.problem:PlanningProblem.state_factor",
        bodies.returns(4.0),
        (
            f"{OWNERSHIP}::test_holders_divide_optimizer_state_in_the_planners_ledger",
            f"{OWNERSHIP}::test_what_fits_only_when_divided_is_planned",
        ),
    ),
    Fault(
        "simulated-as-if-whole",
        "lightning_spindle.costs.base:Costs.held_bytes",
        bodies.counts_all_as_stepped,
        (
            f"{OWNERSHIP}::test_dividing_lowers_the_memory_of_simulated_iterations",
            f"{OWNERSHIP}::test_a_divided_step_takes_half_of_the_time_and_then_the_broadcasts",
        ),
    ),
    Fault(
        "broadcasts-cost-nothing",
        "lightning_spindle.costs.base:Costs.broadcast_s",
        bodies.returns(0.0),
        (
            f"{OWNERSHIP}::test_a_divided_step_takes_half_of_the_time_and_then_the_broadcasts",
            f"{OWNERSHIP}::test_broadcasts_of_all_shares_take_as_long_as_gathering_them",
        ),
    ),
    Fault(
        "a-total-counts-on-every-rank",
        "lightning_spindle.runtime.session:TotalRun.foreign",
        bodies.returns([]),
        (
            f"{FREEZING}::test_freezing_a_weight_of_the_total",
            f"{WAYS}::test_loss_weight_that_a_task_uses_too",
        ),
    ),
    Fault(
        "optimizers-not-complete-for-callbacks",
        "lightning_spindle.strategy:SpindleStrategy._completely",
        bodies.passes_through(1),
        (f"{FREEZING}::test_freezing_and_unfreezing_in_the_fit",),
    ),
    Fault(
        "changed-attributes-not-noticed",
        "lightning_spindle.runtime.session:Step.outdated",
        bodies.returns([]),
        (
            f"{ATTRIBUTES}::test_attributes_that_a_callback_changes",
            f"{ATTRIBUTES}::test_attributes_of_a_module_of_its_own",
            f"{ATTRIBUTES}::test_attributes_that_change_in_every_step_are_refused_by_name",
        ),
    ),
    Fault(
        "variants-where-they-like",
        "lightning_spindle.program.placing:follow",
        bodies.forgets_keyword("within"),
        (f"{MISSING}::test_c16_an_optional_image",),
    ),
    Fault(
        "momentum-left-behind",
        "lightning_spindle.runtime.state:LocalisedOptimizer.grow",
        lambda original: lambda self, before, transport, device: self.localise(),
        (f"{MISSING}::test_c16_parameters_reach_the_rank_that_runs_the_whole_step",),
    ),
    Fault(
        "only-the-last-variant-summed",
        "lightning_spindle.runtime.training:Programs.of",
        bodies.knows_own_parameters_only,
        (f"{MISSING}::test_c16_with_accumulation",),
    ),
    Fault(
        "one-structure-for-all",
        "lightning_spindle.runtime.variants:Variants._code",
        bodies.returns(2),
        (f"{MISSING}::test_c16_an_optional_image", f"{MISSING}::test_c16_in_a_module_of_its_own"),
    ),
    Fault(
        "zeros-for-skipped-tasks",
        "lightning_spindle.capture.coarse:_CoarseBuilder.__call__",
        bodies.gives_zero_for_none,
        (f"{SKIPPED}::test_c37_one_task_skips",),
    ),
    Fault(
        "parameters-taken-for-frozen",
        "lightning_spindle.capture.tracer:StepTracer.is_trainable",
        bodies.returns(False),
        (f"{FREEZING}::test_a_step_that_looks_at_requires_grad",),
    ),
    Fault(
        "skipped-steps-refused",
        "lightning_spindle.runtime.skipping:allow_skipping",
        bodies.does_nothing,
        (f"{SKIPPED}::test_c37_all_tasks_skip", f"{SKIPPED}::test_c37_a_module_of_its_own_skips"),
    ),
    Fault(
        "windows-end-without-a-sum",
        "lightning_spindle.strategy:SpindleStrategy._skip",
        bodies.does_nothing,
        (f"{SKIPPED}::test_c37_all_tasks_skip",),
    ),
    Fault(
        "lightning-left-changed",
        "lightning_spindle.runtime.skipping:end_skipping",
        bodies.does_nothing,
        (f"{SKIPPED}::test_c37_lightning_is_left_as_it_was",),
    ),
    Fault(
        "row-lists-not-found",
        "lightning_spindle.capture.layout:_row_lists",
        bodies.returns(frozenset()),
        (
            f"{BATCHES}::test_c15_parts_make_the_batch",
            f"{BATCHES}::test_c15_strings_lists_flags_and_ragged_boxes_in_a_fit",
            f"{BATCHES}::test_c15_rows_belong_together_in_each_shard",
        ),
    ),
    Fault(
        "tuples-of-strings-taken-apart",
        "lightning_spindle.capture.trees:_is_strings",
        bodies.returns(False),
        (f"{BATCHES}::test_c15_tuples_of_strings_do_not_depend_on_the_rows",),
    ),
    Fault(
        "dataclasses-as-dicts",
        "lightning_spindle.capture.trees:_original",
        lambda original: lambda values, context: dict(zip(context[1], values, strict=True)),
        (f"{BATCHES}::test_c15_parts_make_the_batch",),
    ),
    Fault(
        "unlike-rows-not-noticed",
        "lightning_spindle.capture.pieces:BatchLayout.rows",
        bodies.counts_the_first_leaf,
        (f"{BATCHES}::test_c15_rows_that_do_not_agree_are_an_error_on_every_rank",),
    ),
    Fault(
        "buffers-of-norms-unseen",
        "lightning_spindle.capture.classify:_Classifier._buffers",
        bodies.returns({}),
        (f"{NORMS}::test_c43_statistics_are_those_of_the_whole_batch",),
    ),
    Fault(
        "written-buffers-unknown",
        "lightning_spindle.runtime.session:_written_buffers",
        bodies.returns({}),
        (f"{KINDS}::test_batch_norm_runs_whole_and_its_buffers_reach_validation",),
    ),
    Fault(
        "shards-drop-alike",
        "lightning_spindle.runtime.randomness:operator_randomness",
        bodies.changes_arguments(lambda device, seed, step, operator, row: (device, seed, step, operator, 0)),
        (f"{DROPOUT}::test_c45_masks_of_rows_differ",),
    ),
    Fault(
        "dropout-from-the-ranks-generator",
        "lightning_spindle.runtime.randomness:operator_randomness",
        bodies.returns(nullcontext()),
        (
            f"{DROPOUT}::test_c45_masks_of_rows_differ",
            f"{DROPOUT}::test_c45_an_operator_draws_from_a_generator_of_its_own",
        ),
    ),
    Fault(
        "operators-move-the-ranks-generator",
        "lightning_spindle.runtime.randomness:operator_randomness",
        bodies.leaves_seed_behind,
        (
            f"{DROPOUT}::test_c45_an_operator_draws_from_a_generator_of_its_own",
            f"{SAMPLERS}::test_c07_each_sample_once_an_epoch",
        ),
    ),
    Fault(
        "parameters-on-every-rank",
        "lightning_spindle.program:holders",
        bodies.replicates_parameters,
        (
            "tests/parity/test_work.py::test_tasks_apart",
            "tests/test_work.py::test_a_rank_holds_the_parameters_of_its_operators",
        ),
    ),
    Fault(
        "operators-run-twice",
        "lightning_spindle.runtime.session:_engine",
        bodies.runs_operators_twice,
        ("tests/parity/test_work.py::test_data_parallel",),
    ),
    Fault(
        "activations-kept-until-the-end",
        "lightning_spindle.runtime.engine:Engine._backward",
        bodies.keeps_activations,
        ("tests/runtime/test_memory.py::test_activations_are_freed_run_by_run",),
    ),
    Fault(
        "sent-tensors-kept",
        "lightning_spindle.runtime.messages:Messenger.finish",
        bodies.does_nothing,
        (
            "tests/runtime/test_memory.py::test_activations_are_freed_run_by_run",
            "tests/runtime/test_memory.py::test_forward_only_keeps_nothing",
        ),
    ),
    Fault(
        "every-shard-sees-all-rows",
        "lightning_spindle.program:ProgramRun.rows",
        bodies.gives_all_rows,
        (
            "tests/parity/test_work.py::test_data_parallel",
            "tests/test_work.py::test_rows_and_flops_are_the_plans",
            "tests/test_work.py::test_ranks_together_do_what_one_process_does",
        ),
    ),
    Fault(
        "every-process-draws-whole-batches",
        "datamodules.sharded:shard",
        bodies.passes_through(0),
        (
            "tests/test_benchmark.py::test_shards_partition_each_global_batch",
            "tests/test_benchmark.py::test_sharded_loaders_draw_the_batches_of_one_process",
            "tests/test_benchmark.py::test_systems_have_the_same_losses",
        ),
    ),
    Fault(
        "shards-gradient-not-rescaled",
        "tasks.global_batch:own_gradient",
        bodies.leaves_out_the_number_of_ranks,
        ("tests/test_benchmark.py::test_mean_of_shards_gradients_is_one_process_s",),
    ),
    Fault(
        "shards-contrasted-apart",
        "tasks.global_batch:GlobalRows.__call__",
        bodies.contrasts_own_rows,
        (
            "tests/test_benchmark.py::test_mean_of_shards_gradients_is_one_process_s",
            "tests/test_benchmark.py::test_systems_have_the_same_losses",
        ),
    ),
    Fault(
        "benchmark-takes-any-losses",
        "benchmarking.results:largest_difference",
        bodies.returns(0.0),
        (
            "tests/test_benchmark.py::test_other_losses_are_an_error_and_no_number",
            "tests/test_benchmark.py::test_differences_of_losses",
        ),
    ),
    Fault(
        "benchmark-jobs-inherit-launch-variables",
        "benchmarking.launch:_environment",
        bodies.gives_own_environment,
        ("tests/test_benchmark.py::test_a_job_inherits_no_launch_variables",),
    ),
    Fault(
        "benchmark-believes-the-number-of-ranks",
        "benchmarking.measured:_problem",
        bodies.returns(""),
        ("tests/test_benchmark.py::test_other_ranks_than_asked_for_are_an_error",),
    ),
    Fault(
        "benchmark-asks-one-rank-where-it-works",
        "benchmarking.job:gathered",
        bodies.changes_result(lambda folders: folders[:1]),
        ("tests/test_benchmark.py::test_ranks_in_different_folders_are_an_error",),
    ),
    Fault(
        "sweep-reports-every-attempt",
        "benchmarking.sweep:latest",
        bodies.passes_through(0),
        ("tests/test_simulated.py::test_a_sweep_has_one_tree_one_table_and_one_report",),
    ),
    Fault(
        "figures-of-all-tasks",
        "benchmarking.figures.suite:part_of",
        bodies.passes_through(0),
        ("tests/test_figures.py::test_results_are_of_the_cell_that_was_asked_for",),
    ),
    Fault(
        "figures-show-exposed-transfers-only",
        "benchmarking.figures.placement:transfer_share",
        bodies.returns(0.0),
        ("tests/test_figures.py::test_transfers_beside_computing_count",),
    ),
    Fault(
        "failure-leaves-no-word",
        "lightning_spindle.runtime.failures:Failures.report",
        bodies.does_nothing,
        ("tests/strategy/test_failures.py::test_one_rank_fails[forward-raise]",),
    ),
    Fault(
        "failure-breaks-no-connection",
        "lightning_spindle.runtime.transport:ProcessGroupTransport.break_off",
        bodies.does_nothing,
        ("tests/strategy/test_failures.py::test_failing_rank_that_goes_on_running",),
    ),
    Fault(
        "collectives-after-a-failure",
        "lightning_spindle.strategy:SpindleStrategy._interrupted",
        bodies.returns(False),
        ("tests/strategy/test_failures.py::test_after_an_exception",),
    ),
    Fault(
        "metrics-not-restored",
        "lightning_spindle.runtime.replay:restore_metrics",
        bodies.does_nothing,
        ("tests/strategy/test_failures.py::test_after_an_exception",),
    ),
    Fault(
        "full-model-not-named",
        "lightning_spindle.runtime.checks:add_hints",
        bodies.does_nothing,
        ("tests/strategy/test_failures.py::test_error_of_a_value_that_is_elsewhere_names_full_model",),
    ),
    Fault(
        "saving-alone-not-noticed",
        "lightning_spindle.runtime.objects:meet",
        bodies.does_nothing,
        ("tests/strategy/test_failures.py::test_saving_on_rank_0_alone[True]",),
    ),
    Fault(
        "agreement-not-required",
        "lightning_spindle.runtime.objects:require_agreement",
        bodies.does_nothing,
        ("tests/strategy/test_bad_input.py::test_models_that_differ_between_ranks",),
    ),
    Fault(
        "unlike-batches-not-noticed",
        "lightning_spindle.runtime.checks:require_same_data",
        bodies.does_nothing,
        ("tests/strategy/test_bad_input.py::test_ranks_that_draw_different_batches",),
    ),
    Fault(
        "unknown-keys-pass",
        "lightning_spindle.runtime.feeding:_require_known",
        bodies.does_nothing,
        ("tests/strategy/test_bad_input.py::test_loader_of_no_task",),
    ),
    Fault(
        "mixing-optimizer-passes",
        "lightning_spindle.runtime.checks:require_separable",
        bodies.does_nothing,
        ("tests/strategy/test_bad_input.py::test_model_that_is_refused",),
    ),
    Fault(
        "unsupported-options-pass",
        "lightning_spindle.runtime.checks:require_supported",
        bodies.does_nothing,
        (
            "tests/strategy/test_bad_input.py::test_option_that_is_refused",
            "tests/strategy/test_bad_input.py::test_model_that_is_refused",
        ),
    ),
    Fault(
        "live-ranks-not-counted",
        "lightning_spindle.runtime.checks:require_world",
        bodies.does_nothing,
        ("tests/strategy/test_bad_input.py::test_devices_that_are_not_the_live_ranks",),
    ),
    Fault(
        "accumulation-summed-every-step",
        "lightning_spindle.strategy:SpindleStrategy.block_backward_sync",
        bodies.gives_a_null_context,
        ("tests/strategy/test_life_cycle.py::test_gradient_accumulation",),
    ),
    Fault(
        "planner-bisection-returns-an-endpoint",
        "lightning_spindle.planner.allocation:continuous_optimum",
        bodies.stops_bisecting,
        (f"{PLANNER}/test_allocation.py::test_theorem_1",),
    ),
    Fault(
        "planner-rounding-dropped",
        "lightning_spindle.planner.allocation:round_layers",
        bodies.passes_through(0),
        (f"{PLANNER}/test_allocation.py::test_rounding_keeps_10a_and_moves_less_than_a_layer",),
    ),
    Fault(
        "planner-extension-skipped",
        "lightning_spindle.planner.scheduling:extend_resources_if_needed",
        bodies.passes_through(0),
        (f"{PLANNER}/test_scheduling.py::test_idle_devices_go_to_the_most_remaining_time",),
    ),
    Fault(
        "planner-stages-not-aligned",
        "lightning_spindle.planner.scheduling:align_time_span",
        bodies.passes_through(0),
        (f"{PLANNER}/test_scheduling.py::test_longer_tuples_are_dissected_to_the_shortest",),
    ),
    Fault(
        "planner-pins-ignored",
        "lightning_spindle.planner.scheduling:_one_for_each_pin",
        bodies.passes_through(0),
        (f"{PLANNER}/test_scheduling.py::test_pinned_metaops_are_never_in_one_stage",),
    ),
    Fault(
        "planner-memory-ignored",
        "lightning_spindle.planner.memory:Memory.fitting",
        bodies.passes_through(2),
        (
            f"{PLANNER}/test_placement.py::test_what_cannot_fit_is_refused_by_name",
            f"{PLANNER}/test_placement.py::test_backtracking_when_memory_fails",
        ),
    ),
    Fault(
        "placement-sequential",
        "lightning_spindle.planner.placement:place",
        bodies.places_sequentially,
        (
            f"{PLANNER}/test_placement.py::test_transfers_against_sequential_placement",
            f"{PLANNER}/test_placement.py::test_memory_is_balanced_where_communication_is_equal",
        ),
    ),
    Fault(
        "placement-not-improved",
        "lightning_spindle.planner.relabel:relabel",
        bodies.passes_through(0),
        (
            f"{PLANNER}/test_placement.py::test_transfers_against_sequential_placement",
            f"{PLANNER}/test_relabel.py::test_relabelling_spreads_what_grows_over_islands",
        ),
    ),
    Fault(
        "shards-in-the-order-of-devices",
        "lightning_spindle.planner.transfers:arranged",
        bodies.changes_result(lambda group: tuple(sorted(group))),
        (f"{PLANNER}/test_relabel.py::test_a_group_keeps_its_rows_where_they_are",),
    ),
    Fault(
        "planner-chosen-by-its-promise",
        "lightning_spindle.planner.choice:Workload.iteration_ms",
        lambda original: lambda self, plan: plan.makespan_ms,
        (f"{PLANNER}/test_choice.py::test_the_plan_that_looks_shorter_loses_where_it_runs_longer",),
    ),
    Fault(
        "level-barrier-not-told",
        "lightning_spindle.planner.losses:without_transfers_ms",
        lambda original: lambda runs, problem: 0.0,
        (f"{PLANNER}/test_losses.py::test_level_barrier_is_seen",),
    ),
    Fault(
        "tasks-scalars-weigh-one",
        "lightning_spindle.runtime.outcome:Outcome.seeds",
        bodies.changes_result(lambda seeds: {value: seed * 0 + 1 for value, seed in seeds.items()}),
        (f"{WAYS}::test_dict_of_batches",),
    ),
    Fault(
        "total-weights-counted-by-every-rank",
        "lightning_spindle.runtime.session:_total_run",
        bodies.counts_total_on_every_rank,
        (f"{WAYS}::test_loss_weight_that_a_task_uses_too",),
    ),
    Fault(
        "batch-size-not-guessed-as-lightning-does",
        "lightning_spindle.runtime.arranging:guessed_rows",
        bodies.returns(1),
        (f"{WAYS}::test_dict_of_batches", f"{WAYS}::test_loader_that_ends"),
    ),
    Fault(
        "all-tasks-taken-as-there",
        "lightning_spindle.runtime.arranging:_sets",
        bodies.changes_result(lambda sets: sets[:1]),
        (f"{WAYS}::test_loader_that_ends",),
    ),
    Fault(
        "rows-of-two-tasks-joined",
        "lightning_spindle.capture.joint:_require_scalars",
        bodies.does_nothing,
        (f"{WAYS}::test_rows_of_two_tasks_that_meet",),
    ),
    Fault(
        "loaders-told-apart-by-nothing",
        "lightning_spindle.capture.arrangement:Arrangement.dataloader_idx",
        bodies.returns(None),
        (f"{WAYS}::test_one_task",),
    ),
    Fault(
        "flows-take-the-first-source",
        "lightning_spindle.task:Flow.__getitem__",
        bodies.passes_through(0),
        ("tests/test_task.py::test_flows_of_several_tasks",),
    ),
    Fault(
        "efficiency-that-does-not-grow",
        "lightning_spindle.costs.devices:_computing_s",
        bodies.computes_at_half_peak,
        (
            "tests/test_costs.py::test_the_batch_curve_agrees_with_its_profile_within_10_percent",
            "tests/test_costs.py::test_layers_agree_with_public_profiles_within_10_percent",
            "tests/test_costs.py::test_efficiency_grows_with_the_batch_and_never_falls_with_the_device",
        ),
    ),
    Fault(
        "members-of-an-island-do-not-share-its-uplink",
        "lightning_spindle.cluster:Cluster.crossing_bytes_per_s",
        bodies.returns(float("inf")),
        ("tests/test_costs.py::test_sums_agree_with_measured_bus_bandwidths_within_5_percent",),
    ),
    Fault(
        "uplinks-not-shared",
        "lightning_spindle.simulate.links:Links._speed",
        bodies.returns(1.0),
        (
            "tests/test_links.py::test_messages_over_one_uplink_share_it",
            "tests/test_links.py::test_a_message_is_fast_again_when_it_is_alone",
            "tests/test_links.py::test_a_sum_and_a_message_share_an_uplink",
        ),
    ),
    Fault(
        "gradients-never-cleared",
        "lightning_spindle.simulate.memory:Memory.gradients_cleared",
        bodies.does_nothing,
        ("tests/test_simulate.py::test_memory_holds_parameters_gradients_and_activations",),
    ),
    Fault(
        "attention-of-cpus-costs-nothing",
        "lightning_spindle.capture.flops:_attention",
        bodies.returns(0),
        (f"{SHAPES}::test_attention_is_counted_on_cpus_too",),
    ),
    Fault(
        "twins-not-held-against-the-model",
        "lightning_spindle.capture.shapes:_in_words",
        bodies.returns("the same"),
        (f"{SHAPES}::test_another_model_is_no_twin",),
    ),
    Fault(
        "entries-of-a-row-are-the-twin-s",
        "lightning_spindle.capture.shapes:_of_shape",
        bodies.passes_through(0),
        (f"{SHAPES}::test_entries_of_a_row_are_the_model_s",),
    ),
    Fault(
        "shared-parameters-by-each-task-s-name",
        "lightning_spindle.capture.shapes:_first_names",
        bodies.changes_result(lambda names: {name: name for name in names}),
        (f"{SHAPES}::test_a_twin_gives_what_the_model_itself_would",),
    ),
    Fault(
        "padding-counted-as-tokens",
        "tasks.generative:token_mean",
        bodies.changes_arguments(
            lambda logits, tokens, lengths: (logits, tokens, lengths * 0 + tokens.shape[1])
        ),
        ("tests/test_workloads.py::test_token_mean_counts_tokens_not_rows",),
    ),
    Fault(
        "mean-of-tokens-not-rescaled",
        "tasks.global_batch:_Sums.backward",
        bodies.passes_through(1),
        ("tests/test_benchmark.py::test_mean_of_shards_gradients_is_one_process_s",),
    ),
    Fault(
        "losses-of-all-rows-split",
        "lightning_spindle.capture.grouping:Group.layout",
        bodies.splits_everything,
        ("tests/parity/test_workloads.py::test_small_workloads",),
    ),
    Fault(
        "operators-simulated-without-their-inputs",
        "lightning_spindle.simulate.prepared:_message",
        bodies.needs_no_messages,
        (
            "tests/test_emulate.py::test_simulated_and_emulated_iterations_of_a_workload_agree",
            "tests/test_sleeping.py",
        ),
    ),
    Fault(
        "sums-simulated-for-nothing",
        "lightning_spindle.simulate.prepared:_sum",
        bodies.does_nothing,
        ("tests/test_emulate.py::test_simulated_and_emulated_iterations_of_a_workload_agree",),
    ),
    Fault(
        "emulated-messages-without-bytes",
        "lightning_spindle.emulate.transport:EmulatedTransport._bytes",
        bodies.returns(0.0),
        ("tests/test_emulate.py::test_clocks_show_what_is_worked_out_by_hand",),
    ),
    Fault(
        "emulated-backward-takes-no-time",
        "lightning_spindle.emulate.stubs:_Pass.backward",
        bodies.gives_no_gradients,
        ("tests/test_emulate.py::test_clocks_show_what_is_worked_out_by_hand",),
    ),
)


def apply_fault(name: str, faults: Iterable[Fault] = FAULTS) -> None:
    """Replace the target of the fault ``name`` in this process and in the Python processes it starts."""
    fault = next((fault for fault in faults if fault.name == name), None)
    if fault is None:
        raise ValueError(f"no fault is named {name!r}; there are {[f.name for f in faults]}")
    module_name, _, qualname = fault.target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *path, attribute = qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    held = vars(owner)[attribute]
    if isinstance(held, staticmethod | classmethod):
        replacement: Any = type(held)(_marked(fault.body(held.__func__), held.__func__))
    elif isinstance(held, property):
        assert held.fget is not None
        replacement = property(_marked(fault.body(held.fget), held.fget), held.fset, held.fdel)
    else:
        replacement = _marked(fault.body(held), held)
    setattr(owner, attribute, replacement)
    _exchange_in_modules(held, replacement)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(SITE) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, paths)])


def _marked(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement, leaving a mark for the runner when it is called."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if mark := os.environ.get("SPINDLE_FAULT_REACHED"):
            Path(mark).touch()
        return replacement(*args, **kwargs)

    return call


def _exchange_in_modules(held: Any, replacement: Any) -> None:
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in OURS:
            continue
        for key, value in list(vars(module).items()):
            if value is held:
                setattr(module, key, replacement)
            elif type(value) is dict:
                value.update({k: replacement for k, v in value.items() if v is held})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a fault's tests said; ``problem`` is empty if every one of them turned red."""

    fault: Fault
    problem: str
    seconds: float
    output: str


def judge(fault: Fault, root: Path = ROOT, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Run the fault's tests with the fault in place."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        mark = Path(folder) / "reached"
        environment = {"SPINDLE_FAULT": fault.name, "SPINDLE_FAULT_REACHED": str(mark)}
        code, output = _pytest(fault.tests, environment, root, timeout_s)
        reached = mark.exists()
    failed = [line.split()[1] for line in output.splitlines() if line.startswith("FAILED ")]
    green = [test for test in fault.tests if not any(_is_case(node, test) for node in failed)]
    if code is None:
        problem = f"still running after {timeout_s:g} s"
    elif code not in (0, 1):
        problem = f"pytest ended with {code}, not with a failed test"
    elif green:
        problem = f"not noticed by {', '.join(green)}" + ("" if reached else " (never called)")
    elif not reached:
        problem = "red, but the replacement was never called"
    else:
        problem = ""
    return Verdict(fault, problem, time.monotonic() - start, output)


def _is_case(node: str, test: str) -> bool:
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def _pytest(
    tests: Sequence[str], environment: dict[str, str], root: Path, timeout_s: float
) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rfE", "--tb=short", "--color=no"]
    command += ["-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", help="faults to try (default: all)")
    parser.add_argument("--list", action="store_true", help="list the faults and stop")
    parser.add_argument("--no-green", action="store_true", help="do not check first that the tests are green")
    parser.add_argument("--workers", type=int, default=2, help="faults tried at the same time (default: 2)")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; see --list")
    chosen = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    width = max(len(fault.name) for fault in chosen)
    if options.list:
        for fault in chosen:
            print(f"{fault.name:{width}}  {fault.target}  {' '.join(fault.tests)}")
        return 0
    if not options.no_green:
        tests = sorted({test for fault in chosen for test in fault.tests})
        code, output = _pytest(tests, {}, ROOT, TIMEOUT_S * 4)
        if code != 0:
            print(output, "\nthe tests are not green without a fault", sep="")
            return 1
        print(f"{'(no fault)':{width}}  green", flush=True)
    missed = 0
    with ThreadPoolExecutor(max(1, options.workers)) as pool:
        for verdict in pool.map(judge, chosen):
            missed += bool(verdict.problem)
            head = f"{verdict.fault.name:{width}}  {verdict.problem or 'red'}"
            print(f"{head}  ({verdict.seconds:.0f} s)", flush=True)
            if verdict.problem:
                print("\n".join(f"    {line}" for line in verdict.output.splitlines()[-15:]), flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults turned their tests red")
    return 1 if missed else 0


if __name__ == "__main__":
    # Not as __main__: the faults' own module must be the one that test processes import.
    from tests.faults import main as imported_main

    sys.exit(imported_main())
