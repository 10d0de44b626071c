"""Faults in what steps that run as one operator do to the model."""

from contextlib import nullcontext
from dataclasses import replace

from tests.faults import bodies
from tests.faults.fault import Fault

REMEMBERED = "tests/cases/test_remembered.py"
UNREMEMBERED = "tests/cases/test_unremembered.py"
SEEN = f"{REMEMBERED}::test_what_a_step_remembers_is_seen_by_the_hooks_of_every_rank"
REFUSED = f"{UNREMEMBERED}::test_what_other_ranks_cannot_have_is_refused"
METRICS = f"{REMEMBERED}::test_metrics_that_a_step_updates_are_those_of_one_process"
WRITTEN = "tests/cases/test_step_loggers.py::test_what_a_step_writes_to_loggers_is_written_by_rank_0"
CONTENTS = "tests/capture/test_contents.py"
DONE_ELSEWHERE = f"{CONTENTS}::test_changes_done_to_another_copy_make_it_the_same"
PUT_BACK = f"{CONTENTS}::test_changes_are_put_back"

FAULTS = (
    Fault(
        "changes-of-attributes-not-told",
        "lightning_spindle.runtime.telling:take_over",
        bodies.does_nothing,
        (f"{SEEN}[2]", METRICS),
    ),
    Fault(
        "entries-of-containers-not-compared",
        "lightning_spindle.capture.contents:_same_entries",
        bodies.returns(True),
        (f"{SEEN}[2]", f"{DONE_ELSEWHERE}[filled-counted]", f"{PUT_BACK}[filled-counted]"),
    ),
    Fault(
        "containers-in-containers-not-looked-at",
        "lightning_spindle.capture.contents:_is_container",
        bodies.returns(False),
        (f"{SEEN}[2]", f"{DONE_ELSEWHERE}[filled-counted]", f"{PUT_BACK}[filled-counted]"),
    ),
    Fault(
        "written-attributes-not-seen",
        "lightning_spindle.capture.contents:Contents._of_tensor",
        bodies.returns(()),
        (f"{SEEN}[2]", f"{DONE_ELSEWHERE}[written-counted]", f"{REFUSED}[Hidden]"),
    ),
    Fault(
        "writes-in-inference-mode-not-seen",
        "lightning_spindle.capture.contents:Contents.watched",
        lambda original: lambda contents, thoroughly: nullcontext(),
        (f"{DONE_ELSEWHERE}[written-inference]", f"{REFUSED}[HiddenInFits]"),
    ),
    Fault(
        "parameters-in-attributes-copied",
        "lightning_spindle.capture.contents:Contents.places",
        bodies.changes_result(lambda places: {i: p for i, p in places.items() if p.kind != "parameter"}),
        (f"{REMEMBERED}::test_what_is_kept_in_several_places_is_the_same_there",),
    ),
    Fault(
        "containers-of-other-ranks-not-filled",
        "lightning_spindle.capture.changes:fill",
        bodies.does_nothing,
        (f"{SEEN}[2]",),
    ),
    Fault(
        "attributes-of-other-ranks-trusted",
        "lightning_spindle.capture.changes:apply",
        bodies.changes_arguments(
            lambda changes: (
                [replace(c, count=len(c.target)) if c.kind.value == "fill" else c for c in changes],
            )
        ),
        (
            f"{REFUSED}[Unlike]",
            f"{REFUSED}[UnlikeToo]",
            f"{CONTENTS}::test_a_copy_that_was_not_the_same_is_an_error",
        ),
    ),
    Fault(
        "what-is-registered-not-compared",
        "lightning_spindle.capture.inspecting:_different",
        bodies.returns(()),
        (f"{REFUSED}[Late]",),
    ),
    Fault(
        "what-two-steps-set-not-compared",
        "lightning_spindle.runtime.telling:_refuse_twice",
        bodies.does_nothing,
        (f"{UNREMEMBERED}::test_what_two_tasks_set_differently_is_refused",),
    ),
    Fault(
        "modules-of-two-tasks-not-known",
        "lightning_spindle.capture.coarse:_others_modules",
        bodies.returns(frozenset()),
        (
            f"{UNREMEMBERED}::test_changes_in_a_module_of_two_tasks_are_refused",
            f"{UNREMEMBERED}::test_changes_in_what_two_tasks_hold_are_refused",
        ),
    ),
    Fault(
        "caches-taken-for-changes",
        "lightning_spindle.capture.contents:_Own.changes",
        lambda original: lambda *given: (replace(c, fresh=False) for c in original(*given)),
        (f"{UNREMEMBERED}::test_a_cache_in_a_module_of_two_tasks_is_filled",),
    ),
    Fault(
        "steps-know-their-rank",
        "lightning_spindle.capture.alone:alone",
        lambda original: lambda trainer, model: nullcontext([]),
        (WRITTEN,),
    ),
    Fault(
        "loggers-in-attributes-written-to",
        "lightning_spindle.capture.alone:_held",
        bodies.returns(()),
        (WRITTEN,),
    ),
    Fault(
        "what-loggers-are-given-changes-later",
        "lightning_spindle.capture.alone:_copied",
        bodies.passes_through(0),
        (WRITTEN,),
    ),
    Fault(
        "calls-of-loggers-lost",
        "lightning_spindle.capture.alone:make_calls",
        bodies.does_nothing,
        (WRITTEN,),
    ),
    Fault(
        "metrics-logged-by-name",
        "lightning_spindle.runtime.telling:logged",
        bodies.passes_through(1),
        (METRICS,),
    ),
)
