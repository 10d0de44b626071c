"""What each node of a trace does to rows, found by running it on the whole batch and on parts of it.

Legend: a *cut* takes the rows of the batch apart into parts of unlike size, one of them with its rows
permuted. A node is judged locally: its inputs are the whole run's values, of which a part sees its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_spindle import functional
from lightning_spindle.capture import patches
from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.evaluate import (
    Deterministic,
    NoisyParameters,
    classification,
    copied_buffers,
    filled,
    perturbed,
    run_node,
    with_tensors,
)
from lightning_spindle.capture.kinds import (
    ALL_ROWS,
    GATHERED,
    PARTS,
    PERMUTED,
    ROWS,
    STATIC,
    SUM,
    WHOLE,
    Kind,
    alike,
    kind_of,
    of_scalar,
    permuted_kind,
)
from lightning_spindle.capture.layout import pick, pick_rows
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.capture.provenance import independent
from lightning_spindle.capture.step import StepTrace
from lightning_spindle.capture.stirred import stirred, without_coincidence
from lightning_spindle.graph import Reading

_SHAPE_ONLY = {"size", "dim", "numel", "stride", "ndimension", "is_floating_point", "new_zeros", "new_ones",
               "new_full", "new_empty", "new_tensor", "get_device", "is_complex", "nelement"}  # fmt: skip
_SHAPE_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "itemsize"}


@dataclass
class Info:
    """What is known of a node: a kind for each leaf of its value.

    ``coupling``: it needs all rows at once, whatever its value's kind. ``writes``: buffers that
    it changes. ``draws``: it draws random numbers. ``reading``: what a part sees of its value.
    ``counts``: its value is the numbers of rows.
    """

    kinds: list[Kind]
    coupling: bool = False
    draws: bool = False
    writes: tuple[str, ...] = ()
    dynamic: bool = False
    reading: Reading = Reading.OWN
    counts: bool = False

    @property
    def tags(self) -> set[str]:
        return {kind.tag for kind in self.kinds}


def classify(trace: StepTrace, leaves: Sequence[Any], layout: BatchLayout) -> dict[fx.Node, Info]:
    """Every node's ``Info``, in float64 with noisy parameters; in the model's own type where that fails."""
    rows = layout.rows(list(leaves))
    example = pick_rows(leaves, layout, [row % rows for row in ALL_ROWS])
    attempts: list[tuple[torch.dtype | None, bool]] = [
        (torch.float64, True), (None, True), (torch.float64, False), (None, False),
    ]  # fmt: skip
    failure: Exception | None = None
    for dtype, coincidences in attempts:
        given = perturbed(example, dtype) if coincidences else _cast(example, dtype)
        try:
            return _classified(trace, given, layout, dtype)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _cast(leaves: list[Any], dtype: torch.dtype | None) -> list[Any]:
    if dtype is None:
        return leaves
    return [v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in leaves]


def _classified(
    trace: StepTrace, leaves: list[Any], layout: BatchLayout, dtype: torch.dtype | None
) -> dict[fx.Node, Info]:
    static_anchors: set[fx.Node] = set()
    while True:
        classifier = _Classifier(trace, leaves, layout, dtype, static_anchors)
        with classification(classifier.mode, dtype):
            with_tensors(trace.holder, copied_buffers(trace.holder, dtype), classifier.run)
        missed = classifier.before_static_blocks() - static_anchors
        if not missed:
            return classifier.infos
        static_anchors |= missed


@dataclass
class _Classifier:
    trace: StepTrace
    leaves: list[Any]
    layout: BatchLayout
    dtype: torch.dtype | None
    static_anchors: set[fx.Node]
    mode: Deterministic = field(default_factory=Deterministic)
    infos: dict[fx.Node, Info] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    own: dict[tuple[int, ...], dict[fx.Node, Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Classify all nodes in order."""
        self.own = {part: {} for part in (*PARTS, PERMUTED)}
        noisy = NoisyParameters(self.trace.holder, self.dtype)
        leaf_of = {node: i for i, node in enumerate(self.trace.leaves) if node is not None}
        for node in self.trace.graph.nodes:
            if node.op == "placeholder":
                i = leaf_of.get(node)
                self.values[node] = 0 if i is None else self.leaves[i]
                of = None if i is None else self.layout.leaves[i]
                kind = STATIC if of is None or of.dim is None else Kind("rows", of.dim, of.per_row)
                self.infos[node] = Info([kind] * len(tree_flatten(self.values[node])[0]))
                if isinstance(self.values[node], list):
                    self.infos[node] = Info([STATIC if of is None or of.dim is None else WHOLE])
            elif node.op != "output":
                with noisy.of(node):
                    self._classify(node)

    # ------------------------------------------------------------------------------------- one node
    def _classify(self, node: fx.Node) -> None:
        self.mode.drew, self.mode.rows = False, ROWS
        writes, restore = self._run_whole(node)
        flat, _ = tree_flatten(self.values[node])
        inputs = {tag for n in node.all_input_nodes for tag in self.infos[n].tags}
        info = Info([], draws=self.mode.drew, writes=writes)
        self.infos[node] = info
        if self._runs_everywhere(node):
            info.kinds = [WHOLE] * len(flat)
        elif node.target is functional.batch_rows and self._given(node) == Kind("rows", 0, 1):
            info.kinds, info.counts = [Kind("rows", 0, 1)], True
        elif (reading := self._reading(node)) is not Reading.OWN:
            info.kinds, info.reading = [GATHERED], reading
        elif self._is_static_entry(node):
            info.kinds = [STATIC] * len(flat)
        elif not inputs - {"static"}:
            alone = info.draws or node in self.static_anchors or self.is_block(node)
            info.kinds, info.coupling = [WHOLE if alone else STATIC] * len(flat), info.draws
        elif "gathered" in inputs and not inputs - {"gathered", "static"}:
            info.kinds, info.coupling = [GATHERED] * len(flat), info.draws
        elif "whole" in inputs and not inputs - {"whole", "static", "size", "gathered"}:
            info.kinds = [WHOLE] * len(flat)
            self._run_part(node, PERMUTED, restore)
        else:
            self._judge(node, info, flat, inputs, restore)
        if isinstance(self.values[node], torch.Tensor) and info.kinds[0].tag == "rows":
            assert info.kinds[0].dim is not None
            self.values[node] = without_coincidence(flat[0], info.kinds[0].dim)
        if writes:
            info.coupling = True
            restore(after=True)

    def _judge(
        self, node: fx.Node, info: Info, flat: list[Any], inputs: set[str], restore: Callable[..., None]
    ) -> None:
        parts = [self._run_part(node, part, restore) for part in PARTS]
        shapes_only = not inputs - {"static", "size"} or _reads_shapes(node, self.infos)
        kept = not (info.draws or self._is_anchor(node))
        kinds: list[Kind | None] = [None] * len(flat)
        # What a module does that cannot be traced may hang on all rows' values (``if x.sum() > 0``), also
        # where these parts happen to agree.
        opaque = node.op == "call_module" and node.target in self.trace.opaque and "rows" in inputs
        if not opaque and all(part is not None and len(part) == len(flat) for part in parts):
            for i, leaf in enumerate(flat):
                kinds[i] = kind_of(leaf, [part[i] for part in parts if part is not None], shapes_only, kept)
            if node.op == "call_module" and None in kinds and not info.writes:
                kinds = self._judge_independent(
                    node, kinds, flat, [part for part in parts if part is not None]
                )
        if node.target is patches.as_scalar and isinstance(node.args[0], fx.Node):
            kinds = [of_scalar(kinds[0], self.infos[node.args[0]].kinds)]
        found = [kind for kind in kinds if kind is not None]
        if len(flat) == 1 and not found and not info.writes and not opaque:
            found = self._judge_stirred(node, flat[0], parts)
        if len(found) < len(flat) or (
            "rows" in {k.tag for k in found} and {k.tag for k in found} & {"mean", "sum"}
        ):
            info.coupling = True
            self._run_part(node, PERMUTED, restore)
            permuted = self.own[PERMUTED].get(node)
            other = tree_flatten(permuted)[0] if node in self.own[PERMUTED] else [None] * len(flat)
            info.kinds = [permuted_kind(a, b) for a, b in zip(flat, other, strict=True)]
            return
        info.kinds = found
        if {k.tag for k in found} & {"mean", "sum"}:
            self._run_part(node, PERMUTED, restore)

    def _judge_independent(
        self, node: fx.Node, kinds: list[Kind | None], flat: list[Any], parts: list[list[Any]]
    ) -> list[Kind | None]:
        """What a module gives beside its rows (a table of positions): static where no row can show in it."""
        same = [
            kind is None and all(alike(leaf, part[i]) for part in parts)
            for i, (kind, leaf) in enumerate(zip(kinds, flat, strict=True))
        ]
        given = {n: tree_map(_cloned, self.values[n]) for n in node.all_input_nodes}
        moving = [v for n in given for v in self._moving(n, given[n])]
        if not any(same) or not all(isinstance(v, torch.Tensor) for v in moving):
            return kinds
        args, kwargs = filled(node, given.__getitem__)
        try:
            with self.mode.suspended():
                free = independent(
                    lambda: run_node(self.trace.holder, node, args, kwargs, self.dtype), moving
                )
        except Exception:
            return kinds
        return [STATIC if a and b else kind for kind, a, b in zip(kinds, same, free, strict=True)]

    def _moving(self, node: fx.Node, value: Any) -> list[Any]:
        """The leaves of a value of ``node`` that other rows change."""
        leaves, kinds = tree_flatten(value)[0], self.infos[node].kinds
        if len(kinds) < len(leaves):  # a list with an entry a row
            return [value]
        return [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind != STATIC]

    def _judge_stirred(self, node: fx.Node, whole: Any, parts: list[list[Any] | None]) -> list[Kind]:
        """Where all parts happen to give the same (an accuracy of zero), other inputs tell."""
        if not all(part is not None and len(part) == 1 and alike(whole, part[0]) for part in parts):
            return []
        inputs = {n: stirred(self.values[n], self.infos[n].kinds) for n in node.all_input_nodes}
        values = []
        try:
            for part in (ALL_ROWS, *PARTS):
                given = {n: self._stirred_value(n, stir, part) for n, stir in inputs.items()}
                args, kwargs = filled(node, given.__getitem__)
                values.append(run_node(self.trace.holder, node, args, kwargs, self.dtype))
        except Exception:
            return []
        same = all(alike(values[0], value) for value in values)
        kind = None if same else kind_of(values[0], values[1:], shapes_only=False, kept=False)
        return [] if kind is None else [kind]

    def _stirred_value(self, node: fx.Node, stir: Any, part: tuple[int, ...]) -> Any:
        if stir is not None:
            return stir(part)
        return self.values[node] if part is ALL_ROWS else self._part_value(node, part)

    # ------------------------------------------------------------------------------------- running
    def _run_whole(self, node: fx.Node) -> tuple[tuple[str, ...], Callable[..., None]]:
        buffers = self._buffers(node)
        before = {name: (b, b._version, b.clone()) for name, b in buffers.items()}
        args, kwargs = filled(node, lambda n: self.values[n])
        self.values[node] = run_node(self.trace.holder, node, args, kwargs, self.dtype)
        now = self._buffers(node)
        changed = tuple(n for n, b in now.items() if b is not before[n][0] or b._version != before[n][1])
        afterwards = {name: now[name].clone() for name in changed}

        def restore(after: bool = False) -> None:
            for name in changed:
                now[name].copy_(afterwards[name] if after else before[name][2])

        return changed, restore

    def _buffers(self, node: fx.Node) -> dict[str, torch.Tensor]:
        names: dict[str, torch.Tensor] = {}
        if node.op == "call_module":
            module = self.trace.holder.get_submodule(str(node.target))
            if not is_metric(module):
                names = {f"{node.target}.{name}": b for name, b in module.named_buffers()}
        elif node.op != "get_attr":
            holder_buffers = dict(self.trace.holder.named_buffers())
            for n in node.all_input_nodes:
                if n.op == "get_attr" and str(n.target) in holder_buffers:
                    names[str(n.target)] = holder_buffers[str(n.target)]
        return names

    def _run_part(
        self, node: fx.Node, part: tuple[int, ...], restore: Callable[..., None]
    ) -> list[Any] | None:
        """The flat value of ``node`` on the rows of ``part``; None where it cannot be run on them."""
        self.mode.rows = len(part)
        restore()
        try:
            args, kwargs = filled(node, lambda n: self._part_value(n, part))
            value = run_node(self.trace.holder, node, args, kwargs, self.dtype)
        except Exception:
            return None
        self.own[part][node] = value
        return tree_flatten(value)[0]

    def _part_value(self, node: fx.Node, part: tuple[int, ...]) -> Any:
        if node.op == "placeholder" and isinstance(self.values[node], list):
            rows = self.layout.leaves[self.trace.leaves.index(node)]
            return pick(self.values[node], rows.dim, rows.per_row, part)
        whole, spec = tree_flatten(self.values[node])
        own: list[Any] | None = tree_flatten(self.own[part][node])[0] if node in self.own[part] else None
        leaves = []
        for i, (leaf, kind) in enumerate(zip(whole, self.infos[node].kinds, strict=True)):
            if kind.tag == "rows":
                leaves.append(pick(leaf, kind.dim, kind.per_row, part))
            elif kind.tag in ("static", "gathered") or (kind.tag == "whole" and part is not PERMUTED):
                leaves.append(leaf)
            elif own is None:
                raise RuntimeError(f"{node} has no value for a part of the rows")
            else:
                leaves.append(own[i])
        return tree_unflatten(leaves, spec)

    # ------------------------------------------------------------------------------------- questions
    def _module(self, node: fx.Node) -> Any:
        return self.trace.holder.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _runs_everywhere(self, node: fx.Node) -> bool:
        return node.target in (patches.update_metric, patches.given) or is_metric(self._module(node))

    def _given(self, node: fx.Node) -> Kind | None:
        """The kind of the one tensor that ``node`` is given."""
        kinds = [kind for n in node.all_input_nodes for kind in self.infos[n].kinds]
        return kinds[0] if len(kinds) == 1 else None

    def _reading(self, node: fx.Node) -> Reading:
        """What each part is to see of the value of ``node``; gathering what has no rows changes nothing."""
        given = self._given(node)
        if given is not None and node.target is functional.gather_batch and given.tag == "rows":
            return Reading.GATHERED
        sums = node.target is functional.batch_sum and given == SUM
        if sums and self._is_plain_sum(node.all_input_nodes[0]):
            return Reading.SUMMED
        return Reading.OWN

    def _is_static_entry(self, node: fx.Node) -> bool:
        """Whether ``node`` takes what is static out of a tuple, list or dict that has more in it."""
        if node.target is not patches.operator_getitem or not isinstance(node.args[1], (int, str)):
            return False
        given = node.args[0]
        if not isinstance(given, fx.Node) or type(self.values[given]) not in (tuple, list, dict):
            return False
        leaves, spec = tree_flatten(self.values[given])
        if not len(leaves) == len(self.infos[given].kinds) > 1:
            return False
        entry = tree_unflatten(self.infos[given].kinds, spec)[node.args[1]]
        return all(kind == STATIC for kind in tree_flatten(entry)[0])

    def _is_plain_sum(self, node: fx.Node) -> bool:
        """Whether a sum can be computed again by each who needs it."""
        info = self.infos[node]
        plain = node.op != "call_module" and not (info.coupling or info.draws or info.writes)
        inputs = [n for n in node.all_input_nodes if self.infos[n].tags & {"mean", "sum"}]
        return plain and all(self._is_plain_sum(n) for n in inputs)

    def _is_anchor(self, node: fx.Node) -> bool:
        module = self._module(node)
        return module is not None and any(True for _ in module.parameters())

    def is_block(self, node: fx.Node) -> bool:
        """Whether ``node`` calls a repeated layer or one that could not be traced through."""
        return self._module(node) in self.trace.blocks or node.target in self.trace.opaque

    def before_static_blocks(self) -> set[fx.Node]:
        """Light operators on the way to a block whose input has no rows: they must not be copied."""
        found: set[fx.Node] = set()
        for node in self.trace.graph.nodes:
            if not self.is_block(node) or any(
                not self.infos[n].tags <= {"static", "whole"} for n in node.all_input_nodes
            ):
                continue
            stack = list(node.all_input_nodes)
            while stack:
                at = stack.pop()
                if at.op == "call_module" and self.infos[at].tags == {"static"} and self._is_anchor(at):
                    found.add(at)
                if self.infos[at].tags == {"static"}:
                    stack.extend(at.all_input_nodes)
        return found


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _reads_shapes(node: fx.Node, infos: dict[fx.Node, Info]) -> bool:
    if node.op == "call_method" and node.target in ("to", "type_as"):
        return isinstance(node.args[0], fx.Node) and infos[node.args[0]].tags <= {"static", "size"}
    if node.op == "call_method":
        return str(node.target) in _SHAPE_ONLY
    if node.target is getattr:
        return node.args[1] in _SHAPE_ATTRIBUTES
    return node.target is patches.length
