"""What the Spindle paper reports (arXiv 2409.03365), to hold ours against.

Speedups are read from the bars of its later version's figure 8 and uncertain in the last digit.
"""

SPEEDUPS: dict[tuple[str, int, int, str], float] = {
    (workload, tasks, devices, system): value
    for (workload, tasks, devices), values in {
        ("multitask_clip", 4, 8): (1.21, 0.96, 1.09, 1.02),
        ("multitask_clip", 4, 16): (1.22, 1.00, 1.08, 1.05),
        ("multitask_clip", 4, 32): (1.52, 1.36, 1.20, 1.09),
        ("multitask_clip", 7, 8): (1.31, None, 1.09, 1.02),
        ("multitask_clip", 7, 16): (1.26, 0.84, 1.09, 1.04),
        ("multitask_clip", 7, 32): (1.54, 1.15, 1.17, 1.01),
        ("multitask_clip", 10, 8): (1.37, None, 1.08, 1.01),
        ("multitask_clip", 10, 16): (1.33, 0.93, 1.08, 1.02),
        ("multitask_clip", 10, 32): (1.71, 1.38, 1.14, 1.05),
        ("ofasys", 4, 8): (1.53, 1.23, 1.01, 0.99),
        ("ofasys", 4, 16): (1.42, 1.20, 1.01, 0.98),
        ("ofasys", 4, 32): (1.51, 1.28, 1.04, 1.01),
        ("ofasys", 7, 8): (1.71, 1.17, 1.07, 1.02),
        ("ofasys", 7, 16): (1.43, 1.12, 1.03, 0.98),
        ("ofasys", 7, 32): (1.33, 1.13, 1.06, 1.01),
        ("qwen_val", 3, 32): (1.16, 1.04, 1.04, 1.02),
        ("qwen_val", 3, 64): (1.63, 1.44, 1.11, 1.03),
    }.items()
    for system, value in zip(("spindle", "optimus", "stmm", "megatron"), values, strict=True)
    if value is not None
}
"""Over DeepSpeed, by workload, tasks, devices and system: 17 cells (figure 8)."""

GROWTH: dict[tuple[str, int, int, int, str], float] = {
    ("multitask_clip", 4, 16, 32, "spindle"): 1.45,
    ("multitask_clip", 4, 16, 32, "megatron"): 1.21,
    ("multitask_clip", 4, 16, 32, "deepspeed"): 1.17,
    ("qwen_val", 3, 32, 64, "spindle"): 1.78,
    ("qwen_val", 3, 32, 64, "megatron"): 1.27,
    ("qwen_val", 3, 32, 64, "deepspeed"): 1.26,
}
"""A system's iteration on fewer devices over that on more (section 5.2)."""

OVER_C_STAR: dict[tuple[str, int, int], float] = {
    ("multitask_clip", 4, 16): 1.02,
    ("multitask_clip", 7, 16): 1.05,
    ("multitask_clip", 10, 16): 1.07,
    ("multitask_clip", 4, 32): 1.07,
    ("multitask_clip", 7, 32): 1.07,
    ("multitask_clip", 10, 32): 1.07,
}
"""Iteration time over C* (figure 11)."""

TRANSFER_SHARES: dict[tuple[str, int, int], tuple[float, float]] = {
    ("multitask_clip", 10, 8): (0.032, 0.097),
    ("multitask_clip", 10, 16): (0.057, 0.27),
    ("ofasys", 7, 8): (0.038, 0.103),
    ("ofasys", 7, 16): (0.062, 0.206),
    ("qwen_val", 3, 32): (0.017, 0.061),
    ("qwen_val", 3, 64): (0.025, 0.087),
}
"""Send and receive as a share of the iteration, under Spindle's placement and sequential placement."""

PLANNING_S = 3.0
"""Planning takes less in all experiments (section 5.5.1)."""
SINGLE_TASK_SPEEDUP = 1.48
"""The most that Spindle gains on one task (appendix C)."""
