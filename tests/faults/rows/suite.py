"""Faults in tasks, data and the benchmark suite."""

from tests.faults import bodies
from tests.faults.bodies import suite as broken
from tests.faults.fault import Fault

FAULTS = (
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
        broken.leaves_out_the_number_of_ranks,
        ("tests/test_benchmark.py::test_mean_of_shards_gradients_is_one_process_s",),
    ),
    Fault(
        "shards-contrasted-apart",
        "tasks.global_batch:GlobalRows.__call__",
        broken.contrasts_own_rows,
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
        broken.gives_own_environment,
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
        "emulated-iterations-may-be-anything",
        "benchmarking.emulated:_too_far",
        bodies.returns(""),
        ("tests/test_simulated.py::test_emulated_iterations_stand_beside_simulated_ones",),
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
)
