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
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_spindle.capture import patches
from lightning_spindle.capture.blocks import is_metric
from lightning_spindle.capture.evaluate import (
    Deterministic, classification, filled, noisy_state, perturbed, run_node, with_tensors,
)  # fmt: skip
from lightning_spindle.capture.layout import pick, pick_rows
from lightning_spindle.capture.pieces import BatchLayout
from lightning_spindle.capture.tracer import StepTrace

ROWS = 6
_CUTS = (((0,), (1, 2, 3, 4, 5)), ((4, 1), (5, 0, 3, 2)))
_PERMUTED = (3, 5, 0, 4, 2, 1)
_WHOLE = tuple(range(ROWS))
_PARTS = [part for cut in _CUTS for part in cut]
_SHAPE_ONLY = {"size", "dim", "numel", "stride", "ndimension", "is_floating_point", "new_zeros", "new_ones",
               "new_full", "new_empty", "new_tensor", "get_device", "is_complex", "nelement"}  # fmt: skip
_SHAPE_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "itemsize"}
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4, torch.complex128: 1e-8}


@dataclass(frozen=True)
class Kind:
    """How one tensor relates to rows.

    ``rows``: dimension ``dim`` holds ``per_row`` entries a row. ``static``: equal on all parts.
    ``size``: a function of the number of rows alone. ``mean``/``sum``: the parts' values make
    the whole's by a mean weighted by rows / by addition. ``whole``: needs all rows.
    """

    tag: str
    dim: int | None = None
    per_row: int = 1


STATIC, SIZE, MEAN, SUM, WHOLE = Kind("static"), Kind("size"), Kind("mean"), Kind("sum"), Kind("whole")


@dataclass
class Info:
    """What is known of a node: a kind for each leaf of its value.

    ``coupling``: it needs all rows at once, whatever its value's kind. ``writes``: buffers that
    it changes. ``draws``: it draws random numbers.
    """

    kinds: list[Kind]
    coupling: bool = False
    draws: bool = False
    writes: tuple[str, ...] = ()
    dynamic: bool = False

    @property
    def tags(self) -> set[str]:
        return {kind.tag for kind in self.kinds}


def classify(trace: StepTrace, leaves: Sequence[Any], layout: BatchLayout) -> dict[fx.Node, Info]:
    """Every node's ``Info``, in float64 with noisy parameters; in the model's own type where that fails."""
    rows = layout.rows(list(leaves))
    example = pick_rows(leaves, layout, [row % rows for row in _WHOLE])
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
        state = noisy_state(trace.holder, dtype, torch.Generator().manual_seed(2))
        classifier = _Classifier(trace, leaves, layout, dtype, static_anchors)
        with classification(classifier.mode, dtype):
            with_tensors(trace.holder, state, classifier.run)
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
        self.own = {part: {} for part in (*_PARTS, _PERMUTED)}
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
                self._classify(node)

    # ------------------------------------------------------------------------------------- one node
    def _classify(self, node: fx.Node) -> None:
        self.mode.drew, self.mode.rows = False, ROWS
        writes, restore = self._run_whole(node)
        flat, _ = tree_flatten(self.values[node])
        inputs = {tag for n in node.all_input_nodes for tag in self.infos[n].tags}
        info = Info([], draws=self.mode.drew, writes=writes)
        self.infos[node] = info
        if self._is_metric(node):
            info.kinds = [WHOLE] * len(flat)
        elif not inputs - {"static"}:
            alone = info.draws or node in self.static_anchors or self.is_block(node)
            info.kinds, info.coupling = [WHOLE if alone else STATIC] * len(flat), info.draws
        elif "whole" in inputs and not inputs - {"whole", "static", "size"}:
            info.kinds = [WHOLE] * len(flat)
            self._run_part(node, _PERMUTED, restore)
        else:
            self._judge(node, info, flat, inputs, restore)
        if writes:
            info.coupling = True
            restore(after=True)

    def _judge(
        self, node: fx.Node, info: Info, flat: list[Any], inputs: set[str], restore: Callable[..., None]
    ) -> None:
        parts = [self._run_part(node, part, restore) for part in _PARTS]
        shapes_only = not inputs - {"static", "size"} or _reads_shapes(node)
        kept = not (info.draws or self._is_anchor(node))
        kinds: list[Kind | None] = [None] * len(flat)
        if all(part is not None and len(part) == len(flat) for part in parts):
            for i, leaf in enumerate(flat):
                kinds[i] = _kind(leaf, [part[i] for part in parts if part is not None], shapes_only, kept)
        found = [kind for kind in kinds if kind is not None]
        if len(found) < len(flat) or (
            "rows" in {k.tag for k in found} and {k.tag for k in found} & {"mean", "sum"}
        ):
            info.coupling = True
            self._run_part(node, _PERMUTED, restore)
            permuted = self.own[_PERMUTED].get(node)
            other = tree_flatten(permuted)[0] if node in self.own[_PERMUTED] else [None] * len(flat)
            info.kinds = [_permuted_kind(a, b) for a, b in zip(flat, other, strict=True)]
            return
        info.kinds = found
        if {k.tag for k in found} & {"mean", "sum"}:
            self._run_part(node, _PERMUTED, restore)

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
            elif kind.tag == "static" or (kind.tag == "whole" and part is not _PERMUTED):
                leaves.append(leaf)
            elif own is None:
                raise RuntimeError(f"{node} has no value for a part of the rows")
            else:
                leaves.append(own[i])
        return tree_unflatten(leaves, spec)

    # ------------------------------------------------------------------------------------- questions
    def _module(self, node: fx.Node) -> Any:
        return self.trace.holder.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _is_metric(self, node: fx.Node) -> bool:
        return node.target is patches.update_metric or is_metric(self._module(node))

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


def _reads_shapes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in _SHAPE_ONLY
    if node.target is getattr:
        return node.args[1] in _SHAPE_ATTRIBUTES
    return node.target is patches.length


def _kind(whole: Any, parts: list[Any], shapes_only: bool, kept: bool) -> Kind | None:
    """The kind that holds on all parts, None where there is none."""
    if not isinstance(whole, torch.Tensor):
        if all(type(p) is type(whole) and p == whole for p in parts):
            return STATIC if shapes_only or whole is None else None
        if shapes_only:
            return SIZE
        return (
            _reduced(torch.as_tensor(whole), [torch.as_tensor(p) for p in parts])
            if _numbers([whole, *parts])
            else None
        )
    if not all(isinstance(p, torch.Tensor) for p in parts):
        return None
    if shapes_only and kept:
        return STATIC if all(_alike(whole, p) for p in parts) else SIZE
    rows = _rows(whole, list(zip(_PARTS, parts, strict=True)))
    if rows is not None:
        return rows
    if shapes_only and all(_alike(whole, p) for p in parts):
        return STATIC
    return None if all(_alike(whole, p) for p in parts) else _reduced(whole, parts)


def _permuted_kind(whole: Any, permuted: Any) -> Kind:
    if (
        isinstance(whole, torch.Tensor)
        and isinstance(permuted, torch.Tensor)
        and whole.shape == permuted.shape
    ):
        if not _alike(whole, permuted):
            return _rows(whole, [(_PERMUTED, permuted)]) or WHOLE
    return WHOLE


def _rows(whole: torch.Tensor, parts: list[tuple[tuple[int, ...], torch.Tensor]]) -> Kind | None:
    for dim, entries in enumerate(whole.shape):
        if entries == 0 or entries % ROWS:
            continue
        per_row = entries // ROWS
        if all(
            part.dim() == whole.dim()
            and part.shape[dim] == per_row * len(index)
            and _alike(pick(whole, dim, per_row, index), part)
            for index, part in parts
        ):
            return Kind("rows", dim, per_row)
    return None


def _reduced(whole: torch.Tensor, parts: list[torch.Tensor]) -> Kind | None:
    if whole.dtype is torch.bool or whole.is_complex() or any(p.shape != whole.shape for p in parts):
        return None
    pairs = list(zip(_PARTS, parts, strict=True))
    cuts = [pairs[:2], pairs[2:]]
    if whole.is_floating_point() and all(
        _alike(whole, sum(p * (len(i) / ROWS) for i, p in cut).to(whole.dtype))
        for cut in cuts  # type: ignore
    ):
        return MEAN
    if all(_alike(whole, sum(p for _, p in cut).to(whole.dtype)) for cut in cuts):  # type: ignore
        return SUM
    return None


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(v, (int, float)) for v in values)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = _TOLERANCE.get(a.dtype, 3e-2)
    finite = a[a.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-6), equal_nan=True)
